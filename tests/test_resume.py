"""Exact resume of whole jobs: real torchrun, megatron-core and vLLM; six iterations at once, and three and then three more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from train_support import PROGRAM, Processes, make_inputs, read_lines, tiny_flags

from benchmarks.fault_judge import differences, saved_tensors

LAUNCH_TIMEOUT_S = 400.0
PPO = {"kl_coef": 0.05, "kl_target": 0.5, "lr_warmup_steps": 5, "clip_grad": 0.5, "num_logged_samples": 32}
"""What has state: an adaptive KL controller, a schedule, Adam's moments of two networks."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, tokenizer and prompts."""
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def launch(inputs: Path, run_dir: Path, **fields: object) -> str:
    """One torchrun of four ranks to its end; what it printed."""
    with Processes(run_dir.parent / f"log_{len(list(run_dir.parent.iterdir()))}", {"WANDB_MODE": "offline"}) as processes:
        processes.torchrun(4, [*PROGRAM, *tiny_flags(inputs, run_dir, **(PPO | {"rollout_world_size": 2} | fields))])
        code = processes.wait(LAUNCH_TIMEOUT_S)
        assert code == 0, processes.output()
        assert processes.alive() == []
        return processes.output()


def merged(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the greedy answers of an iteration that was the last of its launch, but not of the run."""
    return [row for row in samples if not row["greedy"] or row["iteration"] in (0, 5)]


@pytest.mark.parametrize(
    "fields",
    [
        {"tensor_model_parallel_size": 2, "loggers": ["wandb"]},
        {"pipeline_model_parallel_size": 2, "rollout_tensor_parallel_size": 2, "async_save": True, "params_dtype": "bfloat16"},
        {"critic": "shared", "use_distributed_optimizer": True},
    ],
    ids=["TP2, TP1 x 2", "PP2, TP2", "DP2, TP1 x 2"],
)
def test_b84_b86_three_and_three_are_six_bit_for_bit(inputs: Path, tmp_path: Path, fields: dict[str, object]) -> None:
    """Weights, masters, moments, random states, controller, counters; every metric but times; every sample."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    launch(inputs, whole, train_iters=6, save_interval=3, **fields)
    launch(inputs, halves, train_iters=3, save_interval=3, **fields)
    assert "resuming after iteration 3 from" in launch(inputs, halves, train_iters=6, save_interval=3, **fields)
    for folder in (whole, halves):
        rows = merged(read_lines(folder / "samples.jsonl"))
        (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert differences(whole, halves, 6) == []
    assert len(saved_tensors(whole / "checkpoints" / "iter_0000006" / "megatron")) > 20
    assert [record["iteration"] for record in read_lines(halves / "metrics.jsonl")] == list(range(6))
    state = json.loads((halves / "checkpoints" / "iter_0000006" / "state.json").read_text())
    assert state["iteration"] == state["version"] == 6 and state["kl_coef"] != 0.05
    if "loggers" in fields:
        runs = {path.name.rpartition("-")[2] for path in (halves / "wandb").glob("offline-run-*")}
        assert runs == {state["wandb_run_id"]}, "both launches are one run of Weights & Biases"


def test_b89_another_mesh_goes_on_with_a_notice_and_another_meaning_is_refused(inputs: Path, tmp_path: Path) -> None:
    """TP2 -> PP2 by the name of another run's checkpoint; then a learning rate that was not allowed to change."""
    first, second = tmp_path / "first", tmp_path / "second"
    launch(inputs, first, train_iters=1, save_interval=1, tensor_model_parallel_size=2, rollout_backend="hf")
    checkpoint = first / "checkpoints" / "iter_0000001"
    change: dict[str, object] = {"pipeline_model_parallel_size": 2, "rollout_backend": "hf", "train_iters": 2, "save_interval": 1}
    text = launch(inputs, second, resume=checkpoint, **change)
    assert "resuming after iteration 1 from" in text
    assert "seeded anew" in text, "the notice on random states"
    assert [record["iteration"] for record in read_lines(second / "metrics.jsonl")] == [1]
    with Processes(tmp_path / "log") as processes:
        flags = tiny_flags(inputs, second, **(PPO | {"rollout_world_size": 2, "lr": 1e-4} | change | {"train_iters": 3}))
        processes.torchrun(4, [*PROGRAM, *flags])
        assert processes.wait(LAUNCH_TIMEOUT_S) != 0
        output = processes.output()
    assert "field  in the checkpoint  now" in output
    assert "lr     0.001              0.0001" in output
    assert "--allow-changed lr" in output
