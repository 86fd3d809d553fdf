"""Who sends which box to whom: the weight transfer of every sync as data, built on each rank without communication.

Stands between the layouts (``megatron_layout``, ``vllm_layout``, ...) and ``executor.py``, which only follows the plan. Built once
a run.

    source layouts  --+   boxes of one canonical tensor intersect    +-- streams: what one destination shard can get from
    destination  -----+-> -------------------------------------->  --+   one set of sources (data-parallel and TP replicas)
                                                                          |  choose a source for each stream
                                                                          v
                          groups {source} + {replicas of the shard}, each with its transfers, in one global order

Destination ranks with equal layouts (the same shard of different replicas) are one *destination class*: a group broadcasts to the
whole class, so that a source's traffic does not grow with the number of replicas. Every rank derives the same plan from the same
layouts; ``digest`` proves it. Left out: bytes, buckets, casts (``executor.py``) and proof of equality (``checksum.py``).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatron_ppo.resharding.layout import Block, Ranges, RankLayout, shifted

TRAINER_ONLY = frozenset({"score.weight"})
"""Canonical tensors that a trainer may hold and no rollout engine wants: the value head."""
_SLACK = 64
"""The busiest sender may exceed the least possible by one part in so many where that saves groups: norms are not worth communicators."""
_SHOWN = 8
"""How many faults an error names before it only counts."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One box of a canonical tensor, from the source's parameter to the destinations' parameter; all three boxes equal in shape.

    A box of a stacked parameter has further dims of extent 1 in front (``layout.Block``).
    """

    name: str
    """Canonical name."""
    canonical: Ranges
    source_parameter: str
    source: Ranges
    destination_parameter: str
    destination: Ranges

    @property
    def num_elements(self) -> int:
        """Elements in the box."""
        return volume(self.canonical)


@dataclass(frozen=True)
class Group:
    """One stream of transfers from one global rank to all ranks of a destination class."""

    source: int
    """Global rank."""
    destinations: tuple[int, ...]
    """Global ranks, ascending, all of one layout. Holds ``source`` itself only where both meshes are the same ranks."""
    transfers: tuple[Transfer, ...]
    """In the order in which the elements stand in the stream."""

    @property
    def name(self) -> str:
        """Unique in a plan: classes are disjoint, and one source has at most one group a class."""
        return f"weights/{self.source}-to-{self.destinations[0]}"

    @property
    def ranks(self) -> tuple[int, ...]:
        """Members, ascending."""
        return tuple(sorted({self.source, *self.destinations}))

    @property
    def num_elements(self) -> int:
        """Elements of the whole stream."""
        return sum(transfer.num_elements for transfer in self.transfers)


@dataclass(frozen=True)
class RankTraffic:
    """What one rank moves in one sync. A broadcast counts once at its source, however many replicas listen."""

    bytes_sent: int = 0
    bytes_received: int = 0
    num_groups: int = 0
    num_transfers: int = 0


@dataclass(frozen=True)
class ReshardPlan:
    """All groups of one sync, in the one global order in which every rank makes and serves those it belongs to."""

    groups: tuple[Group, ...]
    bytes_per_element: int
    source_shapes: Mapping[int, Mapping[str, tuple[int, ...]]]
    """Source rank -> parameter name -> local shape."""
    destination_shapes: Mapping[int, Mapping[str, tuple[int, ...]]]
    """Destination rank -> parameter name -> local shape, padding included."""

    def groups_of(self, rank: int) -> tuple[Group, ...]:
        """Groups of a global rank, in global order."""
        return tuple(group for group in self.groups if rank == group.source or rank in group.destinations)

    def summary(self) -> dict[int, RankTraffic]:
        """Traffic of each global rank of both sides; ranks that do nothing are listed with zeros."""
        rows = {rank: [0, 0, 0, 0] for rank in sorted({*self.source_shapes, *self.destination_shapes})}
        for group in self.groups:
            num_bytes = group.num_elements * self.bytes_per_element
            rows[group.source][0] += num_bytes
            for rank in group.destinations:
                rows[rank][1] += num_bytes
            for rank in group.ranks:
                rows[rank][2] += 1
                rows[rank][3] += len(group.transfers)
        return {rank: RankTraffic(*row) for rank, row in rows.items()}

    def digest(self) -> str:
        """SHA-256 of everything that both ends must agree on; compared over the bridge before the first sync."""
        text = hashlib.sha256(f"{self.bytes_per_element}".encode())
        for group in self.groups:
            text.update(repr(group).encode())
        known: dict[int, bytes] = {}
        for side in (self.source_shapes, self.destination_shapes):
            for rank in sorted(side):
                shapes = side[rank]
                if id(shapes) not in known:
                    known[id(shapes)] = hashlib.sha256(repr(sorted(shapes.items())).encode()).digest()
                text.update(f"|{rank}:".encode() + known[id(shapes)])
        return text.hexdigest()


def build_plan(
    sources: Mapping[int, RankLayout],
    destinations: Mapping[int, RankLayout],
    *,
    bytes_per_element: int,
    trainer_only: Collection[str] = TRAINER_ONLY,
) -> ReshardPlan:
    """The plan that fills every block of every destination exactly once.

    Args:
        sources: global rank -> layout of each training rank. Many may hold one box; any of them may be chosen to send it.
        destinations: global rank -> layout of each rollout rank. Ranks with equal layouts are served by one broadcast.
        bytes_per_element: of the dtype on the wire.
        trainer_only: canonical names that need no destination.

    Sources are chosen greedily to keep, first, the busiest sender at or below the busiest receiver (or, where that cannot be, near
    the least possible), and, second, the number of groups small. So data-parallel replicas share the sending only where it is the
    limit.

    Raises:
        ValueError: a destination box that no source holds, a parameter without blocks, a box written or named twice, a tensor that
            no destination wants, extents of a canonical tensor that differ between the sides. Names, ranges and ranks are in the text.
    """
    if not sources or not destinations:
        raise ValueError(f"a plan needs layouts of both sides, and has {len(sources)} of sources, {len(destinations)} of destinations")
    senders, receivers = _classes(sources), _classes(destinations)
    filled = {block.parameter for receiver in receivers for block in receiver.layout.blocks}
    for receiver in receivers:
        _check_destination(receiver, filled)
    held = _index(senders)
    _check_extents(held, receivers, trainer_only)
    streams = _streams(held, receivers)
    chosen = _choose_sources(streams, senders, receivers)
    class_of = {rank: number for number, sender in enumerate(senders) for rank in sender.ranks}
    return ReshardPlan(
        groups=_ordered([_group(rank, receivers[number], chosen[rank, number], class_of) for rank, number in sorted(chosen)]),
        bytes_per_element=bytes_per_element,
        source_shapes={rank: layout.shapes for rank, layout in sources.items()},
        destination_shapes={rank: layout.shapes for rank, layout in destinations.items()},
    )


# ---- boxes


def volume(box: Ranges) -> int:
    """Elements in a box."""
    count = 1
    for start, stop in box:
        count *= stop - start
    return count


def intersect(one: Ranges, other: Ranges) -> Ranges | None:
    """The common box, or None where it is empty."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def subtract(box: Ranges, hole: Ranges) -> list[Ranges]:
    """``box`` without ``hole`` (which lies inside), as disjoint boxes."""
    parts: list[Ranges] = []
    for dim, ((start, stop), (low, high)) in enumerate(zip(box, hole, strict=True)):
        for piece in ((start, low), (high, stop)):
            if piece[0] < piece[1]:
                parts.append((*hole[:dim], piece, *box[dim + 1 :]))
    return parts


