"""Weights for an engine whose parameters no table describes: full tensors, one by one, into the engine's own loader.

Takes the place of ``executor.py`` in a sync, with the same methods, where the tables do not know the model and the engine is vLLM:

    training ranks   rows ---gather to rank 0--> full tensor, cast to the wire's dtype
    rank 0           ---one broadcast a tensor--> every rollout rank ---(name, tensor)--> the engine's loader, which cuts out its part

Slower than the exact way: every rollout rank takes in the whole model, and nothing overlaps. A rank holds about the largest tensor more
than its weights (twice, where it casts). On ranks that do both (colocated) the gather gives every rank the full tensor, and no broadcast
follows. Tensors travel in one fixed order. Left out: what the engine does with them, and whether it left a parameter out, which the
engine's backend checks.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megatron_ppo.canonical import CanonicalTensor
from megatron_ppo.resharding.checksum import Checksums, tensor_checksum
from megatron_ppo.resharding.executor import GroupBridge, MakeGroup, Parameters, ReshardExecutor, TransferStats
from megatron_ppo.resharding.gather import gather_canonical
from megatron_ppo.resharding.layout import RankLayout

Load = Callable[[Iterable[tuple[str, Tensor]]], None]
"""The engine's loader: takes every tensor, and raises where one does not fit or a parameter was left without weights."""


