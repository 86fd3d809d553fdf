"""The recipes: each fits together and is planned, every number can be changed, and what the launchers get is what was asked for."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from train_support import ROOT, make_inputs, read_lines

from megatron_ppo.__main__ import main
from megatron_ppo.config_io import parse_arguments
from megatron_ppo.families import network_shape
from megatron_ppo.plan_job import GIB, Plan
from scripts import recipes_page
from scripts.recipes_page import Recipe

RECIPES = recipes_page.names()
STANDIN = """#!/bin/sh
echo "$(basename "$0")" "$@"
"""


def run_recipe(name: str, arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """``bash scripts/recipes/NAME.sh ARGUMENTS`` from another folder than the repository's."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "TORCHELASTIC"))}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / "recipes" / f"{name}.sh"), *arguments],
        env=variables | {"PATH": path, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"} | environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.fixture(scope="module")
def recipes() -> dict[str, Recipe]:
    return {name: recipes_page.read_recipe(name) for name in recipes_page.names()}


@pytest.fixture(scope="module")
def plans(recipes: dict[str, Recipe]) -> dict[str, Plan]:
    """The full plan of every recipe."""
    return dict(zip(recipes, recipes_page.make_plans(list(recipes.values())), strict=True))


def test_there_is_a_recipe_for_every_shape() -> None:
    assert sorted(path.name for path in (ROOT / "megatron_ppo" / "model_shapes").iterdir() if path.is_dir()) == RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_fits_together(name: str, recipes: dict[str, Recipe], tmp_path: Path) -> None:
    """All equations hold, the batch's too; tensor parallelism stays within a node; no GPU is left over; key/value heads are not replicated
    but where a replica would not hold the weights otherwise; the head of the file says the launch that it starts."""
    world_size, config = recipes[name].world_size, recipes[name].config
    prompts = tmp_path / "prompts.jsonl"
    prompts.touch()
    config.replace(prompt_data=str(prompts)).validate(world_size)
    network, parallel = network_shape(Path(config.model.model_path)), config.parallel
    sizes = config.mesh_sizes(world_size)
    assert max(sizes["tp"], sizes["rollout_tp"]) <= 8
    assert world_size == sizes["tp"] * sizes["pp"] * sizes["cp"] * sizes["dp"] + sizes["rollout_tp"] * sizes["replicas"]
    assert parallel.rollout_tensor_parallel_size <= network.num_key_value_heads or name == "qwen3_235b_a22b"
    assert config.uses_reference and config.model.critic == "separate" and config.model.params_dtype == "bfloat16"
    head = (ROOT / "scripts" / "recipes" / f"{name}.sh").read_text().split("model=")[0].replace("\n# ", " ")
    pipeline = f" x PP {sizes['pp']}" if sizes["pp"] > 1 else ""
    data = f" x DP {sizes['dp']}" if sizes["dp"] > 1 else ""
    experts = f" with EP {sizes['ep']}" if sizes["ep"] > 1 else ""
    assert f"{world_size // 8} nodes x 8 GPUs" in head
    assert f"Training TP {sizes['tp']}{pipeline}{data}{experts}" in head
    assert f"Rollout {sizes['replicas']} replicas of TP {sizes['rollout_tp']}" in head


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_fits_into_memory(name: str, plans: dict[str, Plan]) -> None:
    """Training into 80 GB on every rank in every phase, whatever the rollout nodes have; each rollout rank receives its shard."""
    plan = plans[name]
    assert plan.faults == () and plan.headroom > 0
    assert recipes_page.training_peak(plan) < 80e9
    assert plan.traffic.received_over_shard == (1.0, 1.0)
    said = re.search(r"Expected: (\d+) GiB of a training GPU; a refit in ([\d.]+) s", (recipes_page.FOLDER / f"{name}.sh").read_text())
    assert said is not None
    assert said.groups() == (f"{recipes_page.training_peak(plan) / GIB:.0f}", f"{plan.seconds.sync:.1f}")


@pytest.mark.slow
def test_the_page_says_what_the_planner_says(recipes: dict[str, Recipe], plans: dict[str, Plan]) -> None:
    """Otherwise: python scripts/recipes_page.py."""
    assert recipes_page.PAGE.read_text() == recipes_page.page(list(recipes.values()), list(plans.values()))


def test_numbers_come_from_the_environment_and_arguments_stand_above(recipes: dict[str, Recipe]) -> None:
    """A value, several values, a switch, the launch, the model; what was not asked for stays."""
    environment = {
        "NODES": "4",
        "TENSOR_MODEL_PARALLEL_SIZE": "2",
        "SEQUENCE_PARALLEL": "false",
        "VLLM_OVERRIDES": "gpu_memory_utilization 0.5 max_num_seqs 64",
        "LR": "3e-6",
        "CRITIC_LR": "2e-5",
        "MODEL_PATH": str(ROOT / "megatron_ppo" / "model_shapes" / "qwen3_8b"),
    }
    arguments = ["--critic-lr", "4e-5", "--clip-ratio", "0.2", "0.28"]
    recipe = recipes_page.read_recipe("llama3.1_8b", arguments, environment)
    overrides = {"gpu_memory_utilization": "0.5", "max_num_seqs": "64"}
    assert recipe.world_size == 32
    assert recipe.config == recipes["llama3.1_8b"].config.replace(
        tensor_model_parallel_size=2,
        sequence_parallel=False,
        vllm_overrides=overrides,
        lr=3e-6,
        critic_lr=4e-5,
        clip_ratio=(0.2, 0.28),
        model_path=environment["MODEL_PATH"],
    )


def test_a_wrong_override_is_refused_with_the_equation_and_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    for environment, parts in (
        ({"TENSOR_MODEL_PARALLEL_SIZE": "3"}, ["TP 3 x PP 1 x CP 1 = 3", "Launch 17 ranks", "32 attention heads", "[1, 2, 4, 8, 16, 32]"]),
        ({"NODES": "1"}, ["world size 8", "rollout_world_size is 8, so 0 ranks are left to train", "Launch 12 ranks"]),
        ({"ROLLOUT_TENSOR_PARALLEL_SIZE": "3"}, ["rollout_world_size = 8", "replicas x TP = rollout ranks", "The nearest are 6 and 9"]),
    ):
        assert main(["plan", "--refit", *recipes_page.plan_words("llama3.1_8b", environment=environment)]) == 2
        said = capsys.readouterr().err
        for part in parts:
            assert part in said


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["plan"], {"SEQUENCE_PARALLEL": "8"}, "SEQUENCE_PARALLEL=8 must be true or false"),
        (["plan"], {"NODES": "two"}, "NODES=two and GPUS_PER_NODE=8 must be whole numbers"),
        (["torchrun"], {}, "set MODEL_PATH, or give --model-path"),
        (["slurm", "--model-path", "m"], {}, "set PROMPT_DATA, or give --prompt-data"),
    ],
)
def test_what_is_missing_or_no_number_is_said_at_once(arguments: list[str], environment: dict[str, str], words: str) -> None:
    done = run_recipe("llama3.1_8b", arguments, **environment)
    assert done.returncode != 0 and words in done.stderr


