"""Writes docs/recipes.md from what the planner says of every recipe, so that the page and the recipes cannot disagree.

python scripts/recipes_page.py            writes the page
python scripts/recipes_page.py --check    exit code 1 where the page is not what the planner says
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ppo.config import Config
from megatron_ppo.config_io import parse_command
from megatron_ppo.plan_job import GIB, Plan, plan_from_stages
from megatron_ppo.plan_networks import build_stages
from megatron_ppo.planner import Options

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "scripts" / "recipes"
PAGE = ROOT / "docs" / "recipes.md"

HEAD = """# Recipes

One file a model size: `scripts/recipes/NAME.sh` holds the flags and says why they are so; `scripts/recipes/launch.sh` does the rest. All
are PPO with a critic of the actor's size and a frozen reference, in bfloat16 with fp32 gradients and a sharded optimizer.

    bash scripts/recipes/llama3.1_8b.sh plan        # meshes, memory, refit, seconds: on this machine, without GPU or weights
    bash scripts/recipes/llama3.1_8b.sh show        # the flags of train

A run needs the model's folder and prompts:

    export MODEL_PATH=/models/Llama-3.1-8B-Instruct PROMPT_DATA=/data/prompts.jsonl
    bash scripts/recipes/llama3.1_8b.sh slurm                                    # sbatch, with requeue before the time limit
    RDZV_ENDPOINT=node1:29500 bash scripts/recipes/llama3.1_8b.sh torchrun       # on each of its nodes
    bash scripts/recipes/llama3.1_8b.sh srun                                     # inside an allocation

Every number can be changed by a variable with the flag's name in capitals, or by the flag itself, which stands above it; `NODES` and
`GPUS_PER_NODE` size the launch:

    NODES=3 ROLLOUT_WORLD_SIZE=16 bash scripts/recipes/llama3.1_8b.sh plan --max-response-length 7168

What does not divide is refused with the equation, its numbers and a remedy; what does not fit into memory is said by `plan`, with the
nearest meshes that do.

## What they take

`python scripts/recipes_page.py` writes this table from the planner ([planner.md](planner.md)); no row has been run on GPUs. Memory is
that of the fullest rank in its fullest phase, with 4 GiB set aside for context, collectives and fragments; a rollout rank takes
`gpu_memory_utilization` of its GPU whatever it holds, so its column is the weights. Refit: the bytes of one copy of the weights, what a
rollout rank receives, and seconds at 50 GB/s a GPU between nodes.

"""

COLUMNS = (
    "recipe",
    "nodes x GPUs",
    "training mesh",
    "rollout mesh",
    "responses: iteration / step",
    "tokens: prompt + response",
    "training GiB",
    "rollout weights GiB",
    "refit GiB: copy / rank",
    "refit s",
)

TAIL = """
A GPU has 80 GB, but for the rollout nodes of llama3.1_405b: in bfloat16 each of eight ranks holds {large:.0f} GiB of weights, and a replica
may not straddle nodes, so they have 141 GB, as
its `plan` is told: `--gpu-memory-gib {training:g} --rollout-gpu-memory-gib {rollout:g}`.

Meshes follow the same rules: tensor parallelism within a node and not above the key/value heads (but for replicas of qwen3_235b_a22b,
which need eight GPUs); whole experts, spread within a node; a pipeline across nodes where the model does not fit otherwise; data
parallelism where that is what makes the optimizer fit; replicas as small as weights and cache allow, as two engines of one GPU sample
more than one engine of two.
"""


@dataclass(frozen=True)
class Recipe:
    """What a recipe asks the planner."""

    name: str
    options: Options
    config: Config

    @property
    def world_size(self) -> int:
        """Ranks of the launch."""
        assert self.options.world_size is not None, "a recipe names its size"
        return self.options.world_size


def names() -> list[str]:
    """Of all recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.sh") if path.stem != "launch")


def plan_words(name: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> list[str]:
    """The command line that ``plan`` gets from a recipe, without ``python -m megatron_ppo plan``. ``RuntimeError`` where it ends badly."""
    command = ["bash", str(FOLDER / f"{name}.sh"), "plan", *arguments]
    variables = {"PATH": os.environ["PATH"], "PYTHON": "echo"} | dict(environment or {})
    done = subprocess.run(command, env=variables, cwd="/", capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    words = shlex.split(done.stdout)
    assert words[:3] == ["-m", "megatron_ppo", "plan"], words
    return words[3:]


def read_recipe(name: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> Recipe:
    """A recipe, with what its user changes."""
    return Recipe(name, *parse_command(plan_words(name, arguments, environment), Options(), program=name))


def make_plans(recipes: Sequence[Recipe]) -> list[Plan]:
    """All plans; the networks of all are built by the same child processes."""
    for recipe in recipes:
        recipe.config.validate(recipe.world_size, needs_data=False)
    sizes = [recipe.config.training_size(recipe.world_size) for recipe in recipes]
    stages = build_stages([recipe.config for recipe in recipes], sizes)
    return [
        plan_from_stages(recipe.config, recipe.world_size, recipe.options.machine(), found)
        for recipe, found in zip(recipes, stages, strict=True)
    ]


def training_peak(plan: Plan) -> float:
    """Bytes of the fullest training rank in its fullest phase."""
    return max(stage.peak for stage in plan.stages)


def row(recipe: Recipe, plan: Plan) -> str:
    """A line of the table."""
    config, sizes = recipe.config, recipe.config.mesh_sizes(recipe.world_size)
    per_node = plan.machine.ranks_per_node
    mesh = " x ".join(f"{axis.upper()} {sizes[axis]}" for axis in ("tp", "pp", "cp", "dp") if sizes[axis] > 1 or axis == "tp")
    cells = [
        f"`{recipe.name}`",
        f"{recipe.world_size // per_node} x {per_node}",
        mesh + (f", EP {sizes['ep']}" if sizes["ep"] > 1 else ""),
        f"{sizes['replicas']} x TP {sizes['rollout_tp']}",
        f"{config.rollout_batch_size} / {config.training.global_batch_size}",
        f"{config.rollout.max_prompt_length} + {config.rollout.max_response_length}",
        f"{training_peak(plan) / GIB:.0f}",
        f"{plan.engine.weights / GIB:.0f}",
        f"{plan.traffic.model_bytes / GIB:.0f} / {plan.traffic.busiest_receiver.bytes_received / GIB:.0f}",
        f"{plan.seconds.sync:.1f}",
    ]
    return f"| {' | '.join(cells)} |\n"


def page(recipes: Sequence[Recipe], plans: Sequence[Plan]) -> str:
    """The whole page."""
    in_order = sorted(zip(recipes, plans, strict=True), key=lambda pair: pair[1].traffic.num_parameters)
    lines = [f"| {' | '.join(COLUMNS)} |\n", "|---" * len(COLUMNS) + "|\n", *(row(*pair) for pair in in_order)]
    largest = in_order[-1][1]
    memory = {"training": largest.machine.gpu_memory_gib, "rollout": largest.machine.rollout_memory_gib}
    return HEAD + "".join(lines) + TAIL.format(large=largest.engine.weights / GIB, **memory)


def main() -> int:
    """Write or check the page; the exit code."""
    recipes = [read_recipe(name) for name in names()]
    text = page(recipes, make_plans(recipes))
    if "--check" in sys.argv[1:]:
        if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text:
            print(f"{PAGE.name} is out of date: run python scripts/recipes_page.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
