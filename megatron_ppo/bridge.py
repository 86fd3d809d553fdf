"""Process groups that cross the meshes: control between heads, weights from training ranks to rollout ranks.

    control   head of each mesh's replicas     gloo          objects, barriers, small reductions
    weights   one source + its receivers       nccl | gloo   buckets of raw bytes, several in flight

A bridge is made by its members only, so nobody has to wait for ranks that do not need it; ranks that share several bridges must make
them in one common order. It is no ``torch.distributed`` group: ``dist.*`` functions know only groups under the default group and do not
take it, so its methods are all there is. Ranks are global everywhere. Nothing is pickled: objects travel as JSON.

Noticing a lost peer is not done here (gloo does not reliably notice one): see ``watchdog.py``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ppo.world import World

Backend = Literal["gloo", "nccl"]


class Bridge:
    """A group of global ranks of both meshes. Every method is collective over its members unless it says otherwise."""

    def __init__(self, name: str, ranks: Sequence[int], world: World, backend: Backend = "gloo", timeout_s: float = 1800.0) -> None:
        """Join the group ``name`` of the given global ranks; the position in ``ranks`` is the position in the group.

        All members must pass the same name, ranks, backend and timeout, and a name must be used once in a launch. ``ValueError`` for
        ranks that are repeated, outside the launch, or do not include this one.
        """
        self.name = name
        self.ranks = tuple(ranks)
        self._check_ranks(world)
        self.rank = self.ranks.index(world.global_rank)
        self.size = len(self.ranks)
        self._global_rank = world.global_rank
        store = dist.PrefixStore(f"bridge/{name}", world.store)
        self._agree_on_ranks(store)
        self.device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", torch.cuda.current_device())
        self._group: dist.ProcessGroup | None = _make_group(store, self.rank, self.size, self.device, timedelta(seconds=timeout_s))

    def broadcast(self, tensor: Tensor, source: int, async_op: bool = False) -> dist.Work | None:
        """Overwrite ``tensor`` on every member with that of global rank ``source``, bit for bit, any dtype.

        The tensor is contiguous, of one shape and dtype everywhere, on ``self.device``. With ``async_op`` returns a work to ``wait()``
        for; until then the tensor must be left alone. Works of one bridge finish in order, works of several bridges are independent.
        """
        return self._finish(self._open().broadcast(self._bytes_of(tensor), self._position(source)), async_op)

    def send(self, tensor: Tensor, destination: int, async_op: bool = False) -> dist.Work | None:
        """Send ``tensor`` to global rank ``destination``, which must ``recv`` one of the same size. Between two members."""
        return self._finish(self._open().send([self._bytes_of(tensor)], self._position(destination), 0), async_op)

    def recv(self, tensor: Tensor, source: int, async_op: bool = False) -> dist.Work | None:
        """Overwrite ``tensor`` with what global rank ``source`` sends. Between two members."""
        return self._finish(self._open().recv([self._bytes_of(tensor)], self._position(source), 0), async_op)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, async_op: bool = False) -> dist.Work | None:
        """Replace ``tensor`` (one shape and dtype everywhere) by its reduction over all members."""
        self._check(tensor)
        return self._finish(self._open().allreduce(tensor, op), async_op)

    def barrier(self) -> None:
        """Return when every member has called."""
        # A reduction rather than the backends' barrier: NCCL's has to guess a device.
        flag = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.all_reduce(flag)
        flag.cpu()

    def broadcast_object(self, value: object, source: int) -> object:
        """The JSON value of global rank ``source``, on every member; the other members' ``value`` is ignored (pass None).

        What comes back went through JSON on every member: tuples are lists, and keys of dicts are strings.
        """
        payload = self._encode(value) if source == self._global_rank else None
        size = torch.tensor([0 if payload is None else payload.numel()], dtype=torch.int64, device=self.device)
        self.broadcast(size, source)
        if payload is None:
            payload = torch.empty(int(size.item()), dtype=torch.uint8, device=self.device)
        self.broadcast(payload, source)
        return _decode(payload)

    def gather_objects(self, value: object) -> list[object] | None:
        """All members' JSON values in the order of ``ranks``, at ``ranks[0]``; None on the others."""
        payload = self._encode(value)
        sizes = self._all_sizes(payload)
        if self.rank != 0:
            self.send(payload, self.ranks[0])
            return None
        parts = [payload] + [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes[1:]]
        for source, part in zip(self.ranks[1:], parts[1:], strict=True):
            self.recv(part, source)
        return [_decode(part) for part in parts]

    def all_gather_objects(self, value: object) -> list[object]:
        """All members' JSON values in the order of ``ranks``, on every member."""
        payload = self._encode(value)
        sizes = self._all_sizes(payload)
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        padded[: payload.numel()] = payload
        parts = [torch.empty_like(padded) for _ in sizes]
        self._open().allgather(parts, padded).wait()
        return [_decode(part[:size]) for part, size in zip(parts, sizes, strict=True)]

    def close(self) -> None:
        """Leave the group; connections end. Not collective; nothing may be in flight. Further calls are a ``RuntimeError``."""
        if self._group is not None:
            self._group.shutdown()
            self._group = None

    # -- checks and conversions ---------------------------------------------------------------------------------------

    def _open(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError(f"bridge {self.name!r} is closed")
        return self._group

    def _check_ranks(self, world: World) -> None:
        foreign = [rank for rank in self.ranks if not 0 <= rank < world.world_size]
        if foreign or len(set(self.ranks)) != len(self.ranks):
            raise ValueError(
                f"bridge {self.name!r} needs distinct global ranks from 0 to {world.world_size - 1}, but was given {list(self.ranks)}"
            )
        if world.global_rank not in self.ranks:
            raise ValueError(
                f"{world.describe(world.global_rank)} is not among the ranks {list(self.ranks)} of bridge {self.name!r}: "
                f"only members make a bridge"
            )

    def _agree_on_ranks(self, store: dist.Store) -> None:
        """Whoever comes first writes the member list; a member with another list would otherwise hang or join the wrong peers."""
        mine = json.dumps(self.ranks)
        theirs = store.compare_set("ranks", "", mine).decode()
        if theirs != mine:
            raise ValueError(f"bridge {self.name!r} has the ranks {mine} here, but {theirs} on the rank that came first")

    def _position(self, global_rank: int) -> int:
        if global_rank not in self.ranks:
            raise ValueError(f"rank {global_rank} is not among the ranks {list(self.ranks)} of bridge {self.name!r}")
        return self.ranks.index(global_rank)

    def _check(self, tensor: Tensor) -> None:
        if tensor.device != self.device:
            raise ValueError(f"bridge {self.name!r} moves tensors on {self.device}, but this one is on {tensor.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"bridge {self.name!r} moves contiguous tensors; this one has shape {list(tensor.shape)} and gaps")

    def _bytes_of(self, tensor: Tensor) -> Tensor:
        """The same memory as uint8: backends do not know all dtypes, and a copy has no use for them."""
        self._check(tensor)
        return tensor.detach().reshape(-1).view(torch.uint8)

    def _encode(self, value: object) -> Tensor:
        text = json.dumps(value).encode()
        return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self.device)

    def _all_sizes(self, payload: Tensor) -> list[int]:
        size = torch.tensor([payload.numel()], dtype=torch.int64, device=self.device)
        sizes = [torch.empty_like(size) for _ in self.ranks]
        self._open().allgather(sizes, size).wait()
        return [int(each.item()) for each in sizes]

    def _finish(self, work: dist.Work, async_op: bool) -> dist.Work | None:
        if async_op:
            return work
        work.wait()
        return None


def _decode(payload: Tensor) -> object:
    return json.loads(payload.cpu().numpy().tobytes())


def _make_group(store: dist.Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> dist.ProcessGroup:
    """A process group outside the default group's registry, so that ranks of other default groups can be members."""
    group = dist.ProcessGroup(store, rank, size)
    backend: dist.ProcessGroupGloo | dist.ProcessGroupNCCL
    if device.type == "cpu":
        kind = dist.ProcessGroup.BackendType.GLOO
        backend = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    else:
        kind = dist.ProcessGroup.BackendType.NCCL
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        backend = dist.ProcessGroupNCCL(store, rank, size, options)
    backend._set_sequence_number_for_group()
    group._set_default_backend(kind)
    group._register_backend(torch.device(device.type), kind, backend)
    return group
