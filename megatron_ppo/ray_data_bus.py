"""The data bus of a launch by Ray: trajectories lie in Ray's object store, and a directory actor knows where.

    rollout rank 2 (replica head)            directory (one actor)            training rank 0
    put(trajectories, key) -> object store   (2, key) -> reference   <------  get(DataHandle(2, key)), bytes from the object store

Handles, checks and what stays in its own process are ``DataBus``'s; only the transport differs. References go through the directory
and never through the launch's store, so that Ray counts them and frees an object when its owner deletes it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import ray

from megatron_ppo.data_bus import DataBus, DataHandle
from megatron_ppo.world import World

_ANSWER_S = 60.0
"""For the directory to answer at all."""


class Directory:
    """Which object holds what. One actor a launch; a reference travels in a list, or Ray would replace it by its object."""

    def __init__(self) -> None:
        self._references: dict[tuple[int, str], list[Any]] = {}
        self._changed = asyncio.Condition()

    async def add(self, owner: int, key: str, reference: list[Any]) -> None:
        """Make known what ``owner`` has put."""
        async with self._changed:
            self._references[owner, key] = reference
            self._changed.notify_all()

    async def find(self, owner: int, key: str, limit_s: float) -> list[Any] | None:
        """The reference, as soon as there is one; None where there is none within the time limit."""

        async def known() -> None:
            async with self._changed:
                await self._changed.wait_for(lambda: (owner, key) in self._references)

        try:
            await asyncio.wait_for(known(), limit_s)
        except TimeoutError:
            return None
        return self._references.get((owner, key))

    async def has(self, owner: int, key: str) -> bool:
        """Whether there is one now."""
        return (owner, key) in self._references

    async def remove(self, owner: int, key: str) -> None:
        """Forget it."""
        del self._references[owner, key]


class RayDataBus(DataBus):
    """One rank's end of the bus, inside an actor of Ray."""

    def __init__(self, world: World, directory: Any, *, timeout_s: float) -> None:
        """``directory``: handle of the launch's ``Directory`` actor."""
        super().__init__(world, timeout_s=timeout_s)
        self._directory = directory
        self._own: dict[str, Any] = {}

    def _serve(self, key: str, data: bytes) -> None:
        self._own[key] = ray.put(np.frombuffer(data, dtype=np.uint8))  # an array is stored and read without a copy
        ray.get(self._directory.add.remote(self._world.global_rank, key, [self._own[key]]), timeout=_ANSWER_S)

    def _withdraw(self, key: str) -> None:
        ray.get(self._directory.remove.remote(self._world.global_rank, key), timeout=_ANSWER_S)
        del self._own[key]

    def _pull(self, handle: DataHandle, limit_s: float) -> bytes:
        found = ray.get(self._directory.find.remote(handle.owner, handle.key, limit_s), timeout=limit_s + _ANSWER_S)
        if found is None:
            raise TimeoutError(f"rank {handle.owner} did not put {handle.key!r} within {limit_s:.0f} s")
        return bytes(ray.get(found[0], timeout=limit_s))

    def _is_served(self, handle: DataHandle) -> bool:
        return bool(ray.get(self._directory.has.remote(handle.owner, handle.key), timeout=_ANSWER_S))
