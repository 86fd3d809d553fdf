"""Carries out a plan: packs boxes into buckets, broadcasts them, unpacks them into the live parameters.

Step 1 of every iteration (the sync). Every rank serves its groups' buckets in one global order, at most two of them in buffers:

    source        pack 0 | pack 1 | wait 0, pack 2 | ...          cast to the wire's dtype while packing
    broadcast              0 ---- | 1 ------------ | 2 --
    destination                     wait 0, unpack 0 | wait 1, unpack 1 | ...

A group's stream is its transfers laid end to end and cut every ``bucket_bytes``; whole buckets of a transfer, and a last part of at least a
quarter of one, come first and stay by themselves. Where such a bucket lies in one piece in a parameter of the wire's dtype, it is sent from
there, and received into there: without packing, and without a buffer, so that up to four broadcasts are under way. Bucket k of every group
precedes bucket k + 1 of any, and ranks start their broadcasts in that order: the oldest unfinished bucket is never behind another on any
of its members, so that no two ranks can wait for each other. Extra memory is two buckets, made once.

Left out: what goes where (``plan.py``), the proof that it arrived (``checksum.py``), and what becomes of an engine whose transfer failed
midway (the caller marks it unusable).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Protocol

import torch
from torch import Tensor

from megatron_ppo.resharding.boxes import volume
from megatron_ppo.resharding.layout import Ranges, box_shape, shifted
from megatron_ppo.resharding.plan import Group, ReshardPlan, Transfer, elements_alone

Parameters = Mapping[str, Tensor]
"""Local parameter name -> live tensor."""
_NUM_BUFFERS = 2
_IN_FLIGHT = 4
"""Broadcasts under way on a rank: at most two out of buffers, the others where parameters lie, which takes no memory."""


class Work(Protocol):
    """A started broadcast."""

    def wait(self) -> object:
        """Block until the tensor may be read or reused; raises where the transfer failed."""


class GroupBridge(Protocol):
    """What the executor needs of ``bridge.Bridge``: one process group over a plan's group."""

    def broadcast(self, tensor: Tensor, source: int, async_op: bool = False) -> Work | None:
        """Fill ``tensor`` on every member with that of global rank ``source``."""


MakeGroup = Callable[[str, Sequence[int]], GroupBridge]
"""(unique name, member global ranks ascending) -> bridge; called by the members only, in the plan's order."""


@dataclass(frozen=True)
class TransferStats:
    """What one rank moved in one sync. Bytes on the wire's dtype, padding excluded; a broadcast counts once at its source."""

    bytes_sent: int
    bytes_received: int
    num_buckets: int
    seconds: float


@dataclass(frozen=True)
class _Copy:
    """A box of a parameter that stands at ``offset`` in a bucket, row-major."""

    source_parameter: str
    source: Ranges
    destination_parameter: str
    destination: Ranges
    offset: int
    shape: tuple[int, ...]
    """Of the box in the canonical tensor; a stacked parameter has dims of extent 1 in front of it."""
    strides: tuple[int, ...]
    """In the bucket."""
    num_elements: int


@dataclass(frozen=True)
class _Span:
    """Where a whole bucket lies in one piece: elements from ``start`` on of a row-major parameter."""

    parameter: str
    start: int


@dataclass(frozen=True)
class _Content:
    """What a bucket holds."""

    copies: tuple[_Copy, ...]
    num_elements: int
    source: _Span | None = None
    destination: _Span | None = None


@dataclass(frozen=True)
class _Bucket:
    """One broadcast."""

    bridge: GroupBridge | None
    """None where source and only destination are the same rank."""
    source: int
    is_source: bool
    is_destination: bool
    content: _Content


@dataclass(frozen=True)
class _Started:
    """A bucket under way."""

    work: Work | None
    tensor: Tensor
    left: tuple[_Copy, ...]
    """What is to be copied out of ``tensor`` when it has arrived."""
    buffer: Tensor | None
    """The buffer that ``tensor`` is a part of; None where it is a part of a parameter."""


