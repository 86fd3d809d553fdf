"""Two sets of parameters, block by block: what differs, where in the canonical tensor, and that padding is left out."""

from __future__ import annotations

import torch

from megatron_ppo.resharding.compare import compare_blocks
from megatron_ppo.resharding.layout import Block, RankLayout

EMBEDDING = Block("embedding", ((4, 7), (0, 2)), "vocabulary", ((0, 3), (0, 2)))  # rows 4 to 6 of it; row 3 here is padding
EXPERT = Block("experts.1.up", ((0, 2), (0, 3)), "stacked", ((1, 2), (0, 2), (0, 3)))  # the second slot
LAYOUT = RankLayout((EMBEDDING, EXPERT), {"vocabulary": (4, 2), "stacked": (2, 2, 3)})


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {"vocabulary": torch.arange(8.0, dtype=dtype).view(4, 2), "stacked": torch.arange(12.0, dtype=dtype).view(2, 2, 3)}


def test_equal_blocks_differ_nowhere_and_padding_may() -> None:
    other = parameters()
    other["vocabulary"][3] = torch.nan  # padding
    other["stacked"][0] = -1  # another expert's slot, of no block
    assert [(one.num_differing, one.span) for one in compare_blocks(LAYOUT, parameters(), other)] == [(0, None), (0, None)]


def test_a_difference_is_named_in_the_canonical_tensor() -> None:
    other = parameters(torch.bfloat16)
    other["vocabulary"][2, 1] += 1
    other["stacked"][1, 0, 1] = other["stacked"][1, 1, 2] = -1
    first, second = compare_blocks(LAYOUT, parameters(torch.bfloat16), other)
    assert (first.num_differing, first.span) == (1, ((6, 7), (1, 2)))
    assert (second.num_differing, second.span) == (2, ((0, 2), (1, 3)))
    assert str(second) == "experts.1.up [0:2, 1:3] (in stacked): 2 of 6 elements differ"


def test_bits_are_compared_not_numbers() -> None:
    """-0.0 equals 0.0 as a number, and NaN not even itself."""
    one, other = parameters(), parameters()
    one["vocabulary"][0], other["vocabulary"][0] = 0.0, -0.0
    one["stacked"][1] = other["stacked"][1] = torch.nan
    assert [found.num_differing for found in compare_blocks(LAYOUT, one, other)] == [2, 0]


def test_another_dtype_differs_everywhere() -> None:
    first, second = compare_blocks(LAYOUT, parameters(), parameters(torch.bfloat16))
    assert (first.num_differing, first.span) == (6, EMBEDDING.canonical) and second.num_differing == 6
