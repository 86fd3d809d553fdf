"""The DataBus: handles instead of data.

``put`` keeps data with its owner and returns a handle at once; whoever holds the handle pulls the data with ``get``. A handle is only
(owner, key), so the reader on the other mesh can form it by itself: nothing has to be sent to announce data.

    rollout rank 2 (replica head)                        training rank 0
    put(trajectories, key) ---> its own TCPStore  <----- get(DataHandle(2, key))     pulls, in chunks of 4 MiB

Trajectories are served by a ``TCPStore`` (a C++ thread) that the owner hosts from its first shared ``put`` on; its address stands in
the world's store. Everything else (weights, experience) never leaves its process: ``get`` hands back the object itself.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megatron_ppo.types import TrajectoryBatch
from megatron_ppo.world import World

CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True)
class DataHandle:
    """Names data without holding it."""

    owner: int
    """Global rank that keeps the data."""
    key: str
    """The owner's name for it."""


class DataBus:
    """One rank's end of the bus."""

    def __init__(self, world: World, *, timeout_s: float) -> None:
        self._world = world
        self._timeout_s = timeout_s
        self._local: dict[str, object] = {}
        self._num_chunks: dict[str, int] = {}
        self._server: dist.TCPStore | None = None
        self._clients: dict[int, dist.TCPStore] = {}
        self._num_unnamed = 0

    def put(self, data: object, key: str | None = None) -> DataHandle:
        """Keep ``data`` and return its handle. Only a ``TrajectoryBatch`` can be pulled by other ranks.

        Raises:
            ValueError: the key is in use; ``delete`` the older data first.
        """
        if key is None:
            key = f"unnamed/{self._num_unnamed}"
            self._num_unnamed += 1
        if key in self._local:
            raise ValueError(f"the data bus of rank {self._world.global_rank} already holds {key!r}; delete it first")
        self._local[key] = data
        if isinstance(data, TrajectoryBatch) and self._is_shared(data):
            self._serve(key, data.to_bytes())
        return DataHandle(self._world.global_rank, key)

    def get(self, handle: DataHandle, timeout_s: float | None = None) -> object:
        """The data, pulled from its owner where that is another rank; blocks until it has been put there.

        Raises:
            KeyError: this rank is the owner and has no such data.
            TimeoutError: the owner did not put it in time.
        """
        if handle.owner == self._world.global_rank:
            return self._local[handle.key]
        return TrajectoryBatch.from_bytes(self._pull(handle, self._timeout_s if timeout_s is None else timeout_s))

    def wait(
        self, handles: Sequence[DataHandle], num_returns: int = 1, timeout_s: float | None = None
    ) -> tuple[list[DataHandle], list[DataHandle]]:
        """(ready, pending) as soon as ``num_returns`` handles are ready, or when the time is over; order is kept."""
        if not 0 < num_returns <= len(handles):
            raise ValueError(f"num_returns = {num_returns} must be between 1 and the number of handles, {len(handles)}")
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        pause_s = 0.001
        while True:
            ready = [handle for handle in handles if self._is_ready(handle)]
            if len(ready) >= num_returns or time.monotonic() >= deadline:
                return ready, [handle for handle in handles if handle not in ready]
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)

    def delete(self, handle: DataHandle) -> None:
        """Forget data of this rank's own; a ``RuntimeError`` for another rank's."""
        if handle.owner != self._world.global_rank:
            raise RuntimeError(f"only the owner, rank {handle.owner}, may delete {handle.key!r}")
        if self._is_shared(self._local.pop(handle.key)):
            self._withdraw(handle.key)

    def _is_shared(self, data: object) -> bool:
        return isinstance(data, TrajectoryBatch) and not self._world.is_colocated  # a colocated owner is also the one who reads it

    # -- the transport: all that another kind of bus replaces ---------------------------------------------------------

    def _serve(self, key: str, data: bytes) -> None:
        """Let other ranks pull ``data``."""
        if self._server is None:
            host = _own_address()
            self._server = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            self._world.store.set(f"data_bus/{self._world.global_rank}", f"{host}:{self._server.port}")
        chunks = [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)]
        for i, chunk in enumerate(chunks):
            self._server.set(f"{key}/{i}", chunk)  # type: ignore[arg-type]  # bytes are taken, whatever the stub says
        self._num_chunks[key] = len(chunks)
        self._server.set(f"{key}/size", str(len(chunks)))  # last: its presence means that all chunks are there

    def _withdraw(self, key: str) -> None:
        """The end of ``_serve``."""
        assert self._server is not None
        for name in ["size", *map(str, range(self._num_chunks.pop(key)))]:
            self._server.delete_key(f"{key}/{name}")

    def _pull(self, handle: DataHandle, limit_s: float) -> bytes:
        """What the owner, another rank, serves; ``TimeoutError``."""
        client = self._client(handle.owner, limit_s)
        try:
            client.wait([f"{handle.key}/size"], datetime.timedelta(seconds=limit_s))
        except dist.DistStoreError as error:
            raise TimeoutError(f"rank {handle.owner} did not put {handle.key!r} within {limit_s:.0f} s") from error
        num_chunks = int(client.get(f"{handle.key}/size"))
        return b"".join(client.get(f"{handle.key}/{i}") for i in range(num_chunks))

    def _is_served(self, handle: DataHandle) -> bool:
        """Whether the owner, another rank, serves it now."""
        if handle.owner not in self._clients and not self._world.store.check([f"data_bus/{handle.owner}"]):
            return False
        return self._client(handle.owner, self._timeout_s).check([f"{handle.key}/size"])

    def _client(self, owner: int, timeout_s: float) -> dist.TCPStore:
        if owner not in self._clients:
            name = f"data_bus/{owner}"
            try:
                self._world.store.wait([name], datetime.timedelta(seconds=timeout_s))
            except dist.DistStoreError as error:
                raise TimeoutError(f"rank {owner} put nothing on the data bus within {timeout_s:.0f} s") from error
            host, _, port = self._world.store.get(name).decode().rpartition(":")
            self._clients[owner] = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
        return self._clients[owner]

    def _is_ready(self, handle: DataHandle) -> bool:
        return handle.key in self._local if handle.owner == self._world.global_rank else self._is_served(handle)


def _own_address() -> str:
    """An address of this host that the other ranks can reach.

    It is the one from which this host reaches MASTER_ADDR. On the master's own host that may be a loopback address, and then
    MASTER_ADDR itself is what others use.
    """
    master = os.environ["MASTER_ADDR"]
    family, kind, _, _, address = socket.getaddrinfo(master, int(os.environ["MASTER_PORT"]), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # a datagram socket sends nothing here; it only picks the route
        own = str(probe.getsockname()[0])
    return master if ipaddress.ip_address(own).is_loopback else own
