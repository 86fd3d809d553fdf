"""``python -m megatron_ppo convert``: Hugging Face folder -> distributed checkpoint of megatron-core, and back. No GPU, no launcher.

::

    HF folder, .gguf  ->  TARGET/megatron/  torch_dist, keys "actor.model." (critic, reward)     read under any TP, PP, EP
                          TARGET/hf/        config.json, tokenizer, generation config, chat template
                          TARGET/COMPLETE   manifest
    checkpoint of a run, or the above  ->  TARGET/  config.json, model*.safetensors, the same sidecars

What is in memory is about one layer: boxes of canonical tensors go from file to file, by the tables of ``resharding/``. The target is made
under a temporary name and gets its own when it is whole (and, with ``--verify``, equal to the source).

    exit code 0   done
              1   it could not be written, or --verify found tensors that differ; there is no target
              2   bad input; nothing was written

Left out: optimizer states, which have no place in a Hugging Face folder; converting from one mesh to another, which loading does.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from safetensors import SafetensorError
from torch import Tensor

from megatron_ppo.checkpoint import STATE_FILE
from megatron_ppo.checkpoint_manifest import COMPLETE, files_of, sync_files, sync_path, write_manifest
from megatron_ppo.conversion_source import SIDECARS, STORE, Role, Source, check_source, find_source, sidecar_folder
from megatron_ppo.families import EMBEDDING, LM_HEAD, SCORE_HEAD, Head, NetworkShape, canonical_tensors, layer_tensors, network_shape
from megatron_ppo.gguf import unpack_gguf
from megatron_ppo.megatron_store import MegatronStore, StoredNetwork, has_value_head, open_slabs, stored_bytes, stored_slabs, write_store
from megatron_ppo.resharding.hf_checkpoint import HFCheckpoint, check_heads, copy_sidecars, write_hf_checkpoint
from megatron_ppo.resharding.layout import Ranges, box_shape
from megatron_ppo.run_folder import replace_folder

PROGRAM = "megatron_ppo convert"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HEADS: dict[Role, Head] = {"actor": "lm", "critic": "value", "reward": "score"}
LEAST_BYTES = 512 << 20
"""Of a shard that is written, and of what is read from a mapped file before it is closed; one decoder layer where that is more."""
MARKER = ".converted"
"""File in a Hugging Face folder that ``convert`` has made: only such a one is replaced by ``--force``."""
_SHOWN = 20


@dataclass(frozen=True)
class Options:
    """Hugging Face folder (or .gguf file) to a distributed checkpoint of megatron-core, or back; which one, the source says. Example:
    python -m megatron_ppo convert --source runs/ppo --target exported
    """

    source: Path
    """Hugging Face folder, .gguf file, checkpoint (also one that convert made), run folder (its newest), Megatron-LM torch_dist folder."""
    target: Path
    """The folder to make. It must not exist."""
    to: Literal["megatron", "hf"] | None = None
    """Format of the target. Default: the other one; for a .gguf file, hf."""
    critic: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Convert a critic: a value head in place of the language-model head. From a policy's folder it starts at 0."""
    reward_model: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Convert a reward model: a one-label sequence classifier."""
    dtype: Literal["keep", "float32", "bfloat16"] = "keep"
    """Dtype of the target's weights."""
    hf_folder: Path | None = None
    """Where config.json and tokenizer of a distributed checkpoint are. Default: where the checkpoint says."""
    verify: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Read the target again and compare every tensor with the source, bit for bit (after the cast to --dtype)."""
    force: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace a target that convert has made before, when the new one is whole."""

    @property
    def role(self) -> Role:
        """Whose weights."""
        return "critic" if self.critic else "reward" if self.reward_model else "actor"

    @property
    def cast(self) -> torch.dtype | None:
        """None: as they are."""
        return DTYPES.get(self.dtype)


class Differs(Exception):
    """The target is not the source; the message names tensors."""


def main(arguments: Sequence[str]) -> int:
    """``python -m megatron_ppo convert``; the exit code."""
    options = tyro.cli(Options, args=list(arguments), prog=PROGRAM)
    try:
        convert(options)
    except ValueError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    except Differs as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    except (OSError, SafetensorError) as error:
        print(f"{PROGRAM}: {options.target} was not made, and what there was of it is removed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{PROGRAM}: stopped; {options.target} was not made", file=sys.stderr)
        return 130
    return 0