REAL = {"MODEL_PATH": "/models/m", "PROMPT_DATA": "/data/p.jsonl"}


@pytest.mark.parametrize(
    ("arguments", "environment", "launch"),
    [
        (
            ["srun"],
            {"PYTHON": "/env/bin/python"},
            "srun --nodes 72 --ntasks-per-node 8 --kill-on-bad-exit=1 --distribution=block --signal TERM@600 "
            "/env/bin/python -m megatron_ppo train",
        ),
        (
            ["slurm"],
            {"CPUS_PER_GPU": "12"},
            "sbatch --job-name llama3.1_405b --nodes 72 --ntasks-per-node 8 --cpus-per-task 12 --gpus-per-node 8 {scripts}/train_slurm.sh",
        ),
        (
            ["slurm"],
            {"LAUNCHER": "torchrun", "PARTITION": "big"},
            "sbatch --job-name llama3.1_405b --nodes 72 --ntasks-per-node 1 --cpus-per-task 64 --gpus-per-node 8 --partition big "
            "{scripts}/train_slurm.sh",
        ),
        (
            ["slurm"],
            {"PARTITION": "h100", "ROLLOUT_PARTITION": "h200"},
            "sbatch --job-name llama3.1_405b --nodes 64 --ntasks-per-node 8 --cpus-per-task 8 --gpus-per-node 8 --partition h100 : "
            "--nodes 8 --ntasks-per-node 8 --cpus-per-task 8 --gpus-per-node 8 --partition h200 {scripts}/train_slurm.sh",
        ),
        (
            ["torchrun"],
            {"RDZV_ENDPOINT": "node1:29500"},
            "interpreter -m torch.distributed.run --nnodes 72 "
            "--rdzv-backend c10d --rdzv-endpoint node1:29500 --rdzv-id llama3.1_405b --nproc-per-node 8 "
            "--max-restarts 2 --shutdown-timeout 1800 -m megatron_ppo train",
        ),
    ],
)
def test_a_recipe_starts_by_each_launcher(
    recipes: dict[str, Recipe], tmp_path: Path, arguments: list[str], environment: dict[str, str], launch: str
) -> None:
    """The same flags as those that are planned, but for the model and the prompts."""
    for name in ("srun", "sbatch", "interpreter"):
        (tmp_path / name).write_text(STANDIN)
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(tmp_path / "interpreter")} | REAL | environment
    done = run_recipe("llama3.1_405b", [*arguments, "--seed", "3"], **environment)
    assert done.returncode == 0, done.stderr
    launch = launch.format(scripts=ROOT / "scripts")
    assert done.stdout.startswith(launch)
    flags = shlex.split(done.stdout.removeprefix(launch))
    expected = recipes["llama3.1_405b"].config.replace(seed=3, model_path=REAL["MODEL_PATH"], prompt_data=REAL["PROMPT_DATA"])
    assert parse_arguments(flags, program="test") == expected


