"""Which source sends how much of each stream: the numbers only. Used by ``plan.py``, which knows the boxes.

First the largest of ingress and egress over ranks is made the least possible (within one part in 64, where that saves groups), then
groups (pairs of source and destination class) few. Sizes are elements; a stream may be shared at any element.

    streams     what one destination class takes from any one of a set of ranks          sets overlap: norms lie on every rank of a stage,
       |                                                                                  a row of a matrix on its data-parallel copies
       |  greedy: whole streams, to ranks that are in a group with the class already
       v
    loads <= limit ?  -- no --> push the rest along paths stream -> rank -> stream of that rank -> rank ... to a rank with room (max-flow)
                                  |  no path: the ranks reached can only send what is theirs alone. That over their number is a lower
                                  v  bound for every assignment, so the limit rises to it
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

_SLACK = 64
"""The busiest rank may exceed the least possible by one part in so many where that saves groups: norms are not worth communicators."""


@dataclass(frozen=True)
class StreamSize:
    """What one destination class takes from one set of sources."""

    receiver: int
    """Number of the destination class."""
    candidates: tuple[int, ...]
    """Ranks any of which can send it, ascending."""
    size: int
    """Elements, above 0."""


def choose_sources(streams: Sequence[StreamSize], *, ingress: int, own: Sequence[Collection[int]]) -> list[dict[int, int]]:
    """For each stream: rank -> elements that it sends, which add up to the stream's size. Deterministic.

    Args:
        ingress: elements that the busiest receiver gets, whatever is chosen.
        own: for each destination class its ranks; a source among them is preferred, all else equal.
    """
    limit = ingress
    while (bound := _Shares(streams, own, limit).fill()) is not None:
        assert bound > limit, f"a bound of {bound} does not exceed the limit {limit} that could not be kept"
        limit = bound
    attempts = []
    for most in (limit, limit + limit // _SLACK):
        for by_receiver in (False, True):
            attempts.append(_Shares(streams, own, most))
            bound = attempts[-1].fill(by_receiver=by_receiver)
            assert bound is None, "a limit that one order keeps is kept by all"
    fewest = min(attempts, key=lambda attempt: attempt.num_groups)  # the first of equals, so that room is used only where it helps
    return [dict(sorted(amounts.items())) for amounts in fewest.amounts]


class _Shares:
    """One attempt to assign all streams with no rank above ``limit``."""

    def __init__(self, streams: Sequence[StreamSize], own: Sequence[Collection[int]], limit: int) -> None:
        self._streams = streams
        self._own = own
        self._room = {rank: limit for stream in streams for rank in stream.candidates}
        self._sent: dict[int, set[int]] = {rank: set() for rank in self._room}
        """Rank -> numbers of the streams of which it sends anything."""
        self._groups: set[tuple[int, int]] = set()
        """(rank, destination class)."""
        self._open = Counter((rank, stream.receiver) for stream in streams for rank in stream.candidates)
        """(rank, destination class) -> unassigned streams that the rank could send."""
        self.amounts: list[dict[int, int]] = [{} for _ in streams]

    @property
    def num_groups(self) -> int:
        """Pairs of a rank and a destination class to which it sends anything."""
        return len({(rank, stream.receiver) for stream, amounts in zip(self._streams, self.amounts, strict=True) for rank in amounts})

    def fill(self, *, by_receiver: bool = False) -> int | None:
        """Assign everything. None, or else a lower bound of the busiest sender above the limit: it cannot be kept.

        Streams with fewest candidates choose first: of all, or (``by_receiver``) of one class after the other, which keeps room for its
        small streams where its large ones went.
        """

        def scarcity(number: int) -> tuple[int, int, int, int]:
            stream = self._streams[number]
            return stream.receiver if by_receiver else 0, len(stream.candidates), -stream.size, number

        order = sorted(range(len(self._streams)), key=scarcity)
        left = {number: rest for number in order if (rest := self._assign_greedily(number))}
        for number, missing in left.items():
            pushed = 0
            while pushed < missing:
                path = self._path(number)
                if not isinstance(path, list):
                    return self._bound(path)
                pushed += self._push(path, missing - pushed)
        return None

    def _assign_greedily(self, number: int) -> int:
        """Give the stream to one rank, or else to as few as have room; returns the elements that are left over.

        A rank is preferred that has a group with the class, then the one that can also send most of the class's other streams, so that
        dense weights follow the experts.
        """
        stream = self._streams[number]
        receiver, own = stream.receiver, self._own[stream.receiver]

        def cost(rank: int) -> tuple[bool, int, bool, int]:
            return (rank, receiver) not in self._groups, -self._open[rank, receiver], rank not in own, rank

        rank = min((rank for rank in stream.candidates if self._room[rank] >= stream.size), key=cost, default=None)
        rest = stream.size
        if rank is not None:
            self._give(number, rank, rest)
            rest = 0
        else:
            for rank in sorted(stream.candidates, key=lambda rank: ((rank, receiver) not in self._groups, -self._room[rank], rank)):
                part = min(rest, self._room[rank])
                if part:
                    self._give(number, rank, part)
                    rest -= part
        for rank in stream.candidates:
            self._open[rank, receiver] -= 1
        return rest

    def _give(self, number: int, rank: int, amount: int) -> None:
        """More of the stream to the rank, or less where ``amount`` is negative."""
        amounts = self.amounts[number]
        amounts[rank] = amounts.get(rank, 0) + amount
        self._room[rank] -= amount
        self._groups.add((rank, self._streams[number].receiver))
        self._sent[rank].add(number)
        if not amounts[rank]:
            del amounts[rank]
            self._sent[rank].remove(number)

    def _path(self, number: int) -> list[tuple[int, int]] | set[int]:
        """The shortest [(stream, rank), ...] to a rank with room: each stream gives to its rank, which gives up a part of the next.

        Without one, the ranks reached, all of them full.
        """
        came_from: dict[int, tuple[int, int | None]] = {}  # rank -> (stream that may give to it, rank where that stream was met)
        met: set[int] = {number}
        queue: deque[tuple[int, int | None]] = deque([(number, None)])
        while queue:
            stream, before = queue.popleft()
            for rank in self._streams[stream].candidates:
                if rank in came_from:
                    continue
                came_from[rank] = (stream, before)
                if self._room[rank] > 0:
                    path, at = [], rank
                    while True:
                        giver, previous = came_from[at]
                        path.append((giver, at))
                        if previous is None:
                            return path[::-1]
                        at = previous
                queue.extend((other, rank) for other in sorted(self._sent[rank] - met))
                met |= self._sent[rank]
        return set(came_from)

    def _push(self, path: Sequence[tuple[int, int]], wanted: int) -> int:
        """Move up to ``wanted`` elements along the path; returns how many."""
        moved = min([wanted, self._room[path[-1][1]], *(self.amounts[s][r] for (_, r), (s, _) in pairwise(path))])
        for position in range(len(path) - 1, -1, -1):
            stream, rank = path[position]
            if position:
                self._give(stream, path[position - 1][1], -moved)
            self._give(stream, rank, moved)
        return moved

    def _bound(self, ranks: set[int]) -> int:
        """What only these ranks can send, over their number."""
        inside = sum(stream.size for stream in self._streams if ranks.issuperset(stream.candidates))
        return -(-inside // len(ranks))
