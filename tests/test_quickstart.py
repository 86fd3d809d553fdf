"""The two commands of the README, as a person calls them: meshes by name, inputs made by code, a curve at the end; and the real model."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megatron_ppo.config_io import parse_arguments

ROOT = Path(__file__).resolve().parent.parent


def load_script(name: str) -> ModuleType:
    """A file of scripts/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


quickstart = load_script("quickstart")


def run_quickstart(*arguments: str) -> str:
    """Output of ``quickstart.sh`` with these arguments; it must succeed."""
    command = ["bash", "scripts/quickstart.sh", *arguments]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900)
    assert result.returncode == 0, result.stdout
    return result.stdout


def read_lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("text", "world_size"),
    [
        ("tp=2,replicas=2", 4),
        ("pp=2,replicas=2", 4),
        ("dp=2,replicas=2", 4),
        ("tp=2,rollout_tp=2", 4),
        ("tp=2,pp=2,replicas=2", 6),
        ("vpp=2,pp=2", 3),
        ("tp=2,colocated", 2),
        ("colocated,dp=4,rollout_tp=2", 4),
    ],
)
def test_a_mesh_tells_ranks_and_flags(text: str, world_size: int) -> None:
    mesh = quickstart.parse_mesh(text)
    assert mesh.world_size == world_size
    flags = mesh.flags()
    num_rollout = 0 if "colocated" in text else mesh.rollout_tp * mesh.replicas
    assert flags[flags.index("--rollout-world-size") + 1] == str(num_rollout)
    assert ("--virtual-pipeline-model-parallel-size" in flags) == ("vpp" in text)


def test_plain_size_flags_tell_the_number_of_ranks_too() -> None:
    flags = [*quickstart.parse_mesh("tp=2,dp=2,replicas=2").flags(), "--pipeline-model-parallel-size", "2", "--rollout-world-size", "3"]
    assert quickstart.count_ranks(parse_arguments(flags, program="p"), 2) == 2 * 2 * 2 + 3


def test_help_needs_no_environment() -> None:
    """On a fresh clone it must not install anything first."""
    result = subprocess.run([sys.executable, "-I", "-S", "scripts/quickstart.py", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0 and "--mesh" in result.stdout, result.stderr


@pytest.mark.parametrize("text", ["tp", "tp=0", "tp=x", "tpp=2", "tp=2,tp=2", "tp=2;pp=2", "", "colocated=1", "colocated,colocated"])
def test_a_mesh_that_is_none_is_refused_with_the_names(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="of tp, pp, vpp, cp, dp, rollout_tp, replicas, or the word colocated"):
        quickstart.parse_mesh(text)


def test_replicas_of_colocated_ranks_are_not_chosen() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="training ranks / rollout_tp"):
        quickstart.parse_mesh("tp=2,colocated,replicas=2")


def test_every_backend_has_a_mesh_of_its_own() -> None:
    """``--backend fsdp`` alone must start: FSDP has no tensor parallelism."""
    for (model, backend), mesh in quickstart.DEFAULT_MESH.items():
        flags = ["--config", f"examples/{model}.yaml", "--backend", backend, *mesh.flags()]
        config = parse_arguments(flags, program="p")
        assert config.parallel.backend == backend
        assert config.data_parallel_size(quickstart.count_ranks(config, mesh.dp)) == mesh.dp
        assert backend == "megatron" or config.model_parallel_size == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quickstart_runs_twice_in_one_folder(tmp_path: Path) -> None:
    """Shortened to 2 iterations; the second run keeps what the first one left."""
    for _ in range(2):
        output = run_quickstart("--train-iters", "2", "--mesh", "tp=1", "--run-dir", str(tmp_path / "run"))
        for part in ("iteration 2/2", "mean reward", "update", "learning_curve.png", "hf"):
            assert part in output
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"metrics.jsonl", "metrics.1.jsonl", "hf", "hf.1", "config.yaml", "learning_curve.png", "samples.jsonl"} <= names
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quickstart_runs_with_fsdp_on_the_ranks_that_sample(tmp_path: Path) -> None:
    """Shortened to 2 iterations; the other variants differ from this one and the default in flags that jobs of other tests have."""
    output = run_quickstart(
        *("--backend", "fsdp", "--mesh", "dp=2,colocated", "--rollout-backend", "hf", "--train-iters", "2"),
        *("--run-dir", str(tmp_path / "run")),
    )
    assert "quickstart: 2 ranks" in output and "iteration 2/2" in output
    assert all(record["refit/received_bytes"] == record["refit/shard_bytes"] for record in read_lines(tmp_path / "run" / "metrics.jsonl"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quickstart_learns(tmp_path: Path) -> None:
    """From random weights to nine tenths of the reward, training TP=2 with two vLLM replicas."""
    run_quickstart("--run-dir", str(tmp_path / "run"))
    records = read_lines(tmp_path / "run" / "metrics.jsonl")
    rewards = [float(str(record["reward/mean"])) for record in records]
    assert rewards[0] <= 0.35
    assert sum(rewards[-10:]) / 10 >= 0.9
    assert all(record["refit/received_bytes"] == record["refit/shard_bytes"] for record in records)
    assert all(float(str(record["refit/shard_bytes"])) > 0 for record in records)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pretrained_weights_arrive_in_the_rollout(tmp_path: Path) -> None:
    """SmolLM2: the greedy answers before any update are sentences about what was asked."""
    output = run_quickstart(
        *("--model", "smollm2", "--train-iters", "1", "--run-dir", str(tmp_path / "run"), "--max-response-length", "24"),
        *("--samples-per-prompt", "2", "--global-batch-size", "8", "--micro-batch-size", "4"),
    )
    assert "1 iterations in" in output
    greedy = [sample for sample in read_lines(tmp_path / "run" / "samples.jsonl") if sample["greedy"] and sample["iteration"] == 0]
    assert len(greedy) == 4
    for sample in greedy:
        name = str(sample["prompt"]).rsplit("user\n", 1)[1].split()[0]
        assert name in str(sample["response"]), sample
    (metrics,) = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert metrics["refit/received_bytes"] == metrics["refit/shard_bytes"] == 2 * 134515008  # bf16, the head tied
    assert float(str(metrics["logprob_diff/mean"])) < 0.1  # bf16 against fp32
