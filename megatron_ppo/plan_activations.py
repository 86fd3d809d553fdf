"""Bytes that a pass keeps for its backward pass, from the shape of the network, the batch and the way it is computed.

The method is that of "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198, section 4): go through a layer,
add up what each operation saves, divide what tensor parallelism splits by t, and the rest by t too where sequences are split (section 4.2).
That paper counts 34 sbh + 5 a s^2 b for GPT-3's layer. Here layers are gated, without biases and dropout, with grouped queries, and
attention is computed without its [s, s] scores (arXiv:2205.14135), in one of three ways whose saved tensors differ:

    local                our norm and scaled_dot_product_attention in megatron-core's layer: what a machine without Transformer Engine runs
    transformer_engine   norms fused with the linear layer behind them, one attention kernel
    hf                   transformers' layer, under FSDP

How many micro-batches are in flight on a pipeline stage is that of 1F1B and of the interleaved schedule (arXiv:2104.04473, section 2.2).
``benchmarks/plan_memory.py`` holds ``local`` and ``hf`` to what real ranks save; ``transformer_engine`` has not been measured. Left out:
what is not kept for a backward pass (``plan_memory.py`` adds working memory).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_ppo.config import Config
from megatron_ppo.families import Head, NetworkShape

Implementation = Literal["local", "transformer_engine", "hf"]
"""How layers are computed."""

_FP32 = 4
_INDEX = 8


@dataclass(frozen=True)
class Pass:
    """One micro-batch on one rank, and how it is computed."""

    network: NetworkShape
    config: Config
    implementation: Implementation
    num_rows: int
    length: int
    """Tokens of a row with padding."""

    @property
    def num_tokens(self) -> float:
        """Tokens of the micro-batch that this rank computes: context parallelism splits rows."""
        return self.num_rows * self.length / self.config.parallel.context_parallel_size

    @property
    def num_tokens_outside(self) -> float:
        """Those outside of attention and MLP, where sequence parallelism splits once more."""
        p = self.config.parallel
        return self.num_tokens / (p.tensor_model_parallel_size if p.sequence_parallel else 1)

    @property
    def tp(self) -> int:
        """Ranks that share a matrix."""
        return self.config.parallel.tensor_model_parallel_size

    @property
    def element(self) -> int:
        """Bytes of an element of hidden states."""
        return 2 if self.config.model.params_dtype == "bfloat16" else 4

    @property
    def query(self) -> float:
        """Columns of this rank's queries."""
        return self.network.query_size / self.tp

    @property
    def key(self) -> float:
        """Columns of this rank's keys, and of its values: at least one head."""
        return max(self.network.kv_size / self.tp, self.network.head_dim)

    @property
    def hidden(self) -> float:
        """Bytes of hidden states between layers."""
        return self.num_tokens_outside * self.network.hidden_size * self.element

    @property
    def logits(self) -> float:
        """Bytes of this rank's logits, padding of the vocabulary included, in the dtype of the weights."""
        return self.num_tokens * vocabulary_rows(self.network, self.config) / self.tp * self.element


