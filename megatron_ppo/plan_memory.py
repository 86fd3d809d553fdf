"""Bytes on each kind of rank in each phase of an iteration, from parameters (``plan_networks.py``) and passes (``plan_activations.py``).

    resident    weights, gradients, optimizer of each network, and two buckets: there from the first optimizer step on
    sync        + the engine's weights, where the same ranks sample; cpu_offload = sampling takes gradients and optimizer away
    rollout     + the engine's key/value cache, where the same ranks sample; gradients and optimizer are still away
    score       + working memory of a forward pass and its logits
    update      + activations kept for the backward pass, logits, working memory

A rank that only samples holds the engine all the time, and so does plain generation (hf) where the same ranks train: it cannot sleep. With
compute_on = rollout, reference and reward model lie beside the engine, whole (``backends/hf_evaluation.py``), and not on training ranks.

A training rank's bytes of an element: weights in ``params_dtype``; gradients fp32 (megatron-core's buffers, whole on each rank); Adam's two
moments fp32; with bf16 weights an fp32 master more. The last two are cut over the ranks that hold the same parameters (data x context
parallel; for experts those that hold the same ones) where the optimizer is distributed (arXiv:1910.02054, P_os). FSDP keeps fp32 shards of
everything (P_os+g+p), gradients only while the network takes its step, and gathers a layer at a time. Phases that hold no more than these
(saving: copies go to host memory) are left out. Working memory is an estimate of what is allocated and freed within a layer; nothing here
has been compared with a GPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_ppo.backends.base import PlannedNetwork, RoleName, planned_networks
from megatron_ppo.config import Config
from megatron_ppo.families import Head, NetworkShape, network_shape
from megatron_ppo.packing import round_up
from megatron_ppo.plan_activations import Implementation, Pass, kept_by_stage, vocabulary_rows
from megatron_ppo.plan_networks import HeldParameters, Stage, build_stages, chunk_sizes
from megatron_ppo.resharding.megatron_mesh import megatron_parallel
from megatron_ppo.resharding.vllm_layout import hf_layout
from megatron_ppo.roles.hf_generate import MAX_NUM_SEQS, PREFILL_TOKENS
from megatron_ppo.roles.logits import CHUNK_SIZE

Phase = Literal["sync", "rollout", "score", "update"]
PHASES: tuple[Phase, ...] = ("sync", "rollout", "score", "update")

_FP32 = 4


@dataclass(frozen=True)
class Resident:
    """Bytes of one network on one rank, between passes."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class StageMemory:
    """One kind of rank of the training mesh."""

    stage: Stage
    resident: Mapping[RoleName, Resident]
    phases: Mapping[Phase, Mapping[str, float]]
    """Phase -> what -> bytes."""

    def total(self, phase: Phase) -> float:
        """Bytes in a phase."""
        return sum(self.phases[phase].values())

    @property
    def peak(self) -> float:
        """Bytes in the fullest phase."""
        return max(map(self.total, self.phases))


@dataclass(frozen=True)
class EngineMemory:
    """One rank of a rollout replica."""

    weights: int
    working: float
    """Of the engine's largest pass."""
    cache: float
    """Key/value cache: what is left of the engine's share, or as vllm_overrides say. Negative: weights and passes alone exceed it."""
    cache_bytes_per_token: float
    max_model_len: int
    frozen: Mapping[RoleName, int]
    """Weights of the frozen networks that this rank has beside the engine (compute_on = rollout)."""
    evaluation: float
    """Working memory of their largest pass, after the cache has been freed."""
    sleeps: bool
    """Whether the engine gives up its weights while the same rank trains."""

    @property
    def total(self) -> float:
        """Bytes of the engine and of what lies beside it."""
        return sum(self.sampling().values())

    def held(self) -> dict[str, float]:
        """What -> bytes between passes, without the cache."""
        copies = float(sum(self.frozen.values()))
        return {"engine weights": float(self.weights)} | ({"frozen copies": copies} if copies else {})

    def sampling(self) -> dict[str, float]:
        """What -> bytes in the fuller of both: while it samples, or while what was sampled goes through the frozen networks."""
        if self.evaluation > self.working + max(0.0, self.cache):
            return self.held() | {"working": self.evaluation}
        return self.held() | {"key/value cache": max(0.0, self.cache), "working": self.working}

    @property
    def num_sequences(self) -> int:
        """Sequences of ``max_model_len`` that the cache holds at once."""
        return max(0, int(self.cache / (self.cache_bytes_per_token * self.max_model_len)))


