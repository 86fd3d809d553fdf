"""Boxes: division and the search for overlapping pairs, held to counting elements one by one."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from megatron_ppo.resharding.boxes import divide, intersect, overlapping_pairs, volume
from megatron_ppo.resharding.layout import Ranges

dims = st.tuples(st.integers(0, 5), st.integers(0, 4)).map(lambda pair: (pair[0], pair[0] + pair[1]))


def elements(box: Ranges) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(start, stop) for start, stop in box)))


@given(st.lists(dims, max_size=3).map(tuple), st.integers(0, 70))
def test_a_divided_box_keeps_its_elements_in_row_major_order(box: Ranges, count: int) -> None:
    first, others = divide(box, count)
    assert [e for part in first for e in elements(part)] == elements(box)[:count]
    assert [e for part in others for e in elements(part)] == elements(box)[count:]
    assert len(first) + len(others) <= 2 * len(box) + 1


@given(st.data())
def test_overlapping_pairs_are_all_pairs_with_a_common_element(data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, 3))
    boxes = data.draw(st.lists(st.tuples(*[dims] * rank), max_size=9))
    expected = [(i, j) for i, j in itertools.combinations(range(len(boxes)), 2) if set(elements(boxes[i])) & set(elements(boxes[j]))]
    assert overlapping_pairs(boxes) == expected
    assert all((intersect(boxes[i], boxes[j]) is not None) == ((i, j) in expected) for i, j in itertools.combinations(range(len(boxes)), 2))


def test_a_stack_of_many_experts_is_searched_in_near_linear_work() -> None:
    """Work counted as ranges looked at: 8 times the boxes take less than 12 times the work (all pairs would take 64)."""
    looked_at = 0

    class Counted(tuple[tuple[int, int], ...]):
        __slots__ = ()

        def __getitem__(self, dim: object) -> object:  # type: ignore[override]
            nonlocal looked_at
            looked_at += 1
            return super().__getitem__(dim)  # type: ignore[index]

    work = []
    for experts in (64, 512):
        halves = [((e, e + 1), (16 * part, 16 * part + 16), (0, 8)) for e in range(experts) for part in range(2)]
        looked_at = 0
        assert overlapping_pairs([Counted(box) for box in halves]) == []
        work.append(looked_at)
    assert 0 < work[1] < 12 * work[0]
    assert overlapping_pairs([*halves, ((100, 101), (31, 32), (7, 8))]) == [(201, 1024)]


def test_a_scalar_is_one_element() -> None:
    assert volume(()) == 1
    assert overlapping_pairs([(), ()]) == [(0, 1)]
    assert divide((), 1) == ([()], [])
