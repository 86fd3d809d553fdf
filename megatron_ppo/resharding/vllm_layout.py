"""How the parameters of vLLM's models, and of plain Hugging Face models, lie on each rollout rank, as blocks of canonical tensors.

Pure data: vllm is not imported, so that training ranks can plan. Rollout ranks compare it with the engine's live parameters at start.
Source of names and rules: vLLM 0.32, ``model_executor/layers/linear.py`` (QKVParallelLinear, MergedColumnParallelLinear),
``vocab_parallel_embedding.py``, ``models/llama.py``, ``qwen2.py``, ``qwen3.py``. Unquantised weights only.

    qkv_proj      rows  [q_r; k_r; v_r]; with more ranks than key/value heads each rank holds one whole head, replicated
    gate_up_proj  rows  [gate_r; up_r]
    embed_tokens  rows  padded to a multiple of 64, then cut into TP equal parts
"""

from __future__ import annotations

from megatron_ppo.resharding.families import EMBEDDING, FINAL_NORM, LM_HEAD, Head, NetworkShape, canonical_tensors
from megatron_ppo.resharding.layout import RankLayout
from megatron_ppo.resharding.layout_builder import LayoutBuilder, padded_rows

VOCAB_MULTIPLE = 64
"""vLLM's DEFAULT_VOCAB_PADDING_SIZE."""


def vllm_layout(network: NetworkShape, *, tensor_parallel_size: int, tp_rank: int) -> RankLayout:
    """All parameters of the rank; ``ValueError`` (``check_vllm``) where the sizes do not divide."""
    check_vllm(network, tensor_parallel_size)
    if not 0 <= tp_rank < tensor_parallel_size:
        raise ValueError(f"no rank {tp_rank} in a replica of {tensor_parallel_size} ranks")
    builder = LayoutBuilder(canonical_tensors(network))
    rows = padded_rows(network.vocab_size, VOCAB_MULTIPLE) // tensor_parallel_size
    builder.vocabulary(EMBEDDING, EMBEDDING, tp_rank, rows)
    for layer in range(network.num_layers):
        _add_layer(builder, network, tensor_parallel_size, tp_rank, f"model.layers.{layer}.")
    builder.whole(FINAL_NORM, FINAL_NORM)
    if not network.tied:
        builder.vocabulary(LM_HEAD, LM_HEAD, tp_rank, rows)
    return builder.build()


def hf_layout(network: NetworkShape, head: Head = "lm") -> RankLayout:
    """A rank that holds the whole Hugging Face model: every parameter is its canonical tensor."""
    tensors = canonical_tensors(network, head)
    builder = LayoutBuilder(tensors)
    for tensor in tensors:
        builder.whole(tensor.name, tensor.name)
    return builder.build()


def check_vllm(network: NetworkShape, tensor_parallel_size: int) -> None:
    """``ValueError`` with the numbers for the first rule of vLLM that the size breaks."""
    tp, heads, kv_heads = tensor_parallel_size, network.num_attention_heads, network.num_key_value_heads
    if tp < 1:
        raise ValueError(f"rollout_tensor_parallel_size must be at least 1, but is {tp}")
    if heads % tp:
        raise ValueError(f"{heads} attention heads do not divide by rollout_tensor_parallel_size {tp}; choose a divisor of {heads}")
    if kv_heads % tp and tp % kv_heads:
        raise ValueError(
            f"{kv_heads} key/value heads and rollout_tensor_parallel_size {tp}: one must be a multiple of the other; choose another size"
        )
    if network.intermediate_size % tp:
        raise ValueError(f"intermediate_size {network.intermediate_size} does not divide by rollout_tensor_parallel_size {tp}")
    padded = padded_rows(network.vocab_size, VOCAB_MULTIPLE)
    if padded % tp:
        raise ValueError(f"vocab_size {network.vocab_size}, padded to {padded} rows, does not divide by rollout_tensor_parallel_size {tp}")


def _add_layer(builder: LayoutBuilder, network: NetworkShape, tp: int, tp_rank: int, prefix: str) -> None:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    query_rows = network.query_size // tp
    queries = (tp_rank * query_rows, (tp_rank + 1) * query_rows)
    heads_per_rank = max(network.num_key_value_heads // tp, 1)
    ranks_per_head = max(tp // network.num_key_value_heads, 1)
    kv_rows = heads_per_rank * network.head_dim
    kv = (tp_rank // ranks_per_head * kv_rows, (tp_rank // ranks_per_head + 1) * kv_rows)
    for kind in ("weight", "bias") if network.has_qkv_bias else ("weight",):
        pieces = [(f"{attention}{part}_proj.{kind}", queries if part == "q" else kv) for part in "qkv"]
        builder.stack(f"{attention}qkv_proj.{kind}", pieces)
    builder.split(f"{attention}o_proj.weight", f"{attention}o_proj.weight", 1, tp_rank, tp)
    if network.has_qk_norm:
        builder.whole(f"{attention}q_norm.weight", f"{attention}q_norm.weight")
        builder.whole(f"{attention}k_norm.weight", f"{attention}k_norm.weight")
    rows = network.intermediate_size // tp
    part = (tp_rank * rows, (tp_rank + 1) * rows)
    builder.stack(f"{mlp}gate_up_proj.weight", [(f"{mlp}gate_proj.weight", part), (f"{mlp}up_proj.weight", part)])
    builder.split(f"{mlp}down_proj.weight", f"{mlp}down_proj.weight", 1, tp_rank, tp)
    for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        builder.whole(f"{prefix}{norm}", f"{prefix}{norm}")