class HFWeightLoader:
    """One rank's part. Collective: all ranks of the launch make it, then run each sync together.

    Args:
        tensors: what the engine gets, in this order.
        layouts: rank of the training mesh -> how the actor lies on it.
        rank: this process's global rank.
        training_ranks, rollout_ranks: global ranks of the meshes; the same where ranks do both.
        make_group: makes a process group; called once, by the first training rank and all rollout ranks.
        transfer_dtype: dtype on the wire, the rollout engine's.
        device: where full tensors are put together and received.
        load: the engine's loader; None on ranks without an engine.
    """

    def __init__(
        self,
        tensors: Sequence[CanonicalTensor],
        layouts: Mapping[int, RankLayout],
        *,
        rank: int,
        training_ranks: range,
        rollout_ranks: range,
        make_group: MakeGroup,
        transfer_dtype: torch.dtype,
        device: torch.device,
        load: Load | None,
    ) -> None:
        self.rank = rank
        self.transfer_dtype = transfer_dtype
        self.source = training_ranks[0]
        """Global rank from which the full tensors come."""
        self.keeps_checksums = False
        """Whether the next syncs note checksums of what is sent and of what arrives."""
        self.checksums: Checksums = {}
        """Tensor -> its sums in the last sync, where ``keeps_checksums`` was set."""
        self._tensors = tuple(tensors)
        self._layouts = layouts
        self._device = device
        self._load = load
        self._is_colocated = training_ranks == rollout_ranks
        self._position = rank - training_ranks[0] if rank in training_ranks else None
        self._bridge: GroupBridge | None = None
        members = (self.source, *rollout_ranks)
        if not self._is_colocated and rank in members:
            self._bridge = make_group("full-tensors", members)
        self._broken = False

    @property
    def full_bytes(self) -> int:
        """Bytes of all tensors on the wire."""
        return sum(torch.Size(tensor.shape).numel() for tensor in self._tensors) * self.transfer_dtype.itemsize

    def expected_bytes(self, shard_bytes: int) -> int:
        """What a rollout rank receives in a sync, whatever its engine holds: every tensor, whole."""
        return self.full_bytes

    def send(self, parameters: Parameters) -> TransferStats:
        """Give this training rank's share. ``ValueError`` where it is not as the layouts say; ``RuntimeError`` where a transfer failed."""
        if self._is_colocated:
            raise RuntimeError(f"rank {self.rank} sends and receives: call exchange, which does both at once")
        return self._checked(lambda: self._send(parameters))

    def receive(self, parameters: Parameters) -> TransferStats:
        """Fill the engine by its own loader; ``parameters`` (its live ones) are not looked at.

        ``RuntimeError``: a transfer failed, or the loader raised, did not take all tensors or left a parameter out. The engine then holds
        no whole set of weights, and this loader cannot be used again.
        """
        return self._checked(lambda: self._fill(self._received()))

    def exchange(self, sources: Parameters, destinations: Parameters) -> TransferStats:
        """``send`` and ``receive`` of a rank that is in both meshes (colocated). Raises as they do."""
        return self._checked(lambda: self._fill(self._gathered(sources)))

    def describe(self, *, sources: Parameters | None = None, destinations: Parameters | None = None) -> str:
        """JSON that both ends compare before the first sync (``compare_descriptions``)."""
        wire = [(tensor.name, tensor.shape) for tensor in self._tensors]
        faults = []
        if self._position is not None:
            given = {name: tuple(tensor.shape) for name, tensor in (sources or {}).items()}
            planned = self._layouts[self._position].shapes
            faults = [f"{name} has shape {given.get(name)}, planned {shape}" for name, shape in planned.items() if given.get(name) != shape]
        return json.dumps(
            {
                "rank": self.rank,
                "plan": hashlib.sha256(json.dumps(wire).encode()).hexdigest(),
                "dtype": str(self.transfer_dtype),
                "bucket_bytes": 0,
                "faults": faults,
            }
        )

    def _checked(self, run: Callable[[], TransferStats]) -> TransferStats:
        if self._broken:
            raise RuntimeError(f"an earlier transfer of rank {self.rank} failed midway; restart the run from its last checkpoint")
        self.checksums = {}
        try:
            with torch.no_grad():
                return run()
        except BaseException:
            self._broken = True
            raise

    def _send(self, parameters: Parameters) -> TransferStats:
        started, sent = time.monotonic(), 0
        for name, tensor in self._gather(parameters, to=0):
            if tensor is None:
                continue
            assert self._bridge is not None
            wire = tensor.to(self.transfer_dtype)
            self._note(name, wire)
            self._bridge.broadcast(wire, self.source)
            sent += wire.nbytes
        return TransferStats(sent, 0, len(self._tensors), time.monotonic() - started)

    def _fill(self, stream: Iterator[tuple[str, Tensor]]) -> TransferStats:
        assert self._load is not None, f"rank {self.rank} has no engine to fill"
        started, counted = time.monotonic(), _Counted(stream)
        try:
            self._load(counted)
        except Exception as error:  # an engine's loader may raise anything
            if counted.is_broken:  # it was the transfer that failed, not the loader
                raise
            raise RuntimeError(f"the engine's own loader failed, at {counted.last or 'the start'}: {error}") from error
        left = [name for name, _ in counted]  # the other ranks count on every tensor being received
        if left:
            raise RuntimeError(f"the engine's own loader did not take {len(left)} tensors: {', '.join(left[:5])}")
        return TransferStats(0, counted.num_bytes, len(self._tensors), time.monotonic() - started)

    def _received(self) -> Iterator[tuple[str, Tensor]]:
        assert self._bridge is not None
        for tensor in self._tensors:
            full = torch.empty(tensor.shape, dtype=self.transfer_dtype, device=self._device)
            self._bridge.broadcast(full, self.source)
            self._note(tensor.name, full)
            yield tensor.name, full

    def _gathered(self, parameters: Parameters) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._gather(parameters, to=None):
            assert tensor is not None
            wire = tensor.to(self.transfer_dtype)
            self._note(name, wire)
            yield name, wire

    def _gather(self, parameters: Parameters, *, to: int | None) -> Iterator[tuple[str, Tensor | None]]:
        shapes = {tensor.name: tensor.shape for tensor in self._tensors}
        # Where a sync is proved, copies of a shard are held to each other, too: one of them is sent.
        return gather_canonical(
            self._layouts, parameters, to=to, names=list(shapes), shapes=shapes, check_replicas=self.keeps_checksums
        )

    def _note(self, name: str, wire: Tensor) -> None:
        if self.keeps_checksums:
            self.checksums[name] = tensor_checksum(wire)


WeightTransfer = ReshardExecutor | HFWeightLoader
"""How the weights of a run travel."""


def compare_full(sent: Checksums, received: Checksums) -> list[str]:
    """Tensors that did not arrive as they were sent, in words; one that is absent on either side counts."""
    names = list(dict.fromkeys([*sent, *received]))
    return [
        f"{name}: checksums {sent.get(name, 'none')} sent, {received.get(name, 'none')} received"
        for name in names
        if list(sent.get(name, [])) != list(received.get(name, [])) or name not in sent or name not in received
    ]


class _Counted:
    """Tensors by name on their way into a loader, counted; it can be read on after the loader has stopped."""

    def __init__(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        self.is_broken = False
        self.last = ""
        self.num_bytes = 0
        self._tensors = tensors

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        try:
            name, tensor = next(self._tensors)
        except StopIteration:
            raise
        except BaseException:
            self.is_broken = True
            raise
        self.last = name
        self.num_bytes += tensor.nbytes
        return name, tensor
