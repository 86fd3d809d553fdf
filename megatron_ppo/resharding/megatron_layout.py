"""How the parameters of megatron-core's ``GPTModel`` lie on each training rank, as blocks of canonical tensors.

Pure data: built from the network and the parallel sizes, on any machine; megatron is not imported. The plan (``plan.py``) intersects
it with the rollout side's layout; ``hf_checkpoint.py`` loads through it; export reads through it. Source of names and of the rules:
megatron-core 0.16.1, ``models/gpt``, ``transformer/attention.py``, ``transformer/transformer_layer.py``.

    linear_qkv   rows  [q of group 0; k 0; v 0 | q of group 1; k 1; v 1 | ...], cut into TP equal parts
    linear_fc1   rows  [gate_r; up_r] on rank r
    embedding    rows  padded to a multiple of make_vocab_size_divisible_by * TP, cut into TP equal parts
    layers             chunk v of stage p holds layers v * L/V + p * L/(V*P) onwards, numbered from 0 locally
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ppo.config import Config
from megatron_ppo.resharding.families import EMBEDDING, FINAL_NORM, LM_HEAD, SCORE_HEAD, Head, NetworkShape, canonical_tensors
from megatron_ppo.resharding.layout import RankLayout
from megatron_ppo.resharding.layout_builder import LayoutBuilder, Piece, cut_pieces, padded_rows

VALUE_HEAD = "value_head.weight"
"""Local name of the scalar head (critic and reward model alike), replicated over tensor-parallel ranks."""


@dataclass(frozen=True)
class MegatronParallel:
    """The sizes of the training mesh that decide where a weight lies; data and context parallel ranks hold the same."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    """Chunks a stage holds; None: one, and names without the ``model{v}.`` prefix."""
    make_vocab_size_divisible_by: int = 128

    @property
    def num_chunks(self) -> int:
        """Chunks of a stage, 1 without the interleaved schedule."""
        return self.virtual_pipeline_model_parallel_size or 1


def megatron_parallel(config: Config) -> MegatronParallel:
    """The sizes of a run."""
    parallel = config.parallel
    return MegatronParallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        make_vocab_size_divisible_by=config.model.make_vocab_size_divisible_by,
    )


def megatron_layout(
    network: NetworkShape,
    parallel: MegatronParallel,
    *,
    tp_rank: int,
    pp_rank: int,
    head: Head = "lm",
    transformer_engine_names: bool = False,
) -> RankLayout:
    """All parameters of the rank. With the interleaved schedule, names of chunk v begin with ``model{v}.``.

    ``transformer_engine_names``: the spec that fuses each norm into the linear layer after it. ``ValueError`` (``check_megatron``) where
    the sizes do not divide.
    """
    check_megatron(network, parallel)
    if not 0 <= tp_rank < parallel.tensor_model_parallel_size or not 0 <= pp_rank < parallel.pipeline_model_parallel_size:
        raise ValueError(f"no rank (tp {tp_rank}, pp {pp_rank}) in {parallel}")
    rank = _Rank(LayoutBuilder(canonical_tensors(network, head)), network, parallel, tp_rank)
    for chunk in range(parallel.num_chunks):
        prefix = "" if parallel.virtual_pipeline_model_parallel_size is None else f"model{chunk}."
        if pp_rank == 0 and chunk == 0:
            rank.add_vocabulary(f"{prefix}embedding.word_embeddings.weight", EMBEDDING)
        for local, layer in enumerate(chunk_layers(network.num_layers, parallel, pp_rank, chunk)):
            layer_prefix = f"{prefix}decoder.layers.{local}."
            rank.add_attention(layer, layer_prefix)
            rank.add_mlp(layer, layer_prefix)
            rank.add_norms(layer, layer_prefix, transformer_engine_names)
        if pp_rank == parallel.pipeline_model_parallel_size - 1 and chunk == parallel.num_chunks - 1:
            rank.add_heads(prefix, head)
    return rank.builder.build()


def check_megatron(network: NetworkShape, parallel: MegatronParallel) -> None:
    """``ValueError`` with the equation and its numbers for the first rule that the sizes break."""
    tp, pp, chunks = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, parallel.num_chunks
    layers, heads, groups = network.num_layers, network.num_attention_heads, network.num_key_value_heads
    if min(tp, pp, chunks, parallel.make_vocab_size_divisible_by) < 1:
        raise ValueError(f"every size must be at least 1, but they are {parallel}")
    if parallel.virtual_pipeline_model_parallel_size is not None and pp == 1:
        raise ValueError(
            f"virtual_pipeline_model_parallel_size {chunks} needs pipeline_model_parallel_size > 1; leave it unset or raise the latter"
        )
    if pp > layers:
        raise ValueError(f"pipeline_model_parallel_size {pp} exceeds the model's {layers} layers; lower it")
    if layers % (pp * chunks):
        raise ValueError(
            f"{layers} layers do not divide by pipeline_model_parallel_size {pp} * virtual chunks {chunks} = {pp * chunks}; "
            "choose sizes whose product divides the number of layers (uneven stages are not supported)"
        )
    if heads % tp:
        raise ValueError(f"{heads} attention heads do not divide by tensor_model_parallel_size {tp}; choose a divisor of {heads}")
    if groups % tp and tp % groups:
        raise ValueError(
            f"{groups} key/value heads and tensor_model_parallel_size {tp}: one must be a multiple of the other; choose another size"
        )
    qkv_rows = network.query_size + 2 * network.kv_size
    if qkv_rows % tp:
        raise ValueError(f"the {qkv_rows} rows of linear_qkv do not divide by tensor_model_parallel_size {tp}; choose another size")
    if network.intermediate_size % tp:
        raise ValueError(
            f"intermediate_size {network.intermediate_size} does not divide by tensor_model_parallel_size {tp}; choose another"
        )


def padded_vocab_size(network: NetworkShape, parallel: MegatronParallel) -> int:
    """Rows of embedding and head over all tensor-parallel ranks together."""
    return padded_rows(network.vocab_size, parallel.make_vocab_size_divisible_by * parallel.tensor_model_parallel_size)


def chunk_layers(num_layers: int, parallel: MegatronParallel, pp_rank: int, chunk: int = 0) -> range:
    """Global numbers of the layers in a chunk of a stage, in order."""
    pp, chunks = parallel.pipeline_model_parallel_size, parallel.num_chunks
    size = num_layers // (pp * chunks)
    start = chunk * (num_layers // chunks) + pp_rank * size
    return range(start, start + size)


@dataclass(frozen=True)
class _Rank:
    """What the parts of one rank's layout need in common; every method adds parameters to the builder."""

    builder: LayoutBuilder
    network: NetworkShape
    parallel: MegatronParallel
    tp_rank: int

    def add_vocabulary(self, parameter: str, name: str) -> None:
        rows = padded_vocab_size(self.network, self.parallel) // self.parallel.tensor_model_parallel_size
        self.builder.vocabulary(parameter, name, self.tp_rank, rows)

    def add_attention(self, layer: int, prefix: str) -> None:
        network, tp = self.network, self.parallel.tensor_model_parallel_size
        source = f"model.layers.{layer}.self_attn."
        rows = (network.query_size + 2 * network.kv_size) // tp
        for kind in ("weight", "bias") if network.has_qkv_bias else ("weight",):
            pieces = cut_pieces(_interleaved_qkv(network, source, kind), self.tp_rank * rows, (self.tp_rank + 1) * rows)
            self.builder.stack(f"{prefix}self_attention.linear_qkv.{kind}", pieces)
        self.builder.split(f"{prefix}self_attention.linear_proj.weight", f"{source}o_proj.weight", 1, self.tp_rank, tp)
        if network.has_qk_norm:
            self.builder.whole(f"{prefix}self_attention.q_layernorm.weight", f"{source}q_norm.weight")
            self.builder.whole(f"{prefix}self_attention.k_layernorm.weight", f"{source}k_norm.weight")

    def add_mlp(self, layer: int, prefix: str) -> None:
        source, tp = f"model.layers.{layer}.mlp.", self.parallel.tensor_model_parallel_size
        rows = self.network.intermediate_size // tp
        part = (self.tp_rank * rows, (self.tp_rank + 1) * rows)
        self.builder.stack(f"{prefix}mlp.linear_fc1.weight", [(f"{source}gate_proj.weight", part), (f"{source}up_proj.weight", part)])
        self.builder.split(f"{prefix}mlp.linear_fc2.weight", f"{source}down_proj.weight", 1, self.tp_rank, tp)

    def add_norms(self, layer: int, prefix: str, fused: bool) -> None:
        source = f"model.layers.{layer}."
        before_attention = "self_attention.linear_qkv.layer_norm_weight" if fused else "input_layernorm.weight"
        before_mlp = "mlp.linear_fc1.layer_norm_weight" if fused else "pre_mlp_layernorm.weight"
        self.builder.whole(f"{prefix}{before_attention}", f"{source}input_layernorm.weight")
        self.builder.whole(f"{prefix}{before_mlp}", f"{source}post_attention_layernorm.weight")

    def add_heads(self, prefix: str, head: Head) -> None:
        self.builder.whole(f"{prefix}decoder.final_layernorm.weight", FINAL_NORM)
        uses_embedding_itself = self.network.tied and self.parallel.pipeline_model_parallel_size == 1
        if head in ("lm", "lm+value") and not uses_embedding_itself:  # a tied model's last stage keeps a copy of the embedding
            self.add_vocabulary(f"{prefix}output_layer.weight", EMBEDDING if self.network.tied else LM_HEAD)
        if head != "lm":
            self.builder.whole(f"{prefix}{VALUE_HEAD}", SCORE_HEAD)


def _interleaved_qkv(network: NetworkShape, source: str, kind: str) -> list[Piece]:
    """Rows of the whole fused tensor. More ranks than groups cut a group's rows: such ranks gather activations, not weights."""
    size = network.head_dim
    queries = network.query_size // network.num_key_value_heads
    pieces: list[Piece] = []
    for group in range(network.num_key_value_heads):
        pieces.append((f"{source}q_proj.{kind}", (group * queries, (group + 1) * queries)))
        pieces.append((f"{source}k_proj.{kind}", (group * size, (group + 1) * size)))
        pieces.append((f"{source}v_proj.{kind}", (group * size, (group + 1) * size)))
    return pieces
