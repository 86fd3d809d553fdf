"""A run by Ray on a real cluster of this machine: the same weights as under torchrun, the object store as the data bus, a rank that fails.

One cluster serves the tests of this file, and another belongs to the command that starts it; nothing of them is left. Ranks take a part of
a CPU, so that four fit on two. Run as a script this file is the cluster, or the driver of the bus: ``python test_ray.py cluster|bus``.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from toy_batches import make_trajectories
from train_support import PROGRAM, ROOT, Processes, make_inputs, read_lines, tiny_flags

from megatron_ppo.data_bus import DataHandle
from megatron_ppo.types import TrajectoryBatch
from megatron_ppo.world import World

LIMIT_S = 280.0
RAY = ("scripts/train_ray.py", "--num-training-ranks", "2", "--cpus-per-rank", "0.25")
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    # Made here, so that cluster and drivers have the same one, and nobody else has it.
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": uuid.uuid4().hex,
}
REWARD = '''
"""Ends the rank that asks first, once; the score does not tell."""
import os, pathlib, signal

STRUCK = pathlib.Path(__file__).with_name("struck")

def strikes(sample):
    try:
        STRUCK.touch(exist_ok=False)
    except FileExistsError:
        return 1.0 / (1 + sample.num_response_tokens)
    rank = parent("self")
    while b"ray::Rank" not in pathlib.Path(f"/proc/{rank}/cmdline").read_bytes():
        rank = parent(rank)
    os.kill(rank, signal.SIGKILL)
    return 0.0

def parent(pid):
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
'''


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, tokenizer and prompts."""
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a cluster of one node."""
    with Processes(tmp_path_factory.mktemp("cluster"), SETTINGS) as processes:
        processes.start([__file__, "cluster"])
        processes.wait_until(lambda: "address " in processes.stdout(), "the cluster's address", LIMIT_S)
        yield processes.stdout().rpartition("address ")[2].strip()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ray_starts_again_after_a_failure_and_trains_the_weights_that_torchrun_trains(inputs: Path, tmp_path: Path, cluster: str) -> None:
    """Two training and two rollout ranks. The first attempt loses one: all end, each says why; the second goes on to the end.

    Two iterations, compared to torchrun's: every bit of the export, and every figure that is no time.
    """
    (tmp_path / "reward.py").write_text(REWARD, encoding="utf-8")
    fields = {"tensor_model_parallel_size": 2, "rollout_world_size": 2, "rollout_backend": "hf", "save_hf_interval": 0}
    fields |= {"reward": f"{tmp_path / 'reward.py'}:strikes"}
    with Processes(tmp_path / "log", SETTINGS) as processes:
        processes.start([*RAY, "--ray-address", cluster, "--max-restarts", "1", *tiny_flags(inputs, tmp_path / "ray", **fields)])
        assert processes.wait(LIMIT_S) == 0, processes.output()
        output = processes.output()
        processes.torchrun(4, [*PROGRAM, *tiny_flags(inputs, tmp_path / "torchrun", **fields)])
        assert processes.wait(LIMIT_S, 1) == 0, processes.output(1)
    struck = re.search(r"rank ([23]) \(rollout rank [01]\) lost in phase", output)
    assert struck, output
    victim = int(struck[1])
    for rank in {0, 1, 2, 3} - {victim}:
        lost = rf"rank {victim} \(rollout rank {victim - 2}\) lost in phase rollout of iteration 0; this is rank {rank} in phase .*; ending"
        assert re.search(lost, output), output
    assert re.search(r"train_ray: rank \d ended: .*; starting again \(1 restarts left\)", output), output
    assert "ended after 2 of 2 iterations" in output
    by_ray, by_torchrun = (load_file(tmp_path / name / "hf" / "model.safetensors") for name in ("ray", "torchrun"))
    assert by_ray.keys() == by_torchrun.keys()
    assert all(torch.equal(by_ray[name], by_torchrun[name]) for name in by_ray)
    lines = [read_lines(tmp_path / name / "samples.jsonl") for name in ("ray", "torchrun")]
    assert lines[0] == lines[1]
    records = [read_lines(tmp_path / name / "metrics.jsonl") for name in ("ray", "torchrun")]
    assert len(records[0]) == 2
    assert [without_times(record) for record in records[0]] == [without_times(record) for record in records[1]]


def without_times(record: dict[str, object]) -> dict[str, object]:
    """What does not depend on the machine."""
    return {name: value for name, value in record.items() if not name.startswith("time/") and name != "tokens_per_s"}


@pytest.mark.slow
def test_what_does_not_fit_is_said_before_anything_starts(inputs: Path, tmp_path: Path) -> None:
    """Sizes that do not divide need no cluster; a cluster that is too small is said with the equation."""
    with Processes(tmp_path / "log", SETTINGS) as processes:
        processes.start([*RAY, *tiny_flags(inputs, tmp_path / "run", tensor_model_parallel_size=4)])
        processes.start([*RAY, "--cpus-per-rank", "1000", *tiny_flags(inputs, tmp_path / "run")])
        assert [processes.wait(LIMIT_S, number) for number in (0, 1)] == [2, 2], processes.output(0) + processes.output(1)
        assert "world size 3 = training + rollout ranks" in processes.stderr(0)
        assert "3 ranks x 1000 CPU = 3000, but the cluster has" in processes.stderr(1)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_bus_over_the_object_store(cluster: str) -> None:
    """Handles formed by the reader, waiting, time limits, deletion: as the other bus has it."""
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, __file__, "bus", cluster]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def exchange(rank: int, directory: object) -> str:
    """Rank 1 puts and deletes; rank 0, by itself, reads."""
    from megatron_ppo.ray_data_bus import RayDataBus

    world = World(rank, 2, 0, "rollout" if rank else "training", 0, 1, range(1), range(1, 2), 1, dist.HashStore(), "test")
    bus = RayDataBus(world, directory, timeout_s=60)
    batch, handle = make_trajectories([3, 5], [4, 300], seed=1), DataHandle(1, "trajectories/0")
    if rank == 1:
        assert bus.put(batch, "trajectories/0") == handle and bus.get(handle) is batch
        bus.wait([DataHandle(0, "read")], timeout_s=60)
        bus.delete(handle)
        bus.put(batch, "deleted")
        bus.wait([DataHandle(0, "finished")], timeout_s=60)
        return "ok"
    with pytest.raises(TimeoutError, match="rank 1 did not put 'never'"):
        bus.get(DataHandle(1, "never"), timeout_s=0.2)
    read = bus.get(handle)
    assert isinstance(read, TrajectoryBatch) and read.to_bytes() == batch.to_bytes()
    assert bus.wait([handle, DataHandle(1, "never")], timeout_s=0) == ([handle], [DataHandle(1, "never")])
    with pytest.raises(RuntimeError, match="only the owner, rank 1"):
        bus.delete(handle)
    bus.put(batch, "read")
    assert bus.get(DataHandle(1, "deleted")) is not None
    assert bus.wait([handle], timeout_s=0) == ([], [handle])
    bus.put(batch, "finished")
    bus.wait([DataHandle(1, "never")], timeout_s=1.0)  # until the other has read it; an object ends with its owner
    return "ok"


def main(role: str, address: str = "local") -> None:
    """A cluster that stays, or the driver of ``exchange`` on one."""
    import ray

    from megatron_ppo.ray_data_bus import Directory

    if role == "cluster":
        ray.init(address=address, num_cpus=2, include_dashboard=False)
        print(f"address {ray.get_runtime_context().gcs_address}", flush=True)
        signal.pause()
    ray.init(address=address)
    shared = ray.remote(num_cpus=0)(Directory).remote()
    end = ray.remote(num_cpus=0.25)(exchange)
    assert ray.get([end.remote(rank, shared) for rank in range(2)], timeout=LIMIT_S) == ["ok", "ok"]
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
