"""Other meshes for the same job: the fastest for a number of GPUs (``--search``), or the nearest to one that does not fit.

    sizes of the rollout mesh -> the engine's best TP on it ---.
    training ranks left -> TP x PP x CP x EP that divide -> recomputation and micro-batch that fit, the fastest ---> seconds of an iteration

Thousands of meshes are compared, so parameters are counted from the layouts (``megatron_layout``, ``hf_layout``: the data that backends
hold their live parameters to at start) and not by building each; a test holds both counts equal. Seconds are ``plan_time.py``'s, with the
weight sync taken as evenly spread over senders. Left out: uneven and interleaved pipelines, and tensor-parallel groups across nodes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ppo.backends.base import RoleName, planned_networks, rollout_head
from megatron_ppo.config import Config
from megatron_ppo.families import Head, NetworkShape
from megatron_ppo.plan_job import GIB, MOST_RANKS, implementation_of
from megatron_ppo.plan_memory import (
    EngineMemory,
    check_overrides,
    engine_memory,
    micro_batch_shape,
    num_micro_batches,
    shape_of,
    stage_memory,
)
from megatron_ppo.plan_networks import HeldParameters, Stage, chunk_sizes
from megatron_ppo.plan_time import Machine, Seconds, bubble, rollout_seconds, sync_seconds, training_seconds
from megatron_ppo.resharding.fsdp_layout import shard_rows
from megatron_ppo.resharding.megatron_layout import megatron_faults, megatron_layout
from megatron_ppo.resharding.megatron_mesh import MegatronParallel, RankCoordinates, megatron_parallel
from megatron_ppo.resharding.vllm_layout import hf_layout, vllm_faults, vllm_layout

SHOWN = 10
NEAREST = 3
_RECOMPUTE = ("none", "selective", "full")
_SPLIT_FIELDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")


@dataclass(frozen=True)
class Candidate:
    """A mesh that fits."""

    config: Config
    fields: dict[str, Any]
    """Flat fields by which it differs from what was asked for, or that say its sizes."""
    seconds: Seconds
    headroom: float
    """Bytes left on the fullest rank."""

    def flags(self, world_size: int) -> list[str]:
        """As ``plan`` and ``train`` take them."""
        flags = ["--world-size", str(world_size)]
        for name, value in self.fields.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                flags.append(f"--{'' if value else 'no-'}{flag}")
            elif isinstance(value, dict):
                flags += [f"--{flag}", *(text for pair in value.items() for text in pair)] if value else []
            else:
                flags += [f"--{flag}", str(value)]
        return flags


def search_meshes(config: Config, num_gpus: int, machine: Machine) -> list[Candidate]:
    """The best meshes of ``num_gpus`` ranks, at most ``SHOWN``; of each pair of sizes of the two meshes the best one. ``ValueError`` where
    the model itself cannot be planned."""
    if not 2 <= num_gpus <= MOST_RANKS:
        raise ValueError(f"--search {num_gpus}: a launch has at least 2 ranks, and at most {MOST_RANKS} are planned")
    shape_of(Path(config.model.model_path))
    best: dict[tuple[Any, ...], Candidate] = {}
    alike = machine.rollout_memory_gib == machine.gpu_memory_gib  # otherwise no rank can be of both meshes
    for one in _candidates(config, num_gpus, machine, colocated=(False, True) if alike else (False,)):
        p = one.config.parallel
        key = (p.rollout_world_size, p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.context_parallel_size)
        if key not in best or one.seconds.total < best[key].seconds.total:
            best[key] = one
    return sorted(best.values(), key=lambda one: one.seconds.total)[:SHOWN]


def nearest_meshes(config: Config, world_size: int, machine: Machine) -> list[Candidate] | None:
    """Meshes of as many ranks that fit, those first that differ least from ``config``; None where the model or the engine's overrides
    cannot be read, or no launch has so many ranks."""
    if not (1 if config.is_colocated else 2) <= world_size <= MOST_RANKS:
        return None
    try:
        check_overrides(config)
        shape_of(Path(config.model.model_path))
    except ValueError:
        return None
    found = list(_candidates(config, world_size, machine, colocated=(config.is_colocated,), near=config))
    return sorted(found, key=lambda one: (_distance(config, one.config, world_size), one.seconds.total))[:NEAREST]


def _distance(asked: Config, other: Config, world_size: int) -> float:
    """Doublings between two configurations' sizes, and steps of recomputation."""
    pairs = [
        (getattr(asked.parallel, name), getattr(other.parallel, name))
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "rollout_tensor_parallel_size",
        )
    ]
    pairs.append((asked.rollout_size(world_size), other.rollout_size(world_size)))
    pairs.append((micro_batch_shape(asked)[0], micro_batch_shape(other)[0]))
    steps = abs(_RECOMPUTE.index(asked.model.recompute_granularity) - _RECOMPUTE.index(other.model.recompute_granularity))
    return sum(abs(math.log2(a / b)) for a, b in pairs if a > 0 and b > 0) + steps


