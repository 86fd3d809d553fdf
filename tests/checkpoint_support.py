"""The ranks of a training mesh as they stand after reading a checkpoint, in one process. Test support only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_ppo.families import Head, canonical_tensors, network_shape
from megatron_ppo.resharding.hf_checkpoint import HFCheckpoint, load_hf_weights
from megatron_ppo.resharding.layout import RankLayout, view
from megatron_ppo.resharding.megatron_layout import training_layouts
from megatron_ppo.resharding.megatron_mesh import MegatronParallel

Ranks = list[tuple[RankLayout, dict[str, Tensor]]]


@dataclass(frozen=True)
class Mesh:
    """A training mesh."""

    world_size: int
    parallel: MegatronParallel
    transformer_engine_names: bool = False


def load_ranks(source: Path, mesh: Mesh, head: Head = "lm", *, head_required: bool = False) -> Ranks:
    """What every rank of the mesh holds after reading the checkpoint."""
    dtype = HFCheckpoint(source).read("model.norm.weight").dtype
    layouts = training_layouts(
        network_shape(source), mesh.parallel, mesh.world_size, head=head, transformer_engine_names=mesh.transformer_engine_names
    )
    ranks: Ranks = []
    for rank in range(mesh.world_size):
        parameters = {name: torch.full(shape, 7.0, dtype=dtype) for name, shape in layouts[rank].shapes.items()}
        load_hf_weights(source, layouts[rank], parameters, head=head, head_required=head_required)
        ranks.append((layouts[rank], parameters))
    return ranks


def join(ranks: Ranks, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Full tensors out of the ranks; NaN where nobody holds an element, and an error where two ranks hold different ones."""
    dtype = next(iter(ranks[0][1].values())).dtype
    full = {name: torch.full(shape, float("nan"), dtype=dtype) for name, shape in shapes.items()}
    for layout, parameters in ranks:
        for block in layout.blocks:
            target, value = view(full[block.name], block.canonical), view(parameters[block.parameter], block.local)
            assert bool((target.isnan() | (target == value)).all()), f"ranks disagree on {block.name}"
            target.copy_(value)
    return full


def shapes_of(source: Path, head: Head = "lm") -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of what the config describes."""
    return {tensor.name: tensor.shape for tensor in canonical_tensors(network_shape(source), head)}


def same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """The same names, dtypes, shapes and bits."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)) for name in one
    )
