"""The field's usual weight sync, written well: what ``refit.py`` compares the exact way with.

slime (``UpdateWeightFromDistributed``), verl (``checkpoint_engine`` over NCCL) and OpenRLHF (over DeepSpeed's shards) do the same in
essence: walk over the layers, all-gather each weight over the ranks that share it, let one rank (slime: of each pipeline stage) broadcast
the full tensors to all ranks of all engines, in buckets or one by one, and let every engine rank cut its own shard out of them.

    TP rank 0 of a stage   all-gather 0 | all-gather 1 | all-gather 2 ...       straight from the parameters, into a bucket
                                  broadcast 0 --- | broadcast 1 --- |           the bucket as it was gathered
    rollout rank                              wait 0, cut out 0 | wait 1, ...   straight from the bucket into the live parameters

Done here although the originals do not all do it: two buckets in flight, so that gathering overlaps broadcasting; all pipeline stages at
once (slime takes a lock); no copy to pack a gathered weight, to put its parts in order, or to name it (the receivers know how a bucket
was gathered and read it in place; only weights that are not split are copied, by one rank); all views made once, before the first sync; no
metadata, no pickling, no calls between processes. With TP 1 nothing is gathered.

Left out: receiving straight into a parameter, which only weights that nobody splits would allow;
data-parallel replicas (one of them does all this, the others wait) and experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ppo.bridge import Bridge
from megatron_ppo.resharding.boxes import intersect, volume
from megatron_ppo.resharding.executor import slice_boxes
from megatron_ppo.resharding.layout import Block, Ranges, RankLayout, box_shape, shifted, view

_IN_FLIGHT = 2
Copies = list[tuple[Tensor, Tensor]]
"""(target, source) views."""


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: its ranks in tensor-parallel order, the first of which broadcasts, and their layouts."""

    ranks: tuple[int, ...]
    layouts: tuple[RankLayout, ...]

    @property
    def source(self) -> int:
        """Global rank that broadcasts."""
        return self.ranks[0]


@dataclass(frozen=True)
class _Piece:
    """Elements ``start`` to ``stop`` of a parameter, in a bucket from ``offset`` on: once, or one after the other for each TP rank."""

    parameter: str
    start: int
    stop: int
    offset: int
    parts: int

    @property
    def size(self) -> int:
        """Elements of one rank's part."""
        return self.stop - self.start


def find_stages(layouts: Mapping[int, RankLayout], tp: int) -> list[Stage]:
    """Stages of a training mesh without data parallelism: ``tp`` neighbours each."""
    firsts = range(0, len(layouts), tp)
    return [Stage(tuple(range(f, f + tp)), tuple(layouts[rank] for rank in range(f, f + tp))) for f in firsts]


