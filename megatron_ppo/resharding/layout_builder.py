"""The few ways in which frameworks lay a canonical tensor into local parameters, as methods that collect a ``RankLayout``.

Used by ``megatron_layout.py`` and ``vllm_layout.py``, which know names and rules; here is only the arithmetic of boxes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from megatron_ppo.families import Head, NetworkShape, canonical_tensors
from megatron_ppo.resharding.layout import Block, Range, Ranges, RankLayout, box_shape

Piece = tuple[str, Range]
"""Rows (start, stop) of the canonical tensor of that name."""


class LayoutBuilder:
    """Collects the blocks and parameter shapes of one rank."""

    def __init__(self, network: NetworkShape, head: Head = "lm") -> None:
        self._canonical = _canonical_shapes(network, head)
        self._blocks: list[Block] = []
        self._shapes: dict[str, tuple[int, ...]] = {}

    def build(self) -> RankLayout:
        """What was collected."""
        return RankLayout(tuple(self._blocks), dict(self._shapes))

    def whole(self, parameter: str, name: str) -> None:
        """The parameter is the canonical tensor."""
        shape = self._canonical[name]
        box = _full(shape)
        self._add_parameter(parameter, shape)
        self._blocks.append(Block(name, box, parameter, box))

    def split(self, parameter: str, name: str, dim: int, rank: int, parts: int) -> None:
        """The parameter is the ``rank``-th of ``parts`` equal parts along ``dim``."""
        shape = self._canonical[name]
        assert shape[dim] % parts == 0, f"{name}: {shape[dim]} does not divide by {parts}; the caller checks that"
        size = shape[dim] // parts
        local_shape = (*shape[:dim], size, *shape[dim + 1 :])
        canonical = (*_full(shape[:dim]), (rank * size, (rank + 1) * size), *_full(shape[dim + 1 :]))
        self._add_parameter(parameter, local_shape)
        self._blocks.append(Block(name, canonical, parameter, _full(local_shape)))

    def stack(self, parameter: str, pieces: Sequence[Piece]) -> None:
        """The parameter is the pieces, one below the other; all agree in the other dims."""
        rest = self._canonical[pieces[0][0]][1:]
        row = 0
        for name, (start, stop) in pieces:
            rows = (row, row + stop - start)
            self._blocks.append(Block(name, ((start, stop), *_full(rest)), parameter, (rows, *_full(rest))))
            row = rows[1]
        self._add_parameter(parameter, (row, *rest))

    def slots(self, parameter: str, slots: Sequence[Sequence[tuple[str, Ranges]]]) -> None:
        """The parameter is a stack along a new first dim; each slot is its pieces (name, canonical box), one below the other."""
        shape: tuple[int, ...] = ()
        for number, pieces in enumerate(slots):
            row = 0
            for name, box in pieces:
                local = _slot_box(number, row, box)
                self._blocks.append(Block(name, box, parameter, local))
                row = local[1][1]
                shape = (row, *box_shape(local[2:]))
        self._add_parameter(parameter, (len(slots), *shape))

    def vocabulary(self, parameter: str, name: str, rank: int, rows_per_rank: int) -> None:
        """Rows ``rank * rows_per_rank`` onwards; those past the canonical end are padding and in no block."""
        rows, *rest = self._canonical[name]
        start, stop = rank * rows_per_rank, min((rank + 1) * rows_per_rank, rows)
        self._add_parameter(parameter, (rows_per_rank, *rest))
        if start < stop:
            others = _full(tuple(rest))
            self._blocks.append(Block(name, ((start, stop), *others), parameter, ((0, stop - start), *others)))

    def _add_parameter(self, parameter: str, shape: tuple[int, ...]) -> None:
        assert parameter not in self._shapes, f"{parameter} was described twice"
        self._shapes[parameter] = shape


@lru_cache(maxsize=4)
def _canonical_shapes(network: NetworkShape, head: Head) -> Mapping[str, tuple[int, ...]]:
    """Kept, because the layouts of a mesh are built one by one, and a large mixture has tens of thousands of tensors."""
    return {tensor.name: tensor.shape for tensor in canonical_tensors(network, head)}


@lru_cache(maxsize=4096)
def _slot_box(number: int, row: int, box: Ranges) -> Ranges:
    """Where a piece lies in a stack. Kept, because all layers are alike, and boxes that are one object take the memory of one."""
    size, *rest = box_shape(box)
    return ((number, number + 1), (row, row + size), *_full(tuple(rest)))


def cut_pieces(pieces: Sequence[Piece], start: int, stop: int) -> list[Piece]:
    """What of the stacked pieces lies in rows ``start`` to ``stop`` of the stack."""
    result = []
    row = 0
    for name, (first, last) in pieces:
        low, high = max(row, start), min(row + last - first, stop)
        if low < high:
            result.append((name, (first + low - row, first + high - row)))
        row += last - first
    return result


def padded_rows(rows: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``rows``."""
    return -(-rows // multiple) * multiple


def _full(shape: tuple[int, ...]) -> Ranges:
    return tuple((0, size) for size in shape)
