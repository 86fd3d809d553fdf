"""One launch, planned: meshes on nodes, memory of every kind of rank, weight traffic, batches, seconds, and what does not fit. Pure data.

Called by ``planner.py`` for one configuration and by ``plan_search.py`` for many. Left out: other meshes, and words.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ppo.config import Config
from megatron_ppo.families import NetworkShape, network_shape
from megatron_ppo.plan_activations import Implementation, in_flight
from megatron_ppo.plan_memory import (
    PHASES,
    EngineMemory,
    Phase,
    StageMemory,
    engine_memory,
    max_num_seqs,
    micro_batch_shape,
    num_micro_batches,
    responses_of_replica,
    stage_memory,
    utilization,
)
from megatron_ppo.plan_networks import Stage, build_stages
from megatron_ppo.plan_time import Machine, Seconds, bubble, rollout_seconds, sync_seconds, training_seconds
from megatron_ppo.refit_traffic import RefitTraffic, refit_traffic
from megatron_ppo.weight_synchronizer import refit_plan, rollout_layouts
from megatron_ppo.world import straddling_replica

GIB = 2**30
MOST_RANKS = 16384
"""Of one launch: a plan lists every rank."""


@dataclass(frozen=True)
class Batches:
    """How an iteration's responses are cut."""

    num_responses: int
    per_replica: int
    """Responses that a rollout replica samples, at most."""
    optimizer_steps: int
    data_parallel_size: int
    rows_per_step: int
    """Responses of an optimizer step on one data-parallel replica."""
    micro_batch_rows: int
    micro_batch_length: int
    num_micro_batches: int
    """Of a replica in one optimizer step."""
    in_flight: tuple[int, ...]
    """Chunks whose activations the first rank of each stage holds at once."""


@dataclass(frozen=True)
class Plan:
    """Everything about one launch."""

    config: Config
    world_size: int
    machine: Machine
    implementation: Implementation
    network: NetworkShape
    stages: tuple[StageMemory, ...]
    """Kinds of training ranks, by pipeline stage."""
    engine: EngineMemory
    traffic: RefitTraffic
    batches: Batches
    seconds: Seconds
    faults: tuple[str, ...]
    """What does not fit, with its amount and a remedy."""
    notes: tuple[str, ...]
    """What fits and costs."""

    @property
    def memory(self) -> float:
        """Bytes of a training rank's GPU."""
        return self.machine.gpu_memory_gib * GIB

    @property
    def rollout_memory(self) -> float:
        """Bytes of a rollout rank's GPU."""
        return self.machine.rollout_memory_gib * GIB

    @property
    def engine_total(self) -> float:
        """Bytes of a rank that only samples, with buckets and reserve."""
        return sum(self.engine_phases["rollout"].values())

    @property
    def engine_phases(self) -> dict[Phase, dict[str, float]]:
        """Phase -> what -> bytes, of a rank that only samples: the engine keeps its cache during a sync."""
        fixed = {"buckets": 2.0 * self.config.parallel.bucket_bytes, "reserve": self.machine.reserve_gib * GIB}
        rollout = self.engine.sampling() | fixed
        sync = self.engine.held() | fixed | ({"key/value cache": max(0.0, self.engine.cache)} if self.engine.sleeps else {})
        return {"sync": sync, "rollout": rollout}

    @property
    def fullest(self) -> tuple[float, float]:
        """(bytes left on the rank that has least left, in its fullest phase; bytes of its GPU). Negative: missing."""
        found = [(self.memory - stage.peak, self.memory) for stage in self.stages]
        return min(found if self.config.is_colocated else [*found, (self.rollout_memory - self.engine_total, self.rollout_memory)])

    @property
    def headroom(self) -> float:
        """The first of ``fullest``."""
        return self.fullest[0]


def implementation_of(config: Config) -> Implementation:
    """How layers are computed on the machine that is planned for: with Transformer Engine, unless the configuration says local."""
    if config.parallel.backend == "fsdp":
        return "hf"
    return "local" if config.transformer_impl == "local" else "transformer_engine"


