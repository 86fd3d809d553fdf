"""Training and rollout on the same ranks, by turns: results of disjoint meshes, exact resume, and who is named when a rank is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_jobs import forked_job
from safetensors.torch import load_file
from spawn import run_program
from toy_models import make_toy
from train_support import PROGRAM, Job, Processes, make_inputs, promised, read_lines, run_job, stopped_after, tiny_flags, warnings_in

from benchmarks.fault_judge import differences

LAUNCH_TIMEOUT_S = 500.0
PPO = {"kl_coef": 0.05, "kl_target": 0.5, "num_logged_samples": 32}
CANNOT_SLEEP = "vLLM cannot sleep on a CPU"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, tokenizer and prompts."""
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def comparable(record: dict[str, Any]) -> dict[str, Any]:
    """Without what another placement, or number of replicas, must change: times and traffic."""
    return {name: value for name, value in record.items() if not name.startswith(("time/", "refit/")) and name != "tokens_per_s"}


def assert_same_job(one: Job, other: Job) -> None:
    """Every metric, sample and exported weight, bit for bit."""
    assert len(one.metrics) == 2
    assert [comparable(record) for record in one.metrics] == [comparable(record) for record in other.metrics]
    assert one.samples == other.samples
    left, right = (load_file(job.folder / "hf" / "model.safetensors") for job in (one, other))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_megatron_tp2_equals_disjoint_meshes_bit_for_bit(inputs: Path, tmp_path: Path) -> None:
    """Two vLLM replicas on the two ranks that train, the optimizer out of their way, against one on a rank of its own."""
    fields = {**PPO, "tensor_model_parallel_size": 2, "save_hf_interval": 0, "params_dtype": "bfloat16", "rollout_dtype": "bfloat16"}
    colocated = run_job(inputs, tmp_path / "colocated", 2, rollout_world_size=0, cpu_offload="sampling", **fields)
    disjoint = forked_job(inputs, tmp_path / "disjoint", 3, rollout_world_size=1, **fields)
    assert_same_job(colocated, disjoint)
    assert [line for line in warnings_in(colocated.output) if CANNOT_SLEEP not in line] == []
    assert colocated.output.count(CANNOT_SLEEP) == 1 and CANNOT_SLEEP not in disjoint.output
    for record in colocated.metrics + disjoint.metrics:
        assert record["refit/received_bytes"] == record["refit/shard_bytes"] > 0


def test_fsdp_goes_on_on_disjoint_meshes_bit_for_bit(inputs: Path, tmp_path: Path) -> None:
    """Two shards; Hugging Face rollouts on the ranks that train, optimizer and gradients out of their way: 2 + 2 = 4, where the other two
    iterations are those of two ranks that train and two that sample. The other way round: ``test_fsdp_job.py``."""
    fields = {**PPO, "backend": "fsdp", "rollout_backend": "hf", "save_interval": 2, "train_iters": 4}
    whole = forked_job(inputs, tmp_path / "whole", 2, rollout_world_size=0, cpu_offload="sampling", **fields)
    apart = forked_job(inputs, stopped_after(whole.folder, 2, tmp_path / "apart"), 4, rollout_world_size=2, **fields)
    assert "resuming after iteration 2 from" in apart.output
    assert differences(whole.folder, apart.folder, 4) == []


def test_verify_proves_a_mixture_on_the_ranks_that_train(tmp_path: Path) -> None:
    """Two stages into a vLLM replica of two ranks, in bf16 on the wire; exact, gathered, read from the folder, and counted."""
    model = make_toy(tmp_path / "model", "qwen3_moe", head_dim=32)
    flags = ["--model-path", model, "--rollout-world-size", 0, "--pipeline-model-parallel-size", 2, "--rollout-tensor-parallel-size", 2]
    flags += ["--max-prompt-length", 24, "--max-response-length", 8, "--rollout-dtype", "bfloat16"]
    flags += ["--vllm-overrides", "kv_cache_memory_bytes", 53687091]
    text = run_program(2, ["verify", *flags], tmp_path / "log", COLUMNS="200")
    assert "tensors on 2 rollout ranks are equal bit for bit" in text
    assert "TP 0 PP 1 DP 0, replica 0 TP 1" in text and text.count("1.000") == 2


def test_b92_a_lost_rank_is_named_with_its_phase(inputs: Path, tmp_path: Path) -> None:
    """kill -9 of a rank that trains and samples: the other ends within the promised time and says whom it lost, and in which phase."""
    flags = tiny_flags(inputs, tmp_path / "run", rollout_world_size=0, rollout_backend="hf", backend="fsdp", train_iters=1000)
    with Processes(tmp_path / "log") as processes:
        processes.torchrun(2, [*PROGRAM, *flags])
        records = tmp_path / "run" / "metrics.jsonl"
        processes.wait_until(lambda: records.exists() and len(read_lines(records)) >= 2, "a second iteration", LAUNCH_TIMEOUT_S)
        victim, other = processes.rank(1), processes.rank(0)
        os.kill(victim, signal.SIGKILL)
        processes.wait_until(lambda: other not in processes.alive(), "the end of the other rank", promised(10.0))
        assert processes.wait(60.0) != 0
        assert "rank 1 (training and rollout rank 1)" in processes.output()
