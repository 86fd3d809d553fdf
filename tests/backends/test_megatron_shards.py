"""A range of a flattened tensor as boxes: what the distributed optimizer's shards become in a checkpoint."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ppo.backends.megatron_shards import boxes_of_range


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
@settings(max_examples=300, deadline=None)
def test_boxes_give_the_range_in_order_and_are_few(shape: list[int], data: st.DataObject) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    whole = torch.arange(size).view(shape)
    boxes = list(boxes_of_range(shape, start, stop))
    found = [number for offset, extent in boxes for number in _box(whole, offset, extent).flatten().tolist()]
    assert found == list(range(start, stop))
    assert len(boxes) <= 2 * len(shape) - 1
    assert all(min(extent) > 0 for _, extent in boxes)


def test_a_range_between_rows_is_head_rows_and_tail() -> None:
    assert list(boxes_of_range((6, 6), 20, 32)) == [((3, 2), (1, 4)), ((4, 0), (1, 6)), ((5, 0), (1, 2))]
    assert list(boxes_of_range((6, 6), 7, 9)) == [((1, 1), (1, 2))]
    assert list(boxes_of_range((6, 6), 0, 36)) == [((0, 0), (6, 6))]


def _box(tensor: torch.Tensor, offset: tuple[int, ...], extent: tuple[int, ...]) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(offset, extent, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor
