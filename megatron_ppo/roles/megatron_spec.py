"""Which modules a transformer layer of the Megatron roles is made of, and how a sequence is cut over context-parallel ranks.

With Transformer Engine its spec is taken as it stands. Without it ("local") two modules are our own, because
megatron-core's refuse: ``RMSNorm`` works under sequence parallelism, ``CausalAttention`` under context parallelism. Rows
are right-padded and attention is causal, so that a real token never sees padding and no mask tensor exists.

Context parallelism cuts a sequence into 2 x CP equal chunks and gives rank r chunks r and 2 x CP - 1 - r ("zig-zag"), so
that all ranks have the same amount of causal work. RoPE follows the same order (megatron-core does that by itself).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_ppo import device

device.prepare_megatron()

from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402  the stand-ins must be there first
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_block import (  # noqa: E402
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


def block_spec(config: TransformerConfig, vp_stage: int | None, pp_rank: int) -> TransformerBlockSubmodules:
    """The layers of one pipeline chunk and the norm after the last, for ``config.transformer_impl``."""
    num_layers = get_num_layers_to_build(config, vp_stage, pp_rank)
    if config.transformer_impl == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm

        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm, qk_layernorm=config.qk_layernorm
        )
        return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=TENorm)
    return TransformerBlockSubmodules(layer_specs=[_local_layer_spec(config)] * num_layers, layer_norm=RMSNorm)


def _local_layer_spec(config: TransformerConfig) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = CausalAttention
    attention.q_layernorm = attention.k_layernorm = RMSNorm if config.qk_layernorm else IdentityOp
    return layer


class RMSNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps) over the last dim (arXiv:1910.07467), normalised in fp32, scaled in x's
    dtype (as HF).

    Under sequence parallelism each rank sees its own part of the sequence; the mark on the weight makes megatron add up
    the gradients.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device.device()))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size] -> the same shape and dtype."""
        wide = hidden.float()
        normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normalised.to(hidden.dtype)


class CausalAttention(nn.Module):
    """Causal scaled-dot-product attention; grouped queries and context parallelism included, dropout left out (it is
    always off).

    Under context parallelism keys and values of the whole sequence are gathered on each rank; gradients are scattered back.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: object,  # megatron also passes layer_number, attn_mask_type, attention_type and cp_comm_type
    ) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.context_parallel_size = config.context_parallel_size
        self.cp_group = pg_collection.cp if self.context_parallel_size > 1 else None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: object) -> Tensor:
        """query [s, b, heads, d], key and value [s, b, groups, d] -> [s, b, heads * d]. ``attention_mask`` must be None."""
        assert attention_mask is None, "rows are right-padded: causal attention needs no mask"
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))  # [b, heads, s, d]
        if self.context_parallel_size == 1:
            context = self._attend(query, key, value, is_causal=True)
        else:
            context = self._attend_across_ranks(query, self._whole_sequence(key), self._whole_sequence(value))
        return context.permute(2, 0, 1, 3).flatten(2).contiguous()

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, mask: Tensor | None = None) -> Tensor:
        return nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=is_causal,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    def _whole_sequence(self, part: Tensor) -> Tensor:
        """[b, groups, s / CP, d] of this rank -> [b, groups, s, d] in the sequence's order, differentiable."""
        gathered = gather_from_sequence_parallel_region(part.movedim(2, 0).contiguous(), group=self.cp_group)
        return _unzigzag(gathered, 0, self.context_parallel_size).movedim(0, 2)

    def _attend_across_ranks(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Each of this rank's two chunks attends to all that stands before it, and causally to itself."""
        assert self.cp_group is not None
        outputs = []
        for chunk, part in zip(chunks_of_rank(self.cp_group.rank(), self.context_parallel_size), query.chunk(2, dim=2), strict=True):
            width = part.shape[2]
            end = (chunk + 1) * width
            mask = torch.ones(width, end, dtype=torch.bool, device=part.device).tril(diagonal=chunk * width)
            outputs.append(self._attend(part, key[:, :, :end], value[:, :, :end], is_causal=False, mask=mask))
        return torch.cat(outputs, dim=2)


def chunks_of_rank(cp_rank: int, cp_size: int) -> tuple[int, int]:
    """The two chunks, out of 2 x CP, that a context-parallel rank holds."""
    return cp_rank, 2 * cp_size - 1 - cp_rank


def context_parallel_part(tensor: Tensor, dim: int, cp_rank: int, cp_size: int) -> Tensor:
    """This rank's two chunks of a whole sequence along ``dim``, whose size must be a multiple of 2 x ``cp_size``.

    Labels have to be aligned with their tokens (shifted) before they are cut: a chunk's last label is the next chunk's
    first token.
    """
    if cp_size == 1:
        return tensor
    if tensor.shape[dim] % (2 * cp_size):
        raise ValueError(
            f"a sequence of {tensor.shape[dim]} cannot be cut for context_parallel_size {cp_size}: pad it to a multiple of {2 * cp_size}"
        )
    chunks = tensor.chunk(2 * cp_size, dim=dim)
    first, second = chunks_of_rank(cp_rank, cp_size)
    return torch.cat([chunks[first], chunks[second]], dim=dim)


def context_parallel_whole(part: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """Inverse of ``context_parallel_part``: the whole sequence on every rank of ``group``. Not differentiable."""
    if group is None or group.size() == 1:
        return part
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return _unzigzag(torch.cat(parts, dim=dim), dim, group.size())


def _unzigzag(gathered: Tensor, dim: int, cp_size: int) -> Tensor:
    """Chunks in the order of the ranks that hold them -> in the sequence's order."""
    held = [chunk for rank in range(cp_size) for chunk in chunks_of_rank(rank, cp_size)]
    chunks = gathered.chunk(2 * cp_size, dim=dim)
    return torch.cat([chunks[held.index(number)] for number in range(2 * cp_size)], dim=dim)
