"""Read and write weights in Hugging Face format: ``config.json`` plus safetensors, one file or shards with an index.

Before the first iteration every rank fills its live parameters from here, reading only the boxes that its layout names. At a
checkpoint or an export the same format is written, shard by shard, so that a whole model is never in memory. Pickled files are never
opened: a ``.bin`` can run code when it is loaded.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_ppo.families import (
    EMBEDDING,
    LM_HEAD,
    SCORE_HEAD,
    GenericNetwork,
    Head,
    Network,
    canonical_names,
    canonical_tensors,
    check_tensors,
    read_json,
)
from megatron_ppo.generic_network import describe_network
from megatron_ppo.resharding.layout import Ranges, RankLayout, view

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SIDECARS = (
    "generation_config.json",
    "tokenizer*",
    "*.model",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates",
    "LICENSE*",
    "NOTICE*",
)
"""What belongs to a model besides config and weights: everything that a user of the export needs to generate with it."""


class HFCheckpoint:
    """A folder in Hugging Face format, opened for reading: headers now, tensors when asked for.

    ``config``: the parsed config.json. ``shapes``: canonical name -> shape of every tensor in the files.
    ``ValueError`` where the folder is incomplete, naming the file or tensor.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.config = read_json(self.folder / "config.json")
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._stored: dict[str, tuple[safe_open, str]] = {}
        for file, names in _weight_map(self.folder).items():
            handle = _open(file)
            present = set(handle.keys())
            absent = sorted(set(names) - present)
            if absent:
                raise ValueError(f"{INDEX_FILE} says that {file} holds {', '.join(absent)}, but it does not; copy the checkpoint again")
            for name in names or sorted(present):
                self._stored[name] = (handle, name)
        self._stored = {plain: self._stored[name] for name, plain in canonical_names(self._stored).items()}
        self.shapes = {name: tuple(handle.get_slice(raw).get_shape()) for name, (handle, raw) in self._stored.items()}

    def read(self, name: str, ranges: Ranges | None = None) -> Tensor:
        """A box of a tensor (all of it where ``ranges`` is None) in the dtype of the file, on the CPU; only its bytes are read."""
        if name not in self._stored:
            raise ValueError(f"{self.folder} holds no tensor {name}")
        handle, raw = self._stored[name]
        if ranges is None:
            return handle.get_tensor(raw)
        shape = self.shapes[name]
        if len(ranges) != len(shape) or any(not 0 <= a <= b <= size for (a, b), size in zip(ranges, shape, strict=True)):
            raise ValueError(f"box {ranges} does not lie in {name} of shape {shape} ({self.folder})")
        return handle.get_slice(raw)[tuple(slice(start, stop) for start, stop in ranges)]

    def name_as(self, network: Network) -> None:
        """Take the network's names for the tensors: some models were stored without the first part of their names, or with it."""
        if not isinstance(network, GenericNetwork):
            return
        known = {one.name for one in network.stored} | {alias for alias, _ in network.aliases}
        prefix = f"{network.trunk}."
        for name in [name for name in self.shapes if name not in known]:
            for other in (prefix + name, name.removeprefix(prefix)):
                if other in known and other not in self.shapes:
                    self._stored[other], self.shapes[other] = self._stored.pop(name), self.shapes.pop(name)
                    break


