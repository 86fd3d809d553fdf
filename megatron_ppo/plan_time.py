"""Predicted seconds of an iteration: a roofline, good for comparing meshes with each other, not for promising a time.

    update   6 N FLOPs a token and pass (8 N with full recomputation) and attention's 12 L q T / 2 (arXiv:2204.02311, appendix B), N
             without the embedding and, of a mixture, with the experts that a token goes through; at ``mfu`` of the GPUs' peak;
             x (1 + bubble), bubble = (p - 1) / (m v) (arXiv:2104.04473, section 2.2: p stages, m micro-batches, v chunks a stage);
             + what travels meanwhile, taken not to overlap: 4 all-reduces of hidden states a layer for tensor parallelism
             (arXiv:1909.08053; 6 with full recomputation), gradients and parameters once a step for data parallelism, tokens to
             experts and back
    score    2 N FLOPs a token for each network, likewise
    rollout  prompts at ``mfu``; then one token of every sequence a step, which reads the weights and the key/value cache of the sequences
             (at ``decode_efficiency`` of the memory's bandwidth) or computes 2 N FLOPs each, whichever takes longer, and waits for 2
             all-reduces a layer under tensor parallelism; with compute_on = rollout 2 N FLOPs a token for each network of the replica more
    sync     the busiest sender's or receiver's bytes over its link

Every response is taken at its longest. Rewards, logging, start-up and checkpoints are left out. Nothing here has been compared with a GPU.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

from megatron_ppo.backends.base import planned_networks
from megatron_ppo.config import Config
from megatron_ppo.families import EMBEDDING, LM_HEAD, NetworkShape, canonical_tensors
from megatron_ppo.plan_memory import (
    EngineMemory,
    frozen_on_rollout,
    max_num_seqs,
    micro_batch_shape,
    num_micro_batches,
    responses_of_replica,
    shape_of,
)
from megatron_ppo.resharding.megatron_mesh import megatron_parallel

_FP32 = 4


@dataclass(frozen=True)
class Machine:
    """What the GPUs and their links are taken to do. Defaults: H100 SXM, 400 Gbit/s a GPU between nodes."""

    ranks_per_node: int = 8
    gpu_memory_gib: float = 80.0
    rollout_gpu_memory_gib: float | None = None
    """Of the rollout ranks' GPUs; None: as the training ranks'."""
    reserve_gib: float = 4.0
    """Of that, what context, collectives and fragments take."""
    peak_tflops: float = 989.0
    """Dense bf16."""
    mfu: float = 0.4
    """Share of the peak that forward and backward passes reach."""
    memory_gbs: float = 3350.0
    """GB/s of a GPU's memory."""
    decode_efficiency: float = 0.6
    """Share of that which decoding reaches."""
    nvlink_gbs: float = 450.0
    """GB/s in one direction between GPUs of a node."""
    network_gbs: float = 50.0
    """GB/s in one direction of a GPU to other nodes."""
    latency_us: float = 10.0
    """Of one small all-reduce."""

    @property
    def rollout_memory_gib(self) -> float:
        """Memory of a rollout rank's GPU."""
        return self.gpu_memory_gib if self.rollout_gpu_memory_gib is None else self.rollout_gpu_memory_gib

    @property
    def flops(self) -> float:
        """FLOP/s that a GPU reaches."""
        return self.peak_tflops * 1e12 * self.mfu

    def link(self, num_ranks: int) -> float:
        """Bytes/s of a rank within a group that spans so many consecutive ranks."""
        return (self.nvlink_gbs if num_ranks <= self.ranks_per_node else self.network_gbs) * 1e9


@dataclass(frozen=True)
class Seconds:
    """Of one iteration."""

    sync: float
    rollout: float
    score: float
    update: float
    bubble: float
    """Idle share of a training rank's time, over the time it works."""
    communication: float
    """Seconds of ``update`` that something travels."""

    @property
    def total(self) -> float:
        """The phases take turns."""
        return self.sync + self.rollout + self.score + self.update


@functools.cache
def active_parameters(network: NetworkShape, *, with_head: bool = True) -> int:
    """Elements of the matrices that a token goes through."""
    total = 0
    for tensor in canonical_tensors(network):
        if tensor.name == EMBEDDING or (tensor.name == LM_HEAD and not with_head):
            continue
        share = network.num_experts_per_tok / network.num_experts if network.num_experts and ".experts." in tensor.name else 1.0
        total += int(math.prod(tensor.shape) * share)
    if with_head and network.tied:
        total += network.vocab_size * network.hidden_size
    return total


def pass_flops(network: NetworkShape, length: int, *, with_head: bool = True) -> float:
    """FLOPs of a forward pass a token: 2 N, and causal attention over rows of ``length``."""
    return 2.0 * active_parameters(network, with_head=with_head) + 2.0 * network.num_layers * network.query_size * length


def bubble(config: Config, count: int) -> float:
    """Idle time of a pipeline over its working time, for ``count`` micro-batches."""
    p = config.parallel
    return (p.pipeline_model_parallel_size - 1) / (count * (p.virtual_pipeline_model_parallel_size or 1))


