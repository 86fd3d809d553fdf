"""Groups across two meshes: bytes, objects, several at once, and what is refused. One launch proves most of it."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from spawn import run_ranks

from megatron_ppo.bridge import Bridge
from megatron_ppo.world import World

OBJECTS = [{"rank": 0, "text": "\u00fc" * 3}, [1, 2.5, None], "x" * 10_000, {}]


def join(rank: int, world_size: int) -> World:
    """Two meshes of half the ranks each, with a default group of their own, without a configuration."""
    half = world_size // 2
    port = int(os.environ["MASTER_PORT"])
    server = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    store = dist.PrefixStore("test", server)
    mesh, here = ("training", rank) if rank < half else ("rollout", rank - half)
    dist.init_process_group("gloo", store=dist.PrefixStore(mesh, store), rank=here, world_size=half)
    return World(
        global_rank=rank,
        world_size=world_size,
        local_rank=rank,
        mesh="training" if rank < half else "rollout",
        rank=here,
        mesh_size=half,
        training_ranks=range(half),
        rollout_ranks=range(half, world_size),
        rollout_tensor_parallel_size=1,
        store=store,
        run_id="test",
    )


def use_everything(rank: int, world_size: int) -> None:
    world = join(rank, world_size)
    everyone = Bridge("everyone", range(world_size), world)
    move_tensors(rank, everyone)
    move_objects(rank, everyone)
    if rank != 0:
        use_a_part(rank, Bridge("part", [3, 1, 2], world))
    use_several_at_once(rank, world)
    everyone.barrier()
    refuse(rank, world, everyone)
    everyone.barrier()
    everyone.close()
    with pytest.raises(RuntimeError, match="'everyone' is closed"):
        everyone.barrier()
    dist.destroy_process_group()


def move_tensors(rank: int, bridge: Bridge) -> None:
    """Broadcasts are bit for bit in every dtype (NaN payloads, booleans, bf16), and in place in a view; sends pair up."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8, torch.float64):
        truth = torch.arange(0, 24 * 8, dtype=torch.int64).view(dtype)[:24].reshape(4, 6) if dtype is not torch.bool else torch.eye(4) > 0
        mine = truth.clone() if rank == 2 else torch.zeros_like(truth)
        assert bridge.broadcast(mine, 2) is None
        assert torch.equal(mine.view(torch.uint8), truth.contiguous().view(torch.uint8)), dtype
    nan = torch.tensor([0x7FC01234], dtype=torch.int32).view(torch.float32)
    mine = nan.clone() if rank == 0 else torch.zeros(1)
    bridge.broadcast(mine, 0)
    assert mine.view(torch.int32).item() == 0x7FC01234
    weights = torch.nn.Parameter(torch.full((3, 4), float(rank)))
    bridge.broadcast(weights[1], 3)
    assert weights[:, 0].tolist() == [float(rank), 3.0, float(rank)]
    total = torch.tensor([float(rank), 1.0])
    bridge.all_reduce(total)
    assert total.tolist() == [6.0, 4.0]
    bridge.all_reduce(total.fill_(float(rank)), dist.ReduceOp.MAX)
    assert total.tolist() == [3.0, 3.0]
    if rank in (1, 3):
        data = torch.full((5,), 7.0 if rank == 1 else 0.0)
        bridge.send(data, 3) if rank == 1 else bridge.recv(data, 1)
        assert data.tolist() == [7.0] * 5


def move_objects(rank: int, bridge: Bridge) -> None:
    gathered = bridge.gather_objects(OBJECTS[rank])
    assert gathered == (OBJECTS if rank == 0 else None)
    assert bridge.all_gather_objects(OBJECTS[rank]) == OBJECTS
    assert bridge.broadcast_object(OBJECTS[2] if rank == 2 else None, 2) == OBJECTS[2]
    assert bridge.broadcast_object((1, 2) if rank == 1 else "ignored", 1) == [1, 2]
    with pytest.raises(TypeError):
        bridge.gather_objects({1, 2})  # no JSON, and nothing has been sent


def use_a_part(rank: int, bridge: Bridge) -> None:
    """Ranks are global and in the order given: the first of them gathers."""
    assert bridge.gather_objects(rank) == ([3, 1, 2] if rank == 3 else None)
    data = torch.full((2,), float(rank))
    bridge.broadcast(data, 1)
    assert data.tolist() == [1.0, 1.0]
    bridge.close()


def use_several_at_once(rank: int, world: World) -> None:
    """Two sources, each with a group of its own and both rollout ranks in both: works of both in flight, waited for out of order."""
    sources = [source for source in (0, 1) if rank in (source, 2, 3)]
    bridges = {source: Bridge(f"weights{source}", [source, 2, 3], world) for source in sources}
    works: list[dist.Work] = []
    buffers: list[tuple[int, int, torch.Tensor]] = []
    for bucket in range(4):
        for source in sources:
            data = torch.full((50_000,), float(10 * source + bucket) if rank == source else -1.0)
            work = bridges[source].broadcast(data, source, async_op=True)
            assert work is not None
            works.append(work)
            buffers.append((source, bucket, data))
    for work in reversed(works):
        work.wait()
    for source, bucket, data in buffers:
        assert bool((data == 10 * source + bucket).all())
    for bridge in bridges.values():
        bridge.close()


def refuse(rank: int, world: World, bridge: Bridge) -> None:
    """Wrong arguments are refused before anything is sent."""
    with pytest.raises(ValueError, match="distinct global ranks"):
        Bridge("twice", [rank, rank], world)
    with pytest.raises(ValueError, match="from 0 to 3"):
        Bridge("outside", [rank, 4], world)
    with pytest.raises(ValueError, match="only members make a bridge"):
        Bridge("others", [(rank + 1) % 4], world)
    with pytest.raises(ValueError, match="rank 9 is not among"):
        bridge.broadcast(torch.zeros(1), 9)
    with pytest.raises(ValueError, match="contiguous"):
        bridge.broadcast(torch.zeros(4, 4).t()[1:], 0)
    with pytest.raises(ValueError, match="this one is on meta"):
        bridge.broadcast(torch.zeros(4, device="meta"), 0)
    if rank == 0:
        alone = Bridge("alone", [0], world)  # the first of its name: writes the list of members
        alone.barrier()
    bridge.barrier()
    if rank == 1:
        with pytest.raises(ValueError, match=r"\[0\] on the rank that came first"):
            Bridge("alone", [0, 1], world)


def test_everything_a_bridge_does() -> None:
    """Four ranks in two meshes; every method, every rank."""
    run_ranks(use_everything, 4, timeout_s=60)