def _candidates(
    config: Config, num_gpus: int, machine: Machine, *, colocated: tuple[bool, ...], near: Config | None = None
) -> Iterator[Candidate]:
    sizes: list[int] = []
    if False in colocated:
        sizes += _rollout_sizes(num_gpus, machine)
        if near is not None and 0 < near.parallel.rollout_world_size < num_gpus:
            sizes = sorted({*sizes, near.parallel.rollout_world_size})
    for rollout in [*sizes, *([0] if True in colocated else [])]:
        start = config.replace(rollout_world_size=rollout, virtual_pipeline_model_parallel_size=None, cpu_offload=_offload(config, rollout))
        for engine_config, engine in _engines(start, num_gpus, machine, every=near is not None):
            if rollout:
                time = rollout_seconds(engine_config, engine_config.num_replicas(num_gpus), engine, machine)
                yield from _trainers(engine_config, num_gpus, machine, engine, time, near)
            else:
                yield from _colocated(engine_config, num_gpus, machine, near)


def _offload(config: Config, rollout: int) -> str:
    if config.parallel.cpu_offload == "always":
        return "always"
    return "none" if rollout else "sampling"


def _rollout_sizes(num_gpus: int, machine: Machine) -> list[int]:
    """Eighths of the GPUs, in whole nodes where there are several."""
    unit = machine.ranks_per_node if num_gpus >= 2 * machine.ranks_per_node else 1
    units = num_gpus // unit
    return sorted({max(1, round(units * eighth / 8)) * unit for eighth in range(1, 7)} - {num_gpus})


def _powers(limit: int) -> list[int]:
    return [2**power for power in range(limit.bit_length()) if 2**power <= limit]


def _engines(config: Config, num_gpus: int, machine: Machine, *, every: bool) -> list[tuple[Config, EngineMemory]]:
    """The engine's tensor-parallel sizes that fit: the fastest, or all."""
    network, found = shape_of(Path(config.model.model_path)), []
    rollout = config.rollout_size(num_gpus)
    for tp in _powers(min(machine.ranks_per_node, rollout)):
        if config.rollout.rollout_backend == "hf" and tp > 1:
            continue
        changed = config.replace(rollout_tensor_parallel_size=tp)
        if rollout % tp or machine.ranks_per_node % tp or any(vllm_faults(network, tp, config.rollout_expert_parallel)):
            continue
        if config.rollout.prompts_per_iteration < rollout // tp:
            continue
        memory = machine.rollout_memory_gib * GIB
        engine = engine_memory(changed, _engine_elements(changed), memory, changed.num_replicas(num_gpus))
        total = engine.total + 2 * config.parallel.bucket_bytes + machine.reserve_gib * GIB
        if config.is_colocated or (engine.num_sequences >= 1 and total <= memory):  # colocated: ``_colocated`` chooses its share
            found.append((changed, engine))
    if every or config.is_colocated:
        return found
    return sorted(found, key=lambda one: rollout_seconds(one[0], one[0].num_replicas(num_gpus), one[1], machine))[:1]


@functools.cache
def _elements(network: NetworkShape, tp: int, whole_experts: bool, backend: str, head: Head) -> int:
    """Elements of an engine's rank: one layer is counted and multiplied, all are equal."""
    totals = []
    for num_layers in (1, 2):
        thin = dataclasses.replace(network, num_layers=num_layers)
        layout = (
            hf_layout(thin, head)
            if backend == "hf"
            else vllm_layout(thin, tensor_parallel_size=tp, tp_rank=0, expert_parallel=whole_experts)
        )
        totals.append(sum(math.prod(shape) for shape in layout.shapes.values()))
    return totals[0] + (network.num_layers - 1) * (totals[1] - totals[0])


def _engine_elements(config: Config) -> int:
    network, tp = shape_of(Path(config.model.model_path)), config.parallel.rollout_tensor_parallel_size
    return _elements(network, tp, config.rollout_expert_parallel, config.rollout.rollout_backend, rollout_head(config))


# -- training meshes --------------------------------------------------------------------------------------------------


def _trainers(
    config: Config, num_gpus: int, machine: Machine, engine: EngineMemory, rollout_time: float, near: Config | None
) -> Iterator[Candidate]:
    num_training = config.training_size(num_gpus)
    for mesh in _meshes(config, num_training, machine):
        stages = layout_stages(mesh, num_training)
        for changed in _passes(mesh, num_gpus, stages, machine, near):
            headroom = _headroom(changed, stages, num_training, machine, None)
            if headroom >= 0:
                yield _candidate(changed, num_gpus, machine, stages, engine, rollout_time, headroom)
                break


