"""Bit for bit: whether two sets of one rank's live parameters hold the same weights, block by block of its layout.

Used where one way of bringing weights into an engine is held to another (``verify_ranks.py``). Elements that belong to no block
(vocabulary padding) are left out. The proof of a sync, which has no second set to compare with, is ``checksum.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from megatron_ppo.resharding.boxes import box_text
from megatron_ppo.resharding.checksum import BITS
from megatron_ppo.resharding.layout import Block, Ranges, RankLayout, box_shape, view


@dataclass(frozen=True)
class BlockComparison:
    """What two sets of parameters hold of one block."""

    block: Block
    num_differing: int
    """Elements whose bits differ; -0.0 and 0.0 do, two equal NaN do not."""
    span: Ranges | None
    """Smallest box of the canonical tensor that holds all of them; None: there are none."""

    def __str__(self) -> str:
        """``NAME [0:64, 3:4] (in PARAMETER): 7 of 4096 elements differ``."""
        where = "" if self.span is None else f" {box_text(self.span)}"
        return f"{self.block.name}{where} (in {self.block.parameter}): {self.num_differing} of {self.block.num_elements} elements differ"


def compare_blocks(layout: RankLayout, one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Iterator[BlockComparison]:
    """Each block of the layout, in its order. Parameters are of one shape; another dtype makes every element differ."""
    for block in layout.blocks:
        shape = box_shape(block.canonical)
        left, right = (view(side[block.parameter], block.local).reshape(shape).to("cpu") for side in (one, other))
        if left.dtype != right.dtype:
            yield BlockComparison(block, block.num_elements, block.canonical)
            continue
        bits = BITS[left.element_size()]
        differs = left.contiguous().view(bits) != right.contiguous().view(bits)
        places = differs.nonzero()
        span = None
        if len(places):
            low, high = places.amin(dim=0).tolist(), places.amax(dim=0).tolist()
            span = tuple((start + a, start + b + 1) for (start, _), a, b in zip(block.canonical, low, high, strict=True))
        yield BlockComparison(block, len(places), span)