def training_seconds(config: Config, num_training: int, held: int, machine: Machine) -> tuple[float, float, float]:
    """(score, update, seconds of the update that something travels). ``held``: elements of the actor on the fullest training rank."""
    t = config.training
    length = micro_batch_shape(config)[1]
    tokens = float(config.rollout_batch_size * length)
    share = tokens / (num_training * machine.flops)
    count = num_micro_batches(config, num_training)
    idle = 1 + bubble(config, count)
    factor = 4.0 if config.model.recompute_granularity == "full" else 3.0
    score = update = travel = 0.0
    for plan in planned_networks(config).values():
        network = shape_of(plan.folder)
        flops = pass_flops(network, length, with_head=plan.head in ("lm", "lm+value"))
        moved = _travel(config, network, tokens, num_training, machine)
        score += share * flops * idle + moved
        if plan.peak_lr is not None:
            step = _per_step(config, num_training, held, count, machine)
            steps = t.ppo_epochs * config.rollout_batch_size // t.global_batch_size
            # A backward pass computes twice what a forward one does, and sends as much.
            traveled = t.ppo_epochs * (factor - 1) * moved + steps * step
            update += share * flops * t.ppo_epochs * factor * idle + traveled
            travel += traveled
    return score, update, travel


def _travel(config: Config, network: NetworkShape, tokens: float, num_training: int, machine: Machine) -> float:
    """Seconds that hidden states travel in a forward pass of all tokens, on one rank."""
    if config.parallel.backend == "fsdp":
        return 0.0
    p, element = config.parallel, 2 if config.model.params_dtype == "bfloat16" else _FP32
    tp, pp, cp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.context_parallel_size
    own = tokens / (num_training // (tp * pp * cp)) / cp  # tokens that pass through this rank
    hidden = own * network.hidden_size * element
    layers = network.num_layers / pp
    seconds = layers * 2 * hidden * 2 * (tp - 1) / tp / machine.link(tp)
    ep, expert_tp = p.expert_model_parallel_size, megatron_parallel(config).expert_tensor_size
    if network.num_experts and ep > 1:
        seconds += layers * 2 * hidden / tp * network.num_experts_per_tok * (ep - 1) / ep / machine.link(ep * expert_tp)
    if cp > 1:  # keys and values of the whole rows
        seconds += layers * hidden * 2 * network.kv_size / network.hidden_size / tp * (cp - 1) / machine.link(tp * cp)
    return seconds + (hidden / machine.link(num_training) if pp > 1 else 0.0)


def _per_step(config: Config, num_training: int, held: int, count: int, machine: Machine) -> float:
    """Seconds that gradients and parameters travel in an optimizer step."""
    p, element = config.parallel, 2 if config.model.params_dtype == "bfloat16" else _FP32
    if p.backend == "fsdp":
        shards = config.fsdp_shards(num_training)
        whole = held * shards * (shards - 1) / shards
        return count * whole * (2 * element + _FP32) / machine.link(shards)
    copies = num_training // (p.tensor_model_parallel_size * p.pipeline_model_parallel_size)
    spanned = num_training // p.pipeline_model_parallel_size
    return held * (_FP32 + element) * (copies - 1) / copies / machine.link(spanned)


def rollout_seconds(config: Config, num_replicas: int, engine: EngineMemory, machine: Machine) -> float:
    """Seconds until the last replica has sampled its share, sequence by sequence of the longest response."""
    network, r = shape_of(Path(config.model.model_path)), config.rollout
    tp = config.parallel.rollout_tensor_parallel_size
    own = responses_of_replica(config, num_replicas)
    at_once = max(1, min(own, engine.num_sequences or own, max_num_seqs(config)))
    waves = math.ceil(own / at_once)
    bandwidth = machine.memory_gbs * 1e9 * machine.decode_efficiency
    prompts = own * r.max_prompt_length * pass_flops(network, r.max_prompt_length) / (tp * machine.flops)
    length = r.max_prompt_length + r.max_response_length / 2
    # A large batch reads every expert.
    read = engine.weights + at_once * length * engine.cache_bytes_per_token
    compute = at_once * pass_flops(network, int(length)) / (tp * machine.flops)
    element = 2 if r.rollout_dtype == "bfloat16" else _FP32
    moved = at_once * network.hidden_size * element * 2 * (tp - 1) / tp / machine.link(tp) + machine.latency_us * 1e-6 if tp > 1 else 0.0
    step = max(read / bandwidth, compute) + 2 * network.num_layers * moved
    return prompts + waves * r.max_response_length * step + _evaluation_seconds(config, own, machine)


def _evaluation_seconds(config: Config, num_rows: int, machine: Machine) -> float:
    """compute_on = rollout: a replica's rows through its frozen networks, and through the actor where that has a value head."""
    if config.rollout.compute_on != "rollout":
        return 0.0
    length = config.max_model_len
    flops = sum(pass_flops(shape_of(plan.folder), length, with_head=plan.head == "lm") for plan in frozen_on_rollout(config).values())
    if config.model.critic == "shared":
        flops += pass_flops(shape_of(Path(config.model.model_path)), length, with_head=False)
    return num_rows * length * flops / machine.flops


def sync_seconds(busiest_sent: float, busiest_received: float, world_size: int, machine: Machine) -> float:
    """Seconds of one weight sync: both meshes on one node use its links, otherwise the network."""
    return max(busiest_sent, busiest_received) / machine.link(world_size)