class ReshardExecutor:
    """One rank's part of a plan. Collective: all ranks of the plan make it, then run each sync together.

    Args:
        plan: equal on all ranks (``describe`` and ``compare_descriptions`` prove it).
        rank: this process's global rank.
        make_group: makes a process group; ranks call it in the plan's order, each only for the groups it belongs to.
        bucket_bytes: size of a broadcast; two buffers of that size are all the extra memory.
        transfer_dtype: dtype on the wire, which is the rollout engine's. Sources of another floating dtype are cast as by ``Tensor.to``.
    """

    def __init__(self, plan: ReshardPlan, rank: int, make_group: MakeGroup, *, bucket_bytes: int, transfer_dtype: torch.dtype) -> None:
        if plan.bytes_per_element != transfer_dtype.itemsize:
            raise ValueError(
                f"the plan counts {plan.bytes_per_element} bytes an element, {transfer_dtype} has {transfer_dtype.itemsize}; "
                "build the plan with transfer_dtype.itemsize"
            )
        if bucket_bytes < transfer_dtype.itemsize:
            raise ValueError(f"bucket_bytes {bucket_bytes} cannot hold one element of {transfer_dtype}; give at least 1 MiB")
        self.plan = plan
        self.rank = rank
        self.bucket_bytes = bucket_bytes
        self.transfer_dtype = transfer_dtype
        self._buckets = _schedule(plan, rank, make_group, bucket_bytes // transfer_dtype.itemsize)
        self._buffers: list[Tensor] = []
        self._broken = False

    def expected_bytes(self, shard_bytes: int) -> int:
        """What a rollout rank receives in a sync, by the bytes of its engine's parameters: exactly those."""
        return shard_bytes

    def send(self, parameters: Parameters) -> TransferStats:
        """Broadcast this training rank's share. Parameters may be of any floating dtype and strides.

        Raises:
            ValueError: parameters missing or of another shape (names in the text); nothing has been sent then.
            RuntimeError: a transfer failed; this executor cannot be used again, as its ranks are no longer in step.
        """
        if self.rank in self.plan.destination_shapes:
            raise RuntimeError(f"rank {self.rank} sends and receives: call exchange, which does both at once")
        return self._checked_run(parameters, None)

    def receive(self, parameters: Parameters) -> TransferStats:
        """Fill this rollout rank's live parameters in place; elements outside every block (padding) keep what they hold.

        Raises:
            ValueError: parameters missing, unknown to the plan, of another shape or dtype than ``transfer_dtype``, or sharing memory.
            RuntimeError: a transfer failed midway; the parameters are then of mixed versions, and broadcasts that were under way may still
                write into them: close all groups before anything else does.
        """
        if self.rank in self.plan.source_shapes:
            raise RuntimeError(f"rank {self.rank} sends and receives: call exchange, which does both at once")
        return self._checked_run(None, parameters)

    def exchange(self, sources: Parameters, destinations: Parameters) -> TransferStats:
        """``send`` and ``receive`` of a rank that is in both meshes (colocated). Raises as they do."""
        return self._checked_run(sources, destinations)

    def describe(self, *, sources: Parameters | None = None, destinations: Parameters | None = None) -> str:
        """JSON that both ends compare before the first sync (``compare_descriptions``): the plan, the wire, and this rank's faults."""
        return json.dumps(
            {
                "rank": self.rank,
                "plan": self.plan.digest(),
                "dtype": str(self.transfer_dtype),
                "bucket_bytes": self.bucket_bytes,
                "faults": self._faults(sources, destinations),
            }
        )

    def _checked_run(self, sources: Parameters | None, destinations: Parameters | None) -> TransferStats:
        if self._broken:
            raise RuntimeError(f"an earlier transfer of rank {self.rank} failed midway; restart the run from its last checkpoint")
        faults = self._faults(sources, destinations)
        if faults:
            raise ValueError(f"rank {self.rank} cannot take part in the weight transfer: {'; '.join(faults)}")
        try:
            return self._run(sources or {}, destinations or {})
        except BaseException:
            self._broken = True
            raise

    @torch.no_grad()
    def _run(self, sources: Parameters, destinations: Parameters) -> TransferStats:
        started = time.monotonic()
        if not self._buckets:
            return TransferStats(0, 0, 0, time.monotonic() - started)
        free = self._make_buffers(next(iter((sources or destinations).values())).device)
        in_flight: deque[_Started] = deque()
        sent = received = 0
        with _side_stream(free[0].device):
            for bucket in self._buckets:
                content, side = bucket.content, sources if bucket.is_source else destinations
                tensor = _in_place(content.source if bucket.is_source else content.destination, content, self.transfer_dtype, side)
                buffer = None
                while len(in_flight) == _IN_FLIGHT or (tensor is None and not free):
                    free += _finish(in_flight.popleft(), destinations)
                if tensor is None:
                    buffer = free.pop()
                    tensor = buffer[: content.num_elements]
                    if bucket.is_source:
                        _pack(content, tensor, sources)
                is_left = bucket.is_destination and (bucket.is_source or buffer is not None)
                sent += tensor.nbytes * bucket.is_source
                received += tensor.nbytes * bucket.is_destination
                work = None if bucket.bridge is None else bucket.bridge.broadcast(tensor, bucket.source, async_op=True)
                in_flight.append(_Started(work, tensor, content.copies if is_left else (), buffer))
            while in_flight:
                _finish(in_flight.popleft(), destinations)
        return TransferStats(sent, received, len(self._buckets), time.monotonic() - started)

    def _make_buffers(self, device: torch.device) -> list[Tensor]:
        """The buffers, made at the first sync; the list is the caller's."""
        if not self._buffers or self._buffers[0].device != device:
            size = max(bucket.content.num_elements for bucket in self._buckets)
            count = min(_NUM_BUFFERS, len(self._buckets))
            self._buffers = [torch.empty(size, dtype=self.transfer_dtype, device=device) for _ in range(count)]
        return list(self._buffers)

    def _faults(self, sources: Parameters | None, destinations: Parameters | None) -> list[str]:
        """Why this rank could not take part, in words."""
        faults: list[str] = []
        for shapes, given in ((self.plan.source_shapes, sources), (self.plan.destination_shapes, destinations)):
            if self.rank in shapes:
                faults += _shape_faults(shapes[self.rank], given or {})
        for name, tensor in (sources or {}).items():
            if not tensor.is_floating_point():
                faults.append(f"{name} is {tensor.dtype}, which is not cast to {self.transfer_dtype}")
        faults += self._destination_faults(destinations or {})
        return faults

    def _destination_faults(self, destinations: Parameters) -> list[str]:
        planned = self.plan.destination_shapes.get(self.rank, {})
        unknown = [name for name in destinations if name not in planned]
        faults = [f"the plan fills no {', '.join(unknown)}, which would keep old weights"] if unknown else []
        address: dict[int, str] = {}
        for name, tensor in destinations.items():
            if tensor.dtype != self.transfer_dtype:
                faults.append(f"{name} is {tensor.dtype}, the wire {self.transfer_dtype}")
            other = address.setdefault(tensor.data_ptr(), name)
            if other != name and tensor.numel():
                faults.append(f"{name} and {other} share memory, so that a tied weight would be written twice")
        return faults


def compare_descriptions(descriptions: Sequence[str]) -> None:
    """Refuse a sync that cannot work, on all ranks alike: each gives the descriptions of all (or of all heads), in any order.

    Raises:
        ValueError: a rank's faults (missing names, other shapes or dtypes), or plans, dtypes or bucket sizes that differ; with the ranks.
    """
    found = [json.loads(text) for text in descriptions]
    faults = [f"rank {one['rank']}: {fault}" for one in found for fault in one["faults"]]
    for key, what in (("plan", "plan digest"), ("dtype", "dtype on the wire"), ("bucket_bytes", "bucket_bytes")):
        ranks: dict[object, list[int]] = {}
        for one in found:
            ranks.setdefault(one[key], []).append(one["rank"])
        if len(ranks) > 1:
            faults.append(f"{what} differs: " + ", ".join(f"{value} on ranks {who}" for value, who in ranks.items()))
    if faults:
        raise ValueError(f"training and rollout ranks do not agree on the weight transfer: {'; '.join(faults)}")


def slice_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Ranges]:
    """Elements start..stop of a row-major tensor of that shape, as boxes in order, each of which is itself contiguous in that order."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    row = volume(tuple((0, size) for size in shape[1:]))
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        index = start // row
        yield from (((index, index + 1), *box) for box in slice_boxes(shape[1:], start - index * row, stop - index * row))
        return
    if start < first * row:
        yield from (((first - 1, first), *box) for box in slice_boxes(shape[1:], start - (first - 1) * row, row))
    if first < last:
        yield ((first, last), *((0, size) for size in shape[1:]))
    if last * row < stop:
        yield from (((last, last + 1), *box) for box in slice_boxes(shape[1:], 0, stop - last * row))


def _schedule(plan: ReshardPlan, rank: int, make_group: MakeGroup, bucket_elements: int) -> tuple[_Bucket, ...]:
    """This rank's buckets in the global order: bucket k of every group before bucket k + 1 of any."""
    found: list[tuple[int, int, _Bucket]] = []
    for number, group in enumerate(plan.groups_of(rank)):
        bridge = make_group(group.name, group.ranks) if len(group.ranks) > 1 else None
        for k, content in enumerate(_cut(group, plan, bucket_elements)):
            bucket = _Bucket(bridge, group.source, rank == group.source, rank in group.destinations, content)
            found.append((k, number, bucket))
    return tuple(bucket for _, _, bucket in sorted(found, key=lambda entry: entry[:2]))


