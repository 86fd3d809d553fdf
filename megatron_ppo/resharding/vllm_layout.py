"""How the parameters of vLLM's models, and of plain Hugging Face models, lie on each rollout rank, as blocks of canonical tensors.

Pure data: vllm is not imported, so that training ranks can plan. Rollout ranks compare it with the engine's live parameters at start.
Source of names and rules: vLLM 0.32, ``model_executor/layers/linear.py`` (QKVParallelLinear, MergedColumnParallelLinear),
``vocab_parallel_embedding.py``, ``fused_moe/``, ``models/llama.py``, ``mixtral.py``, ``qwen2.py``, ``qwen3.py``, ``qwen3_moe.py``.
Unquantised weights only.

    qkv_proj      rows  [q_r; k_r; v_r]; with more ranks than key/value heads each rank holds one whole head, replicated
    gate_up_proj  rows  [gate_r; up_r]
    embed_tokens  rows  padded to a multiple of 64, then cut into TP equal parts
    w13_weight    [E, 2 * width / TP, H]: rows [gate_r; up_r] of each expert        with expert parallelism: whole experts, E / TP of them;
    w2_weight     [E, H, width / TP]                                                the first ranks hold one more where it does not divide
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ppo.families import EMBEDDING, FINAL_NORM, LM_HEAD, SCORE_HEAD, GenericNetwork, Head, Network, NetworkShape, canonical_tensors
from megatron_ppo.resharding.layout import Block, Range, RankLayout
from megatron_ppo.resharding.layout_builder import LayoutBuilder, padded_rows

VOCAB_MULTIPLE = 64
"""vLLM's DEFAULT_VOCAB_PADDING_SIZE."""


def vllm_layout(network: NetworkShape, *, tensor_parallel_size: int, tp_rank: int, expert_parallel: bool = False) -> RankLayout:
    """All parameters of the rank; ``ValueError`` (``check_vllm``) where the sizes do not divide.

    ``expert_parallel``: vLLM's ``enable_expert_parallel``, which gives each rank of the replica whole experts.
    """
    check_vllm(network, tensor_parallel_size, expert_parallel)
    if not 0 <= tp_rank < tensor_parallel_size:
        raise ValueError(f"no rank {tp_rank} in a replica of {tensor_parallel_size} ranks")
    builder = LayoutBuilder(network)
    rows = padded_rows(network.vocab_size, VOCAB_MULTIPLE) // tensor_parallel_size
    builder.vocabulary(EMBEDDING, EMBEDDING, tp_rank, rows)
    for layer in range(network.num_layers):
        prefix = f"model.layers.{layer}."
        _add_attention(builder, network, tensor_parallel_size, tp_rank, prefix)
        if network.experts is None:
            _add_mlp(builder, network, tensor_parallel_size, tp_rank, f"{prefix}mlp.")
        else:
            _add_experts(builder, network, tensor_parallel_size, tp_rank, prefix, expert_parallel)
    builder.whole(FINAL_NORM, FINAL_NORM)
    if not network.tied:
        builder.vocabulary(LM_HEAD, LM_HEAD, tp_rank, rows)
    return builder.build()


def held_experts(network: NetworkShape, tensor_parallel_size: int, tp_rank: int, expert_parallel: bool) -> range:
    """Global numbers of the experts of which the rank holds anything, in their order on it; empty for a dense family."""
    if not expert_parallel:
        return range(network.num_experts)
    base, more = divmod(network.num_experts, tensor_parallel_size)
    first = tp_rank * base + min(tp_rank, more)
    return range(first, first + base + (tp_rank < more))


def hf_layout(network: Network, head: Head = "lm") -> RankLayout:
    """A rank that holds the whole Hugging Face model: every parameter is its canonical tensor, but for experts.

    transformers 5 calls a mixture of experts ``mlp`` in every family and stacks its experts: ``gate_up_proj`` [E, 2 * width, H] and
    ``down_proj`` [E, H, width].
    """
    if isinstance(network, GenericNetwork):
        return _generic_layout(network, head)
    tensors, experts = canonical_tensors(network, head), network.experts
    builder = LayoutBuilder(network, head)
    for tensor in tensors:
        if experts is None or f".{experts.block}." not in tensor.name:
            builder.whole(tensor.name, tensor.name)
    if experts is not None:
        whole = (0, network.intermediate_size)
        for layer in range(network.num_layers):
            block, mlp = f"model.layers.{layer}.{experts.block}.", f"model.layers.{layer}.mlp."
            builder.whole(f"{mlp}gate.weight", f"{block}gate.weight")
            held = range(network.num_experts)
            _stack_experts(builder, network, block, held, whole, f"{mlp}experts.gate_up_proj", f"{mlp}experts.down_proj")
    return builder.build()


