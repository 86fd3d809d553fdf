"""Where each element of this rank's weights and optimizer state lies in a checkpoint: boxes of whole tensors, the same for every mesh.

megatron-core says of each parameter which part of which checkpoint tensor it is (``sharded_state_dict``). That is taken over here, with
three changes, so that any mesh can read what any other wrote:

    optimizer state   lies as its parameter does. The distributed optimizer cuts the flat parameters of a buffer into equal ranges, whose
                      ends fall in the middle of a row: a range is at most 2 x dims - 1 boxes, written by the rank that holds it, without
                      a gather. megatron-core's own formats gather on one rank, or read on the same mesh only, and none goes from the
                      distributed to the plain optimizer.
    vocabulary        rows that only pad it are not part of the checkpoint: their number depends on the mesh, and they are 0.
    extra state       of Transformer Engine (fp8 scales, pickled) is left out: nothing here trains in fp8.

A box of a parameter [R, C] whose flat range ends inside a row, as three boxes:

        row 3   . . a a a a      head of the range
        row 4   b b b b b b      whole rows
        row 5   c c . . . .      tail

Left out: files (``megatron_checkpoint.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_ppo.backends.megatron_optimizer import MegatronOptimizer
from megatron_ppo.backends.stored_tensors import NUM_STEPS

if TYPE_CHECKING:
    from megatron_ppo.backends.megatron import Network


@dataclass(frozen=True)
class Entry:
    """A live tensor of this rank that is one box of one checkpoint tensor."""

    key: str
    tensor: Tensor
    """Flat view of live memory, in the order of the box."""
    shape: tuple[int, ...]
    """Of the box, in all dims of the checkpoint tensor (layers and experts are its first)."""
    offset: tuple[int, ...]
    global_shape: tuple[int, ...]
    replica_id: tuple[int, ...]
    """The copy whose numbers are all 0 is the one that is written."""


def network_entries(role: str, network: Network) -> Iterator[Entry]:
    """All boxes of a trained network that this rank holds: ``{role}.model.*``, then ``{role}.optimizer.*``. Not collective.

    Optimizer state of a parameter saved as ``{role}.model.KEY`` is ``{role}.optimizer.{master, exp_avg or exp_avg_sq}.KEY``.
    """
    pieces: dict[int, list[_Piece]] = {}
    for part in network.roles:
        for piece in _pieces(part):
            pieces.setdefault(piece.parameter.data_ptr(), []).append(piece)
            yield piece.whole(f"{role}.model.{piece.key}")
    if network.optimizer is None:
        return
    yield from _optimizer_entries(f"{role}.optimizer.", network.optimizer, pieces)


def num_steps_entry(role: str, steps: Tensor, rank: int) -> Entry:
    """``{role}.optimizer.num_steps``: ``steps`` is int64 [1], written by rank 0."""
    return Entry(f"{role}.optimizer.{NUM_STEPS}", steps, (1,), (0,), (1,), (rank,))


def _optimizer_entries(prefix: str, optimizer: MegatronOptimizer, pieces: dict[int, list[_Piece]]) -> Iterator[Entry]:
    for state in optimizer.owned_states():
        for piece in pieces.get(state.parameter.data_ptr(), ()):  # none: a part of a vocabulary that holds nothing but padding
            for name, tensor in state.tensors.items():
                yield from piece.owned(f"{prefix}{name}.{piece.key}", tensor, state.start, state.stop, sharded=optimizer.is_sharded)


@dataclass(frozen=True)
class _Piece:
    """A range of a flat local parameter that is one box of a checkpoint tensor: the whole parameter, or the gate half of a gate/up pair."""

    key: str
    parameter: Tensor
    start: int
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    global_shape: tuple[int, ...]
    replica_id: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)

    def whole(self, key: str) -> Entry:
        """The piece of the parameter itself."""
        tensor = self.parameter.view(-1)[self.start : self.stop]
        return Entry(key, tensor, self.shape, self.offset, self.global_shape, self.replica_id)

    def owned(self, key: str, tensor: Tensor, start: int, stop: int, *, sharded: bool) -> Iterator[Entry]:
        """Boxes of the piece that lie in the parameter's flat range [start, stop), which ``tensor`` holds."""
        first, last = max(start, self.start), min(stop, self.stop)
        if first >= last:
            return
        # A range of the distributed optimizer is held by one data-parallel rank alone: among those there are no copies.
        replica = (*self.replica_id[:-1], 0) if sharded else self.replica_id
        at = first - start
        for place, shape in boxes_of_range(self.shape, first - self.start, last - self.start):
            size = math.prod(shape)
            offset = tuple(base + inner for base, inner in zip(self.offset, place, strict=True))
            yield Entry(key, tensor[at : at + size], shape, offset, self.global_shape, replica)
            at += size


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, shape) of the boxes that elements [start, stop) of a flattened tensor fill, in that order: at most 2 x dims - 1.

    >>> list(boxes_of_range((6, 6), 20, 32))
    [((3, 2), (1, 4)), ((4, 0), (1, 6)), ((5, 0), (1, 2))]
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    whole_from, whole_to = -(-start // row), stop // row
    if whole_from > whole_to:  # inside one row
        yield from _in_row(shape, whole_to, start, stop)
        return
    yield from _in_row(shape, whole_from - 1, start, whole_from * row)
    if whole_from < whole_to:
        yield (whole_from, *(0 for _ in shape[1:])), (whole_to - whole_from, *shape[1:])
    yield from _in_row(shape, whole_to, whole_to * row, stop)


def _in_row(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    base = index * math.prod(shape[1:])
    for offset, size in boxes_of_range(shape[1:], start - base, stop - base):
        yield (index, *offset), (1, *size)


def _pieces(part: Any) -> Iterator[_Piece]:
    """What megatron-core says of all parameters of one chunk, a ``MegatronActorCritic``."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    for value in nested_values(part.sharded_state_dict(metadata=metadata)):
        if isinstance(value, ShardedTensorFactory):
            yield from _built_pieces(value.data.detach(), nested_values(value.build()), part.vocab_size)
        elif isinstance(value, ShardedTensor):
            yield from _built_pieces(value.data.detach(), [value], part.vocab_size)


def _built_pieces(parameter: Tensor, built: Iterable[Any], vocab_size: int) -> Iterator[_Piece]:
    for sharded in built:
        data = sharded.data
        assert parameter.is_contiguous() and data.is_contiguous(), f"{sharded.key} is not one range of its parameter"
        start = (data.data_ptr() - parameter.data_ptr()) // data.element_size()
        assert start >= 0 and start + data.numel() <= parameter.numel(), f"{sharded.key} does not lie in its parameter"
        shape = (*(1 for _ in range(sharded.prepend_axis_num)), *sharded.local_shape)
        offset, whole = tuple(sharded.global_offset), tuple(sharded.global_shape)
        if sharded.allow_shape_mismatch:  # megatron-core's mark of a vocabulary: rows are its first dim
            rows = max(0, min(shape[0], vocab_size - offset[0]))
            shape, whole = (rows, *shape[1:]), (vocab_size, *whole[1:])
            if rows == 0:
                continue
        replica = sharded.replica_id
        assert isinstance(replica, tuple), f"{sharded.key} has replica id {replica}"
        yield _Piece(sharded.key, parameter, start, shape, offset, whole, replica)


def sharded_tensor(entry: Entry, data: Tensor) -> Any:
    """megatron-core's ``ShardedTensor`` of an entry, with ``data`` (flat, contiguous) in place of the live tensor.

    Its grid is said to be irregular, which it is for optimizer state: torch then checks that the boxes of all ranks fill each tensor.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    return ShardedTensor(
        key=entry.key,
        data=data.view(entry.shape),
        dtype=data.dtype,
        local_shape=entry.shape,
        global_shape=entry.global_shape,
        global_offset=entry.offset,
        axis_fragmentations=None,
        replica_id=entry.replica_id,
    )


def is_written(entry: Entry) -> bool:
    """Whether this rank's copy is the one that goes into the checkpoint."""
    return not any(entry.replica_id)
