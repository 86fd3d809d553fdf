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
from megatron_ppo.backends.base import planned_networks
from megatron_ppo.canonical import GenericNetwork
from megatron_ppo.config import Config
from megatron_ppo.config_checks import batch_faults
from megatron_ppo.config_io import parse_command
from megatron_ppo.generic_network import describe_network
from megatron_ppo.plan_job import GIB, MOST_RANKS, Plan, make_plan
from megatron_ppo.plan_memory import check_overrides, frozen_on_rollout
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
    rollout_gpu_memory_gib: float | None = None
    """Memory of a rollout rank's GPU, where it is of another size. Default: --gpu-memory-gib."""
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
        if self.rollout_gpu_memory_gib is not None:
            numbers["--rollout-gpu-memory-gib"] = self.rollout_gpu_memory_gib
        for name, number in numbers.items():
            if not 0 < number < math.inf or (name == "--ranks-per-node" and number < 1):
                raise ValueError(f"{name} {number} must be {'at least 1' if name == '--ranks-per-node' else 'a finite number above 0'}")
        for name in numbers.keys() & {"--gpu-memory-gib", "--rollout-gpu-memory-gib"}:
            if not 0 <= self.reserve_gib < numbers[name]:
                raise ValueError(f"--reserve-gib {self.reserve_gib} must be at least 0 and below {name} {numbers[name]}")
        return Machine(
            ranks_per_node=self.ranks_per_node,
            gpu_memory_gib=self.gpu_memory_gib,
            rollout_gpu_memory_gib=self.rollout_gpu_memory_gib,
            reserve_gib=self.reserve_gib,
            peak_tflops=self.peak_tflops,
            mfu=self.mfu,
            memory_gbs=self.memory_gbs,
            nvlink_gbs=self.nvlink_gbs,
            network_gbs=self.network_gbs,
        )

    def refuse_conflicts(self, config: Config) -> None:
        """``ValueError`` for options that would be passed over in silence, and for sizes that no launch has."""
        chosen = [name for name, given in (("--search", self.search is not None), ("--refit", self.refit)) if given]
        if len(chosen) == 2:
            raise ValueError("--search and --refit both stand in place of the plan: give one of them")
        if self.search is not None and self.world_size is not None:
            raise ValueError(f"--search {self.search} is the number of ranks, and --world-size {self.world_size} another: leave that out")
        if self.search is not None and self.png is not None:
            raise ValueError("--search draws no picture: leave --png out, and give it to a plan of the mesh that you choose")
        other = self.rollout_gpu_memory_gib
        if config.is_colocated and self.search is None and other is not None and other != self.gpu_memory_gib:
            raise ValueError(
                f"--rollout-gpu-memory-gib {other} is not --gpu-memory-gib {self.gpu_memory_gib}, but with rollout_world_size = 0 every "
                "rank is of both meshes: leave it out, or set rollout_world_size"
            )
        for path in (self.json, self.png):
            if path is not None and path.is_dir():
                raise ValueError(f"{path} is a folder; name a file in it")


def main(arguments: Sequence[str]) -> int:
    """``python -m megatron_ppo plan``: 0; 1 where the plan does not fit into memory; 2 with the reason on standard error."""
    options, config = parse_command(arguments, Options(), program=PROGRAM)
    try:
        machine = options.machine()
        options.refuse_conflicts(config)
        if options.refit:
            return refit_report.show(config, _world_size(options, config), options.ranks_per_node, png=options.png, json_file=options.json)
        if options.search is not None:
            return _search(options, config, machine)
        return _plan(options, config, machine)
    except (ValueError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2


def _world_size(options: Options, config: Config) -> int:
    """``ValueError`` for a size that no launch has."""
    if options.world_size is None:
        smallest = smallest_world_size(config)
        if smallest > MOST_RANKS:
            raise ValueError(f"the smallest launch of these sizes has {smallest} ranks, and at most {MOST_RANKS} are planned: lower a size")
        return smallest
    if not 1 <= options.world_size <= MOST_RANKS:
        raise ValueError(f"--world-size {options.world_size} must be at least 1 and at most {MOST_RANKS}: every rank is planned")
    return options.world_size


def _plan(options: Options, config: Config, machine: Machine) -> int:
    world_size = _world_size(options, config)
    try:
        config.validate(world_size, needs_data=False)
        _check_batches(config, config.data_parallel_size(world_size), config.num_replicas(world_size))
        check_overrides(config)
        _refuse_generic(config)
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


def _check_all_but_meshes(config: Config, world_size: int) -> None:
    """``ValueError`` with what is wrong whatever the sizes are that a search chooses: those are taken to be 1."""
    plain = config.replace(
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        expert_model_parallel_size=1,
        context_parallel_size=min(1, config.parallel.context_parallel_size),
        rollout_world_size=1,
        rollout_tensor_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        fsdp_shard_size=None,
        cpu_offload="none" if config.parallel.cpu_offload == "sampling" else config.parallel.cpu_offload,
        sequence_parallel=False,
        transformer_overrides={},
    )
    plain.validate(max(2, world_size), needs_data=False)
    _check_batches(plain, 1, 1)
    check_overrides(config)
    _refuse_generic(config)


def _check_batches(config: Config, data_parallel_size: int, num_replicas: int) -> None:
    found = list(batch_faults(config, data_parallel_size, num_replicas))
    if found:
        raise ValueError("the batches do not divide:\n  - " + "\n  - ".join(found))


def _refuse_generic(config: Config) -> None:
    """``ValueError`` for networks outside the tables, with what can be said of them: their layers' activations have no formula here."""
    for plan in {**planned_networks(config), **frozen_on_rollout(config)}.values():
        network = describe_network(plan.folder)
        if isinstance(network, GenericNetwork):
            count = sum(math.prod(shape) for _, shape in network.parameters)
            raise ValueError(
                f"{plan.folder}: {network.reason}. The planner knows what layers of its families keep, and not this one's. The model has "
                f"{count / 1e9:.4g} billion parameters: FSDP over S ranks holds {16 * count / GIB:.4g} / S GiB of weights, gradients and "
                "moments for each trained copy on a rank. plan --refit shows its weight sync where rollout_backend is hf"
            )


def _write(options: Options, plan: Plan) -> None:
    for path, write in ((options.json, plan_report.write_json), (options.png, draw_meshes)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(plan, path)
            print(f"wrote {path}")


def _propose(config: Config, world_size: int, machine: Machine) -> None:
    """The nearest meshes of as many ranks that fit, where a mesh can help."""
    try:
        _check_all_but_meshes(config, world_size)
    except ValueError:
        return
    found = nearest_meshes(config, world_size, machine)
    if found is not None:
        plan_report.print_candidates(found, f"nearest meshes of {world_size} ranks that fit", world_size)


def _search(options: Options, config: Config, machine: Machine) -> int:
    assert options.search is not None
    _check_all_but_meshes(config, options.search)
    found: list[Candidate] = search_meshes(config, options.search, machine)
    kinds = f"{options.search} GPUs of {machine.gpu_memory_gib:g} GiB"
    if machine.rollout_memory_gib != machine.gpu_memory_gib:
        kinds += f" (those that sample: {machine.rollout_memory_gib:g})"
    title = f"best meshes of {kinds}, by predicted seconds of an iteration"
    plan_report.print_candidates(found, title, options.search)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        plan_report.write_candidates(found, options.json)
        print(f"wrote {options.json}")
    return 0 if found else 1