def vocabulary_rows(network: NetworkShape, config: Config) -> int:
    """Rows of embedding and head on all tensor-parallel ranks together."""
    if config.parallel.backend == "fsdp":
        return network.vocab_size
    multiple = config.model.make_vocab_size_divisible_by * config.parallel.tensor_model_parallel_size
    return -(-network.vocab_size // multiple) * multiple


def layer_terms(one: Pass) -> dict[str, float]:
    """Bytes that one layer keeps, by part, without recomputation."""
    network, inside, e = one.network, one.num_tokens, one.element
    terms = {"norms": 2 * _norm(one, one.num_tokens_outside * network.hidden_size, one.num_tokens_outside)}
    # What linear layers were given: the norms' results (with sequence parallelism only this rank's part is kept), and attention's, which
    # attention keeps too.
    terms["inputs of linear layers"] = 2 * one.hidden + inside * one.query * e
    terms["queries, keys, values"] = _query_key_value(one)
    terms["attention"] = inside * network.num_attention_heads / one.tp * _FP32  # the logarithm of each softmax's sum
    if _gathers(one):
        terms["attention"] += inside * one.query * e  # the results of both chunks, before they are put together
    terms |= _mixture(one) if network.num_experts else {"mlp": _gated(one) * inside * network.intermediate_size / one.tp * e}
    return terms


def _norm(one: Pass, num_elements: float, num_vectors: float) -> float:
    """An RMSNorm over so many elements: what it was given (in fp32) and what it made of it, before the weight; a number for each vector."""
    if one.implementation == "transformer_engine":
        return num_elements * one.element + num_vectors * _FP32
    return num_elements * (_FP32 + one.element) + num_vectors * _FP32


def _query_key_value(one: Pass) -> float:
    inside, e, rotated = one.num_tokens, one.element, one.query + one.key
    if _gathers(one):  # rotated queries, and keys and values of the whole rows
        kept = inside * (one.query + 2 * one.key * one.config.parallel.context_parallel_size) * e
    else:
        # The values are a view of what the one projection gave, and keep all of it; transformers projects each by itself.
        projected = one.key if one.implementation == "hf" else one.query + 2 * one.key
        kept = inside * (projected + rotated) * e
    if one.implementation != "hf":  # cosines and sines, once for queries and once for keys
        kept += 4 * one.length / one.config.parallel.context_parallel_size * one.network.head_dim * e
    if one.network.has_qk_norm:
        kept += _norm(one, inside * rotated, inside * rotated / one.network.head_dim)
        if one.implementation == "local" and e == _FP32:
            kept -= inside * one.key * e  # the keys before their norm are a view of the projection's result
    return kept


def _gathers(one: Pass) -> bool:
    """Whether a context-parallel rank attends to keys and values that it has gathered (``megatron_spec.CausalAttention``)."""
    return one.implementation == "local" and one.config.parallel.context_parallel_size > 1


def _gated(one: Pass) -> int:
    """Widths that a gated MLP keeps: gate and up, the gate's activation, both multiplied; megatron-core also copies ``up`` (adding 0)."""
    return 4 if one.implementation == "hf" else 5


def _mixture(one: Pass) -> dict[str, float]:
    """Router and experts; every rank is taken to be given equally many tokens."""
    network, e = one.network, one.element
    expert_tp = int(one.config.model.transformer_overrides.get("expert_tensor_parallel_size", one.tp))
    routed = one.num_tokens_outside * network.num_experts_per_tok * expert_tp
    return {
        "router": one.num_tokens_outside * network.num_experts * _FP32,
        # Twice: the tokens as they are put in the experts' order, and the weighted results; each token with its weight.
        "dispatched tokens": routed * (network.hidden_size * e + _FP32 + _INDEX),
        "experts": (_gated(one) + 1) * routed * network.intermediate_size / expert_tp * e,
    }


def kept_by_layer(one: Pass) -> float:
    """Bytes that a layer keeps between its forward and its backward pass, with the configuration's recomputation."""
    granularity = one.config.model.recompute_granularity
    if granularity == "full":
        return one.hidden  # what the layer was given
    terms = layer_terms(one)
    if granularity == "selective" and one.implementation == "hf":  # all of the attention block but its norm
        del terms["attention"], terms["queries, keys, values"]
        terms["inputs of linear layers"] -= one.num_tokens * one.query * one.element
    elif granularity == "selective":
        del terms["attention"]
    return sum(terms.values())


def kept_by_ends(one: Pass, head: Head, *, is_first: bool, is_last: bool) -> float:
    """Bytes that embedding, last norm and head keep, without logits."""
    kept = one.num_tokens * (_INDEX + 1) if is_first else 0.0
    if is_last:
        kept += _norm(one, one.num_tokens_outside * one.network.hidden_size, one.num_tokens_outside) + one.hidden
        if head != "lm" and (one.element != _FP32 or one.hidden < one.num_tokens * one.network.hidden_size * _FP32):
            kept += one.num_tokens * one.network.hidden_size * _FP32  # the value head's input, whole and in fp32
        kept += one.num_rows * one.length * _LOSS_BYTES
    return kept


_LOSS_BYTES = 45
"""A token's numbers that log-probs and loss keep: fp32 tensors, masks and labels."""


def kept_by_recomputation(one: Pass) -> float:
    """Bytes that a layer keeps while it is computed again for its backward pass, beside what it was given; 0 where none is."""
    if one.config.model.recompute_granularity != "full":
        return 0.0
    given_is_kept = one.implementation == "transformer_engine" or one.element == _FP32  # by the first norm, which makes no copy of it
    return sum(layer_terms(one).values()) - (one.hidden if given_is_kept else 0.0)


def in_flight(config: Config, stage: int, num_micro_batches: int) -> int:
    """Chunks of layers of ``stage`` whose activations are held at once: 1F1B holds a micro-batch for every stage from here on; the
    interleaved schedule starts up with so many chunks (megatron-core's ``get_pp_rank_microbatches``), and one more is under way."""
    p = config.parallel
    pp, chunks = p.pipeline_model_parallel_size, p.virtual_pipeline_model_parallel_size
    if chunks is None:
        return min(num_micro_batches, pp - stage)
    return min(num_micro_batches * chunks, (pp - stage - 1) * 2 + (chunks - 1) * pp + 1)


@dataclass(frozen=True)
class Kept:
    """Bytes that a rank holds at most for backward passes, over all micro-batches in flight."""

    layers: float
    """Layers and embedding."""
    head: float
    """Last norm, heads and loss: of one micro-batch, whose backward pass comes at once."""
    logits: float
    """Likewise."""
    again: float
    """A layer that is computed again, when head and logits have gone."""

    @property
    def peak(self) -> float:
        """All that is held at once."""
        return self.layers + max(self.head + self.logits, self.again)


def kept_by_stage(one: Pass, head: Head, stage: int, num_layers: tuple[int, ...], num_micro_batches: int) -> Kept:
    """What a rank of ``stage`` holds. ``num_layers``: of each of its chunks."""
    pp = one.config.parallel.pipeline_model_parallel_size
    is_first, is_last = stage == 0, stage == pp - 1
    held = in_flight(one.config, stage, num_micro_batches)
    ends = kept_by_ends(one, head, is_first=is_first, is_last=False)
    # Chunks are of one size but for the embedding's or the loss's: the largest is taken for all.
    return Kept(
        layers=held * (max(num_layers) * kept_by_layer(one) + ends),
        head=kept_by_ends(one, head, is_first=False, is_last=is_last),
        logits=one.logits if is_last and head in ("lm", "lm+value") else 0.0,
        again=kept_by_recomputation(one),
    )