def box_text(box: Ranges) -> str:
    """``[0:128, 0:64]``."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


# ---- who holds and who wants


@dataclass(frozen=True)
class _Class:
    """Ranks with equal layouts."""

    ranks: tuple[int, ...]
    layout: RankLayout


@dataclass(frozen=True)
class _Piece:
    """One distinct canonical box, and which source classes hold it, each in its own block."""

    box: Ranges
    holders: dict[int, Block]


@dataclass(frozen=True)
class _Pieces:
    """The pieces of one canonical tensor, sorted by box, with what a binary search along dim 0 needs."""

    pieces: list[_Piece]
    starts: list[int]
    furthest: list[int]

    def overlapping(self, box: Ranges) -> Sequence[_Piece]:
        """Pieces that can meet ``box`` along dim 0."""
        if not box:
            return self.pieces
        start, stop = box[0]
        return self.pieces[bisect_right(self.furthest, start) : bisect_left(self.starts, stop)]


@dataclass(frozen=True)
class _Need:
    """A part of a destination block, and the piece that it is cut from."""

    position: int
    """Place in the destination's layout, which is the order in the stream."""
    canonical: Ranges
    block: Block
    piece: _Piece


_Stream = tuple[int, tuple[int, ...]]
"""(destination class, source classes that all hold the needs of the stream)."""


