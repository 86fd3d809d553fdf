"""A plan (``plan_job.Plan``) or a list of candidates in words: tables for people, JSON for programs. Called by ``planner.py``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from megatron_ppo.plan_job import GIB, Plan
from megatron_ppo.plan_memory import PHASES, StageMemory, num_micro_batches
from megatron_ppo.refit_traffic import size_text

if TYPE_CHECKING:
    from megatron_ppo.plan_search import Candidate

_WIDTH = 170
"""Columns where the output is no terminal."""
_SHOWN_NODES = 16
"""Lines of the table of nodes."""
_KINDS = (
    *("weights", "gradients", "optimizer", "activations", "logits", "working"),
    *("engine weights", "frozen copies", "key/value cache", "buckets", "reserve"),
)
"""Columns of the table of memory."""


def _console() -> Console:
    return Console(file=sys.stdout, highlight=False, markup=False, width=None if sys.stdout.isatty() else _WIDTH)


def print_plan(plan: Plan) -> None:
    """The whole plan on standard output."""
    console = _console()
    console.print(_header(plan), soft_wrap=True)
    for table in (_placement(plan), _holdings(plan), _memory(plan)):
        console.print()
        console.print(table)
    for title, lines in (("batches", _batches(plan)), ("weight sync", _refit(plan)), ("seconds of an iteration", _seconds(plan))):
        console.print(f"\n{title}")
        for line in lines:
            console.print(f"  {line}", soft_wrap=True)
    console.print()
    for note in plan.notes:
        console.print(f"note: {note}", soft_wrap=True)
    for fault in plan.faults:
        console.print(f"DOES NOT FIT: {fault}", soft_wrap=True)
    if not plan.faults:
        left, memory = plan.fullest
        console.print(f"fits: {left / GIB:.1f} GiB of {memory / GIB:g} are left on the fullest rank")


def _header(plan: Plan) -> str:
    config, machine = plan.config, plan.machine
    nodes = -(-plan.world_size // machine.ranks_per_node)
    network = plan.network
    experts = f", {network.num_experts} experts a layer, {network.num_experts_per_tok} a token" if network.num_experts else ""
    model = config.model
    return "\n".join(
        [
            f"model      {model.model_path}: {network.family}, {network.num_layers} layers{experts}, "
            f"{_count(plan.traffic.num_parameters)} parameters, {model.params_dtype}",
            f"launch     {plan.world_size} ranks on {nodes} node{'s' * (nodes > 1)} of {machine.ranks_per_node} GPUs of "
            f"{_memory_text(plan)}"
            f"{', colocated: all train and sample by turns' if config.is_colocated else ''}",
            f"training   {plan.traffic.training_mesh}; optimizer {_optimizer_text(plan)}; recomputation {model.recompute_granularity}; "
            f"layers of {plan.implementation}",
            f"rollout    {plan.traffic.rollout_mesh}, {config.rollout.rollout_backend}, {config.rollout.rollout_dtype}",
        ]
    )


def _count(number: float) -> str:
    """Parameters, in millions below a tenth of a billion."""
    return f"{number / 1e9:.3f} B" if number >= 1e8 else f"{number / 1e6:.3f} M"


def _unit(plan: Plan) -> tuple[str, int]:
    """Name and bytes of the unit of the tables: a model for a laptop would be 0.00 GiB everywhere."""
    return ("GiB", GIB) if plan.traffic.num_parameters >= 1e8 else ("MiB", 2**20)


def _memory_text(plan: Plan) -> str:
    training, rollout = (f"{size:g} GiB" for size in (plan.machine.gpu_memory_gib, plan.machine.rollout_memory_gib))
    return training if training == rollout else f"{training} (training) and {rollout} (rollout)"


def _optimizer_text(plan: Plan) -> str:
    p, name = plan.config.parallel, plan.config.optimizer.optimizer
    if p.backend == "fsdp":
        return f"{name}, sharded; cpu_offload {p.cpu_offload}"
    return f"{name}, {'sharded over data x context parallel ranks' if p.use_distributed_optimizer else 'whole on every rank'}"


def spans(plan: Plan, stage: StageMemory) -> list[range]:
    """The ranks of a kind, as consecutive numbers."""
    per_stage = plan.config.training_size(plan.world_size) // plan.config.parallel.pipeline_model_parallel_size
    first, last = stage.stage.stages[0], stage.stage.stages[-1]
    return [range(first * per_stage, (last + 1) * per_stage)]


def _range_text(numbers: range) -> str:
    return str(numbers.start) if len(numbers) == 1 else f"{numbers.start}-{numbers.stop - 1}"


def _stages_text(stage: StageMemory) -> str:
    return _range_text(range(stage.stage.stages[0], stage.stage.stages[-1] + 1))


def _placement(plan: Plan) -> Table:
    """Which ranks lie on which node; equal neighbours in one line."""
    table = Table(title="placement", title_justify="left")
    for name in ("nodes", "ranks", "what they do"):
        table.add_column(name, overflow="fold")
    lines = _node_lines(plan)
    left_out = len(lines) - _SHOWN_NODES
    if left_out > 0:  # the middle
        rest = ("...", "", f"{left_out} more lines; --json FILE has every rank")
        lines = [*lines[: _SHOWN_NODES // 2], rest, *lines[-(_SHOWN_NODES // 2) :]]
    for line in lines:
        table.add_row(*line)
    return table


def _node_lines(plan: Plan) -> list[tuple[str, str, str]]:
    per_node = plan.machine.ranks_per_node
    grouped: list[tuple[int, int, str]] = []  # first node, last node, what
    for node in range(-(-plan.world_size // per_node)):
        ranks = range(node * per_node, min((node + 1) * per_node, plan.world_size))
        what = _node_text(plan, ranks)
        if grouped and grouped[-1][2] == what:
            grouped[-1] = (grouped[-1][0], node, what)
        else:
            grouped.append((node, node, what))
    lines = []
    for first, last, what in grouped:
        ranks = range(first * per_node, min((last + 1) * per_node, plan.world_size))
        lines.append((_range_text(range(first, last + 1)), _range_text(ranks), what))
    return lines


def _node_text(plan: Plan, ranks: range) -> str:
    training = [rank for rank in ranks if rank < plan.config.training_size(plan.world_size)]
    parts = []
    if training:
        rows = [plan.traffic.rows[rank].place for rank in training]
        shown = [
            f"{axis} {_values(sorted({row[axis] for row in rows}))}" for axis in rows[0] if axis in ("pp", "copy", "shard", "cp", "tp")
        ]
        parts.append(f"train: {', '.join(shown)}")
    if plan.config.is_colocated or len(training) < len(ranks):
        parts.append(f"sample: engines of TP {plan.config.parallel.rollout_tensor_parallel_size}")
    return "; ".join(parts)


def _values(numbers: Sequence[int]) -> str:
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers))


def _holdings(plan: Plan) -> Table:
    name, unit = _unit(plan)
    table = Table(title=f"what a rank holds of each network ({name})", title_justify="left")
    for name in ("stage", "ranks", "layers", "network", "parameters", "weights", "gradients", "optimizer"):
        table.add_column(name, justify="left" if name in ("stage", "network") else "right")
    for stage in plan.stages:
        ends = [name for name, here in (("embedding", stage.stage.is_first), ("head", stage.stage.is_last)) if here]
        layers = " + ".join(map(str, stage.stage.num_layers)) + (f" + {' + '.join(ends)}" if ends else "")
        for index, (role, found) in enumerate(stage.resident.items()):
            start = (_stages_text(stage), ", ".join(map(_range_text, spans(plan, stage))), layers) if not index else ("", "", "")
            number = _count(stage.stage.networks[role].total)
            table.add_row(*start, role, number, *(f"{size / unit:.2f}" for size in (found.weights, found.gradients, found.optimizer)))
    config, start = plan.config, ("rollout", _range_text(_rollout_ranks(plan)), str(plan.network.num_layers))
    copies = [(str(role), size, config.model.params_dtype) for role, size in plan.engine.frozen.items()]
    for name, held, dtype in [("engine", plan.engine.weights, config.rollout.rollout_dtype), *copies]:
        elements = held / (2 if dtype == "bfloat16" else 4)
        table.add_row(*(start if name == "engine" else ("", "", "")), name, _count(elements), f"{held / unit:.2f}", "", "")
    return table


def _rollout_ranks(plan: Plan) -> range:
    return range(plan.world_size - plan.config.rollout_size(plan.world_size), plan.world_size)


def _memory(plan: Plan) -> Table:
    unit_name, unit = _unit(plan)
    table = Table(title=f"memory of a rank by phase ({unit_name}); a GPU has {_memory_text(plan)}", title_justify="left")
    rows = [(_stages_text(stage), plan.memory, stage.phases) for stage in plan.stages]
    if not plan.config.is_colocated:
        rows.append(("rollout", plan.rollout_memory, plan.engine_phases))
    found = {kind for _, _, phases in rows for parts in phases.values() for kind, size in parts.items() if size}
    assert found <= set(_KINDS), found
    kinds = [kind for kind in _KINDS if kind in found]
    for name in ("stage", "phase", *kinds, "total", "headroom"):
        table.add_column(name, justify="left" if name in ("stage", "phase") else "right")
    for name, memory, phases in rows:
        for phase, parts in phases.items():
            cells = [f"{parts.get(kind, 0.0) / unit:.2f}" for kind in kinds]
            total = sum(parts.values())
            table.add_row(name if phase == PHASES[0] else "", phase, *cells, f"{total / unit:.2f}", f"{(memory - total) / unit:.2f}")
    return table


def _batches(plan: Plan) -> list[str]:
    r, b, t = plan.config.rollout, plan.batches, plan.config.training
    flight = b.in_flight
    return [
        f"{r.prompts_per_iteration} prompts x {r.samples_per_prompt} samples = {b.num_responses} responses of at most "
        f"{r.max_prompt_length} + {r.max_response_length} tokens; {b.per_replica} a replica",
        f"{b.num_responses} / global_batch_size {t.global_batch_size} x {t.ppo_epochs} epochs = {b.optimizer_steps} optimizer steps",
        f"{t.global_batch_size} / data parallel {b.data_parallel_size} = {b.rows_per_step} rows = {b.num_micro_batches} micro-batches "
        f"of at most {b.micro_batch_rows} x {b.micro_batch_length} tokens",
        f"in flight at once: {flight[0]} on the first stage, {flight[-1]} on the last; "
        f"bubble {plan.seconds.bubble:.1%} of the working time",
    ]


def _refit(plan: Plan) -> list[str]:
    traffic, engine = plan.traffic, plan.engine
    low, high = traffic.received_over_shard
    sender, receiver = traffic.busiest_sender, traffic.busiest_receiver
    cache = f"{size_text(max(0, round(engine.cache)))} = {engine.num_sequences} sequences of {engine.max_model_len} tokens a replica"
    return [
        f"{size_text(traffic.bytes_received)} received in {traffic.num_groups} groups, {low:.3f} to {high:.3f} of each shard; "
        f"the usual full broadcast: {traffic.full_broadcast_factor:.1f} times as much",
        f"busiest sender: rank {sender.rank}, {size_text(sender.bytes_sent)}; busiest receiver: rank {receiver.rank}, "
        f"{size_text(receiver.bytes_received)}; {plan.seconds.sync:.2f} s",
        f"an engine's rank: {size_text(round(engine.weights))} of weights, {size_text(round(engine.working))} of passes, cache {cache}",
    ]


def _seconds(plan: Plan) -> list[str]:
    s, m = plan.seconds, plan.machine
    return [
        f"sync {s.sync:.2f} + rollout {s.rollout:.1f} + score {s.score:.1f} + update {s.update:.1f} "
        f"(of which travelling {s.communication:.1f}) = {s.total:.1f} s, every response at its longest",
        f"assumed: {m.peak_tflops:g} TFLOP/s x MFU {m.mfu:g}, memory {m.memory_gbs:g} GB/s x {m.decode_efficiency:g}, "
        f"{m.nvlink_gbs:g} GB/s in a node, {m.network_gbs:g} GB/s between nodes. Not compared with GPUs: for comparing meshes",
    ]


# -- candidates -------------------------------------------------------------------------------------------------------


def print_candidates(found: Sequence[Candidate], title: str, world_size: int) -> None:
    """A table of meshes, the best first, and the flags of the first."""
    console = _console()
    if not found:
        console.print(f"{title}: none. Take more GPUs, a smaller micro-batch or shorter sequences", soft_wrap=True)
        return
    table = Table(title=title, title_justify="left")
    columns = (
        "#",
        "TP",
        "PP",
        "CP",
        "EP",
        "DP",
        "rollout",
        "recompute",
        "micro-batch",
        "GiB left",
        "bubble",
        "sync",
        "rollout s",
        "score",
        "update",
        "total s",
    )
    for name in columns:
        table.add_column(name, justify="right")
    for index, one in enumerate(found, 1):
        p, s = one.config.parallel, one.seconds
        replicas = (
            f"{one.config.num_replicas(world_size)} x TP {p.rollout_tensor_parallel_size}{' colocated' if one.config.is_colocated else ''}"
        )
        sizes = (p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.context_parallel_size, p.expert_model_parallel_size)
        table.add_row(
            str(index),
            *map(str, (*sizes, one.config.data_parallel_size(world_size))),
            replicas,
            one.config.model.recompute_granularity,
            str(one.config.training.micro_batch_size),
            f"{one.headroom / GIB:.1f}",
            f"{s.bubble:.0%}",
            *(f"{number:.1f}" for number in (s.sync, s.rollout, s.score, s.update, s.total)),
        )
    console.print(table)
    console.print(f"the first: {' '.join(found[0].flags(world_size))}", soft_wrap=True)


def write_candidates(found: Sequence[Candidate], path: Path) -> None:
    """The same as JSON."""
    rows = [
        {"fields": one.fields, "headroom_bytes": one.headroom, "seconds": asdict(one.seconds) | {"total": one.seconds.total}}
        for one in found
    ]
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


# -- JSON -------------------------------------------------------------------------------------------------------------


def write_json(plan: Plan, path: Path) -> None:
    """Every number of the text, and each rank's place; sizes are bytes."""
    path.write_text(json.dumps(plan_json(plan), indent=1) + "\n", encoding="utf-8")


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain data."""
    traffic, config = plan.traffic, plan.config
    num_training = config.training_size(plan.world_size)
    assert plan.batches.num_micro_batches == num_micro_batches(config, num_training)
    return {
        "world_size": plan.world_size,
        "machine": asdict(plan.machine),
        "implementation": plan.implementation,
        "fits": not plan.faults,
        "faults": list(plan.faults),
        "notes": list(plan.notes),
        "headroom_bytes": plan.headroom,
        "mesh": config.mesh_sizes(plan.world_size) | {"colocated": config.is_colocated},
        "training_mesh": traffic.training_mesh,
        "rollout_mesh": traffic.rollout_mesh,
        "stages": [
            {
                "stages": list(stage.stage.stages),
                "ranks": [[part.start, part.stop] for part in spans(plan, stage)],
                "num_layers": list(stage.stage.num_layers),
                "parameters": {role: held.total for role, held in stage.stage.networks.items()},
                "resident": {role: asdict(found) for role, found in stage.resident.items()},
                "phases": {phase: dict(stage.phases[phase]) | {"total": stage.total(phase)} for phase in PHASES},
                "headroom_bytes": plan.memory - stage.peak,
            }
            for stage in plan.stages
        ],
        "engine": asdict(plan.engine)
        | {
            "num_sequences": plan.engine.num_sequences,
            "total": plan.engine_total,
            "phases": {} if config.is_colocated else plan.engine_phases,
            "headroom_bytes": None if config.is_colocated else plan.rollout_memory - plan.engine_total,
        },
        "batches": asdict(plan.batches),
        "refit": {
            "model_bytes": traffic.model_bytes,
            "bytes_received": traffic.bytes_received,
            "num_groups": traffic.num_groups,
            "busiest_sender_bytes": traffic.busiest_sender.bytes_sent,
            "busiest_receiver_bytes": traffic.busiest_receiver.bytes_received,
        },
        "seconds": asdict(plan.seconds) | {"total": plan.seconds.total},
        "ranks": [{"rank": row.rank, "node": row.node, "trains": row.is_training, "place": dict(row.place)} for row in traffic.rows],
    }
