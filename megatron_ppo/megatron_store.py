"""Weights in the folder that ``megatron.core.dist_checkpointing`` writes (format torch_dist), read and written piece by piece.

Stands below ``conversion.py``. No process group, no GPU and no megatron-core are needed: torch's own reader and writer of distributed
checkpoints do the work, and what is in memory is one piece of one layer. Pure data says what lies where: the folder is one more layout
of canonical tensors, that of ``megatron_layout`` for a single rank under the names by which megatron-core stores parameters:

    local parameter                             stored tensor                                         box
    decoder.layers.3.mlp.linear_fc1.weight      decoder.layers.mlp.linear_fc1.weight [L, 2F, H]       [3:4, :, :]
    decoder.layers.3.mlp.experts...weight5      decoder.layers.mlp.experts.experts... [L, E, 2F, H]   [3:4, 5:6, :, :]
    embedding.word_embeddings.weight            the same [V, H]                                       all of it

These shapes do not depend on the mesh: megatron-core 0.16.1 reads and writes its part of them under any TP, PP, EP. Vocabularies are
stored without padding (each mesh pads for itself) and read without it. A checkpoint whose layers are not stacked
(``decoder.layers.3.mlp...``, megatron-core's ``non_homogeneous_layers``) can be read too.

Left out: optimizer states, the files beside the folder, and every check of what a pickle may hold (``unsafe_pickle.py``), which must come
before a folder is opened here.
"""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_ppo.families import Head, NetworkShape
from megatron_ppo.resharding.boxes import box_text, intersect, volume
from megatron_ppo.resharding.layout import Block, Ranges, box_shape, shifted, view
from megatron_ppo.resharding.megatron_layout import VALUE_HEAD, megatron_layout
from megatron_ppo.resharding.megatron_mesh import MegatronParallel, RankCoordinates
from megatron_ppo.unsafe_pickle import DISTRIBUTED_FORMAT

CHUNK_BYTES = 128 << 20
"""A stored chunk is read whole by whoever needs any of it."""
FILE_BYTES = 1 << 30
"""torch's writer keeps the last chunk of every stored tensor until the file ends."""
STACK = "decoder.layers."
VOCABULARIES = frozenset({"embedding.word_embeddings.weight", "output_layer.weight"})
"""Stored tensors that may have rows of padding."""
SECOND_NAMES = {f"{STACK}pre_mlp_layernorm.weight": f"{STACK}mlp.linear_fc1.layer_norm_weight"}
"""The norm before a mixture of experts: Transformer Engine's layers store it under the first name, local ones under the second, so that a
folder for both needs it twice. All other parameters have one stored name."""


@dataclass(frozen=True)
class Slab:
    """What one layer has of one stored tensor (all of it, where layers are not stacked)."""

    key: str
    """Name of the stored tensor, without the role's prefix."""
    shape: tuple[int, ...]
    """Of the whole stored tensor."""
    box: Ranges
    blocks: tuple[Block, ...]
    """Boxes of canonical tensors <-> boxes of the stored tensor; each canonical tensor lies in one slab."""


def stored_slabs(network: NetworkShape, head: Head = "lm") -> list[Slab]:
    """All that a folder holds of a network, in the order of the forward pass."""
    layout = megatron_layout(
        network,
        MegatronParallel(make_vocab_size_divisible_by=1),
        RankCoordinates(dp=0, pp=0, tp=0),
        head=head,
        transformer_engine_names=True,
    )
    leads: dict[str, tuple[str, tuple[int, ...]]] = {name: _stored_place(name) for name in layout.shapes}
    sizes = (network.num_layers, network.num_experts)
    found: dict[tuple[str, tuple[int, ...]], list[Block]] = {}
    for block in layout.blocks:
        key, lead = leads[block.parameter]
        local = (*((at, at + 1) for at in lead), *block.local)
        found.setdefault((key, lead[:1]), []).append(Block(block.name, block.canonical, key, local))
    shapes = {key: (*sizes[: len(lead)], *layout.shapes[name]) for name, (key, lead) in leads.items()}
    slabs = []
    for (key, layer), blocks in found.items():
        rest = tuple((0, size) for size in shapes[key][len(layer) :])
        slabs.append(Slab(key, shapes[key], (*((at, at + 1) for at in layer), *rest), tuple(blocks)))
    return slabs