def make_plan(config: Config, world_size: int, machine: Machine) -> Plan:
    """The plan of a configuration that has passed ``validate``. Starts child processes. ``ValueError`` where a network cannot be built."""
    (stages,) = build_stages([config], [config.training_size(world_size)])
    return plan_from_stages(config, world_size, machine, stages)


def plan_from_stages(config: Config, world_size: int, machine: Machine, stages: Sequence[Stage]) -> Plan:
    """The plan, of what the ranks of each stage hold."""
    num_training, implementation = config.training_size(world_size), implementation_of(config)
    traffic = refit_traffic(refit_plan(config, world_size), config, ranks_per_node=machine.ranks_per_node)
    shard = max(sum(math.prod(shape) for shape in layout.shapes.values()) for layout in rollout_layouts(config))
    engine = engine_memory(config, shard, machine.rollout_memory_gib * GIB, config.num_replicas(world_size))
    beside = engine if config.is_colocated else None
    reserve = machine.reserve_gib * GIB
    memory = tuple(stage_memory(config, stage, num_training, implementation, beside, reserve) for stage in stages)
    held = max(stage.networks["actor"].total for stage in stages)
    score, update, travel = training_seconds(config, num_training, held, machine)
    count = num_micro_batches(config, num_training)
    sync = sync_seconds(traffic.busiest_sender.bytes_sent, traffic.busiest_receiver.bytes_received, world_size, machine)
    rollout = rollout_seconds(config, config.num_replicas(world_size), engine, machine)
    plan = Plan(
        config=config,
        world_size=world_size,
        machine=machine,
        implementation=implementation,
        network=network_shape(Path(config.model.model_path)),
        stages=memory,
        engine=engine,
        traffic=traffic,
        batches=_batches(config, world_size),
        seconds=Seconds(sync, rollout, score, update, bubble(config, count), travel),
        faults=(),
        notes=(),
    )
    return dataclasses.replace(plan, faults=tuple(_faults(plan)), notes=tuple(_notes(plan)))


def _batches(config: Config, world_size: int) -> Batches:
    t = config.training
    num_training = config.training_size(world_size)
    data_parallel = num_training // config.model_parallel_size
    count = num_micro_batches(config, num_training)
    rows, length = micro_batch_shape(config)
    return Batches(
        num_responses=config.rollout_batch_size,
        per_replica=responses_of_replica(config, config.num_replicas(world_size)),
        optimizer_steps=t.ppo_epochs * config.rollout_batch_size // t.global_batch_size,
        data_parallel_size=data_parallel,
        rows_per_step=t.global_batch_size // data_parallel,
        micro_batch_rows=rows,
        micro_batch_length=length,
        num_micro_batches=count,
        in_flight=tuple(in_flight(config, stage, count) for stage in range(config.parallel.pipeline_model_parallel_size)),
    )


