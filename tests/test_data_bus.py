"""The data bus between real processes: handles formed by the reader, chunks, waiting, forgetting, a server that is not there."""

from __future__ import annotations

import dataclasses
import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from spawn import run_ranks
from toy_batches import make_trajectories

from megatron_ppo import data_bus
from megatron_ppo.data_bus import DataBus, DataHandle
from megatron_ppo.types import TrajectoryBatch
from megatron_ppo.world import World


def _world(rank: int, world_size: int) -> World:
    """A launch of one training rank; the others sample."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = dist.TCPStore(*address, world_size, is_master=rank == 0, timeout=timedelta(seconds=30))
    return World(
        global_rank=rank,
        world_size=world_size,
        local_rank=rank,
        mesh="training" if rank == 0 else "rollout",
        rank=max(0, rank - 1),
        mesh_size=1 if rank == 0 else world_size - 1,
        training_ranks=range(1),
        rollout_ranks=range(1, world_size),
        rollout_tensor_parallel_size=1,
        store=store,
        run_id="test",
    )


def _equal(a: TrajectoryBatch, b: TrajectoryBatch) -> bool:
    return a.version == b.version and a.to_bytes() == b.to_bytes()


def _exchange(rank: int, world_size: int) -> str:
    data_bus.CHUNK_BYTES = 1000  # many chunks
    world = _world(rank, world_size)
    bus = DataBus(world, timeout_s=20)
    batch = make_trajectories([3, 5], [4, 300], seed=rank)
    if rank > 0:
        if rank == 2:
            world.store.get("reader waited")
        handle = bus.put(batch, key="trajectories/0")
        assert handle == DataHandle(rank, "trajectories/0")
        assert bus.get(handle) is batch  # the owner's own object, not a copy
        with pytest.raises(ValueError, match="already holds"):
            bus.put(batch, key="trajectories/0")
        world.store.get("reader done")
        bus.delete(handle)
        with pytest.raises(KeyError):
            bus.get(handle)
        world.store.set(f"deleted/{rank}", "1")
        world.store.get("finished")
        world.store.set(f"left/{rank}", "1")
        return "ok"
    handles = [DataHandle(1, "trajectories/0"), DataHandle(2, "trajectories/0")]
    assert bus.wait(handles, num_returns=1) == ([handles[0]], [handles[1]])
    started = time.monotonic()
    assert bus.wait(handles, num_returns=2, timeout_s=0.3) == ([handles[0]], [handles[1]])
    assert time.monotonic() - started < 5
    world.store.set("reader waited", "1")
    assert bus.wait(handles, num_returns=2) == (handles, [])
    got = [bus.get(handle) for handle in handles]
    for one, seed in zip(got, (1, 2), strict=True):
        assert isinstance(one, TrajectoryBatch)
        assert _equal(one, make_trajectories([3, 5], [4, 300], seed=seed))
    world.store.set("reader done", "1")
    for owner in (1, 2):
        world.store.get(f"deleted/{owner}")
    assert bus.wait(handles, num_returns=1, timeout_s=0.1) == ([], handles)
    with pytest.raises(TimeoutError, match="rank 1 did not put 'trajectories/0'"):
        bus.get(handles[0], timeout_s=0.2)
    with pytest.raises(RuntimeError, match="only the owner, rank 1"):
        bus.delete(handles[0])
    world.store.set("finished", "1")
    for owner in (1, 2):
        world.store.get(f"left/{owner}")  # this rank hosts the store: it leaves last
    return "ok"


def test_batches_travel_in_chunks_and_handles_need_no_message() -> None:
    assert run_ranks(_exchange, 3) == ["ok"] * 3


def test_local_objects_stay_where_they_are() -> None:
    """No server is started for what no other rank may read."""
    world = World(0, 1, 0, "training", 0, 1, range(1), range(1, 1), 1, dist.HashStore(), "test")
    bus = DataBus(world, timeout_s=1)
    weights = {"w": torch.ones(2)}
    handle = bus.put(weights)
    assert bus.get(handle) is weights
    assert bus.put(weights) != handle
    assert not world.store.check(["data_bus/0"])
    assert bus.wait([handle, DataHandle(0, "absent")], timeout_s=0) == ([handle], [DataHandle(0, "absent")])
    with pytest.raises(ValueError, match="num_returns = 3"):
        bus.wait([handle], num_returns=3)
    with pytest.raises(TimeoutError, match="rank 7 put nothing"):
        bus.get(DataHandle(7, "x"), timeout_s=0.1)


def test_a_batch_is_of_one_version() -> None:
    """Rows of different weights may not be mixed; padding grows to the longest."""
    one, two = make_trajectories([2], [3]), make_trajectories([2], [9])
    joined = TrajectoryBatch.concatenate([one, two])
    assert joined.tokens.shape == (2, 11)
    assert joined.response_mask.sum(dim=1).tolist() == [3, 9]
    with pytest.raises(ValueError, match=r"versions \[0, 1\]"):
        TrajectoryBatch.concatenate([one, dataclasses.replace(two, version=1)])