@functools.cache
def shape_of(folder: Path) -> NetworkShape:
    """``network_shape``, read once a process."""
    return network_shape(folder)


def micro_batch_shape(config: Config) -> tuple[int, int]:
    """(rows, tokens of a row) of the largest micro-batch: every row as long as prompt and response may be."""
    p, t = config.parallel, config.training
    context = 2 * p.context_parallel_size if p.context_parallel_size > 1 else 1
    length = round_up(config.max_model_len, context * (p.tensor_model_parallel_size if p.sequence_parallel else 1))
    limit = t.max_tokens_per_micro_batch
    rows = t.micro_batch_size if limit is None else min(t.micro_batch_size, max(1, limit // length))
    return rows, length


def num_micro_batches(config: Config, num_training: int) -> int:
    """Micro-batches of a replica in one optimizer step, at that shape."""
    rows = -(-config.training.global_batch_size // max(1, num_training // config.model_parallel_size))
    count = -(-rows // micro_batch_shape(config)[0])
    return round_up(count, config.parallel.pipeline_model_parallel_size) if config.parallel.virtual_pipeline_model_parallel_size else count


def resident(config: Config, held: HeldParameters, num_training: int, *, trained: bool) -> Resident:
    """What a network takes on a rank that holds so many of its parameters."""
    moments = 2 if config.optimizer.optimizer == "adam" else 0
    element = 2 if config.model.params_dtype == "bfloat16" else _FP32
    if config.parallel.backend == "fsdp":
        if not trained:
            return Resident(held.total * element, 0, 0)
        return Resident(held.total * _FP32, held.total * _FP32, held.total * _FP32 * moments)
    if not trained:
        return Resident(held.total * element, 0, 0)
    copies = moments + (element != _FP32)
    dense, expert = optimizer_shards(config, num_training)
    optimizer = -(-held.num_dense // dense) + -(-held.num_expert // expert)
    return Resident(held.total * element, held.total * _FP32, optimizer * _FP32 * copies)


def optimizer_shards(config: Config, num_training: int) -> tuple[int, int]:
    """Ranks over which the optimizer's state of (dense parameters, experts) is cut."""
    if not config.parallel.use_distributed_optimizer:
        return 1, 1
    p, sizes = config.parallel, megatron_parallel(config)
    per_stage = num_training // p.pipeline_model_parallel_size
    return per_stage // p.tensor_model_parallel_size, max(1, per_stage // (sizes.expert_tensor_size * sizes.expert_model_parallel_size))


def stage_memory(
    config: Config, stage: Stage, num_training: int, implementation: Implementation, engine: EngineMemory | None, reserve: float
) -> StageMemory:
    """All phases of one kind of training rank. ``engine``: of the engine on the same rank (colocated), else None. ``reserve``: bytes that
    neither torch nor the engine allocates for tensors (context, collectives, fragments)."""
    planned = planned_networks(config)
    found = {role: resident(config, held, num_training, trained=planned[role].peak_lr is not None) for role, held in stage.networks.items()}
    on_host = config.parallel.cpu_offload == "always"
    base = {
        "weights": 0.0 if on_host else sum(one.weights for one in found.values()),
        # FSDP makes gradients in a step and frees them at its end (``_update``).
        "gradients": 0.0 if config.parallel.backend == "fsdp" else sum(one.gradients for one in found.values()),
        "optimizer": 0.0 if on_host else sum(one.optimizer for one in found.values()),
        "buckets": 2.0 * config.parallel.bucket_bytes,  # made at the first sync, and kept
        "reserve": reserve,
    }
    away = base | ({"gradients": 0.0, "optimizer": 0.0} if config.parallel.cpu_offload == "sampling" else {})
    sync = away | ({"weights": float(found["actor"].weights)} if on_host else {})  # NCCL sends from the GPU
    rollout = dict(away)
    if engine is not None:
        sync |= engine.held()
        rollout |= engine.sampling()
        base |= {} if engine.sleeps else engine.held()
    score = [_score(config, stage, role, found, implementation) for role in stage.networks]
    update = []
    for role, plan in planned.items():
        if plan.peak_lr is not None:
            update.append(_update(config, stage, role, num_training, implementation))
            if config.parallel.backend == "fsdp" and not on_host:
                update[-1]["gradients"] = float(found[role].gradients)
    phases: dict[Phase, Mapping[str, float]] = {
        "sync": sync,
        "rollout": rollout,
        "score": base | max(score, key=lambda one: sum(one.values())),
        "update": base | max(update, key=lambda one: sum(one.values())),
    }
    return StageMemory(stage, found, phases)


def _pass(config: Config, role: RoleName, implementation: Implementation) -> tuple[Pass, Head]:
    plan = planned_networks(config)[role]
    rows, length = micro_batch_shape(config)
    return Pass(shape_of(plan.folder), config, implementation, rows, length), plan.head


def _gathered(config: Config, held: HeldParameters) -> float:
    """FSDP: whole parameters during a pass: the root's, and two layers' (one computes, the next is on its way)."""
    element = 2 if config.model.params_dtype == "bfloat16" else _FP32
    return (held.root_unit + 2 * held.largest_unit) * element if config.parallel.backend == "fsdp" else 0.0


def _score(
    config: Config, stage: Stage, role: RoleName, found: Mapping[RoleName, Resident], implementation: Implementation
) -> dict[str, float]:
    """A forward pass: the widest place of a layer, and the logits with their fp32 chunk."""
    one, head = _pass(config, role, implementation)
    logits = one.logits if stage.is_last and head in ("lm", "lm+value") else 0.0
    working = 2 * one.hidden + _mlp_width(one) * 3 + _logit_chunks(one, 2) * (logits > 0) + _gathered(config, stage.networks[role])
    return {"activations": 0.0, "logits": logits, "working": working}


def _update(config: Config, stage: Stage, role: RoleName, num_training: int, implementation: Implementation) -> dict[str, float]:
    """Forward and backward of one role's step; the other networks stay as they are."""
    one, head = _pass(config, role, implementation)
    count = num_micro_batches(config, num_training)
    number = stage.stages[0]
    kept = kept_by_stage(one, head, number, chunk_sizes(config, one.network, number), count)
    # Gradients of a layer's widest place, of hidden states on both of its sides, and sequence parallelism's gathered input.
    working = 2 * one.hidden + _mlp_width(one) * 3 + one.num_tokens * one.network.hidden_size * one.element
    at_head = kept.logits + _logit_chunks(one, 3) if kept.logits else 0.0  # the logits' gradient
    working = max(working + kept.again - kept.head - kept.logits, at_head) + _gathered(config, stage.networks[role])
    if config.parallel.backend == "fsdp":
        working += stage.networks[role].largest_unit * _FP32  # a layer's whole gradients, before they are summed and cut
    return {"activations": kept.layers + kept.head, "logits": kept.logits, "working": working}


def _mlp_width(one: Pass) -> float:
    """Bytes of one tensor of the MLP's inner width."""
    network = one.network
    tokens = one.num_tokens_outside * network.num_experts_per_tok if network.num_experts else one.num_tokens
    return tokens * network.intermediate_size / (1 if network.num_experts else one.tp) * one.element


def _logit_chunks(one: Pass, count: int) -> float:
    """fp32 copies of the logits of ``CHUNK_SIZE`` tokens."""
    return count * min(one.num_tokens, CHUNK_SIZE) * vocabulary_rows(one.network, one.config) / one.tp * _FP32


def engine_memory(config: Config, shard_elements: int, gpu_memory: float, num_replicas: int = 1) -> EngineMemory:
    """One rollout rank. ``shard_elements``: of the engine's parameters on it (``refit_plan``), ``gpu_memory`` in bytes.

    vLLM takes ``gpu_memory_utilization`` of the GPU for weights, its largest pass and the cache; plain generation (hf) what its rows need:
    those of a replica, of ``num_replicas``, that are sampled at the same time. ``ValueError`` for overrides that are no such numbers.
    """
    network, r, tp = shape_of(Path(config.model.model_path)), config.rollout, config.parallel.rollout_tensor_parallel_size
    plain = r.rollout_backend == "hf"
    element = 2 if r.rollout_dtype == "bfloat16" else _FP32
    weights = shard_elements * element
    per_token = 2.0 * network.num_layers * max(network.kv_size / tp, network.head_dim) * element
    sequences = max_num_seqs(config)
    batched = _whole_number(config, "max_num_batched_tokens", DEFAULT_BATCHED_TOKENS)
    if plain:
        sequences = min(sequences, responses_of_replica(config, num_replicas))
        batched = min(max(PREFILL_TOKENS, r.max_prompt_length), sequences * r.max_prompt_length)
    width = network.intermediate_size * (network.num_experts_per_tok or 1) / tp
    # Hidden states and a gated MLP for the largest batch; fp32 logits of every sequence's last token, twice for the sampler.
    working = batched * (4 * network.hidden_size + 3 * width) * element + 2.0 * sequences * network.vocab_size * _FP32
    if plain:
        cache = per_token * config.max_model_len * sequences
        working += cache / network.num_layers  # a layer's part is copied where it grows
    elif "kv_cache_memory_bytes" in r.vllm_overrides:
        cache = float(_whole_number(config, "kv_cache_memory_bytes", 0))
    else:
        cache = utilization(config) * gpu_memory - weights - working
    frozen, size = frozen_on_rollout(config), 2 if config.model.params_dtype == "bfloat16" else _FP32
    copies = {role: size * _num_elements(shape_of(plan.folder), plan.head) for role, plan in frozen.items()}
    return EngineMemory(weights, working, cache, per_token, config.max_model_len, copies, _evaluation(config, frozen), sleeps=not plain)


@functools.cache
def _num_elements(network: NetworkShape, head: Head) -> int:
    """Of a whole network of transformers."""
    return sum(math.prod(shape) for shape in hf_layout(network, head).shapes.values())


def frozen_on_rollout(config: Config) -> dict[RoleName, PlannedNetwork]:
    """The networks of which each rollout rank has a copy (``backends/hf_evaluation.py``)."""
    if config.rollout.compute_on != "rollout":
        return {}
    planned = planned_networks(config.replace(compute_on="training"))
    return {role: plan for role, plan in planned.items() if plan.peak_lr is None}


def _evaluation(config: Config, frozen: Mapping[RoleName, PlannedNetwork]) -> float:
    """A pass of a micro-batch through a whole network, without gradients: of frozen ones, and of the actor where it has a value head."""
    if config.rollout.compute_on != "rollout":
        return 0.0
    split = {"tensor": 1, "pipeline": 1, "virtual_pipeline": None, "expert": 1}
    alone = config.replace(
        backend="fsdp",
        context_parallel_size=1,
        sequence_parallel=False,
        transformer_overrides={},
        **{f"{name}_model_parallel_size": size for name, size in split.items()},
    )
    actor = PlannedNetwork(Path(config.model.model_path), "value")
    most = 0.0
    for plan in [*frozen.values(), *([actor] if config.model.critic == "shared" else [])]:
        one = Pass(shape_of(plan.folder), alone, "hf", *micro_batch_shape(alone))
        logits = one.logits + _logit_chunks(one, 2) if plan.head == "lm" else 0.0
        most = max(most, logits + 2 * one.hidden + 3 * _mlp_width(one))
    return most


def responses_of_replica(config: Config, num_replicas: int) -> int:
    """Responses that a replica samples in an iteration, at most."""
    return -(-config.rollout.prompts_per_iteration // max(1, num_replicas)) * config.rollout.samples_per_prompt


def max_num_seqs(config: Config) -> int:
    """Responses that an engine samples at the same time."""
    return _whole_number(config, "max_num_seqs", MAX_NUM_SEQS if config.rollout.rollout_backend == "hf" else DEFAULT_SEQUENCES)


def utilization(config: Config) -> float:
    """Share of a GPU that vLLM takes."""
    text = config.rollout.vllm_overrides.get("gpu_memory_utilization")
    if text is None:
        return COLOCATED_UTILIZATION if config.is_colocated else DEFAULT_UTILIZATION
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise ValueError(
            f"vllm_overrides gpu_memory_utilization = {text!r} must be a number above 0 and at most 1: vLLM's share of the GPU"
        )
    return share


def check_overrides(config: Config) -> None:
    """``ValueError`` for overrides of the engine that are no such numbers."""
    for name, default in (("max_num_batched_tokens", DEFAULT_BATCHED_TOKENS), ("kv_cache_memory_bytes", 0)):
        _whole_number(config, name, default)
    max_num_seqs(config), utilization(config)


def _whole_number(config: Config, name: str, default: int) -> int:
    text = config.rollout.vllm_overrides.get(name, str(default))
    if not text.isdecimal() or (not int(text) and name in config.rollout.vllm_overrides):
        raise ValueError(f"vllm_overrides {name} = {text!r} must be a whole number of at least 1")
    return int(text)


DEFAULT_UTILIZATION, COLOCATED_UTILIZATION = 0.85, 0.5
"""``backends/vllm.py``'s ``gpu_memory_utilization``, where the engine has the GPU for itself and where it does not."""
DEFAULT_BATCHED_TOKENS, DEFAULT_SEQUENCES = 16384, 1024
"""vLLM's defaults for offline use on GPUs of 70 GiB and more (``EngineArgs._get_default_max_num_batched_tokens``)."""


def predicted_training(config: Config, num_training: int, implementation: Implementation) -> list[dict[str, float]]:
    """Bytes of weights, gradients, optimizer and activations (with logits) of every rank of a training mesh, by its number: what
    ``benchmarks/plan_memory.py`` compares with real ranks. Starts child processes."""
    stages = build_stages([config], [num_training])[0]
    per_stage = num_training // config.parallel.pipeline_model_parallel_size
    count = num_micro_batches(config, num_training)
    planned = planned_networks(config)
    found = []
    for rank in range(num_training):
        number = rank // per_stage if config.parallel.backend == "megatron" else 0
        stage = next(one for one in stages if number in one.stages)
        parts = [resident(config, held, num_training, trained=planned[role].peak_lr is not None) for role, held in stage.networks.items()]
        kept = []
        for role in ("actor", "critic"):
            if role in stage.networks:
                one, head = _pass(config, role, implementation)
                most = kept_by_stage(one, head, number, chunk_sizes(config, one.network, number), count)
                # torch's own checkpoint keeps the layer that it computes again in a place of its own, which no hook sees.
                kept.append(most.layers + most.head + most.logits if implementation == "hf" else most.peak)
        found.append(
            {
                "weights": sum(part.weights for part in parts),
                "gradients": sum(part.gradients for part in parts),
                "optimizer": sum(part.optimizer for part in parts),
                "activations": max(kept),
            }
        )
    return found