def _faults(plan: Plan) -> list[str]:
    config, found = plan.config, []
    for stage in plan.stages:
        for phase in PHASES:
            missing = stage.total(phase) - plan.memory
            if missing > 0:
                found.append(_too_much(plan, stage, phase, missing))
    if not config.is_colocated and plan.engine_total > plan.rollout_memory:
        found.append(_engine_too_much(plan))
    if plan.engine.num_sequences < 1:
        one = plan.engine.cache_bytes_per_token * plan.engine.max_model_len
        missing = (one - plan.engine.cache) / GIB
        found.append(
            f"the engine's key/value cache holds no whole sequence of {plan.engine.max_model_len} tokens ({one / GIB:.2f} GiB): "
            f"{missing:.1f} GiB are missing beside {plan.engine.weights / GIB:.1f} GiB of weights; raise rollout_tensor_parallel_size"
        )
    nodes = [str(rank // plan.machine.ranks_per_node) for rank in range(plan.world_size)]
    ranks = range(plan.world_size - config.rollout_size(plan.world_size), plan.world_size)
    straddling = straddling_replica(nodes, ranks, config.parallel.rollout_tensor_parallel_size)
    return found + ([straddling] if straddling else [])


def _too_much(plan: Plan, stage: StageMemory, phase: Phase, missing: float) -> str:
    config = plan.config
    parts = sorted(stage.phases[phase].items(), key=lambda part: -part[1])[:3]
    largest = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts)
    need = f"{phase} on stage {_stage_text(stage)} needs {stage.total(phase) / GIB:.1f} GiB of {plan.machine.gpu_memory_gib:g}"
    if phase == "rollout" and config.is_colocated:
        used = stage.total(phase) - plan.engine.total
        room = max(0.0, 1 - used / plan.memory)
        offload = "; or cpu_offload = sampling" if config.parallel.cpu_offload == "none" else ""
        remedy = (
            f"vllm_overrides gpu_memory_utilization is {utilization(config):g}, and there is room for {int(room * 100) / 100:g}{offload}"
        )
        if not plan.engine.sleeps:
            remedy = f"lower vllm_overrides max_num_seqs (it is {max_num_seqs(config)}) or micro_batch_size, or use vllm{offload}"
    elif phase == "update" and stage.phases[phase]["activations"] > missing:
        smaller = max(1, config.training.micro_batch_size // 2)
        remedy = f"lower micro_batch_size (to {smaller}), set recompute_granularity to full, or split more (TP, PP, CP)"
    else:
        remedy = "split more (TP, PP, EP), or add data-parallel ranks that share the optimizer"
    return f"{need}: {missing / GIB:.1f} GiB too much (largest: {largest} GiB). {remedy[0].upper()}{remedy[1:]}"


def _engine_too_much(plan: Plan) -> str:
    config, missing = plan.config, plan.engine_total - plan.rollout_memory
    need = (
        f"a rollout rank needs {plan.engine_total / GIB:.1f} GiB of {plan.machine.rollout_memory_gib:g}: {missing / GIB:.1f} GiB too much"
    )
    if plan.engine.sleeps:
        return f"{need}; raise rollout_tensor_parallel_size, or lower vllm_overrides gpu_memory_utilization (it is {utilization(config):g})"
    copies = sum(plan.engine.frozen.values())
    weights = f"{plan.engine.weights / GIB:.1f} GiB of weights{f', {copies / GIB:.1f} of frozen copies' if copies else ''}"
    on_training = ", or set compute_on to training" if copies else ""
    rows = f"vllm_overrides max_num_seqs (it is {max_num_seqs(config)}) or micro_batch_size"
    return f"{need} ({weights}); lower {rows}{on_training}, or use vllm"


def _stage_text(stage: StageMemory) -> str:
    first, last = stage.stage.stages[0], stage.stage.stages[-1]
    return str(first) if first == last else f"{first}-{last}"


def _notes(plan: Plan) -> list[str]:
    config, p, found = plan.config, plan.config.parallel, []
    per_node = plan.machine.ranks_per_node
    tp = p.tensor_model_parallel_size
    border = config.training_size(plan.world_size) % per_node
    if plan.rollout_memory != plan.memory and border:
        found.append(
            f"training ranks fill only {border} of the {per_node} GPUs of their last node, and rollout ranks, whose GPUs are of another "
            "size, the others: give each mesh whole nodes"
        )
    if tp > per_node or (per_node % tp and tp > 1):
        found.append(f"tensor-parallel groups of {tp} ranks lie on several nodes of {per_node}: each layer waits for the network")
    if plan.seconds.bubble > 0.2:
        found.append(
            f"the pipeline idles {plan.seconds.bubble:.0%} of its working time: {plan.batches.num_micro_batches} micro-batches for "
            f"{p.pipeline_model_parallel_size} stages; raise global_batch_size, or lower micro_batch_size or data parallelism"
        )
    if plan.engine.num_sequences and plan.engine.num_sequences < plan.batches.per_replica:
        found.append(
            f"a replica's cache holds {plan.engine.num_sequences} of the {plan.batches.per_replica} sequences it samples, were all of them "
            "at their longest: the rest would wait"
        )
    if config.model.params_dtype == "float32" or config.rollout.rollout_dtype == "float32":
        found.append("params_dtype or rollout_dtype is float32: twice the memory of bfloat16")
    return found