def convert(options: Options) -> None:
    """Make the target.

    Raises:
        ValueError: the source cannot be used, or the target exists.
        OSError, SafetensorError: it cannot be written.
        Differs: ``verify`` found a difference.
    """
    if options.critic and options.reward_model:
        raise ValueError("--critic and --reward-model exclude each other")
    started = time.monotonic()
    source = find_source(options.source)
    kind = options.to or ("megatron" if source.kind == "hf" else "hf")
    if (kind == "megatron") == source.is_megatron and source.kind != "gguf":
        raise ValueError(
            f"{source} is in that format already"
            + ("; a distributed checkpoint is read under any mesh as it stands" if source.is_megatron else "; leave out --to hf")
        )
    with _new_folder(options.target, source, force=options.force) as folder:
        if source.kind == "gguf":
            num_bytes = _from_gguf(source, folder, options, kind)
        elif kind == "megatron":
            num_bytes = _to_megatron(source.path, folder, options, str(source))
        else:
            num_bytes = _to_hf(source, folder, options)
    seconds = time.monotonic() - started
    equal = "; every tensor equals the source's" if options.verify else ""
    _say(f"wrote {options.target}: {decimal(num_bytes)} in {seconds:.1f} s, peak memory {decimal(_peak_bytes())}{equal}")


# -- both directions --------------------------------------------------------------------------------------------------


def _to_megatron(path: Path, folder: Path, options: Options, source: str) -> int:
    """Returns the bytes of the weights."""
    reader = _HFReader(path)
    network, role = reader.network, options.role
    head = _head_of(reader.checkpoint, network, role)
    check_heads(reader.checkpoint, network, head, head_required=role == "reward")
    names = [tensor.name for tensor in canonical_tensors(network, head)]
    fresh = {SCORE_HEAD} - reader.checkpoint.shapes.keys()  # of a critic whose folder is a policy's
    dtypes = {name: options.cast or reader.dtype(EMBEDDING if name in fresh else name) for name in names}

    def read(name: str, box: Ranges) -> Tensor:
        return torch.zeros(box_shape(box)) if name in fresh else reader.read(name, box)

    slabs = stored_slabs(network, head)
    total = stored_bytes(slabs, dtypes)
    _say(f"{source} -> distributed checkpoint {options.target} ({role}, {network.family}, {decimal(total)})")
    if fresh & set(names):
        _say(f"{path} has no {SCORE_HEAD}: the value head starts at 0")
    with _meter("writing", total) as count:
        write_store(folder / STORE, slabs, read, dtypes, prefix=f"{role}.model.", on_bytes=count)
    (folder / SIDECARS).mkdir()
    shutil.copyfile(path / "config.json", folder / SIDECARS / "config.json")
    copy_sidecars(path, folder / SIDECARS)
    if options.verify:
        stored = open_slabs(MegatronStore(folder / STORE), slabs, f"{role}.model.")
        _compare(stored, read, options.cast)
    write_manifest(folder, {})
    return total


def _to_hf(source: Source, folder: Path, options: Options) -> int:
    """Returns the bytes of the weights."""
    check_source(source)
    sidecars = sidecar_folder(source, options.role, options.hf_folder)
    network = network_shape(sidecars)
    store = MegatronStore(source.store)
    prefix, head = _stored_head(store, options.role)
    stored = open_slabs(store, stored_slabs(network, head), prefix)
    total = stored.num_bytes
    _say(f"{source} -> Hugging Face folder {options.target} ({options.role}, {network.family}, {decimal(total)})")
    with _meter("writing", total) as count:
        write_hf_checkpoint(folder, sidecars, _cast(stored, options.cast, count), _working_bytes(network), head=head)
    if options.verify:
        _compare(stored, _HFReader(folder).read, options.cast)
    sync_files(folder, files_of(folder))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _from_gguf(source: Source, folder: Path, options: Options, kind: str) -> int:
    """Returns the bytes of the weights."""
    if kind == "hf" and options.role != "actor":
        raise ValueError("a GGUF file holds a language model: convert it to hf first, without --critic and --reward-model")
    _say(f"{source}: transformers unpacks it, with the whole model in memory")
    unpacked = folder / "unpacked" if kind == "megatron" else folder
    unpack_gguf(source.path, unpacked, options.cast or torch.float32)
    if kind == "megatron":
        num_bytes = _to_megatron(unpacked, folder, options, str(source))
        shutil.rmtree(unpacked)
        return num_bytes
    checkpoint = HFCheckpoint(folder)
    check_heads(checkpoint, network_shape(checkpoint.config), "lm", head_required=False)
    sync_files(folder, files_of(folder))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _head_of(checkpoint: HFCheckpoint, network: NetworkShape, role: Role) -> Head:
    """What stands on the trunk of a Hugging Face folder; a shared critic's folder holds both heads."""
    if role != "actor":
        return HEADS[role]
    architectures = checkpoint.config.get("architectures")
    if isinstance(architectures, list) and any(str(name).endswith("ForSequenceClassification") for name in architectures):
        raise ValueError(f"{checkpoint.folder} is a sequence classifier, no language model; say --reward-model or --critic")
    both = SCORE_HEAD in checkpoint.shapes and (network.tied or LM_HEAD in checkpoint.shapes)
    return "lm+value" if both else "lm"