def _cut(group: Group, plan: ReshardPlan, bucket_elements: int) -> Iterator[_Content]:
    """The group's buckets: the whole ones of large transfers, each by itself, then all that is left, end to end."""
    held, wanted = plan.source_shapes[group.source], plan.destination_shapes[group.destinations[0]]
    rest: list[tuple[Transfer, int]] = []
    for transfer in group.transfers:
        alone = elements_alone(transfer.num_elements, bucket_elements)
        for start in range(0, alone, bucket_elements):
            stop = min(start + bucket_elements, alone)
            copies = tuple(_copies(transfer, start, stop, 0))
            source = _span(transfer.source_parameter, transfer.source, held, start)
            destination = _span(transfer.destination_parameter, transfer.destination, wanted, start)
            yield _Content(copies, stop - start, source, destination)
        if alone < transfer.num_elements:
            rest.append((transfer, alone))
    yield from _cut_end_to_end(rest, bucket_elements)


def _cut_end_to_end(parts: Sequence[tuple[Transfer, int]], bucket_elements: int) -> Iterator[_Content]:
    """Transfers from an element on to their ends, one after the other, cut every ``bucket_elements``."""
    copies: list[_Copy] = []
    used = 0
    for transfer, first in parts:
        done, total = first, transfer.num_elements
        while done < total:
            stop = min(total, done + bucket_elements - used)
            copies += _copies(transfer, done, stop, used)
            used += stop - done
            done = stop
            if used == bucket_elements:
                yield _Content(tuple(copies), used)
                copies, used = [], 0
    if copies:
        yield _Content(tuple(copies), used)


