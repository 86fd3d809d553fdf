"""Whole jobs of models outside the tables: real torchrun, full tensors into real vLLM; a family of the user's own goes shard by shard."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from forked_jobs import forked_job
from other_models import make_other
from safetensors.torch import load_file
from train_support import Processes, make_inputs, run_job, warnings_in

from megatron_ppo.__main__ import main

LAUNCH_TIMEOUT_S = 500.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SIZES = {"vocab_size": 13, "pad_token_id": None}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer and prompts of the quickstart, beside other models with its vocabulary."""
    folder = make_inputs(tmp_path_factory.mktemp("inputs"))
    for kind in ("gpt2", "gemma2"):
        make_other(folder / kind, kind, **SIZES)
        shutil.copy(folder / "model" / "tokenizer.model", folder / kind)
    return folder


def launch(inputs: Path, run_dir: Path, num_ranks: int, kind: str, *, forked: bool = False, **fields: object) -> tuple[Any, str]:
    """Records and output of one job, by torchrun or without it."""
    settings = {"model_path": inputs / kind, "backend": "fsdp", "critic": "shared", "num_logged_samples": 4, **fields}
    job = (forked_job if forked else run_job)(inputs, run_dir, num_ranks, **settings)
    return job.metrics, job.output


def full_bytes(folder: Path) -> int:
    return sum(tensor.numel() * 4 for tensor in load_file(folder / "model.safetensors").values())


def test_full_tensors_reach_vllm_of_two_ranks(inputs: Path, tmp_path: Path) -> None:
    """Two shards to one replica of TP 2: chosen by itself, said once, counted, and the trainer gives tokens the log-prob that vLLM gave."""
    records, output = launch(inputs, tmp_path / "run", 4, "gpt2", rollout_world_size=2, rollout_tensor_parallel_size=2, save_hf_interval=0)
    assert len(records) == 2
    for record in records:
        assert record["refit/received_bytes"] == 2 * full_bytes(inputs / "gpt2") > record["refit/shard_bytes"] > 0
        assert record["logprob_diff/max"] < 1e-4
    notices = warnings_in(output)
    assert len(notices) == 1 and "weights of this gpt2 model go to vLLM's own loader as full tensors" in notices[0]
    before, after = load_file(inputs / "gpt2" / "model.safetensors"), load_file(tmp_path / "run" / "hf" / "model.safetensors")
    assert set(before) == set(after) and not before["transformer.wte.weight"].equal(after["transformer.wte.weight"])


def test_colocated_ranks_gather_for_their_own_engines(inputs: Path, tmp_path: Path) -> None:
    """Two ranks that train and sample by turns, a replica each; a separate critic on the same family's trunk."""
    records, output = launch(inputs, tmp_path / "run", 2, "gemma2", forked=True, rollout_world_size=0, critic="separate")
    for record in records:
        assert record["refit/received_bytes"] == 2 * full_bytes(inputs / "gemma2")
        assert record["logprob_diff/max"] < 1e-4
    assert output.count("go to vLLM's own loader as full tensors") == 1


def test_the_exact_plan_serves_a_hugging_face_rollout(inputs: Path, tmp_path: Path) -> None:
    fields = {"rollout_world_size": 1, "rollout_backend": "hf", "save_interval": 2}
    records, output = launch(inputs, tmp_path / "run", 3, "gpt2", forked=True, **fields)
    for record in records:
        assert record["refit/received_bytes"] == record["refit/shard_bytes"] == full_bytes(inputs / "gpt2")
        assert record["logprob_diff/max"] < 1e-4
    assert warnings_in(output) == []


GRANITE = """
from megatron_ppo.families import FamilySpec

SPEC = FamilySpec("GraniteForSequenceClassification")
"""


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_family_of_the_users_own_goes_shard_by_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str], size: int) -> None:
    """An entry point names a Llama-like family: ``verify`` proves its bytes and log-probs in vLLM; without it, it says what is missing."""
    flags = ["--model-path", make_other(tmp_path / "granite", "granite"), "--backend", "fsdp", "--num-ranks", 2 + size]
    flags += ["--rollout-world-size", size, "--rollout-tensor-parallel-size", size]
    flags += ["--max-prompt-length", 24, "--max-response-length", 8, "--heartbeat-timeout-s", 60]
    command = [*map(str, flags), "--vllm-overrides", "kv_cache_memory_bytes", "53687091"]
    assert main(["verify", *command]) == 2
    text = capsys.readouterr().err
    assert "there is no plan shard by shard" in text and "model_type 'granite' is not supported" in text and "rollout_backend = hf" in text

    package = tmp_path / "package"
    (package / "granite_family-1.0.dist-info").mkdir(parents=True)
    (package / "granite_family.py").write_text(GRANITE)
    (package / "granite_family-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: granite-family\nVersion: 1.0\n")
    entry = "[megatron_ppo.families]\ngranite = granite_family:SPEC\n"
    (package / "granite_family-1.0.dist-info" / "entry_points.txt").write_text(entry)
    with Processes(tmp_path / "log", {"COLUMNS": "200"}) as processes:
        processes.start(["-m", "megatron_ppo", "verify", *command], PYTHONPATH=f"{package}:{Path(__file__).parents[1]}")
        assert processes.wait(LAUNCH_TIMEOUT_S) == 0, processes.output()
        text = processes.output()
    assert f"tensors on {size} rollout ranks are equal bit for bit" in text and text.count("1.000") == size
    largest = float(text.partition("differ by at most ")[2].split()[0])
    assert largest < 1e-4, json.dumps(text)
