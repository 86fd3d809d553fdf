"""One launch, two meshes: environments, set-up under delays, and that neither mesh sees the other's collectives."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch_config import two_by_two
from spawn import run_ranks

import megatron_ppo.world as world_module
from megatron_ppo.bridge import Bridge
from megatron_ppo.world import close_world, init_world, read_launch, straddling_replica

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "12", "LOCAL_RANK": "1", "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "12",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
}


# -- the environment --------------------------------------------------------------------------------------------------


def test_b98_torchrun_and_srun_name_the_same_place() -> None:
    """B98: both launchers' variables give the same rank, size and device."""
    by_torchrun, by_srun = read_launch(TORCHRUN | {"GROUP_RANK": "1"}), read_launch(SRUN)
    assert by_torchrun == by_srun
    assert (by_srun.global_rank, by_srun.world_size, by_srun.local_rank, by_srun.node) == (5, 12, 1, "1")


def test_b98_conflicting_launchers_are_refused() -> None:
    """B98: two launchers that disagree are an error; two that agree are not, nor torchrun agents that srun started."""
    with pytest.raises(ValueError, match=r"RANK=5 and SLURM_PROCID=0"):
        read_launch(TORCHRUN | SRUN | {"SLURM_PROCID": "0"})
    assert read_launch(TORCHRUN | SRUN).global_rank == 5
    agents = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "TORCHELASTIC_RUN_ID": "x"}
    assert read_launch(TORCHRUN | agents).global_rank == 5


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_b98_a_missing_variable_is_named(name: str) -> None:
    """B98."""
    with pytest.raises(ValueError, match=name):
        read_launch({key: value for key, value in TORCHRUN.items() if key != name})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RANK": "12"}, "RANK=12 must be below WORLD_SIZE=12"),
        ({"RANK": "-1"}, "RANK=-1 must be at least 0"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE='many' is not a whole number"),
        ({"MASTER_PORT": "70000"}, "between 1 and 65535"),
    ],
)
def test_impossible_values_are_refused(changes: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_launch(TORCHRUN | changes)


def test_no_launcher_is_a_clear_error() -> None:
    with pytest.raises(ValueError, match="torchrun or srun"):
        read_launch({"MASTER_ADDR": "a", "MASTER_PORT": "1"})


def test_run_and_attempt_come_from_the_launcher() -> None:
    elastic = read_launch(TORCHRUN | {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "3"})
    assert (elastic.run_id, elastic.attempt) == ("job", "3")
    slurm = read_launch(SRUN | {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "2", "SLURM_RESTART_COUNT": "1"})
    assert (slurm.run_id, slurm.attempt) == ("77.2", "1")


def test_a_replica_may_not_straddle_nodes() -> None:
    """The message names the replica and its global ranks; a layout that fits gives none."""
    nodes = ["0"] * 6 + ["1"] * 6
    assert straddling_replica(nodes, range(4, 12), 2) is None
    fault = straddling_replica(nodes, range(4, 12), 4)
    assert fault is not None
    assert "replica 0 (global ranks 4-7" in fault
    assert "rank 6 on node 1" in fault


# -- whole launches ---------------------------------------------------------------------------------------------------


def set_up_many_times(rank: int, _: int, folder: str, repeats: int) -> dict[str, Any]:
    """Each repeat is an attempt of its own against one store, as after a restart."""
    config = two_by_two(folder)
    delays = random.Random(100 + rank)
    seconds, lists = [], []
    for attempt in range(repeats):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        time.sleep(delays.uniform(0, 0.2))
        start = time.monotonic()
        world = init_world(config)
        bridges = [Bridge("control", [0, 2], world)] if rank in (0, 2) else []
        bridges.append(Bridge("all", range(4), world))
        weights = [Bridge(f"weights{source}", [source, 2, 3], world) for source in (0, 1) if rank in (source, 2, 3)]
        seconds.append(time.monotonic() - start)
        mesh_ranks = [0, 0]
        dist.all_gather_object(mesh_ranks, world.global_rank)
        lists.append((list(world.training_ranks), list(world.rollout_ranks)))
        groups = {world.mesh: mesh_ranks} | {bridge.name: list(bridge.ranks) for bridge in bridges + weights}
        merged: dict[str, list[int]] = {}
        for known in bridges[-1].all_gather_objects(groups):
            assert isinstance(known, dict)
            for name, members in known.items():
                assert merged.setdefault(name, members) == members
        assert sorted(merged) == ["all", "control", "rollout", "training", "weights0", "weights1"]
        if attempt == 0:
            once = (in_mesh_only(world.mesh, bridges[-1]), int(os.environ["RANK"]))
        for bridge in bridges + weights:
            bridge.close()
        close_world(world)
    assert os.environ["RANK"] == str(rank)
    return {"seconds": seconds, "lists": lists, "once": once, "mesh": world.mesh, "rank": world.rank}


def in_mesh_only(mesh: str, everyone: Bridge) -> float:
    """B96: one mesh runs collectives on its default group while the other waits at a bridge; then the other way round."""
    total = torch.ones(1)
    for turn in ("training", "rollout"):
        if mesh == turn:
            for _ in range(3):
                dist.all_reduce(total)
        everyone.barrier()
    return float(total)


def test_b94_b96_meshes_come_up_under_random_delays(tmp_path: Path) -> None:
    """B94: 20 set-ups with random delays, each < 20 s, groups alike on all ranks. B96: a mesh's collectives are its own."""
    two_by_two(str(tmp_path))
    results = run_ranks(set_up_many_times, 4, str(tmp_path), 20, timeout_s=100)
    assert max(second for result in results for second in result["seconds"]) < 20
    assert [(result["mesh"], result["rank"]) for result in results] == [
        ("training", 0),
        ("training", 1),
        ("rollout", 0),
        ("rollout", 1),
    ]
    for rank, result in enumerate(results):
        assert result["once"] == (8.0, rank % 2)
        assert all(lists == ([0, 1], [2, 3]) for lists in result["lists"])


def refused(rank: int, world_size: int, folder: str, changes: dict[str, Any], environment: dict[str, str]) -> tuple[str, str]:
    """(class of the error, its text) of an ``init_world`` that must not come up."""
    os.environ.update({name: value.format(rank=rank, node=rank // 3) for name, value in environment.items()})
    world_module._QUIET_RANKS_WAIT_S = 1.0
    try:
        init_world(two_by_two(folder).replace(**changes))
    except (Exception, SystemExit) as error:
        assert not dist.is_initialized()
        assert os.environ["WORLD_SIZE"] == str(world_size)
        return type(error).__name__, str(error)
    raise AssertionError("the launch came up")


@pytest.mark.parametrize(
    ("changes", "environment", "words"),
    [
        ({"rollout_tensor_parallel_size": 3}, {}, "rollout_tensor_parallel_size = 3"),
        ({"rollout_world_size": 3}, {}, "rollout_world_size is 3, so 1 ranks are left to train"),
        ({"rollout_world_size": 4}, {}, "rollout_world_size is 4, so 0 ranks are left to train"),
        ({"rollout_tensor_parallel_size": 2}, {"GROUP_RANK": "{node}"}, "rank 2 on node 0, rank 3 on node 1"),
    ],
)
def test_a_launch_that_does_not_fit_is_refused_once(
    tmp_path: Path, changes: dict[str, Any], environment: dict[str, str], words: str
) -> None:
    """Rank 0 raises, all other ranks end with code 1 and nothing to print; no process group is made.

    B94: meshes that would overlap (a training mesh of TP 2 beside 3 or 4 of 4 ranks that roll out) are among the refused.
    """
    two_by_two(str(tmp_path))
    results = run_ranks(refused, 4, str(tmp_path), changes, environment, timeout_s=60)
    assert results[0][0] == "ValueError"
    assert words in results[0][1]
    assert results[1:] == [("SystemExit", "1")] * 3


ONE_AND_ONE = {"rollout_world_size": 1, "tensor_model_parallel_size": 1}


def test_b98_a_port_of_another_launch_is_refused(tmp_path: Path) -> None:
    """B98: neither the rank that would serve the store nor a client joins another launch of the same name at that port."""
    two_by_two(str(tmp_path))
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = dist.PrefixStore("local/0", server)
    other.add("signed_in/1", 1)
    host, client = run_ranks(refused, 2, str(tmp_path), ONE_AND_ONE, {"MASTER_PORT": str(server.port)}, timeout_s=60)
    assert host[0] == client[0] == "ValueError"
    assert "cannot serve the launch's store" in host[1]
    assert "has already signed in" in client[1]
    assert not other.check(["signed_in/0"])