def _copies(transfer: Transfer, start: int, stop: int, offset: int) -> Iterator[_Copy]:
    """Elements ``start`` to ``stop`` of a transfer, from ``offset`` on in a bucket."""
    names = transfer.source_parameter, transfer.destination_parameter
    for box in slice_boxes(box_shape(transfer.canonical), start, stop):
        extent, size = box_shape(box), volume(box)
        source, destination = _inside(box, transfer.source), _inside(box, transfer.destination)
        yield _Copy(names[0], source, names[1], destination, offset, extent, _row_major(extent), size)
        offset += size


def _span(parameter: str, box: Ranges, shapes: Mapping[str, tuple[int, ...]], start: int) -> _Span | None:
    """Where a box's elements from ``start`` on lie, if the box is one piece of its row-major parameter; None where it has gaps."""
    first, row, is_cut = 0, 1, False
    for (low, high), size in zip(reversed(box), reversed(shapes[parameter]), strict=True):
        if is_cut and high - low > 1:
            return None
        is_cut = is_cut or high - low < size
        first += low * row
        row *= size
    return _Span(parameter, first + start)


def _inside(box: Ranges, outer: Ranges) -> Ranges:
    """``box``, whose origin is that of ``outer``, in the coordinates in which ``outer`` is given."""
    return shifted(box, tuple((0, 0) for _ in box), outer)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1] if shape else ()


def _pack(content: _Content, target: Tensor, sources: Parameters) -> None:
    """Copy the bucket's elements into ``target``, one box after the other."""
    for copy in content.copies:
        target.as_strided(copy.shape, copy.strides, copy.offset).copy_(_box(sources[copy.source_parameter], copy.source, copy.shape))


def _finish(started: _Started, destinations: Parameters) -> list[Tensor]:
    """Wait for a bucket, and copy what is not yet in its place. Returns the buffer that is free again, if it had one."""
    if started.work is not None:
        started.work.wait()
    first = started.tensor.storage_offset()
    for copy in started.left:
        target = _box(destinations[copy.destination_parameter], copy.destination, copy.shape)
        target.copy_(started.tensor.as_strided(copy.shape, copy.strides, first + copy.offset))
    return [] if started.buffer is None else [started.buffer]


def _in_place(span: _Span | None, content: _Content, dtype: torch.dtype, parameters: Parameters) -> Tensor | None:
    """The bucket's part of its parameter, as a view; None without a span, or where the parameter is not row-major or of another dtype."""
    if span is None:
        return None
    parameter = parameters[span.parameter]
    if parameter.dtype != dtype or not parameter.is_contiguous():
        return None
    return parameter.detach().view(-1)[span.start : span.start + content.num_elements]


def _box(tensor: Tensor, ranges: Ranges, shape: tuple[int, ...]) -> Tensor:
    """``layout.view`` less dims of extent 1 in front, in one call: models of many experts have tens of thousands of boxes.

    Made anew in every sync, as engines may put other tensors in the place of their parameters. Shapes were checked before.
    """
    strides = tensor.stride()
    offset = tensor.storage_offset()
    for (start, _), stride in zip(ranges, strides, strict=True):
        offset += start * stride
    return tensor.as_strided(shape, strides[len(strides) - len(shape) :], offset)


def _shape_faults(planned: Mapping[str, tuple[int, ...]], given: Parameters) -> list[str]:
    missing = [name for name in planned if name not in given]
    faults = [f"missing {', '.join(missing)}"] if missing else []
    for name, shape in planned.items():
        if name in given and tuple(given[name].shape) != shape:
            faults.append(f"{name} has shape {tuple(given[name].shape)}, the plan {shape}")
    return faults


@contextlib.contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    """On a GPU, pack, unpack and wait on a stream of their own, and return when all is done; on a CPU nothing is needed."""
    if device.type != "cuda":
        yield
        return
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(side):
            yield
    finally:
        side.synchronize()
