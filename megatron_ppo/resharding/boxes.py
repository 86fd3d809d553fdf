"""Arithmetic of boxes: half-open index ranges, one a dim. Pure functions of tuples, used by the plan, the executor and the checks.

A box of no dims is a scalar and holds one element.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from megatron_ppo.resharding.layout import Ranges


def volume(box: Ranges) -> int:
    """Elements in a box."""
    count = 1
    for start, stop in box:
        count *= stop - start
    return count


def intersect(one: Ranges, other: Ranges) -> Ranges | None:
    """The common box, or None where it is empty."""
    common = []
    for (a, b), (c, d) in zip(one, other, strict=True):
        start, stop = max(a, c), min(b, d)
        if start >= stop:
            return None
        common.append((start, stop))
    return tuple(common)


def subtract(box: Ranges, hole: Ranges) -> list[Ranges]:
    """``box`` without ``hole`` (which lies inside), as disjoint boxes."""
    parts: list[Ranges] = []
    if box == hole:
        return parts
    for dim, ((start, stop), (low, high)) in enumerate(zip(box, hole, strict=True)):
        for piece in ((start, low), (high, stop)):
            if piece[0] < piece[1]:
                parts.append((*hole[:dim], piece, *box[dim + 1 :]))
    return parts


def divide(box: Ranges, count: int) -> tuple[list[Ranges], list[Ranges]]:
    """The first ``count`` elements of the box in row-major order, and the others, each as disjoint boxes."""
    if count <= 0:
        return [], [box]
    if count >= volume(box):
        return [box], []
    (start, stop), rest = box[0], box[1:]
    row = volume(rest)
    edge, within = start + count // row, count % row
    first: list[Ranges] = [((start, edge), *rest)] if start < edge else []
    others: list[Ranges] = []
    if within:  # the row in which the division falls
        inside, outside = divide(rest, within)
        first += [((edge, edge + 1), *part) for part in inside]
        others += [((edge, edge + 1), *part) for part in outside]
        edge += 1
    if edge < stop:
        others.append(((edge, stop), *rest))
    return first, others


def overlapping_pairs(boxes: Sequence[Ranges]) -> list[tuple[int, int]]:
    """Index pairs (lower first) of boxes that have a common element, all of one number of dims; near linear where they form a grid."""
    pairs: list[tuple[int, int]] = []
    pending = [(list(range(len(boxes))), 0, 0)]
    while pending:
        numbers, dim, tried = pending.pop()
        if len(numbers) < 2:
            continue
        if tried == len(boxes[0]):  # no dim parts them
            pairs += [(i, j) for i, j in itertools.combinations(sorted(numbers), 2) if intersect(boxes[i], boxes[j]) is not None]
            continue
        runs = _runs(numbers, boxes, dim)
        following = (dim + 1) % len(boxes[0])
        pending += [(run, following, tried + 1 if len(runs) == 1 else 1) for run in runs]
    return sorted(pairs)


def _runs(numbers: Collection[int], boxes: Sequence[Ranges], dim: int) -> list[list[int]]:
    """The numbers of boxes, cut wherever no box reaches across in ``dim``."""
    runs: list[list[int]] = []
    reached = -1
    for number in sorted(numbers, key=lambda number: boxes[number][dim]):
        start, stop = boxes[number][dim]
        if start >= reached:
            runs.append([])
        runs[-1].append(number)
        reached = max(reached, stop)
    return runs


def box_text(box: Ranges) -> str:
    """``[0:128, 0:64]``."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"
