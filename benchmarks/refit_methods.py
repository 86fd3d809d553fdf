"""What one rank does in the refit benchmark: the product's own sync, the usual way, and the limit, over the same groups.

    exact    ``ReshardExecutor``, as a run uses it
    gather   all-gather, broadcast of full tensors, each cuts out its own (``refit_gather.py``)
    limit    one broadcast a group of the bytes that ``exact`` sends over it, packed before, all groups at once
    pack, unpack   ``exact`` with groups that send nothing: what is left is the work on memory
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from refit_gather import GatherReceiver, GatherSender, find_stages
from refit_launch import join_world
from refit_model import DTYPE, Mesh, empty_parameters, fill, shard_bytes, wrong_blocks
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ppo.bridge import Bridge
from megatron_ppo.families import NetworkShape
from megatron_ppo.resharding.executor import ReshardExecutor, TransferStats, Work
from megatron_ppo.resharding.layout import RankLayout
from megatron_ppo.resharding.plan import build_plan

_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Traffic:
    """Counted on one rank, in the code that moves the bytes."""

    bytes_sent: int
    bytes_received: int


@dataclass(frozen=True)
class Run:
    """One run of a method on one rank: seconds from barrier to barrier, and the CPU time of all its threads between them."""

    seconds: float
    user_s: float
    system_s: float


@dataclass(frozen=True)
class Profile:
    """Where the last run of ``exact`` spent its time on this rank's main thread; what is left is copying and bookkeeping."""

    total_s: float
    waiting_s: float
    starting_s: float