def _stored_place(parameter: str) -> tuple[str, tuple[int, ...]]:
    """Local name -> (stored name, indices in the dims that stacking puts in front: layer, expert)."""
    in_layer = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", parameter)
    if in_layer is None:
        return parameter, ()
    layer, rest = int(in_layer[1]), in_layer[2]
    in_expert = re.fullmatch(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)", rest)
    if in_expert is None:
        return STACK + rest, (layer,)
    return f"{STACK}mlp.experts.experts.{in_expert[1]}.weight", (layer, int(in_expert[2]))


# -- writing ----------------------------------------------------------------------------------------------------------

Read = Callable[[str, Ranges], Tensor]
"""(canonical name, box) -> the box, in any dtype."""


def write_store(
    folder: Path,
    slabs: Sequence[Slab],
    read: Read,
    dtypes: Mapping[str, torch.dtype],
    *,
    prefix: str,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> None:
    """Write all slabs into an empty folder as megatron-core would, keys beginning with ``prefix``.

    Args:
        read: gives boxes of canonical tensors; called for one chunk after another.
        dtypes: canonical name -> the dtype in which it is stored. ``ValueError`` where tensors that share a stored tensor differ.
        on_bytes: told how many bytes were handed to the disk.

    ``OSError`` where the disk is full or cannot be written; the folder then has no ``.metadata``.
    """
    planner = _StreamingPlanner(
        _chunks(slabs, _stored_dtypes(slabs, dtypes), prefix), [prefix + name for name in extra_states(slabs)], read, on_bytes
    )
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant
            dcp.save({}, storage_writer=_BoundedWriter(folder), planner=planner, no_dist=True)
    except CheckpointException as error:
        raise _cause(error) from error
    torch.save({}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(DISTRIBUTED_FORMAT), encoding="utf-8")


def _cause(error: CheckpointException) -> BaseException:
    """What went wrong in this one process. torch's file format answers a full disk with an error of its own, in whose wake it stands."""
    failure, _ = next(iter(error.failures.values()))
    earlier: BaseException | None = failure
    while earlier is not None:
        if isinstance(earlier, OSError):
            return earlier
        earlier = earlier.__cause__ or earlier.__context__
    return failure


def stored_bytes(slabs: Sequence[Slab], dtypes: Mapping[str, torch.dtype]) -> int:
    """What ``write_store`` will have handed to the disk."""
    return sum(volume(chunk.box) * chunk.dtype.itemsize for chunk in _chunks(slabs, _stored_dtypes(slabs, dtypes), ""))


@dataclass(frozen=True)
class _Chunk:
    """What one write brings to the disk."""

    key: str
    box: Ranges
    slab: Slab
    dtype: torch.dtype


def _stored_dtypes(slabs: Sequence[Slab], dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
    found: dict[str, torch.dtype] = {}
    for slab in slabs:
        for block in slab.blocks:
            dtype = found.setdefault(slab.key, dtypes[block.name])
            if dtype != dtypes[block.name]:
                raise ValueError(
                    f"{block.name} is {dtypes[block.name]}, but other tensors that megatron-core keeps with it in {slab.key} are {dtype}; "
                    "name one dtype for all: --dtype bfloat16 or --dtype float32"
                )
    return found


def _chunks(slabs: Sequence[Slab], dtypes: Mapping[str, torch.dtype], prefix: str) -> list[_Chunk]:
    return [
        _Chunk(prefix + key, box, slab, dtypes[slab.key])
        for slab in slabs
        for key in (slab.key, *([SECOND_NAMES[slab.key]] if slab.key in SECOND_NAMES else []))
        for box in cut_box(slab.box, CHUNK_BYTES // dtypes[slab.key].itemsize)
    ]


def cut_box(box: Ranges, max_elements: int) -> Iterator[Ranges]:
    """The box in parts of at most so many elements, each whole in the dims after the first that is cut (a row is never cut)."""
    elements = volume(box)
    dim = next((dim for dim, (start, stop) in enumerate(box[:-1]) if stop - start > 1), None)
    if elements <= max_elements or dim is None:
        yield box
        return
    start, stop = box[dim]
    step = max(1, max_elements * (stop - start) // elements)
    for first in range(start, stop, step):
        yield from cut_box((*box[:dim], (first, min(first + step, stop)), *box[dim + 1 :]), max_elements)


def extra_states(slabs: Sequence[Slab]) -> Iterator[str]:
    """Names of the states besides weights that megatron-core asks for when it loads a linear layer: all empty.

    They are Transformer Engine's (scales of fp8, which is not used here), and local layers ask for them too, for its sake.
    """
    for slab in slabs:
        module, _, kind = slab.key.rpartition(".")
        if kind == "weight" and module.rpartition(".")[2] in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"):
            leads = sorted({tuple(start for start, _ in block.local[: len(slab.shape) - 2]) for block in slab.blocks})
            whole = slab.shape[:-2]
            yield from (f"{module}._extra_state/shard_{_dotted(lead)}_{_dotted(whole)}" for lead in leads)
    yield "output_layer._extra_state/shard_0_1"  # also asked for where the layer is the embedding itself


def _dotted(numbers: Iterable[int]) -> str:
    return ".".join(map(str, numbers))


class _StreamingPlanner(DefaultSavePlanner):
    """Names all chunks beforehand and makes each when it is written."""

    def __init__(self, chunks: Sequence[_Chunk], empty: Sequence[str], read: Read, on_bytes: Callable[[int], None]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._chunks = {(chunk.key, tuple(start for start, _ in chunk.box)): chunk for chunk in chunks}
        self._empty = empty
        self._read = read
        self._on_bytes = on_bytes

    def create_local_plan(self) -> SavePlan:
        items = []
        for (key, offsets), chunk in self._chunks.items():
            place = ChunkStorageMetadata(torch.Size(offsets), torch.Size(box_shape(chunk.box)))
            data = TensorWriteData(place, TensorProperties(dtype=chunk.dtype), torch.Size(chunk.slab.shape))
            items.append(WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data))
        items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._empty]
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            nothing = io.BytesIO()
            torch.save([None], nothing)
            return nothing
        assert write_item.index.offset is not None
        chunk = self._chunks[write_item.index.fqn, tuple(write_item.index.offset)]
        target = torch.empty(box_shape(chunk.box), dtype=chunk.dtype)
        for block in chunk.slab.blocks:
            common = intersect(block.local, chunk.box)
            if common is not None:
                lead = len(block.local) - len(block.canonical)
                source = shifted(common[lead:], block.local[lead:], block.canonical)
                view(target, _within(common, chunk.box)).copy_(self._read(block.name, source))
        self._on_bytes(target.nbytes)
        return target


class _BoundedWriter(FileSystemWriter):
    """Writes several files one after another instead of one, and makes no chunk before its turn."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written: list[WriteResult] = []
        for number, items in enumerate(_batches(plan.items)):
            prefix = dataclasses.replace(plan.storage_data, prefix=f"__{number}_")
            written += super().write_data(dataclasses.replace(plan, items=items, storage_data=prefix), planner).value()
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done


def _batches(items: Iterable[WriteItem]) -> Iterator[list[WriteItem]]:
    batch: list[WriteItem] = []
    size = 0
    for item in items:
        data = item.tensor_data
        chunk = 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize
        if batch and size + chunk > FILE_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += chunk
    if batch:
        yield batch


# -- reading ----------------------------------------------------------------------------------------------------------


class MegatronStore:
    """A torch_dist folder, opened for reading: what it holds now, tensors when asked for. Only after ``unsafe_pickle`` has passed it."""

    def __init__(self, folder: Path) -> None:
        """``ValueError`` where it is no such folder, or a file is missing, shorter than it should be, or outside the folder."""
        self.folder = folder
        _check_format(folder)
        self._reader = FileSystemReader(folder)
        try:
            metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError, AssertionError) as error:
            raise ValueError(f"{folder / '.metadata'} cannot be read ({error}); copy the checkpoint again") from error
        self._check_files()
        entries = metadata.state_dict_metadata.items()
        self._tensors = {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}
        self.shapes: dict[str, tuple[int, ...]] = {key: tuple(entry.size) for key, entry in self._tensors.items()}
        """Stored name -> shape of every tensor in the folder."""

    def dtype(self, key: str) -> torch.dtype:
        """Of a stored tensor."""
        return self._tensors[key].properties.dtype

    def read(self, key: str, box: Ranges) -> Tensor:
        """A box of a stored tensor. ``ValueError`` where no chunk holds a part of it, or a file is damaged or gone."""
        place = ChunkStorageMetadata(torch.Size(start for start, _ in box), torch.Size(box_shape(box)))
        items = create_read_items_for_chunk_list(key, self._tensors[key], [place])
        held = sum(item.lengths.numel() for item in items)
        if held != volume(box):
            raise ValueError(f"{self.folder} holds {held} of {volume(box)} elements of {key} {box_text(box)}: the checkpoint is not whole")
        target = torch.empty(box_shape(box), dtype=self.dtype(key))
        try:
            self._reader.read_data(LoadPlan(items), _Into(target)).wait()
        except FileNotFoundError as error:
            raise ValueError(f"{error.filename} is gone: {GONE}") from error
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, AssertionError) as error:
            raise ValueError(f"{key} {box_text(box)} in {self.folder} cannot be read ({error}); copy the checkpoint again") from error
        return target

    def _check_files(self) -> None:
        """torch opens whatever names the metadata gives."""
        ends: dict[str, int] = {}
        for info in self._reader.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in ends.items():
            if not isinstance(name, str) or Path(name).name != name or (self.folder / name).is_symlink():
                raise ValueError(f"{self.folder / '.metadata'} names {name!r}, which is no plain file in the same folder")
            size = (self.folder / name).stat().st_size if (self.folder / name).is_file() else None
            if size is None or size < end:
                state = "does not exist" if size is None else f"has {size} bytes, but should have at least {end}"
                raise ValueError(f"{self.folder / name} {state}; copy the checkpoint again")


GONE = "a running job deletes its older checkpoints; convert a newer one, or let the job keep more (keep_checkpoints)"


class _Into(DefaultLoadPlanner):
    """Brings what is read to its place in one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        ranges = tuple((start, start + size) for start, size in zip(read_item.dest_offsets, read_item.lengths, strict=True))
        return view(self._target, ranges)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It was written in place."""


def _check_format(folder: Path) -> None:
    """``metadata.json`` says that megatron-core's torch_dist wrote the folder."""
    path = folder / "metadata.json"
    try:
        kind = json.loads(path.read_text(encoding="utf-8")).get("sharded_backend")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); {_NOT_WHOLE}") from error
    if kind != "torch_dist":
        raise ValueError(f"{path} says {kind!r}, and only format torch_dist can be read; save the checkpoint again with megatron-core 0.16")
    if not (folder / ".metadata").is_file():
        raise ValueError(f"{folder / '.metadata'} does not exist; {_NOT_WHOLE}")


_NOT_WHOLE = "this is no distributed checkpoint of megatron-core, or it was not written to its end: copy it again, or take another"


def open_slabs(store: MegatronStore, slabs: Sequence[Slab], prefix: str) -> StoredNetwork:
    """The network whose keys begin with ``prefix``.

    ``ValueError`` listing every stored tensor that is missing or whose shape is not the network's.
    """
    faults: list[str] = []
    places: list[tuple[Slab, str, Ranges]] = []
    for slab in slabs:
        names = [f"{prefix}{name}" for name in _possible_names(slab)]
        key = next((name for name in names if name in store.shapes), None)
        stacked = key is not None and (not slab.key.startswith(STACK) or not re.match(r"decoder\.layers\.\d", key.removeprefix(prefix)))
        wanted = slab.shape if stacked else slab.shape[1:]
        if key is None:
            faults.append(f"missing: {names[0]} {slab.shape}")
            continue
        have = store.shapes[key]
        if have != wanted and not (slab.key in VOCABULARIES and have[1:] == wanted[1:] and have[0] > wanted[0]):
            faults.append(f"shape of {key}: {have}, but the config says {wanted}")
        places.append((slab, key, slab.box if stacked else slab.box[1:]))
    if faults:
        faults = list(dict.fromkeys(faults))
        listed = "\n  - ".join(faults[:40] + ([f"... and {len(faults) - 40} more"] if len(faults) > 40 else []))
        raise ValueError(
            f"{store.folder} does not hold the network that config.json describes:\n  - {listed}\n"
            "Check that config.json belongs to these weights; other architectures are not supported."
        )
    return StoredNetwork(store, tuple(places))


def _possible_names(slab: Slab) -> list[str]:
    names = [slab.key, *([SECOND_NAMES[slab.key]] if slab.key in SECOND_NAMES else [])]
    if slab.key.startswith(STACK):
        layer = slab.box[0][0]
        names += [f"{STACK}{layer}.{name.removeprefix(STACK)}" for name in names]
    return names


@dataclass(frozen=True)
class StoredNetwork:
    """One network of a folder, as canonical tensors."""

    store: MegatronStore
    places: tuple[tuple[Slab, str, Ranges], ...]
    """Slabs in the order of the forward pass, the stored tensor that holds each, and its box there."""

    @property
    def num_bytes(self) -> int:
        """Of all canonical tensors, in the dtypes in which they are stored."""
        return sum(volume(block.canonical) * self.store.dtype(key).itemsize for slab, key, _ in self.places for block in slab.blocks)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(canonical name, tensor), one slab in memory at a time. A tensor may share memory with the next ones: copy what is kept."""
        for slab, key, box in self.places:
            held = self.store.read(key, box).reshape(box_shape(slab.box))
            by_name: dict[str, list[Block]] = {}
            for block in slab.blocks:
                by_name.setdefault(block.name, []).append(block)
            for name, blocks in by_name.items():
                parts = [view(held, _within(block.local, slab.box)).reshape(box_shape(block.canonical)) for block in blocks]
                yield name, parts[0] if len(parts) == 1 else _joined(parts, blocks)


def _joined(parts: Sequence[Tensor], blocks: Sequence[Block]) -> Tensor:
    """The parts in their places in the canonical tensor, which they fill."""
    shape = tuple(max(block.canonical[dim][1] for block in blocks) for dim in range(len(blocks[0].canonical)))
    full = torch.empty(shape, dtype=parts[0].dtype)
    for part, block in zip(parts, blocks, strict=True):
        view(full, block.canonical).copy_(part)
    return full


def _within(box: Ranges, origin: Ranges) -> Ranges:
    """``box`` counted from the start of ``origin``."""
    return tuple([(start - first, stop - first) for (start, stop), (first, _) in zip(box, origin, strict=True)])


def has_value_head(store: MegatronStore, prefix: str) -> bool:
    """Whether the network under ``prefix`` has a scalar head."""
    return f"{prefix}{VALUE_HEAD}" in store.shapes