def load_hf_weights(
    folder: Path | str,
    layout: RankLayout,
    parameters: Mapping[str, Tensor],
    *,
    head: Head = "lm",
    head_required: bool = False,
    network: Network | None = None,
) -> tuple[str, ...]:
    """Fill a rank's live parameters from a checkpoint, in place, casting to their dtypes; vocabulary padding becomes 0.

    ``parameters``: local name -> tensor, exactly the names and shapes of ``layout``. ``head`` is the one that the layout was built with.
    ``network``: what the layout was built from, where that is not this folder's own config. A checkpoint without ``score.weight`` leaves
    a value head at its own initial values; for ``head="score"``, or with ``head_required``, it is an error, since random rewards would
    follow. A language-model head that ``head`` does not want is left out. Returns the local names left as they were.

    The whole checkpoint is checked on every rank, so that all ranks fail alike: ``ValueError`` with every missing tensor, every tensor
    that nothing consumes, and every shape that differs.
    """
    checkpoint = HFCheckpoint(folder)
    own = describe_network(checkpoint.config)
    network = own if network is None else network
    _check_same_numbers(own, network, checkpoint.folder)
    _check_parameters(layout, parameters, head)
    check_heads(checkpoint, network, head, head_required)
    by_parameter: dict[str, int] = dict.fromkeys(layout.shapes, 0)
    for block in layout.blocks:
        by_parameter[block.parameter] += block.num_elements
    untouched = {block.parameter for block in layout.blocks if block.name == SCORE_HEAD and SCORE_HEAD not in checkpoint.shapes}
    with torch.no_grad():
        for name, covered in by_parameter.items():
            if covered < parameters[name].numel():
                parameters[name].zero_()
        for block in layout.blocks:
            if block.parameter not in untouched:
                view(parameters[block.parameter], block.local).copy_(checkpoint.read(block.name, block.canonical))
    return tuple(sorted(untouched))


def write_hf_checkpoint(
    folder: Path | str,
    source_folder: Path | str,
    tensors: Iterable[tuple[str, Tensor]],
    max_shard_bytes: int = 5 * 10**9,
    *,
    head: Head = "lm",
) -> None:
    """Write full tensors, streamed, as a checkpoint that stands alone.

    ``config.json`` is the source's; only what the weights change is changed: their dtype, and for a critic or reward model (``value``,
    ``score``) the architecture, one label and no tying. Generation config, tokenizer and chat template are copied byte by byte; what the
    source lacks, the export lacks. Tensors may come in any order, under names with wrapper prefixes; all that the config describes must
    come, once each, in its shape (``ValueError`` otherwise, and no weights are left in the folder). A file holds at most
    ``max_shard_bytes`` unless one tensor alone is larger.
    """
    target, source = Path(folder), Path(source_folder)
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be at least 1, but is {max_shard_bytes}")
    config = read_json(source / "config.json")
    network = describe_network(config)
    _checked_sidecars(source)
    if target.is_dir() and [*target.glob("*.safetensors"), *target.glob(INDEX_FILE)]:
        raise ValueError(f"{target} already holds weights, which would be mixed up with the new ones; choose an empty folder")
    target.mkdir(parents=True, exist_ok=True)
    writer = _ShardWriter(target, max_shard_bytes)
    try:
        for name, tensor in tensors:
            writer.add(name, tensor)
        writer.finish(network, head)
    except BaseException:
        writer.discard()
        raise
    _write_config(source / "config.json", target / "config.json", _exported_config(config, head, writer.dtypes))
    copy_sidecars(source, target)