class _TimedGroup:
    """A bridge that adds up the time spent in starting broadcasts and in waiting for them."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self.starting_s = self.waiting_s = 0.0

    def broadcast(self, tensor: Tensor, source: int, async_op: bool = False) -> Work:
        """As ``Bridge.broadcast``."""
        started = time.perf_counter()
        work = self._bridge.broadcast(tensor, source, async_op=True)
        self.starting_s += time.perf_counter() - started
        assert work is not None
        return _TimedWork(work, self)


@dataclass
class _TimedWork:
    work: dist.Work
    group: _TimedGroup

    def wait(self) -> None:
        started = time.perf_counter()
        self.work.wait()
        self.group.waiting_s += time.perf_counter() - started


class NoGroup:
    """A group that sends nothing."""

    def broadcast(self, tensor: Tensor, source: int, async_op: bool = False) -> Work | None:
        """Leave ``tensor`` as it is."""
        return None


class TransferRank:
    """One rank of a case. All methods are called on all ranks at once."""

    def __init__(self, rank: int, num_ranks: int, mesh: Mesh, network: NetworkShape, bucket_bytes: int) -> None:
        self._world = join_world(rank, num_ranks, mesh.num_training, mesh.rollout_tp)
        self._everybody = Bridge("everybody", range(num_ranks), self._world, timeout_s=_TIMEOUT_S)
        self._rank, self._mesh, self._network, self._bucket_bytes = rank, mesh, network, bucket_bytes
        sources, destinations = mesh.source_layouts(network), mesh.destination_layouts(network)
        self._layout = sources[rank] if self._trains else destinations[rank]
        self._plan = build_plan(sources, destinations, bytes_per_element=DTYPE.itemsize)
        self._parameters = empty_parameters(self._layout)
        if self._trains:
            fill(self._layout, network, self._parameters)
        self._groups: dict[str, Bridge] = {}
        self._timed: list[_TimedGroup] = []
        self._exact_s = 0.0
        self._executor = ReshardExecutor(self._plan, rank, self._make_group, bucket_bytes=bucket_bytes, transfer_dtype=DTYPE)
        self._copies_only = ReshardExecutor(self._plan, rank, lambda *_: NoGroup(), bucket_bytes=bucket_bytes, transfer_dtype=DTYPE)
        self._gather = self._make_gather(sources)
        self._packed: list[tuple[Bridge, int, Tensor]] = []
        self._traffic: dict[str, Traffic] = {}

    @property
    def _trains(self) -> bool:
        return self._rank < self._mesh.num_training

    def run(self, method: str) -> Run:
        """Run the method between two barriers over all ranks."""
        return measure(self._call(method), self._everybody.barrier)

    def profile(self) -> Profile:
        """Of the last run of ``exact``."""
        groups = self._timed
        return Profile(self._exact_s, sum(group.waiting_s for group in groups), sum(group.starting_s for group in groups))

    def traffic(self, method: str) -> Traffic:
        """What the method's last run moved here."""
        return self._traffic[method]

    def extra_memory(self, method: str) -> int:
        """Peak of the tensor memory that the method's first run allocates here and holds, in bytes. To be called before ``run``."""
        call = self._call(method)
        self._everybody.barrier()
        peak = peak_allocated_bytes(call)
        self._everybody.barrier()
        return peak

    def check(self, method: str) -> list[str]:
        """Run on parameters that are all NaN, and name the blocks that did not arrive bit for bit."""
        if not self._trains:
            for tensor in self._parameters.values():
                tensor.fill_(float("nan"))
        self.run(method)
        wrong = wrong_blocks(self._layout, self._network, self._parameters)
        return [f"rank {self._rank}, {method}: {name}" for name in wrong]

    def shard_bytes(self) -> int:
        """Bytes of this rollout rank's own shard, whatever the plan says; 0 on a training rank."""
        return 0 if self._trains else shard_bytes(self._layout, self._network, self._world.replica_tp_rank)

    def largest_block_bytes(self) -> int:
        """Bytes of the largest block of this rank's layout."""
        return max(block.num_elements for block in self._layout.blocks) * DTYPE.itemsize

    def prepare_limit(self) -> None:
        """Make the packed buffers of ``limit``."""
        for group in self._plan.groups_of(self._rank):
            packed = torch.ones(group.num_elements, dtype=DTYPE)
            self._packed.append((self._groups[group.name], group.source, packed))

    # -- methods ------------------------------------------------------------------------------------------------------

    def _call(self, method: str) -> Callable[[], None]:
        return {
            "exact": lambda: self._sync(self._executor, "exact"),
            "gather": self._run_gather,
            "limit": self._run_limit,
            "pack": lambda: self._sync(self._copies_only, "pack") if self._trains else None,
            "unpack": lambda: None if self._trains else self._sync(self._copies_only, "unpack"),
        }[method]

    def _sync(self, executor: ReshardExecutor, method: str) -> None:
        for group in self._timed:
            group.waiting_s = group.starting_s = 0.0
        stats: TransferStats = executor.send(self._parameters) if self._trains else executor.receive(self._parameters)
        if method == "exact":
            self._exact_s = stats.seconds
        self._traffic[method] = Traffic(stats.bytes_sent, stats.bytes_received)

    def _run_gather(self) -> None:
        self._gather.run()
        self._traffic["gather"] = Traffic(self._gather.bytes_sent, self._gather.bytes_received)

    def _run_limit(self) -> None:
        works = [bridge.broadcast(packed, source, async_op=True) for bridge, source, packed in self._packed]
        for work in works:
            assert work is not None
            work.wait()
        sizes = [(source == self._rank, packed.nbytes) for _, source, packed in self._packed]
        self._traffic["limit"] = Traffic(sum(size for sends, size in sizes if sends), sum(size for sends, size in sizes if not sends))

    # -- groups -------------------------------------------------------------------------------------------------------

    def _make_group(self, name: str, ranks: Sequence[int]) -> _TimedGroup:
        self._groups[name] = Bridge(name, ranks, self._world, timeout_s=_TIMEOUT_S)
        self._timed.append(_TimedGroup(self._groups[name]))
        return self._timed[-1]

    def _make_gather(self, sources: dict[int, RankLayout]) -> GatherSender | GatherReceiver:
        tp, rollout = self._mesh.parallel.tensor_model_parallel_size, self._world.rollout_ranks
        stages = find_stages(sources, tp)
        bridges = [
            Bridge(f"gather/{stage.source}", [stage.source, *rollout], self._world, timeout_s=_TIMEOUT_S)
            for stage in stages
            if self._rank == stage.source or not self._trains
        ]
        if not self._trains:
            return GatherReceiver(stages, self._layout, self._parameters, bridges, self._bucket_bytes)
        groups = [dist.new_group(list(stage.ranks)) for stage in stages]
        number = self._rank // tp
        bridge = bridges[0] if bridges else None
        return GatherSender(stages[number], self._rank, self._parameters, bridge, groups[number], self._bucket_bytes)


def measure(call: Callable[[], None], barrier: Callable[[], None]) -> Run:
    """Time a call between two barriers."""
    barrier()
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    call()
    barrier()
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    return Run(seconds, after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime)


def peak_allocated_bytes(function: Callable[[], None]) -> int:
    """Most tensor memory that a call holds at once beyond what was there before: the results of torch's operators are counted, not RSS;
    what a kernel needs for itself (a transpose: a tile of 60 x 60) is not seen."""
    with _AllocationCounter() as counter:
        function()
    return counter.peak_bytes


class _AllocationCounter(TorchDispatchMode):
    """Sees every operator of this thread; a result with a storage of its own is an allocation until that storage is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_address(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        results = func(*args, **(kwargs or {}))
        made = [tensor for tensor in tree_leaves(results) if isinstance(tensor, Tensor) and _address(tensor) not in given]
        self._live = {address: entry for address, entry in self._live.items() if not entry[0].expired()}
        for tensor in made:
            storage = tensor.untyped_storage()
            self._live[_address(tensor)] = (StorageWeakRef(storage), storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._live.values()))
        return results


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
