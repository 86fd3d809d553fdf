"""Whole jobs with ``--backend fsdp``: vLLM or Hugging Face rollouts, against the Megatron backend; exact resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from forked_jobs import forked_job
from safetensors.torch import load_file
from spawn import run_program
from toy_models import make_toy
from train_support import make_inputs, run_job, stopped_after, warnings_in

from benchmarks.fault_judge import differences, saved_tensors
from megatron_ppo.__main__ import main

PPO = {"kl_coef": 0.05, "kl_target": 0.5, "lr_warmup_steps": 3, "num_logged_samples": 32}
"""What has state: an adaptive KL controller, a schedule, Adam's moments of two networks."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, tokenizer and prompts."""
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def test_the_same_training_as_with_megatron(inputs: Path, tmp_path: Path) -> None:
    """Two training ranks; two vLLM replicas for FSDP, one for Megatron, which changes no sample: the same tokens and rewards, then the same
    training within rounding; every byte of the engines' parameters is received once a sync, and the trainer gives tokens the log-prob that
    vLLM gave."""
    common = {**PPO, "verify_weights": True}
    ours = run_job(inputs, tmp_path / "fsdp", 4, backend="fsdp", save_hf_interval=0, rollout_world_size=2, **common)
    theirs = forked_job(inputs, tmp_path / "megatron", 3, rollout_world_size=1, **common)
    assert warnings_in(ours.output) == []
    assert len(ours.metrics) == 2
    assert [row for row in ours.samples if row["iteration"] == 0] == [row for row in theirs.samples if row["iteration"] == 0]
    for mine, other in zip(ours.metrics, theirs.metrics, strict=True):
        assert mine["refit/received_bytes"] == mine["refit/shard_bytes"] > 0
        assert other["refit/received_bytes"] == other["refit/shard_bytes"] > 0
        assert mine["logprob_diff/max"] < 1e-4
        for key, value in other.items():
            if not key.startswith(("time/", "logprob_diff/", "refit/")) and key != "tokens_per_s":
                assert mine[key] == pytest.approx(value, rel=2e-3, abs=2e-5), f"{key} at iteration {other['iteration']}"
    exported = load_file(tmp_path / "fsdp" / "hf" / "model.safetensors")
    started = load_file(next((inputs / "model").glob("*.safetensors")))
    assert set(exported) == set(started)
    assert all(not torch.equal(exported[name], started[name]) for name in started)


def test_verify_proves_bytes_and_log_probs_of_three_uneven_shards(tmp_path: Path) -> None:
    """A mixture and vLLM TP 2: 4 experts, 130 rows and heads of one row cut by three, in bf16 on the wire; exact, gathered and counted."""
    model = make_toy(tmp_path / "model", "qwen3_moe", head_dim=32)
    flags = ["--model-path", model, "--backend", "fsdp", "--rollout-world-size", 2, "--rollout-tensor-parallel-size", 2]
    flags += ["--max-prompt-length", 24, "--max-response-length", 8, "--rollout-dtype", "bfloat16"]
    flags += ["--vllm-overrides", "kv_cache_memory_bytes", 53687091]
    text = run_program(5, ["verify", *flags], tmp_path / "log", COLUMNS="200")
    assert "tensors on 2 rollout ranks are equal bit for bit" in text
    assert "copy 0 shard 2" in text and text.count("1.000") == 2


def test_the_refit_report_knows_copies_and_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two copies of four shards feed two replicas of TP 2; one copy is enough, so the other is silent."""
    model = make_toy(tmp_path / "model", "qwen3_moe", head_dim=32)
    flags = ["plan", "--refit", "--model-path", model, "--backend", "fsdp", "--fsdp-shard-size", 4, "--world-size", 12]
    flags += ["--rollout-world-size", 4, "--rollout-tensor-parallel-size", 2, "--max-prompt-length", 8, "--max-response-length", 8]
    assert main([*map(str, flags), "--png", str(tmp_path / "refit.png"), "--json", str(tmp_path / "refit.json")]) == 0
    text = capsys.readouterr().out
    assert "training   ranks 0-7 (8): FSDP, 2 x 4 shards" in text and "4 of 8 training ranks send nothing" in text
    assert "received/shard    1.000 on every rollout rank" in text
    found = json.loads((tmp_path / "refit.json").read_text())
    assert found["ranks"][5]["place"] == {"copy": 1, "shard": 1}


def test_b84_two_and_two_are_four_bit_for_bit(inputs: Path, tmp_path: Path) -> None:
    """Two training ranks as copies, bf16, two Hugging Face rollout ranks: weights, moments, random states, controller, metrics, samples.

    The second half is colocated: a checkpoint knows no placement.
    """
    fields = {**PPO, "backend": "fsdp", "fsdp_shard_size": 1, "params_dtype": "bfloat16", "rollout_backend": "hf"}
    fields |= {"rollout_dtype": "bfloat16", "save_interval": 2, "async_save": True, "train_iters": 4}
    whole = forked_job(inputs, tmp_path / "whole", 4, rollout_world_size=2, **fields)
    resumed = forked_job(inputs, stopped_after(whole.folder, 2, tmp_path / "resumed"), 2, rollout_world_size=0, **fields)
    assert "resuming after iteration 2 from" in resumed.output
    assert differences(whole.folder, resumed.folder, 4) == []
    saved = saved_tensors(whole.folder / "checkpoints" / "iter_0000004" / "fsdp")
    assert saved["actor.model.model.embed_tokens.weight"].dtype == torch.float32, "masters, not what they are rounded to"
    for record in whole.metrics:
        assert record["refit/received_bytes"] == record["refit/shard_bytes"] > 0