def _colocated(config: Config, num_gpus: int, machine: Machine, near: Config | None) -> Iterator[Candidate]:
    """Both meshes are all ranks: the engine is given what the trainer leaves while sampling."""
    memory, reserve = machine.gpu_memory_gib * GIB, machine.reserve_gib * GIB
    for mesh in _meshes(config, num_gpus, machine):
        stages = layout_stages(mesh, num_gpus)
        roomy = mesh
        if mesh.rollout.rollout_backend == "vllm":
            idle = engine_memory(mesh, _engine_elements(mesh), 0.0)
            used = max(stage_memory(mesh, one, num_gpus, implementation_of(mesh), idle, reserve).total("rollout") for one in stages)
            share = min(0.9, int((memory - used + idle.total) / memory * 100) / 100)
            if share <= 0:
                continue
            roomy = mesh.replace(vllm_overrides=dict(mesh.rollout.vllm_overrides) | {"gpu_memory_utilization": f"{share:g}"})
        engine = engine_memory(roomy, _engine_elements(roomy), memory, roomy.num_replicas(num_gpus))
        if engine.num_sequences < 1:
            continue
        time = rollout_seconds(roomy, roomy.num_replicas(num_gpus), engine, machine)
        for changed in _passes(roomy, num_gpus, stages, machine, near):
            headroom = _headroom(changed, stages, num_gpus, machine, engine)
            if headroom >= 0:
                yield _candidate(changed, num_gpus, machine, stages, engine, time, headroom)
                break