def _classes(layouts: Mapping[int, RankLayout]) -> list[_Class]:
    by_object: dict[int, list[int]] = {}
    for rank in sorted(layouts):
        by_object.setdefault(id(layouts[rank]), []).append(rank)
    by_value: dict[object, list[int]] = {}
    for ranks in by_object.values():
        layout = layouts[ranks[0]]
        by_value.setdefault((layout.blocks, tuple(sorted(layout.shapes.items()))), []).extend(ranks)
    classes = [_Class(tuple(sorted(ranks)), layouts[ranks[0]]) for ranks in by_value.values()]
    return sorted(classes, key=lambda c: c.ranks)


def _check_destination(receiver: _Class, filled: Collection[str]) -> None:
    """Every parameter has blocks, inside its shape, and no element is written twice.

    A share of the vocabulary may be all padding, so that a parameter without blocks passes where other ranks get some (``filled``).
    """
    layout, rank = receiver.layout, receiver.ranks[0]
    by_parameter: dict[str, list[Block]] = {name: [] for name in layout.shapes}
    faults: list[str] = []
    for block in layout.blocks:
        shape = layout.shapes.get(block.parameter)
        if shape is None or len(shape) != len(block.local) or any(b > n for (_, b), n in zip(block.local, shape, strict=True)):
            faults.append(f"block {box_text(block.local)} of {block.parameter} lies outside its shape {shape}")
            continue
        for other in by_parameter[block.parameter]:
            if intersect(other.local, block.local) is not None:
                faults.append(
                    f"{block.parameter} {box_text(block.local)} is written twice: {other.name} {box_text(other.canonical)} and "
                    f"{block.name} {box_text(block.canonical)}"
                )
        by_parameter[block.parameter].append(block)
    faults.extend(f"{name} {shape} gets nothing" for name, shape in layout.shapes.items() if name not in filled)
    if faults:
        raise ValueError(f"layout of destination rank {rank}: {_listed(faults)}; correct its layout")


def _index(senders: list[_Class]) -> dict[str, _Pieces]:
    """Canonical name -> what the sources hold of it."""
    found: dict[str, dict[Ranges, dict[int, Block]]] = {}
    for number, sender in enumerate(senders):
        own: dict[str, list[Block]] = {}
        for block in sender.layout.blocks:
            for other in own.setdefault(block.name, []):
                if intersect(other.canonical, block.canonical) is not None:
                    raise ValueError(
                        f"layout of source rank {sender.ranks[0]} names {block.name} {box_text(block.canonical)} twice: "
                        f"{other.parameter} and {block.parameter}; layer numbers must be global, not those of a stage or chunk"
                    )
            own[block.name].append(block)
            found.setdefault(block.name, {}).setdefault(block.canonical, {})[number] = block
    return {name: _sorted_pieces([_Piece(box, found[name][box]) for box in sorted(found[name])]) for name in found}


