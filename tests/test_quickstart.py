"""The two commands of the README, as a person calls them: meshes by name, inputs made by code, a curve at the end; and the real model."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Learned:
    """What the documented default command printed and left."""

    run_dir: Path
    output: str
    records: list[dict[str, object]]


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    """The command without any flag but the run folder's, to its end."""
    run_dir = tmp_path_factory.mktemp("learned") / "run"
    output = run_quickstart("--run-dir", str(run_dir))
    return Learned(run_dir, output, read_lines(run_dir / "metrics.jsonl"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quickstart_learns(learned: Learned) -> None:
    """From random weights to nine tenths of the reward, training TP=2 with two vLLM replicas."""
    assert_output_shows(learned.output, num_iterations=100)
    rewards = [float(str(record["reward/mean"])) for record in learned.records]
    assert rewards[0] <= 0.35
    assert sum(rewards[-10:]) / 10 >= 0.9
    assert all(record["refit/received_bytes"] == record["refit/shard_bytes"] for record in learned.records)
    assert all(float(str(record["refit/shard_bytes"])) > 0 for record in learned.records)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quickstart_runs_again_in_its_folder_with_fsdp_on_the_ranks_that_sample(learned: Learned) -> None:
    """Shortened to 2 iterations; the second run keeps what the first one left. Other variants differ in flags that other jobs have."""
    output = run_quickstart(
        *("--backend", "fsdp", "--mesh", "dp=2,colocated", "--rollout-backend", "hf", "--train-iters", "2"),
        *("--run-dir", str(learned.run_dir)),
    )
    assert "quickstart: 2 ranks" in output
    assert_output_shows(output, num_iterations=2)
    names = {path.name for path in learned.run_dir.iterdir()}
    assert {"metrics.jsonl", "metrics.1.jsonl", "hf", "hf.1", "config.yaml", "learning_curve.png", "samples.jsonl"} <= names
    assert read_lines(learned.run_dir / "metrics.1.jsonl") == learned.records
    records = read_lines(learned.run_dir / "metrics.jsonl")
    assert len(records) == 2
    assert all(record["refit/received_bytes"] == record["refit/shard_bytes"] for record in records)


def assert_output_shows(output: str, num_iterations: int) -> None:
    """Progress to the end, the curve's numbers, the time split, and where everything lies."""
    for part in (f"iteration {num_iterations}/{num_iterations}", "mean reward", "update", "learning_curve.png", "hf"):
        assert part in output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pretrained_weights_arrive_in_the_rollout(tmp_path: Path) -> None:
    """SmolLM2: the greedy answers before any update are sentences about what was asked."""
    output = run_quickstart(
        *("--model", "smollm2", "--train-iters", "1", "--run-dir", str(tmp_path / "run"), "--max-response-length", "16"),
        *("--samples-per-prompt", "1", "--global-batch-size", "4", "--micro-batch-size", "4"),
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
