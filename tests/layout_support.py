"""Fills parameters through a layout and reads canonical tensors back. Test support only.

Every element of every canonical tensor has a number of its own, so that a misplaced row cannot look right.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_ppo.families import FAMILIES, CanonicalTensor, NetworkShape
from megatron_ppo.resharding.layout import RankLayout, view

PADDING = -1


def tiny(family: str = "llama", *, tied: bool = False, **changes: int) -> NetworkShape:
    """TINY of the cases: vocab 32001, hidden 16, 4 layers, 4 query heads, 2 KV heads, head_dim 4, ffn 24; 8 experts in a mixture."""
    numbers = {
        "num_layers": 4,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "intermediate_size": 24,
        "vocab_size": 32001,
    } | changes
    if FAMILIES[family].experts is not None:
        numbers = {"num_experts": 8, "num_experts_per_tok": 2} | numbers
    spec = FAMILIES[family]
    return NetworkShape(family=family, tied=tied, has_qkv_bias=spec.has_qkv_bias, has_qk_norm=spec.has_qk_norm, **numbers)


def numbered(tensors: Iterable[CanonicalTensor]) -> dict[str, Tensor]:
    """int64 tensors; no number occurs twice."""
    result, start = {}, 0
    for tensor in tensors:
        count = torch.Size(tensor.shape).numel()
        result[tensor.name] = torch.arange(start, start + count).view(tensor.shape)
        start += count
    return result


def scatter(layout: RankLayout, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """One rank's parameters; elements in no block are ``PADDING``. Fails where a block overwrites another."""
    parameters = {name: torch.full(shape, PADDING) for name, shape in layout.shapes.items()}
    for block in layout.blocks:
        target = view(parameters[block.parameter], block.local)
        assert (target == PADDING).all(), f"{block} overwrites another block"
        target.copy_(view(tensors[block.name], block.canonical))
    return parameters


def gather(ranks: Iterable[tuple[RankLayout, dict[str, Tensor]]], expected: Iterable[CanonicalTensor]) -> dict[str, Tensor]:
    """Canonical tensors from all ranks. Fails where an element is held by nobody, or where two ranks disagree."""
    result = {tensor.name: torch.full(tensor.shape, PADDING) for tensor in expected}
    for layout, parameters in ranks:
        for block in layout.blocks:
            target = view(result[block.name], block.canonical)
            value = view(parameters[block.parameter], block.local).reshape(target.shape)  # a stacked parameter has a dim more
            assert ((target == PADDING) | (target == value)).all(), f"ranks disagree on {block.name}"
            target.copy_(value)
    for name, tensor in result.items():
        assert (tensor != PADDING).all(), f"{name} is not covered"
    return result