def _sorted_pieces(pieces: list[_Piece]) -> _Pieces:
    if not pieces[0].box:
        return _Pieces(pieces, [], [])
    return _Pieces(pieces, [p.box[0][0] for p in pieces], list(accumulate((p.box[0][1] for p in pieces), max)))


def _check_extents(held: Mapping[str, _Pieces], receivers: list[_Class], trainer_only: Collection[str]) -> None:
    """Both sides must mean the same canonical tensors: a vocabulary cut short would otherwise pass in silence."""
    wanted: dict[str, set[Ranges]] = {}
    for receiver in receivers:
        for block in receiver.layout.blocks:
            wanted.setdefault(block.name, set()).add(block.canonical)
    useless = [name for name in held if name not in wanted and name not in trainer_only]
    faults = [f"{name}: held by sources, wanted by no destination" for name in useless]
    faults += [f"{name}: wanted by a destination, held by no source" for name in wanted if name not in held]
    for name, boxes in wanted.items():
        if name in held:
            source, destination = _hull([p.box for p in held[name].pieces]), _hull(boxes)
            if len(source) != len(destination) or any(s > d for (_, s), (_, d) in zip(source, destination, strict=True)):
                faults.append(f"{name}: sources span {box_text(source)}, destinations {box_text(destination)}")
    if faults:
        raise ValueError(f"the two sides do not describe one model: {_listed(faults)}; compare the two model configurations")


def _hull(boxes: Collection[Ranges]) -> Ranges:
    return tuple((min(a for a, _ in column), max(b for _, b in column)) for column in zip(*boxes, strict=True))


def _streams(held: Mapping[str, _Pieces], receivers: list[_Class]) -> dict[_Stream, list[_Need]]:
    """Cut every destination block along the pieces, and gather what the same sources can give to the same class."""
    streams: dict[_Stream, list[_Need]] = {}
    faults: list[str] = []
    for number, receiver in enumerate(receivers):
        for position, block in enumerate(receiver.layout.blocks):
            needs, holes = _cut(position, block, held[block.name])
            faults.extend(f"{block.name} {box_text(hole)} for {block.parameter} of rank {receiver.ranks[0]}" for hole in holes)
            for need in needs:
                streams.setdefault((number, tuple(need.piece.holders)), []).append(need)
    if faults:
        raise ValueError(f"no source holds {_listed(faults)}; the source layouts leave out a part of the model")
    return streams


def _cut(position: int, block: Block, held: _Pieces) -> tuple[list[_Need], list[Ranges]]:
    """The block's parts by piece, disjoint even where pieces overlap, and what no piece covers."""
    needs: list[_Need] = []
    remaining = [block.canonical] if volume(block.canonical) else []
    for piece in held.overlapping(block.canonical):
        uncovered: list[Ranges] = []
        for box in remaining:
            common = intersect(box, piece.box)
            if common is None:
                uncovered.append(box)
            else:
                needs.append(_Need(position, common, block, piece))
                uncovered.extend(subtract(box, common))
        remaining = uncovered
        if not remaining:
            break
    return needs, remaining


def _listed(faults: Sequence[str]) -> str:
    more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    return "; ".join(faults[:_SHOWN]) + more


# ---- who sends


@dataclass
class _Choice:
    """Greedy assignment in progress."""

    limit: int
    """Elements up to which a source may be loaded at no cost to the whole."""
    loads: dict[int, int]
    groups: dict[tuple[int, int], list[_Need]]
    """(source rank, destination class) -> its needs."""
    own: dict[int, frozenset[int]]
    """Destination class -> its ranks: a source among them costs no traffic to itself."""

    def cheapest(self, receiver: int, candidates: Sequence[int], size: int) -> int | None:
        """A rank that can take ``size`` within the limit: of an existing group first, then of the class itself, then the lowest."""
        fitting = [rank for rank in candidates if self.loads[rank] + size <= self.limit]
        own = self.own[receiver]
        return min(fitting, key=lambda rank: ((rank, receiver) not in self.groups, rank not in own, rank), default=None)

    def assign(self, rank: int, receiver: int, needs: Sequence[_Need]) -> None:
        self.groups.setdefault((rank, receiver), []).extend(needs)
        self.loads[rank] += _size(needs)


