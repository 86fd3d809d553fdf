"""Exact resume of a whole job that really stops: six iterations at once, and three and then three more; another mesh; another meaning.

Real torchruns of two training ranks and one that samples. The same with vLLM on other meshes: ``test_train.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from train_support import PROGRAM, Job, Processes, forget_last_greedy, make_inputs, read_lines, run_job, tiny_flags

from benchmarks.fault_judge import differences, saved_tensors

LAUNCH_TIMEOUT_S = 400.0
JOB: dict[str, object] = {
    "critic": "shared",
    "params_dtype": "bfloat16",
    "kl_coef": 0.05,
    "kl_target": 0.5,
    "lr_warmup_steps": 5,
    "clip_grad": 0.5,
    "num_logged_samples": 32,
    "rollout_backend": "hf",
}
"""What has state: an adaptive KL controller, a schedule, Adam's moments and fp32 masters."""
TP2 = JOB | {"tensor_model_parallel_size": 2}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, tokenizer and prompts."""
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def whole(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Six iterations in one go, saved when they are finished and not before."""
    return run_job(inputs, tmp_path_factory.mktemp("whole") / "run", 3, train_iters=6, save_interval=6, **TP2)


def test_b84_b86_three_and_three_are_six_bit_for_bit(inputs: Path, tmp_path: Path, whole: Job) -> None:
    """Weights, masters, moments, random states, controller, counters; every metric but times; every sample. Saving changes nothing."""
    run_job(inputs, tmp_path / "run", 3, train_iters=3, save_interval=3, **TP2)
    halves = run_job(inputs, tmp_path / "run", 3, train_iters=6, save_interval=3, **TP2)
    assert "resuming after iteration 3 from" in halves.output
    forget_last_greedy(halves.folder, 5)
    assert differences(whole.folder, halves.folder, 6) == []
    newest = halves.folder / "checkpoints" / "iter_0000006"
    assert len(saved_tensors(newest / "megatron")) > 20
    assert [record["iteration"] for record in halves.metrics] == list(range(6))
    state = json.loads((newest / "state.json").read_text())
    assert state["iteration"] == state["version"] == 6 and state["kl_coef"] != JOB["kl_coef"]


def test_b89_another_mesh_goes_on_with_a_notice_and_another_meaning_is_refused(inputs: Path, tmp_path: Path, whole: Job) -> None:
    """TP2 -> PP2 by the name of another run's checkpoint; then a learning rate that was not allowed to change."""
    checkpoint = whole.folder / "checkpoints" / "iter_0000006"
    change: dict[str, object] = JOB | {"resume": checkpoint, "save_interval": 1}
    job = run_job(inputs, tmp_path / "run", 3, train_iters=7, pipeline_model_parallel_size=2, **change)
    assert "resuming after iteration 6 from" in job.output
    assert "seeded anew" in job.output, "the notice on random states"
    assert [record["iteration"] for record in read_lines(job.folder / "metrics.jsonl")] == [6]
    with Processes(tmp_path / "log") as processes:  # a mesh of one rank, too, would only be noticed
        processes.torchrun(2, [*PROGRAM, *tiny_flags(inputs, job.folder, **(change | {"train_iters": 8, "lr": 1e-4}))])
        assert processes.wait(LAUNCH_TIMEOUT_S) != 0
        output = processes.output()
    assert "field  in the checkpoint  now" in output
    assert "lr     0.001              0.0001" in output
    assert "--allow-changed lr" in output