def _stored_head(store: MegatronStore, role: Role) -> tuple[str, Head]:
    """The prefix of a role's keys in a distributed checkpoint, and the head to read with them."""
    present = [name for name in HEADS if any(key.startswith(f"{name}.model.") for key in store.shapes)]
    if role in present:
        return f"{role}.model.", HEADS[role]
    if role == "critic" and has_value_head(store, "actor.model."):
        return "actor.model.", "value"  # it shares the actor's trunk
    if not present and any(key.startswith("decoder.") for key in store.shapes):
        return "", HEADS[role]  # Megatron-LM's
    flags = {"actor": "neither --critic nor --reward-model", "critic": "--critic", "reward": "--reward-model"}
    remedy = "; or ".join(f"for the {name} say {flags[name]}" for name in present)
    raise ValueError(f"{store.folder} holds no weights of the {role}" + (f"; {remedy}" if remedy else ": it is no checkpoint of a model"))


def _cast(stored: StoredNetwork, dtype: torch.dtype | None, count: Callable[[int], None]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in stored.tensors():
        count(tensor.nbytes)
        yield name, tensor if dtype is None else tensor.to(dtype)


def _compare(stored: StoredNetwork, read: Callable[[str, Ranges], Tensor], dtype: torch.dtype | None) -> None:
    """``Differs`` unless every tensor on both sides has the same bits, each after the cast."""
    faults = []
    with _meter("comparing", stored.num_bytes) as count:
        for name, tensor in stored.tensors():
            other = read(name, tuple((0, size) for size in tensor.shape))
            one, two = (each if dtype is None else each.to(dtype) for each in (tensor, other))
            if one.dtype != two.dtype or not torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8)):
                faults.append(name)
            count(tensor.nbytes)
    if faults:
        more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise Differs(f"{len(faults)} tensors of the target differ from the source: {', '.join(faults[:_SHOWN])}{more}; it is removed")


# -- files ------------------------------------------------------------------------------------------------------------


def _working_bytes(network: NetworkShape) -> int:
    """One decoder layer in float32, but no less than makes sense for a file."""
    layer = sum(torch.Size(shape).numel() for _, shape in layer_tensors(network))
    return max(LEAST_BYTES, 4 * layer)


class _HFReader:
    """Boxes of a Hugging Face folder's tensors.

    Its files are mapped, and what was read of a mapped file counts as memory of this process until the file is closed: now and then they
    are closed and opened anew.
    """

    def __init__(self, folder: Path) -> None:
        self.checkpoint = HFCheckpoint(folder)
        self.network = network_shape(self.checkpoint.config)
        self._limit = _working_bytes(self.network)
        self._mapped = 0

    def read(self, name: str, box: Ranges) -> Tensor:
        """In the file's dtype; to be copied before the next call."""
        if self._mapped > self._limit:
            self.checkpoint = HFCheckpoint(self.checkpoint.folder)
            self._mapped = 0
        tensor = self.checkpoint.read(name, box)
        self._mapped += tensor.nbytes
        return tensor

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor in the file."""
        return self.read(name, tuple((0, 1) for _ in self.checkpoint.shapes[name])).dtype


@contextmanager
def _new_folder(target: Path, source: Source, *, force: bool) -> Iterator[Path]:
    """A folder under a temporary name, which becomes ``target`` at the end and is removed where there is none."""
    target = target.absolute()
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        if not force:
            raise ValueError(f"--target {target} exists; name another, or remove it")
        if source.path.resolve().is_relative_to(target.resolve()):
            raise ValueError(f"--target {target} holds the source; name another")
        is_ours = (target / MARKER).is_file() or ((target / COMPLETE).is_file() and not (target / STATE_FILE).exists())
        if not is_ours:
            raise ValueError(f"--target {target} is nothing that convert has made, and --force does not replace it; remove it by hand")
        _say(f"{target} exists and will be replaced (--force)")
    partial = target.with_name(f".{target.name}.partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        partial.mkdir()
    except FileExistsError:
        raise ValueError(f"{partial} exists: another convert is writing it, or one was killed; remove it if there is no other") from None
    try:
        yield partial
        if not (partial / COMPLETE).is_file():
            (partial / MARKER).touch()
        replace_folder(partial, target)
        sync_path(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


# -- output -----------------------------------------------------------------------------------------------------------


def _peak_bytes() -> int:
    """The most memory that this process has held. (Linux's getrusage may give what its parent held before.)"""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.is_file() else None
    if found is not None:
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _say(text: str) -> None:
    print(f"convert: {text}", flush=True)


@contextmanager
def _meter(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Bytes done, rate and time left on a terminal; nothing elsewhere. Yields the function that is told of bytes."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda num_bytes: progress.advance(task, num_bytes)