def _generic_layout(network: GenericNetwork, head: Head) -> RankLayout:
    """As transformers has it, wherever it names or stacks tensors otherwise than checkpoints do."""
    wanted = {tensor.name: tensor.shape for tensor in canonical_tensors(network, head)}
    places = {one.name: (one.parameter, one.start) for one in network.stored}
    shapes = dict(network.parameters) | {SCORE_HEAD: (1, network.hidden_size)}
    blocks = []
    for name, shape in wanted.items():
        parameter, start = places.get(name, (name, (0,) * len(shape)))
        lead = len(start) - len(shape)
        local = tuple((at, at + size) for at, size in zip(start, (*(1,) * lead, *shape), strict=True))
        blocks.append(Block(name, tuple((0, size) for size in shape), parameter, local))
    used = dict.fromkeys(block.parameter for block in blocks)
    return RankLayout(tuple(blocks), {parameter: shapes[parameter] for parameter in used})


def check_vllm(network: NetworkShape, tensor_parallel_size: int, expert_parallel: bool = False) -> None:
    """``ValueError`` with the numbers for every rule of vLLM that the sizes break."""
    faults = list(vllm_faults(network, tensor_parallel_size, expert_parallel))
    if faults:
        raise ValueError("; ".join(faults))


def vllm_faults(network: NetworkShape, tensor_parallel_size: int, expert_parallel: bool = False) -> Iterator[str]:
    """Rules of vLLM that the sizes break, in words."""
    tp, heads, kv_heads = tensor_parallel_size, network.num_attention_heads, network.num_key_value_heads
    if tp < 1:
        yield f"rollout_tensor_parallel_size must be at least 1, but is {tp}"
        return
    if heads % tp:
        good = [n for n in range(1, heads + 1) if heads % n == 0]
        yield f"{heads} attention heads are not a multiple of rollout_tensor_parallel_size = {tp}; it may be one of {good}"
    elif kv_heads % tp and tp % kv_heads:
        yield (
            f"{kv_heads} key/value heads and rollout_tensor_parallel_size = {tp}: one must be a multiple of the other; choose another size"
        )
    padded = padded_rows(network.vocab_size, VOCAB_MULTIPLE)
    if padded % tp:
        yield f"vocab_size {network.vocab_size}, padded to {padded} rows, is not a multiple of rollout_tensor_parallel_size = {tp}"
    if expert_parallel and network.experts is None:
        yield f"enable_expert_parallel is set, but {network.family} is a dense family without experts; leave it out"
    elif network.experts is not None and network.num_experts < tp and (expert_parallel or network.experts.needs_expert_per_rank):
        yield f"{network.num_experts} experts are fewer than rollout_tensor_parallel_size = {tp}; lower it to {network.num_experts} or less"
    elif not expert_parallel and network.intermediate_size % tp:
        name = "intermediate_size" if network.experts is None else network.experts.width_key
        yield f"{name} {network.intermediate_size} is not a multiple of rollout_tensor_parallel_size = {tp}; choose a divisor of it"


def _add_attention(builder: LayoutBuilder, network: NetworkShape, tp: int, tp_rank: int, prefix: str) -> None:
    attention = f"{prefix}self_attn."
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
    for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        builder.whole(f"{prefix}{norm}", f"{prefix}{norm}")


def _add_mlp(builder: LayoutBuilder, network: NetworkShape, tp: int, tp_rank: int, mlp: str) -> None:
    rows = network.intermediate_size // tp
    part = (tp_rank * rows, (tp_rank + 1) * rows)
    builder.stack(f"{mlp}gate_up_proj.weight", [(f"{mlp}gate_proj.weight", part), (f"{mlp}up_proj.weight", part)])
    builder.split(f"{mlp}down_proj.weight", f"{mlp}down_proj.weight", 1, tp_rank, tp)


def _add_experts(builder: LayoutBuilder, network: NetworkShape, tp: int, tp_rank: int, prefix: str, expert_parallel: bool) -> None:
    assert network.experts is not None
    block = f"{prefix}{network.experts.block}."
    builder.whole(f"{block}gate.weight", f"{block}gate.weight")
    held = held_experts(network, tp, tp_rank, expert_parallel)
    width = network.intermediate_size if expert_parallel else network.intermediate_size // tp
    part = (0, width) if expert_parallel else (tp_rank * width, (tp_rank + 1) * width)
    names = (f"{block}experts.routed_experts.w13_weight", f"{block}experts.routed_experts.w2_weight")
    _stack_experts(builder, network, block, held, part, *names)


def _stack_experts(builder: LayoutBuilder, network: NetworkShape, block: str, held: range, part: Range, gate_up: str, down: str) -> None:
    """Two stacked parameters that hold the rows (columns of down) ``part`` of the experts ``held``."""
    experts, hidden = network.experts, (0, network.hidden_size)
    assert experts is not None
    sources = [f"{block}experts.{number}." for number in held]
    builder.slots(gate_up, [[(f"{s}{name}.weight", (part, hidden)) for name in (experts.gate, experts.up)] for s in sources])
    builder.slots(down, [[(f"{s}{experts.down}.weight", (hidden, part))] for s in sources])