def _size(needs: Sequence[_Need]) -> int:
    return sum(volume(need.canonical) for need in needs)


def _choose_sources(
    streams: Mapping[_Stream, list[_Need]], senders: list[_Class], receivers: list[_Class]
) -> dict[tuple[int, int], list[_Need]]:
    """(source rank, destination class) -> needs. Streams with fewest candidates choose first: the others can go around them."""
    candidates = {holders: tuple(sorted(r for h in holders for r in senders[h].ranks)) for _, holders in streams}
    sizes = {key: _size(needs) for key, needs in streams.items()}
    ingress = max(sum(block.num_elements for block in receiver.layout.blocks) for receiver in receivers)
    least = _least_egress({key: (candidates[key[1]], size) for key, size in sizes.items()})
    limit = max(ingress, least + least // _SLACK)
    own = {number: frozenset(receiver.ranks) for number, receiver in enumerate(receivers)}
    choice = _Choice(limit, {rank: 0 for sender in senders for rank in sender.ranks}, {}, own)
    for key in sorted(streams, key=lambda key: (len(candidates[key[1]]), -sizes[key], key)):
        receiver, able = key[0], candidates[key[1]]
        rank = choice.cheapest(receiver, able, sizes[key])
        if rank is not None:
            choice.assign(rank, receiver, streams[key])
            continue
        for need in sorted(streams[key], key=lambda need: -volume(need.canonical)):
            fitting = choice.cheapest(receiver, able, volume(need.canonical))
            rank = min(able, key=lambda rank: (choice.loads[rank], rank)) if fitting is None else fitting
            choice.assign(rank, receiver, [need])
    return choice.groups


def _least_egress(streams: Mapping[_Stream, tuple[tuple[int, ...], int]]) -> int:
    """A lower bound of the busiest sender: whatever only the ranks of a set can send, over the size of that set."""
    totals: dict[frozenset[int], int] = {}
    for able, size in streams.values():
        totals[frozenset(able)] = totals.get(frozenset(able), 0) + size
    bound = -(-sum(totals.values()) // len(frozenset().union(*totals)))
    for ranks in totals:
        inside = sum(size for other, size in totals.items() if len(other) <= len(ranks) and other <= ranks)
        bound = max(bound, -(-inside // len(ranks)))
    return bound


def _group(source: int, receiver: _Class, needs: list[_Need], class_of: Mapping[int, int]) -> Group:
    transfers = []
    for need in sorted(needs, key=lambda need: (need.position, need.canonical)):
        held = need.piece.holders[class_of[source]]
        transfers.append(
            Transfer(
                name=need.block.name,
                canonical=need.canonical,
                source_parameter=held.parameter,
                source=shifted(need.canonical, held.canonical, held.local),
                destination_parameter=need.block.parameter,
                destination=shifted(need.canonical, need.block.canonical, need.block.local),
            )
        )
    return Group(source, receiver.ranks, tuple(transfers))


def _ordered(groups: list[Group]) -> tuple[Group, ...]:
    """One global order in which neighbours share few ranks, so that many sources send at once, not all to one class in turn."""
    next_round: dict[int, int] = {}
    rounds: dict[str, int] = {}
    for group in groups:
        rounds[group.name] = max(next_round.get(rank, 0) for rank in group.ranks)
        next_round.update(dict.fromkeys(group.ranks, rounds[group.name] + 1))
    return tuple(sorted(groups, key=lambda group: (rounds[group.name], group.source, group.destinations)))