def test_a_partition_of_its_own_holds_whole_nodes() -> None:
    done = run_recipe("llama3.1_8b", ["slurm"], **(REAL | {"NODES": "3", "ROLLOUT_WORLD_SIZE": "12", "ROLLOUT_PARTITION": "roll"}))
    assert done.returncode == 2 and done.stdout == ""
    assert "--rollout-world-size 12 must be a multiple of GPUS_PER_NODE=8" in done.stderr
    done = run_recipe("llama3.1_405b", ["slurm"], **(REAL | {"LAUNCHER": "torchrun", "ROLLOUT_PARTITION": "roll"}))
    assert done.returncode == 2 and "use LAUNCHER=srun" in done.stderr


@pytest.mark.slow
def test_a_recipe_trains(tmp_path: Path) -> None:
    """The recipe of 8 billion parameters, with a model, a mesh and batches for this machine: PPO with critic and reference."""
    inputs = make_inputs(tmp_path / "inputs")
    sizes = "--tensor-model-parallel-size 1 --rollout-world-size 1 --no-sequence-parallel --rollout-backend hf --params-dtype float32"
    batch = "--prompts-per-iteration 8 --global-batch-size 8 --max-prompt-length 8 --max-response-length 8 --train-iters 1"
    reward = f"--rollout-dtype float32 --reward token_accuracy --run-dir {tmp_path / 'run'}"
    real = {"MODEL_PATH": str(inputs / "model"), "PROMPT_DATA": str(inputs / "prompts.jsonl"), "NODES": "1", "GPUS_PER_NODE": "2"}
    done = run_recipe("llama3.1_8b", ["torchrun", *shlex.split(f"{sizes} {batch} {reward}")], **real)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert {"kl/mean", "loss/value", "reward/mean"} <= record.keys(), sorted(record)