def cut_stage(stage: Stage, bucket_elements: int) -> list[list[_Piece]]:
    """Buckets of a stage, parameter by parameter; a parameter larger than a bucket goes through several."""
    buckets: list[list[_Piece]] = [[]]
    used = 0
    for name, shape in stage.layouts[0].shapes.items():
        blocks = [[block for block in layout.blocks if block.parameter == name] for layout in stage.layouts]
        parts = len(stage.ranks) if any(other != blocks[0] for other in blocks) else 1
        done, total = 0, torch.Size(shape).numel()
        while done < total:
            if bucket_elements - used < parts:
                buckets.append([])
                used = 0
            size = min(total - done, (bucket_elements - used) // parts)
            buckets[-1].append(_Piece(name, done, done + size, used, parts))
            used += size * parts
            done += size
    return buckets


class GatherSender:
    """A training rank's part. Every rank of the stage gathers; the first broadcasts."""

    def __init__(
        self,
        stage: Stage,
        rank: int,
        parameters: Mapping[str, Tensor],
        bridge: Bridge | None,
        tp_group: dist.ProcessGroup,
        bucket_bytes: int,
    ) -> None:
        """``bridge``: the stage's source and all rollout ranks; None on the other ranks of the stage."""
        self._bridge, self._source, self._tp_group, self._tp = bridge, stage.source, tp_group, len(stage.ranks)
        self._parameters = {name: tensor.view(-1) for name, tensor in parameters.items()}
        itemsize = next(iter(parameters.values())).itemsize
        self._pieces = cut_stage(stage, bucket_bytes // itemsize)
        self._buffers = _Buffers(bucket_bytes, next(iter(parameters.values())))
        self.is_source = rank == stage.source
        self.bytes_sent = self.bytes_received = 0

    @torch.no_grad()
    def run(self) -> None:
        """One sync."""
        self.bytes_sent = self.bytes_received = 0
        in_flight: deque[dist.Work] = deque()
        for number, pieces in enumerate(self._pieces):
            if len(in_flight) == _IN_FLIGHT:
                in_flight.popleft().wait()
            buffer = self._buffers[number]
            is_alone = len(pieces) == 1 and pieces[0].parts == 1  # then it is sent from the parameter itself
            gathers = [work for piece in pieces if not is_alone and (work := self._gather(piece, buffer)) is not None]
            for work in gathers:
                work.wait()
            if self._bridge is not None:
                filled = self._own(pieces[0]) if is_alone else buffer[: pieces[-1].offset + pieces[-1].size * pieces[-1].parts]
                work = self._bridge.broadcast(filled, self._source, async_op=True)
                assert work is not None
                in_flight.append(work)
                self.bytes_sent += filled.nbytes
        while in_flight:
            in_flight.popleft().wait()

    def _own(self, piece: _Piece) -> Tensor:
        return self._parameters[piece.parameter][piece.start : piece.stop]

    def _gather(self, piece: _Piece, buffer: Tensor) -> dist.Work | None:
        own = self._own(piece)
        target = buffer[piece.offset : piece.offset + piece.size * piece.parts]
        if piece.parts == 1:
            if self.is_source:
                target.copy_(own)
            return None
        others = own.nbytes * (self._tp - 1)
        self.bytes_sent += others  # around a ring, as gloo does it
        self.bytes_received += others
        return dist.all_gather_single(target.view(torch.uint8), own.view(torch.uint8), group=self._tp_group, async_op=True)


class GatherReceiver:
    """A rollout rank's part: receives everything, keeps its own shard."""

    def __init__(
        self,
        stages: Sequence[Stage],
        layout: RankLayout,
        live: Mapping[str, Tensor],
        bridges: Sequence[Bridge],
        bucket_bytes: int,
    ) -> None:
        """``bridges``: one a stage, over its source and all rollout ranks."""
        itemsize = next(iter(live.values())).itemsize
        self._buffers = _Buffers(bucket_bytes, next(iter(live.values())))
        self._make_copies = lambda: self._all_copies(stages, layout, live, bucket_bytes // itemsize)
        self._bridges = bridges
        self._sources = [stage.source for stage in stages]
        self._buckets: list[tuple[int, int, Copies]] | None = None
        self.bytes_sent = self.bytes_received = 0

    @torch.no_grad()
    def run(self) -> None:
        """One sync."""
        self.bytes_received = 0
        if self._buckets is None:
            self._buckets = self._make_copies()
        in_flight: deque[tuple[dist.Work, Copies]] = deque()
        for number, (stage, size, copies) in enumerate(self._buckets):
            if len(in_flight) == _IN_FLIGHT:
                _finish(*in_flight.popleft())
            filled = self._buffers[number][:size]
            work = self._bridges[stage].broadcast(filled, self._sources[stage], async_op=True)
            assert work is not None
            in_flight.append((work, copies))
            self.bytes_received += filled.nbytes
        while in_flight:
            _finish(*in_flight.popleft())

    def _all_copies(
        self, stages: Sequence[Stage], layout: RankLayout, live: Mapping[str, Tensor], bucket_elements: int
    ) -> list[tuple[int, int, Copies]]:
        """(stage, elements, copies) of every bucket: bucket k of each stage before bucket k + 1 of any, as the exact way has it."""
        wanted: dict[str, list[Block]] = {}
        for block in layout.blocks:
            wanted.setdefault(block.name, []).append(block)
        cut = [(k, number, pieces) for number, stage in enumerate(stages) for k, pieces in enumerate(cut_stage(stage, bucket_elements))]
        found = []
        for position, (_, number, pieces) in enumerate(sorted(cut, key=lambda entry: entry[:2])):
            buffer, last = self._buffers[position], pieces[-1]
            copies = [copy for piece in pieces for copy in _piece_copies(piece, stages[number], buffer, wanted, live)]
            found.append((number, last.offset + last.size * last.parts, copies))
        return found


def _finish(work: dist.Work, copies: Copies) -> None:
    work.wait()
    for target, source in copies:
        target.copy_(source)


class _Buffers:
    """Two buckets, made at the first use, taken in turn."""

    def __init__(self, bucket_bytes: int, like: Tensor) -> None:
        self._make: Callable[[], Tensor] = lambda: torch.empty(bucket_bytes // like.itemsize, dtype=like.dtype, device=like.device)
        self._made: list[Tensor] = []

    def __getitem__(self, number: int) -> Tensor:
        if not self._made:
            self._made = [self._make() for _ in range(_IN_FLIGHT)]
        return self._made[number % _IN_FLIGHT]


def _piece_copies(
    piece: _Piece, stage: Stage, buffer: Tensor, wanted: Mapping[str, Sequence[Block]], live: Mapping[str, Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """What a receiver needs of a piece."""
    for part in range(piece.parts):
        layout = stage.layouts[part]
        blocks = [block for block in layout.blocks if block.parameter == piece.parameter]
        offset = piece.offset + part * piece.size
        for box in slice_boxes(layout.shapes[piece.parameter], piece.start, piece.stop):
            held = buffer[offset : offset + volume(box)].view(box_shape(box))
            offset += volume(box)
            for source_box, target, target_box in _needs(box, blocks, wanted):
                at = tuple((a - o, b - o) for (a, b), (o, _) in zip(source_box, box, strict=True))
                yield view(live[target], target_box), view(held, at)


def _needs(box: Ranges, blocks: Sequence[Block], wanted: Mapping[str, Sequence[Block]]) -> Iterator[tuple[Ranges, str, Ranges]]:
    """(box of the source's parameter, own parameter, its box) for all that lies in ``box`` and is wanted here."""
    for block in blocks:
        held = intersect(box, block.local)
        if held is None:
            continue
        canonical = shifted(held, block.local, block.canonical)
        for target in wanted.get(block.name, ()):
            common = intersect(canonical, target.canonical)
            if common is not None:
                yield shifted(common, block.canonical, block.local), target.parameter, shifted(common, target.canonical, target.local)
