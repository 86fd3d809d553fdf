"""A run by Ray on a real cluster of this machine: the same weights as under torchrun, the object store as the data bus, a rank that fails.

A cluster belongs to one test and to the process that starts it; nothing of it is left. Ranks take a part of a CPU, so that four fit on two.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
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
SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, tokenizer and prompts."""
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ray_and_torchrun_train_the_same_weights(inputs: Path, tmp_path: Path) -> None:
    """Two iterations of two training and two rollout ranks: every bit of the export, and every figure that is no time."""
    fields = {"tensor_model_parallel_size": 2, "rollout_world_size": 2, "rollout_backend": "hf", "save_hf_interval": 0}
    with Processes(tmp_path / "log", SETTINGS) as processes:
        processes.start([*RAY, *tiny_flags(inputs, tmp_path / "ray", **fields)])
        assert processes.wait(LIMIT_S) == 0, processes.output()
        assert "ended after 2 of 2 iterations" in processes.stdout()
        processes.torchrun(4, [*PROGRAM, *tiny_flags(inputs, tmp_path / "torchrun", **fields)])
        assert processes.wait(LIMIT_S, 1) == 0, processes.output(1)
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
@pytest.mark.timeout(900)
def test_a_rank_that_fails_ends_all_and_is_started_again(inputs: Path, tmp_path: Path) -> None:
    """The reward of the first attempt ends its rank; all ranks end, each says why; the second attempt goes on to the end."""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import os, pathlib, signal\n"
        "STRUCK = pathlib.Path(__file__).with_name('struck')\n"
        "def strikes(sample):\n"
        "    if not STRUCK.exists():\n"
        "        STRUCK.touch()\n"
        "        rank = int(pathlib.Path('/proc/self/stat').read_text().rpartition(')')[2].split()[1])\n"
        "        while b'ray::Rank' not in pathlib.Path(f'/proc/{rank}/cmdline').read_bytes():\n"
        "            rank = int(pathlib.Path(f'/proc/{rank}/stat').read_text().rpartition(')')[2].split()[1])\n"
        "        os.kill(rank, signal.SIGKILL)\n"
        "    return 1.0\n"
    )
    fields = {"rollout_backend": "hf", "critic": "none", "advantage_estimator": "grpo", "reward": f"{reward}:strikes", "train_iters": 1}
    with Processes(tmp_path / "log", SETTINGS) as processes:
        processes.start([*RAY, "--max-restarts", "1", *tiny_flags(inputs, tmp_path / "run", **fields)])
        assert processes.wait(LIMIT_S) == 0, processes.output()
        output = processes.output()
    for rank in (0, 1):
        lost = rf"rank 2 \(rollout rank 0\) lost in phase rollout of iteration 0; this is rank {rank} in phase .*; ending"
        assert re.search(lost, output), output
    assert re.search(r"train_ray: rank \d ended: .*; starting again \(1 restarts left\)", output), output
    assert "ended after 1 of 1 iterations" in output


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
def test_the_bus_over_the_object_store() -> None:
    """Handles formed by the reader, waiting, time limits, deletion: as the other bus has it."""
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
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


if __name__ == "__main__":
    import ray

    from megatron_ppo.ray_data_bus import Directory

    ray.init(address="local", num_cpus=2, include_dashboard=False)
    shared = ray.remote(num_cpus=0)(Directory).remote()
    assert ray.get([ray.remote(exchange).remote(rank, shared) for rank in range(2)], timeout=LIMIT_S) == ["ok", "ok"]
    ray.shutdown()
