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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from megatron_ppo.resharding.boxes import box_text, divide, intersect, overlapping_pairs, subtract, volume
from megatron_ppo.resharding.layout import Block, Ranges, RankLayout, shifted
from megatron_ppo.resharding.source_choice import StreamSize, choose_sources

TRAINER_ONLY = frozenset({"score.weight"})
"""Canonical tensors that a trainer may hold and no rollout engine wants: the value head."""
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
        """Unique in a plan: classes are disjoint, and one source has at most one group a class, beside copies within itself."""
        if self.destinations == (self.source,):
            return f"weights/within-{self.source}"
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
    """A rank that is also a destination of its own group sends itself those bytes: they count on both sides, as in the executor."""
    bytes_received: int = 0
    num_groups: int = 0
    """Process groups the rank belongs to: a group of one rank, which is a local copy, needs none."""
    num_messages: int = 0
    """Broadcasts over those groups."""
    num_buckets: int = 0
    """Buckets that the rank packs or unpacks: the messages, and the buckets of local copies."""
    num_transfers: int = 0
    """Boxes."""


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

    def summary(self, bucket_bytes: int) -> dict[int, RankTraffic]:
        """Traffic of each global rank of both sides; ranks that do nothing are listed with zeros.

        ``bucket_bytes``: the executor's, which cuts each group's stream into buckets of so many bytes, the last one shorter.
        ``ValueError`` where a bucket cannot hold one element.
        """
        bucket_elements = bucket_bytes // self.bytes_per_element
        if bucket_elements < 1:
            raise ValueError(f"bucket_bytes {bucket_bytes} cannot hold one element of {self.bytes_per_element} bytes; give at least 1 MiB")
        rows = {rank: [0] * 6 for rank in sorted({*self.source_shapes, *self.destination_shapes})}
        for group in self.groups:
            elements, over_network = group.num_elements, len(group.ranks) > 1
            alone = [elements_alone(transfer.num_elements, bucket_elements) for transfer in group.transfers]
            buckets = sum(-(-part // bucket_elements) for part in alone) + -(-(elements - sum(alone)) // bucket_elements)
            rows[group.source][0] += elements * self.bytes_per_element
            for rank in group.destinations:
                rows[rank][1] += elements * self.bytes_per_element
            for rank in group.ranks:
                counts = (over_network, over_network * buckets, buckets, len(group.transfers))
                rows[rank][2:] = [known + more for known, more in zip(rows[rank][2:], counts, strict=True)]
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


def elements_alone(num_elements: int, bucket_elements: int) -> int:
    """How many of a transfer's elements, from its first on, travel in buckets that hold nothing else: whole buckets, and a last part of at
    least a quarter of one. The executor spares such a bucket the copy where it lies in one piece in a parameter."""
    last = num_elements % bucket_elements
    return num_elements if 4 * last >= bucket_elements else num_elements - last


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

    Sources are chosen so that, first, the largest of ingress and egress over all ranks is the least possible (``source_choice.py``:
    within one part in 64, where that saves groups), and, second, groups are few. So data-parallel replicas share the sending only
    where it is the limit.

    Groups of a rollout rank, where receiving is the limit: one for each distinct share of a stage's weights that it takes a part of,
    fewer where one training rank holds several of them. With training TP, PP, EP and expert TP, and rollout TP R, each dividing or
    divided by the other, that is at most

        PP x (D + X) + V    D = max(1, TP / R)                      dense weights
                            X = 0                                   no experts
                              = EP x max(1, expert TP / R)          a slice of every expert on each rollout rank
                              = max(1, EP / R) x expert TP          whole experts (rollout expert parallel)
                            V = 2 x (shares that a vocabulary padded differently on the two sides adds: 1 where it is long)

    Where both meshes are the same ranks, what every rank of a class holds itself is copied within each and travels nowhere.

    so at most 2 x PP for a dense model with TP <= R and PP > 1. Sizes that do not divide each other, and more training ranks than
    key/value heads (whose fused rows are cut across heads), add to D what their shares overlap.

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
    at_home = {key: needs for key, needs in streams.items() if _is_held_by_all(receivers[key[0]], key[1], senders)}
    chosen = _assign({key: needs for key, needs in streams.items() if key not in at_home}, senders, receivers)
    class_of = {rank: number for number, sender in enumerate(senders) for rank in sender.ranks}
    groups = [_group(rank, receivers[number], chosen[rank, number], class_of) for rank, number in sorted(chosen)]
    return ReshardPlan(
        groups=_ordered(groups + _within(at_home, receivers, class_of)),
        bytes_per_element=bytes_per_element,
        source_shapes={rank: layout.shapes for rank, layout in sources.items()},
        destination_shapes={rank: layout.shapes for rank, layout in destinations.items()},
    )


# ---- who holds and who wants


@dataclass(frozen=True)
class _Class:
    """Ranks with equal layouts."""

    ranks: tuple[int, ...]
    layout: RankLayout


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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
    by_parameter: dict[str, list[Block]] = {}
    faults: list[str] = []
    for block in layout.blocks:
        shape = layout.shapes.get(block.parameter)
        if shape is None or len(shape) != len(block.local) or any(b > n for (_, b), n in zip(block.local, shape, strict=True)):
            faults.append(f"block {box_text(block.local)} of {block.parameter} lies outside its shape {shape}")
        else:
            by_parameter.setdefault(block.parameter, []).append(block)
    for parameter, blocks in by_parameter.items():
        for i, j in overlapping_pairs([block.local for block in blocks]):
            one, other = blocks[i], blocks[j]
            faults.append(
                f"{parameter} {box_text(other.local)} is written twice: {one.name} {box_text(one.canonical)} and "
                f"{other.name} {box_text(other.canonical)}"
            )
    faults.extend(f"{name} {shape} gets nothing" for name, shape in layout.shapes.items() if name not in filled)
    if faults:
        raise ValueError(f"layout of destination rank {rank}: {_listed(faults)}; correct its layout")


def _index(senders: list[_Class]) -> dict[str, _Pieces]:
    """Canonical name -> what the sources hold of it."""
    found: dict[str, dict[Ranges, dict[int, Block]]] = {}
    for number, sender in enumerate(senders):
        own: dict[str, list[Block]] = {}
        for block in sender.layout.blocks:
            own.setdefault(block.name, []).append(block)
            found.setdefault(block.name, {}).setdefault(block.canonical, {})[number] = block
        for name, blocks in own.items():
            for i, j in overlapping_pairs([block.canonical for block in blocks]):
                raise ValueError(
                    f"layout of source rank {sender.ranks[0]} names {name} {box_text(blocks[j].canonical)} twice: "
                    f"{blocks[i].parameter} and {blocks[j].parameter}; layer numbers must be global, not those of a stage or chunk"
                )
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
                needs.append(_Need(position, box if common == box else common, block, piece))  # equal boxes as one object save memory
                uncovered.extend(subtract(box, common))
        remaining = uncovered
        if not remaining:
            break
    return needs, remaining


def _listed(faults: Sequence[str]) -> str:
    more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    return "; ".join(faults[:_SHOWN]) + more


# ---- who sends


def _is_held_by_all(receiver: _Class, holders: Collection[int], senders: list[_Class]) -> bool:
    """Whether each rank of the destination class is itself a source of what these source classes hold."""
    return {rank for holder in holders for rank in senders[holder].ranks}.issuperset(receiver.ranks)


def _within(streams: Mapping[_Stream, list[_Need]], receivers: list[_Class], class_of: Mapping[int, int]) -> list[Group]:
    """Copies within each rank of what it holds as a source and wants as a destination."""
    needs_of: dict[int, list[_Need]] = {}
    for (number, _), needs in sorted(streams.items()):
        needs_of.setdefault(number, []).extend(needs)
    return [
        _group(rank, replace(receivers[number], ranks=(rank,)), needs, class_of)
        for number, needs in needs_of.items()
        for rank in receivers[number].ranks
    ]


def _assign(streams: Mapping[_Stream, list[_Need]], senders: list[_Class], receivers: list[_Class]) -> dict[tuple[int, int], list[_Need]]:
    """(source rank, destination class) -> needs; a box is cut where its stream is shared by several sources."""
    candidates = {holders: tuple(sorted(r for h in holders for r in senders[h].ranks)) for _, holders in streams}
    keys = sorted(streams)
    shares = choose_sources(
        [StreamSize(key[0], candidates[key[1]], sum(volume(need.canonical) for need in streams[key])) for key in keys],
        ingress=max(sum(block.num_elements for block in receiver.layout.blocks) for receiver in receivers),
        own=[frozenset(receiver.ranks) for receiver in receivers],
    )
    found: dict[tuple[int, int], list[_Need]] = {}
    for key, share in zip(keys, shares, strict=True):
        for rank, needs in _dealt(streams[key], share):
            found.setdefault((rank, key[0]), []).extend(needs)
    return found


def _dealt(needs: list[_Need], share: Mapping[int, int]) -> Iterator[tuple[int, list[_Need]]]:
    """The needs in order, cut so that each rank gets its number of elements."""
    if len(share) == 1:
        yield next(iter(share)), needs
        return
    pending = needs[::-1]
    for rank, wanted in share.items():
        own: list[_Need] = []
        missing = wanted
        while missing:
            need = pending.pop()
            first, others = divide(need.canonical, missing)
            own += [replace(need, canonical=box) for box in first]
            pending += [replace(need, canonical=box) for box in reversed(others)]
            missing -= sum(map(volume, first))
        yield rank, own


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
