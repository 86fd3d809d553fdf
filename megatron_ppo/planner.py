"""``python -m megatron_ppo plan``: what a launch would do and hold, from config.json and the flags of ``train`` alone.

No GPU, no weights, no launch: both meshes on their nodes, what each rank holds, memory by rank and phase with its headroom, the weight
traffic, the arithmetic of batches, predicted seconds; as text, ``--json`` and ``--png``. What does not fit is said with its amount, and the
nearest meshes that do are proposed. ``--search GPUS`` lists the best meshes for so many GPUs. ``--refit`` shows one weight sync in detail
(``refit_report.py``). Example::

    python -m megatron_ppo plan --model-path megatron_ppo/model_shapes/llama3.1_8b --params-dtype bfloat16 --rollout-dtype bfloat16 \\
        --tensor-model-parallel-size 4 --sequence-parallel --rollout-world-size 4 --world-size 16

Below it: ``plan_networks.py`` counts parameters on the real classes, ``plan_memory.py`` bytes, ``plan_time.py`` seconds,
``plan_search.py`` other meshes; ``plan_report.py`` and ``plan_picture.py`` show.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ppo import plan_report, refit_report
from megatron_ppo.config import Config
from megatron_ppo.config_io import parse_command
from megatron_ppo.plan_job import Plan, make_plan
from megatron_ppo.plan_picture import draw_meshes
from megatron_ppo.plan_search import Candidate, nearest_meshes, search_meshes
from megatron_ppo.plan_time import Machine
from megatron_ppo.resharding.megatron_mesh import smallest_world_size

PROGRAM = "megatron_ppo plan"


@dataclass(frozen=True)
class Options:
    """What to show, and of which machines. Example: python -m megatron_ppo plan --model-path MODEL --params-dtype bfloat16
    --tensor-model-parallel-size 4 --rollout-world-size 4 --world-size 16
    """

    refit: bool = False
    """Show the traffic of one weight sync, rank by rank, in place of the plan."""
    search: int | None = None
    """List the best meshes for this number of GPUs, in place of the plan. Sizes of the meshes among the flags are then ignored."""
    world_size: int | None = None
    """Ranks of the launch. Default: the smallest that the sizes of the meshes admit."""
    png: Path | None = None
    """Draw the meshes (with --refit: who sends what to whom) into this file."""
    json: Path | None = None
    """Write every number into this file."""
    ranks_per_node: int = 8
    """Consecutive ranks that share a node."""
    gpu_memory_gib: float = 80.0
    """Memory of a GPU."""
    reserve_gib: float = 4.0
    """Of that, what context, collectives and fragments take."""
    peak_tflops: float = Machine.peak_tflops
    """A GPU's peak, dense, in bf16."""
    mfu: float = Machine.mfu
    """Share of the peak that forward and backward passes reach."""
    memory_gbs: float = Machine.memory_gbs
    """GB/s of a GPU's memory."""
    nvlink_gbs: float = Machine.nvlink_gbs
    """GB/s in one direction between GPUs of a node."""
    network_gbs: float = Machine.network_gbs
    """GB/s in one direction from a GPU to other nodes."""

    def machine(self) -> Machine:
        """The assumptions; ``ValueError`` for one that is no positive number."""
        numbers = {
            "--ranks-per-node": self.ranks_per_node,
            "--gpu-memory-gib": self.gpu_memory_gib,
            "--peak-tflops": self.peak_tflops,
            "--mfu": self.mfu,
            "--memory-gbs": self.memory_gbs,
            "--nvlink-gbs": self.nvlink_gbs,
            "--network-gbs": self.network_gbs,
        }
        for name, number in numbers.items():
            if not 0 < number < math.inf or (name == "--ranks-per-node" and number < 1):
                raise ValueError(f"{name} {number} must be {'at least 1' if name == '--ranks-per-node' else 'a finite number above 0'}")
        if not 0 <= self.reserve_gib < self.gpu_memory_gib:
            raise ValueError(f"--reserve-gib {self.reserve_gib} must be at least 0 and below --gpu-memory-gib {self.gpu_memory_gib}")
        return Machine(
            ranks_per_node=self.ranks_per_node,
            gpu_memory_gib=self.gpu_memory_gib,
            reserve_gib=self.reserve_gib,
            peak_tflops=self.peak_tflops,
            mfu=self.mfu,
            memory_gbs=self.memory_gbs,
            nvlink_gbs=self.nvlink_gbs,
            network_gbs=self.network_gbs,
        )


def main(arguments: Sequence[str]) -> int:
    """``python -m megatron_ppo plan``: 0; 1 where the plan does not fit into memory; 2 with the reason on standard error."""
    options, config = parse_command(arguments, Options(), program=PROGRAM)
    try:
        machine = options.machine()
        if options.refit:
            return refit_report.show(config, _world_size(options, config), options.ranks_per_node, png=options.png, json_file=options.json)
        if options.search is not None:
            return _search(options, config, machine)
        return _plan(options, config, machine)
    except (ValueError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2


def _world_size(options: Options, config: Config) -> int:
    return smallest_world_size(config) if options.world_size is None else options.world_size


def _plan(options: Options, config: Config, machine: Machine) -> int:
    world_size = _world_size(options, config)
    try:
        config.validate(world_size, needs_data=False)
    except ValueError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        _propose(config, world_size, machine)
        return 2
    plan = make_plan(config, world_size, machine)
    plan_report.print_plan(plan)
    _write(options, plan)
    if plan.faults:
        _propose(config, world_size, machine)
        return 1
    return 0


def _write(options: Options, plan: Plan) -> None:
    for path, write in ((options.json, plan_report.write_json), (options.png, draw_meshes)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(plan, path)
            print(f"wrote {path}")


def _propose(config: Config, world_size: int, machine: Machine) -> None:
    """The nearest meshes of as many ranks that fit, where the model itself is known."""
    found = nearest_meshes(config, world_size, machine)
    if found is not None:
        plan_report.print_candidates(found, f"nearest meshes of {world_size} ranks that fit", world_size)


def _search(options: Options, config: Config, machine: Machine) -> int:
    assert options.search is not None
    found: list[Candidate] = search_meshes(config, options.search, machine)
    title = f"best meshes of {options.search} GPUs of {machine.gpu_memory_gib:g} GiB, by predicted seconds of an iteration"
    plan_report.print_candidates(found, title, options.search)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        plan_report.write_candidates(found, options.json)
        print(f"wrote {options.json}")
    return 0 if found else 1
