"""``compute_on = rollout``: values, reference log-probs and reward-model scores by the rollout ranks, in jobs equal to the training mesh's.

All jobs have a shared critic, a reference with other weights than the actor starts from, and a reward model beside the function reward.
SGD, so that rounding stays rounding: Adam would turn a gradient of almost nothing into a whole step.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_support import Job, make_inputs, run_job, stopped_after, warnings_in

from benchmarks.fault_judge import differences, saved_tensors

NUM_ITERATIONS = 3
JOB: dict[str, object] = {
    "critic": "shared",
    "kl_coef": 0.05,
    "kl_target": 0.5,
    "optimizer": "sgd",
    "lr": 0.05,
    "value_loss_coef": 0.5,
    "rollout_backend": "hf",
    "train_iters": NUM_ITERATIONS,
    "save_interval": NUM_ITERATIONS,
    "num_logged_samples": 32,
}
SIZES = {"refit/received_bytes", "refit/shard_bytes"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Beside the policy, where a run starts from and a reward model: its trunk with other weights, under a scalar head."""
    folder = make_inputs(tmp_path_factory.mktemp("inputs"))
    for number, name in enumerate(("start", "reward")):
        shutil.copytree(folder / "model", folder / name)
        (file,) = (folder / name).glob("*.safetensors")
        source = torch.Generator().manual_seed(number)
        tensors = {key: tensor + 0.02 * torch.randn(tensor.shape, generator=source) for key, tensor in load_file(file).items()}
        head = 0.05 * torch.randn(1, tensors["model.norm.weight"].shape[0], generator=source)
        save_file(tensors | {"score.weight": head}, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def on_training(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """What all others are held to: two FSDP shards compute everything, a rollout rank samples."""
    return job(inputs, tmp_path_factory.mktemp("training") / "run", 3, backend="fsdp", rollout_world_size=1)


def job(inputs: Path, folder: Path, num_ranks: int, **fields: object) -> Job:
    done = run_job(inputs, folder, num_ranks, **{**JOB, "load_hf": inputs / "start", "reward_model_path": inputs / "reward", **fields})
    assert warnings_in(done.output) == []
    return done


def comparable(record: dict[str, Any]) -> dict[str, Any]:
    """Without times, and without the size of a shard, to which a value head belongs only where the rollout ranks compute values."""
    return {key: value for key, value in record.items() if not key.startswith("time/") and key != "tokens_per_s" and key not in SIZES}


def assert_equal_up_to_rounding(one: Job, other: Job, stored: str | None = "fsdp") -> None:
    """The same samples; metrics and, where both have checkpoints of one format, trained weights within 1e-5."""
    assert one.samples == other.samples
    assert len(one.metrics) == len(other.metrics) == NUM_ITERATIONS
    for mine, theirs in zip(map(comparable, one.metrics), map(comparable, other.metrics), strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert mine[key] == pytest.approx(value, rel=1e-5, abs=1e-5), f"{key} of iteration {theirs['iteration']}"
    assert one.metrics[0]["values/mean"] != 0 and one.metrics[0]["reward/model"] != 0 and one.metrics[-1]["kl/mean"] != 0
    if stored is None:
        return
    mine, theirs = (saved_tensors(done.folder / "checkpoints" / f"iter_{NUM_ITERATIONS:07d}" / stored) for done in (one, other))
    assert mine.keys() == theirs.keys() and any("score" in name for name in mine)
    for name, tensor in theirs.items():
        if isinstance(tensor, torch.Tensor):
            torch.testing.assert_close(mine[name], tensor, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_the_same_run_and_its_own_resume(inputs: Path, tmp_path: Path, on_training: Job) -> None:
    """Two ranks that do both, in one go; then from its second iteration on two that train and two that sample: bit for bit."""
    fields = {"backend": "fsdp", "compute_on": "rollout"}
    saved = {"save_interval": NUM_ITERATIONS - 1}
    whole = job(inputs, tmp_path / "whole", 2, rollout_world_size=0, cpu_offload="sampling", **fields, **saved)
    resumed = job(inputs, stopped_after(whole.folder, NUM_ITERATIONS - 1, tmp_path / "resumed"), 4, rollout_world_size=2, **fields)
    assert f"resuming after iteration {NUM_ITERATIONS - 1} from" in resumed.output
    assert differences(whole.folder, resumed.folder, NUM_ITERATIONS) == []
    assert_equal_up_to_rounding(whole, on_training)
    head = load_file(next((inputs / "start").glob("*.safetensors")))["score.weight"].nbytes
    for mine, theirs in zip(resumed.metrics, on_training.metrics, strict=True):
        assert mine["refit/received_bytes"] == mine["refit/shard_bytes"] == 2 * (theirs["refit/received_bytes"] + head)
        assert mine["time/evaluate_s"] > 0 and "time/evaluate_s" not in theirs


def test_a_shared_critic_under_pipeline_parallelism_too(inputs: Path, tmp_path: Path, on_training: Job) -> None:
    """The value head is the last of two pipeline stages', and goes to one rollout rank; log-probs and weights are proved as ever."""
    fields = {"pipeline_model_parallel_size": 2, "rollout_world_size": 1, "use_distributed_optimizer": False, "compute_on": "rollout"}
    megatron = job(inputs, tmp_path / "megatron", 3, verify_weights=True, **fields)
    assert_equal_up_to_rounding(megatron, on_training, stored=None)
    for record in megatron.metrics:
        assert record["refit/received_bytes"] == record["refit/shard_bytes"] > 0
        assert record["logprob_diff/max"] < 1e-4
        assert record["loss/value"] > 0