class _ShardWriter:
    """Collects tensors into files of bounded size. Files get their final names when their number is known."""

    def __init__(self, folder: Path, max_shard_bytes: int) -> None:
        self.dtypes: set[torch.dtype] = set()
        self._folder = folder
        self._limit = max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._files: list[tuple[Path, list[str]]] = []
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._total_bytes = 0
        self._given: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a copy of a tensor; ``ValueError`` for a name that came before."""
        plain = canonical_names([name])[name]
        if plain in self._given:
            raise ValueError(f"{self._given[plain]} and {name} are both {plain}; one would overwrite the other")
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._limit:
            self._flush()
        self._given[plain] = name
        self._shapes[plain] = tuple(tensor.shape)
        self._pending[plain] = tensor.detach().to("cpu", copy=True).contiguous()  # a copy: the caller may reuse its buffer
        self._pending_bytes += size
        self._total_bytes += size
        self.dtypes.add(tensor.dtype)

    def finish(self, network: Network, head: Head) -> None:
        """Check that everything came; give the files their names; write the index where there are several."""
        check_tensors(canonical_tensors(network, head), self._shapes, "the export")
        self._flush()
        if len(self._files) == 1:
            self._rename(0, SINGLE_FILE)
            return
        weight_map: dict[str, str] = {}
        for number, (_, names) in enumerate(self._files):
            final = f"model-{number + 1:05d}-of-{len(self._files):05d}.safetensors"
            self._rename(number, final)
            weight_map |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def discard(self) -> None:
        """Remove what was written, also what was written in part."""
        for path, _ in self._files:
            path.unlink(missing_ok=True)
        (self._folder / INDEX_FILE).unlink(missing_ok=True)

    def _rename(self, number: int, name: str) -> None:
        path, names = self._files[number]
        self._files[number] = (path.rename(self._folder / name), names)

    def _flush(self) -> None:
        path = self._folder / f"model-{len(self._files) + 1:05d}.partial"
        self._files.append((path, list(self._pending)))  # before it is written: a full disk leaves half a file
        save_file(self._pending, path, metadata={"format": "pt"})  # transformers refuses files without the metadata
        self._pending = {}
        self._pending_bytes = 0


def _weight_map(folder: Path) -> dict[Path, list[str]]:
    """File -> names that the index says it holds; [] means all that it holds."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file() and index.is_file():
        raise ValueError(f"{folder} holds both {SINGLE_FILE} and {INDEX_FILE}; remove the one that is out of date")
    if single.is_file():
        return {single: []}
    if not index.is_file():
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        if pickled:
            raise ValueError(
                f"{folder} holds weights only as pickle ({', '.join(pickled)}), which can run code when loaded and is refused; "
                "convert them to safetensors in a place that you trust (save_pretrained of transformers writes them)"
            )
        raise ValueError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; a folder in Hugging Face format is needed")
    entries = read_json(index).get("weight_map")
    if not isinstance(entries, dict) or not entries:
        raise ValueError(f"{index} has no weight_map")
    files: dict[Path, list[str]] = {}
    for name, file in entries.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index} places {name} in {file!r}, which is no file name in the same folder")
        files.setdefault(folder / file, []).append(name)
    missing = [str(path) for path in files if not path.is_file()]
    if missing:
        raise ValueError(f"{index} lists files that do not exist: {', '.join(missing)}; copy the checkpoint again")
    return files


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read as safetensors ({error}); copy the checkpoint again") from error


def _check_same_numbers(own: Network, network: Network, folder: Path) -> None:
    wanted = {tensor.name: tensor.shape for tensor in canonical_tensors(network)}
    for tensor in canonical_tensors(own):
        if tensor.name == LM_HEAD:  # judged by ``check_heads``: a critic may come from a tied or an untied policy
            continue
        if wanted.get(tensor.name) != tensor.shape:
            raise ValueError(
                f"{folder}: {tensor.name} is {tensor.shape}, but the network to be filled has {wanted.get(tensor.name, 'no such tensor')}"
            )


def _check_parameters(layout: RankLayout, parameters: Mapping[str, Tensor], head: Head) -> None:
    """The live parameters are those of the layout, and the layout is one with that head."""
    faults = [f"not in the model: {name}" for name in layout.shapes if name not in parameters]
    faults += [f"not in the layout: {name}" for name in parameters if name not in layout.shapes]
    faults += [
        f"{name}: the model has {tuple(parameters[name].shape)}, the layout {shape}"
        for name, shape in layout.shapes.items()
        if name in parameters and tuple(parameters[name].shape) != shape
    ]
    if faults:
        raise ValueError("the model's parameters are not those of its layout:\n  - " + "\n  - ".join(faults))
    names = {block.name for block in layout.blocks}
    if (SCORE_HEAD in names and head == "lm") or (LM_HEAD in names and head in ("value", "score")):
        raise ValueError(f"the layout was built with another head than {head!r}; pass the same head to both")


