"""How the parameters of megatron-core's ``GPTModel`` lie on each training rank, as blocks of canonical tensors.

Pure data: built from the network and the parallel sizes, on any machine; megatron is not imported. The plan (``plan.py``) intersects
it with the rollout side's layout; ``hf_checkpoint.py`` loads through it; export reads through it. Source of names and of the rules:
megatron-core 0.16.1, ``models/gpt``, ``transformer/attention.py``, ``transformer/transformer_layer.py``.

    linear_qkv   rows  [q of group 0; k 0; v 0 | q of group 1; k 1; v 1 | ...], cut into TP equal parts
    linear_fc1   rows  [gate_r; up_r] on rank r
    embedding    rows  padded to a multiple of make_vocab_size_divisible_by * TP, cut into TP equal parts
    layers             those of ``megatron_mesh.stage_layers``, numbered from 0 locally
    experts            expert-parallel rank e holds experts e * E/EP onwards, each cut over the expert-tensor-parallel ranks
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ppo.families import EMBEDDING, FINAL_NORM, LM_HEAD, SCORE_HEAD, Head, NetworkShape
from megatron_ppo.resharding.layout import RankLayout
from megatron_ppo.resharding.layout_builder import LayoutBuilder, Piece, cut_pieces, padded_rows
from megatron_ppo.resharding.megatron_mesh import MegatronParallel, RankCoordinates, rank_coordinates, stage_layers

VALUE_HEAD = "value_head.weight"
"""Local name of the scalar head (critic and reward model alike), replicated over tensor-parallel ranks."""


def training_layouts(
    network: NetworkShape, parallel: MegatronParallel, world_size: int, *, head: Head = "lm", transformer_engine_names: bool = False
) -> dict[int, RankLayout]:
    """Rank -> layout of the whole training mesh; ranks that hold the same share one object."""
    known: dict[tuple[int, int, int, int], RankLayout] = {}
    found: dict[int, RankLayout] = {}
    for rank in range(world_size):
        place = rank_coordinates(rank, world_size, parallel)
        key = (place.tp, place.pp, *((place.ep, place.expert_tp) if network.experts else (0, 0)))
        if key not in known:
            known[key] = megatron_layout(network, parallel, place, head=head, transformer_engine_names=transformer_engine_names)
        found[rank] = known[key]
    return found


def megatron_layout(
    network: NetworkShape,
    parallel: MegatronParallel,
    place: RankCoordinates,
    *,
    head: Head = "lm",
    transformer_engine_names: bool = False,
) -> RankLayout:
    """All parameters of the rank. With the interleaved schedule, names of chunk v begin with ``model{v}.``.

    ``transformer_engine_names``: the spec that fuses each norm into the linear layer after it, and keeps the experts of a layer in one
    module. ``ValueError`` (``check_megatron``) where the sizes do not divide.
    """
    check_megatron(network, parallel)
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    ep, expert_tp = parallel.expert_model_parallel_size, parallel.expert_tensor_size
    if not all(0 <= at < size for at, size in ((place.tp, tp), (place.pp, pp), (place.ep, ep), (place.expert_tp, expert_tp))):
        raise ValueError(f"no rank {place} in {parallel}")
    rank = _Rank(LayoutBuilder(network, head), network, parallel, place, transformer_engine_names)
    stages = stage_layers(network.num_layers, parallel)
    for chunk in range(parallel.num_chunks):
        prefix = "" if parallel.virtual_pipeline_model_parallel_size is None else f"model{chunk}."
        if place.pp == 0 and chunk == 0:
            rank.add_vocabulary(f"{prefix}embedding.word_embeddings.weight", EMBEDDING)
        for local, layer in enumerate(stages[place.pp][chunk]):
            rank.add_layer(layer, f"{prefix}decoder.layers.{local}.")
        if place.pp == pp - 1 and chunk == parallel.num_chunks - 1:
            rank.add_heads(prefix, head)
    return rank.builder.build()


def check_megatron(network: NetworkShape, parallel: MegatronParallel) -> None:
    """``ValueError`` with the equation and its numbers for every rule that the sizes break."""
    faults = list(megatron_faults(network, parallel))
    if faults:
        raise ValueError("; ".join(faults))


def megatron_faults(network: NetworkShape, parallel: MegatronParallel) -> Iterator[str]:
    """Rules of megatron-core that the sizes break, in words."""
    tp, heads, groups = parallel.tensor_model_parallel_size, network.num_attention_heads, network.num_key_value_heads
    sizes = (
        tp,
        parallel.pipeline_model_parallel_size,
        parallel.num_chunks,
        parallel.make_vocab_size_divisible_by,
        parallel.expert_model_parallel_size,
        parallel.expert_tensor_size,
    )
    if min(sizes) < 1:
        yield f"every size must be at least 1, but they are {parallel}"
        return
    try:
        stage_layers(network.num_layers, parallel)
    except ValueError as error:
        yield str(error)
    if heads % tp:
        good = [n for n in range(1, heads + 1) if heads % n == 0]
        yield f"{heads} attention heads are not a multiple of tensor_model_parallel_size = {tp}; it may be one of {good}"
    elif groups % tp and tp % groups:
        yield f"{groups} key/value heads and tensor_model_parallel_size = {tp}: one must be a multiple of the other; choose another size"
    qkv_rows = network.query_size + 2 * network.kv_size
    if not heads % tp and qkv_rows % tp:
        yield f"the {qkv_rows} rows of linear_qkv are not a multiple of tensor_model_parallel_size = {tp}; choose another size"
    yield from _width_faults(network, parallel)


def _width_faults(network: NetworkShape, parallel: MegatronParallel) -> Iterator[str]:
    width, tp = network.intermediate_size, parallel.tensor_model_parallel_size
    ep, expert_tp = parallel.expert_model_parallel_size, parallel.expert_tensor_size
    if network.experts is None:
        if width % tp:
            yield f"intermediate_size {width} is not a multiple of tensor_model_parallel_size = {tp}; choose a divisor of it"
        if ep > 1 or parallel.expert_tensor_parallel_size is not None:
            name, size = ("expert_model_parallel_size", ep) if ep > 1 else ("expert_tensor_parallel_size", expert_tp)
            yield f"{name} = {size}, but {network.family} is a dense family without experts; leave it out"
        return
    if ep == 1 and expert_tp != tp:
        yield (
            f"expert_tensor_parallel_size = {expert_tp} differs from tensor_model_parallel_size = {tp}, which needs "
            "expert_model_parallel_size > 1: megatron-core 0.16.1 would add up the experts' gradients over the wrong ranks"
        )
    if network.num_experts % ep:
        yield f"{network.num_experts} experts are not a multiple of expert_model_parallel_size = {ep}; choose a divisor"
    if width % expert_tp:
        yield f"{network.experts.width_key} {width} is not a multiple of the {expert_tp} ranks that share an expert; choose a divisor"


def padded_vocab_size(network: NetworkShape, parallel: MegatronParallel) -> int:
    """Rows of embedding and head over all tensor-parallel ranks together."""
    return padded_rows(network.vocab_size, parallel.make_vocab_size_divisible_by * parallel.tensor_model_parallel_size)


@dataclass(frozen=True)
class _Rank:
    """What the parts of one rank's layout need in common; every method adds parameters to the builder."""

    builder: LayoutBuilder
    network: NetworkShape
    parallel: MegatronParallel
    place: RankCoordinates
    fused: bool

    def add_vocabulary(self, parameter: str, name: str) -> None:
        rows = padded_vocab_size(self.network, self.parallel) // self.parallel.tensor_model_parallel_size
        self.builder.vocabulary(parameter, name, self.place.tp, rows)

    def add_layer(self, layer: int, prefix: str) -> None:
        self._add_attention(layer, prefix)
        if self.network.experts is None:
            mlp = f"model.layers.{layer}.mlp."
            self._add_swiglu(mlp, ("gate_proj", "up_proj", "down_proj"), f"{prefix}mlp.linear_fc1.weight", f"{prefix}mlp.linear_fc2.weight")
        else:
            self._add_experts(layer, f"{prefix}mlp.")
        self._add_norms(layer, prefix)

    def _add_attention(self, layer: int, prefix: str) -> None:
        network, tp = self.network, self.parallel.tensor_model_parallel_size
        source = f"model.layers.{layer}.self_attn."
        rows = (network.query_size + 2 * network.kv_size) // tp
        for kind in ("weight", "bias") if network.has_qkv_bias else ("weight",):
            pieces = cut_pieces(_interleaved_qkv(network, source, kind), self.place.tp * rows, (self.place.tp + 1) * rows)
            self.builder.stack(f"{prefix}self_attention.linear_qkv.{kind}", pieces)
        self.builder.split(f"{prefix}self_attention.linear_proj.weight", f"{source}o_proj.weight", 1, self.place.tp, tp)
        if network.has_qk_norm:
            self.builder.whole(f"{prefix}self_attention.q_layernorm.weight", f"{source}q_norm.weight")
            self.builder.whole(f"{prefix}self_attention.k_layernorm.weight", f"{source}k_norm.weight")

    def _add_experts(self, layer: int, prefix: str) -> None:
        experts = self.network.experts
        assert experts is not None
        block = f"model.layers.{layer}.{experts.block}."
        self.builder.whole(f"{prefix}router.weight", f"{block}gate.weight")
        count = self.network.num_experts // self.parallel.expert_model_parallel_size
        for local in range(count):
            names = (
                [f"{prefix}experts.{part}.weight{local}" for part in ("linear_fc1", "linear_fc2")]
                if self.fused
                else [f"{prefix}experts.local_experts.{local}.{part}.weight" for part in ("linear_fc1", "linear_fc2")]
            )
            source = f"{block}experts.{self.place.ep * count + local}."
            self._add_swiglu(source, (experts.gate, experts.up, experts.down), names[0], names[1], is_expert=True)

    def _add_swiglu(self, source: str, names: tuple[str, str, str], fc1: str, fc2: str, *, is_expert: bool = False) -> None:
        """[gate_r; up_r] and the columns of down that belong to them."""
        parts = self.parallel.expert_tensor_size if is_expert else self.parallel.tensor_model_parallel_size
        number = self.place.expert_tp if is_expert else self.place.tp
        rows = self.network.intermediate_size // parts
        part = (number * rows, (number + 1) * rows)
        gate, up, down = (f"{source}{name}.weight" for name in names)
        self.builder.stack(fc1, [(gate, part), (up, part)])
        self.builder.split(fc2, down, 1, number, parts)

    def _add_norms(self, layer: int, prefix: str) -> None:
        source = f"model.layers.{layer}."
        before_attention = "self_attention.linear_qkv.layer_norm_weight" if self.fused else "input_layernorm.weight"
        # A router stands between the norm and the experts, so that the norm is fused into nothing.
        fused_mlp = self.fused and self.network.experts is None
        before_mlp = "mlp.linear_fc1.layer_norm_weight" if fused_mlp else "pre_mlp_layernorm.weight"
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