def _meshes(config: Config, num_training: int, machine: Machine) -> Iterator[Config]:
    """TP x PP x CP x EP that divide the model, the ranks and the batch."""
    if config.parallel.backend == "fsdp":
        for shards in _powers(num_training):
            if num_training % shards == 0 and config.training.global_batch_size % num_training == 0:
                yield config.replace(fsdp_shard_size=shards)
        return
    network = shape_of(Path(config.model.model_path))
    overrides = {name: text for name, text in config.model.transformer_overrides.items() if name not in _SPLIT_FIELDS}
    pipelines = [pp for pp in range(1, network.num_layers + 1) if _splits(config, network.num_layers, pp)]
    experts = _powers(network.num_experts) if network.num_experts else [1]
    contexts = sorted({1, config.parallel.context_parallel_size})
    for tp, pp, cp, ep in itertools.product(_powers(machine.ranks_per_node), pipelines, contexts, experts):
        if num_training % (tp * pp * cp) or machine.ranks_per_node % tp:
            continue
        if config.training.global_batch_size % (num_training // (tp * pp * cp)):
            continue
        own = overrides | ({"expert_tensor_parallel_size": "1"} if network.num_experts and ep > 1 and tp > 1 else {})
        changed = config.replace(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            context_parallel_size=cp,
            expert_model_parallel_size=ep,
            sequence_parallel=tp > 1,
            transformer_overrides=own,
        )
        sizes = megatron_parallel(changed)
        if num_training % (sizes.expert_tensor_size * ep * pp) or any(megatron_faults(network, sizes)):
            continue
        yield changed


def _splits(config: Config, num_layers: int, pp: int) -> bool:
    overrides = config.model.transformer_overrides
    ends = [overrides.get(f"account_for_{name}_in_pipeline_split", "false").lower() == "true" for name in ("embedding", "loss")]
    return (num_layers + sum(ends)) % pp == 0


def _passes(config: Config, num_gpus: int, stages: list[Stage], machine: Machine, near: Config | None) -> list[Config]:
    """Recomputation and rows of a micro-batch, those asked for and fewer: the fastest first, or those nearest to ``near``."""
    rows = micro_batch_shape(config)[0]
    held, num_training = max(stage.networks["actor"].total for stage in stages), config.training_size(num_gpus)
    found = [
        config.replace(recompute_granularity=granularity, micro_batch_size=micro)
        for granularity in _RECOMPUTE
        for micro in sorted({*_powers(rows), rows}, reverse=True)
    ]
    if near is not None:
        return sorted(found, key=lambda one: _distance(near, one, num_gpus))
    return sorted(found, key=lambda one: sum(training_seconds(one, num_training, held, machine)[:2]))


def _headroom(config: Config, stages: list[Stage], num_training: int, machine: Machine, engine: EngineMemory | None) -> float:
    kind, reserve = implementation_of(config), machine.reserve_gib * GIB
    peaks = (stage_memory(config, stage, num_training, kind, engine, reserve).peak for stage in stages)
    return machine.gpu_memory_gib * GIB - max(peaks)


def _candidate(
    config: Config,
    num_gpus: int,
    machine: Machine,
    stages: list[Stage],
    engine: EngineMemory,
    rollout_time: float,
    headroom: float,
) -> Candidate:
    p, num_training = config.parallel, config.training_size(num_gpus)
    held = max(stage.networks["actor"].total for stage in stages)
    score, update, travel = training_seconds(config, num_training, held, machine)
    element = 2 if config.rollout.rollout_dtype == "bfloat16" else 4
    sync = sync_seconds(held * element, engine.weights, num_gpus, machine)
    idle = bubble(config, num_micro_batches(config, num_training))
    fields: dict[str, Any] = {"backend": p.backend} if p.backend == "fsdp" else {}
    names = ["rollout_world_size", "rollout_tensor_parallel_size", "micro_batch_size", "recompute_granularity"]
    if p.backend == "fsdp":
        names.append("fsdp_shard_size")
    else:
        names += ["tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"]
        names += ["sequence_parallel", "transformer_overrides"]
    if config.is_colocated:
        names += ["cpu_offload", *(["vllm_overrides"] if config.rollout.rollout_backend == "vllm" else [])]
    for name in names:
        for section in (config.parallel, config.training, config.model, config.rollout):
            if hasattr(section, name):
                fields[name] = getattr(section, name)
    return Candidate(config, fields, Seconds(sync, rollout_time, score, update, idle, travel), headroom)


# -- parameters -------------------------------------------------------------------------------------------------------


def layout_stages(config: Config, num_training: int) -> list[Stage]:
    """What ``build_stages`` counts, from layouts of a network with one layer a chunk."""
    planned = planned_networks(config)
    network = shape_of(Path(config.model.model_path))
    if config.parallel.backend == "fsdp":
        shards = config.fsdp_shards(num_training)
        held = {role: _fsdp_held(shape_of(plan.folder), plan.head, shards) for role, plan in planned.items()}
        return [Stage((0,), 0, (network.num_layers,), is_first=True, is_last=True, networks=held)]
    sizes = megatron_parallel(config)
    count = config.parallel.pipeline_model_parallel_size
    found: list[Stage] = []
    for stages in ((0,), tuple(range(1, count - 1)), (count - 1,)):
        if not stages or (count == 1 and found):
            continue
        number = stages[0]
        first, last = number == 0, number == count - 1
        networks: dict[RoleName, HeldParameters] = {}
        for role, plan in planned.items():
            shape = shape_of(plan.folder)
            networks[role] = _megatron_held(shape, sizes, plan.head, sum(chunk_sizes(config, shape, number)), first, last)
        found.append(Stage(stages, number * (num_training // count), chunk_sizes(config, network, number), first, last, networks))
    return found


def _megatron_held(
    network: NetworkShape, sizes: MegatronParallel, head: Head, num_layers: int, is_first: bool, is_last: bool
) -> HeldParameters:
    """One layer is counted and multiplied: all are equal."""
    plain = MegatronParallel(
        tensor_model_parallel_size=sizes.tensor_model_parallel_size,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=sizes.expert_model_parallel_size,
        expert_tensor_parallel_size=sizes.expert_tensor_parallel_size,
        make_vocab_size_divisible_by=sizes.make_vocab_size_divisible_by,
    )
    dense, expert, first, last = _two_layers(network, plain, head)
    ends = is_first * first + is_last * last
    if is_first and is_last and network.tied and head in ("lm", "lm+value"):
        ends -= first  # one matrix, where one stage has both ends
    return HeldParameters(dense * num_layers + ends, expert * num_layers, 0)


@functools.cache
def _two_layers(network: NetworkShape, sizes: MegatronParallel, head: Head) -> tuple[int, int, int, int]:
    """Elements of (a layer outside of experts, its experts, embedding, last norm and heads), of two stages with a layer each."""
    thin = dataclasses.replace(network, num_layers=2)
    dense = expert = 0
    ends = [0, 0]
    for stage in (0, 1):
        layout = megatron_layout(thin, sizes, RankCoordinates(dp=0, pp=stage, tp=0), head=head)
        for name, shape in layout.shapes.items():
            if "decoder.layers." not in name:
                ends[stage] += math.prod(shape)
            elif stage == 0 and ".experts." in name:
                expert += math.prod(shape)
            elif stage == 0:
                dense += math.prod(shape)
    return dense, expert, ends[0], ends[1]


@functools.cache
def _fsdp_held(network: NetworkShape, head: Head, shards: int) -> HeldParameters:
    shapes = hf_layout(network, head).shapes
    held = sum((shard_rows(shape[0], shards, 0)[1]) * math.prod(shape[1:]) for shape in shapes.values())
    first = sum(math.prod(shape) for name, shape in shapes.items() if ".layers.0." in name)
    root = sum(math.prod(shape) for name, shape in shapes.items() if ".layers." not in name)
    return HeldParameters(held, 0, len(shapes), largest_unit=first, root_unit=root)