def check_heads(checkpoint: HFCheckpoint, network: Network, head: Head, head_required: bool) -> None:
    """``ValueError`` unless all canonical tensors are there in their shapes; the rules for heads are those of ``load_hf_weights``."""
    checkpoint.name_as(network)
    ignored = _left_out(checkpoint, network)
    if SCORE_HEAD not in checkpoint.shapes and head != "lm":
        if head_required or head == "score":
            raise ValueError(
                f"{checkpoint.folder} holds no {SCORE_HEAD}: it is no reward model, and a fresh head would give random rewards; "
                "name a sequence-classification checkpoint with one label"
            )
        ignored.add(SCORE_HEAD)
    if head in ("value", "score"):
        ignored |= {tensor.name for tensor in canonical_tensors(network)} - {tensor.name for tensor in canonical_tensors(network, head)}
        ignored.add(LM_HEAD)
    elif isinstance(network, GenericNetwork):
        for alias, name in network.aliases:
            if alias in checkpoint.shapes and name in checkpoint.shapes:
                _check_tied_copy(checkpoint, name, alias)
    elif network.tied and LM_HEAD in checkpoint.shapes:
        _check_tied_copy(checkpoint, EMBEDDING, LM_HEAD)
        ignored.add(LM_HEAD)
    check_tensors(canonical_tensors(network, head), checkpoint.shapes, str(checkpoint.folder), ignored)


def _left_out(checkpoint: HFCheckpoint, network: Network) -> set[str]:
    """Names in the files that a model of transformers has no use for: tied tensors stored twice, masks that older versions stored."""
    if not isinstance(network, GenericNetwork):
        return set()
    stored = {one.name for one in network.stored}
    masks = {name for name in checkpoint.shapes if name not in stored and any(re.search(pattern, name) for pattern in network.ignored)}
    return masks | {alias for alias, _ in network.aliases}


def _check_tied_copy(checkpoint: HFCheckpoint, first: str, second: str) -> None:
    """Some tied checkpoints store the head too: harmless where it equals the embedding, a contradiction where it does not."""
    rows = checkpoint.shapes[first][0]
    same = checkpoint.shapes[second] == checkpoint.shapes[first]
    rest = tuple((0, size) for size in checkpoint.shapes[first][1:])
    for start in range(0, rows if same else 0, 8192):
        box = ((start, min(start + 8192, rows)), *rest)
        same = same and torch.equal(checkpoint.read(first, box), checkpoint.read(second, box))
    if not same:
        raise ValueError(
            f"{checkpoint.folder}: config.json ties the head to the embedding, but {second} differs from {first}; "
            "set tie_word_embeddings to false, or remove the tensor"
        )


def copy_sidecars(source: Path, target: Path) -> None:
    """Copy generation config, tokenizer and chat template byte by byte. ``ValueError`` for one that is not valid JSON."""
    for path in _checked_sidecars(source):
        copy = shutil.copytree if path.is_dir() else shutil.copyfile
        copy(path, target / path.name)


def _checked_sidecars(source: Path) -> list[Path]:
    found = sorted({path for pattern in SIDECARS for path in source.glob(pattern)})
    for path in found:
        if path.suffix == ".json" and path.is_file():
            try:
                json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ValueError(f"{path} is not valid JSON, so the export would not load: {error}") from error
    return found


def _exported_config(config: Mapping[str, object], head: Head, dtypes: set[torch.dtype]) -> dict[str, object]:
    changed = dict(config)
    if len(dtypes) == 1:
        dtype = str(next(iter(dtypes))).removeprefix("torch.")
        changed |= {key: dtype for key in ("dtype", "torch_dtype") if key in config}
    if head in ("value", "score"):
        network = describe_network(config)
        if network.classifier is None:
            raise ValueError(f"transformers has no classifier for model_type {network.family!r}, which could hold the {head} head")
        changed["architectures"] = [network.classifier]
        changed |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "tie_word_embeddings": False}
    return changed


def _write_config(source: Path, target: Path, config: dict[str, object]) -> None:
    if config == read_json(source):
        shutil.copyfile(source, target)  # unchanged: byte by byte
    else:
        target.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
