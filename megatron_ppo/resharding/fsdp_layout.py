"""How the parameters of a Hugging Face model that PyTorch's FSDP2 shards lie on each rank, as blocks of canonical tensors. Pure data.

``fully_shard`` cuts dim 0 of every parameter into chunks of equal size, as ``torch.chunk`` does: with 130 rows on 4 ranks

    rank   0        1        2        3
    rows   0-33     33-66    66-99    99-130        1 row on 4 ranks: rank 0 has it, the others have an empty parameter

Tied weights are one parameter, the embedding. The experts of a layer are stacked along dim 0 (``hf_layout``): a rank holds whole experts.
Over a 2D mesh (replicate, shard) every line of ``shard`` holds the whole model, so that a box has as many copies as there are lines. Rank r
of the training mesh stands at (r // shard_size, r % shard_size).

Left out: building such a mesh (``backends/fsdp_setup.py``).
"""

from __future__ import annotations

from megatron_ppo.families import Head, Network
from megatron_ppo.resharding.layout import Block, Range, RankLayout
from megatron_ppo.resharding.vllm_layout import hf_layout


def fsdp_layouts(network: Network, *, world_size: int, shard_size: int, head: Head = "lm") -> dict[int, RankLayout]:
    """Rank -> layout of the whole training mesh; ranks that hold the same share one object. ``ValueError`` for a size that does not fit."""
    faults = fsdp_faults(world_size, shard_size)
    if faults:
        raise ValueError(faults)
    shards = [fsdp_layout(network, shard_size=shard_size, shard_rank=rank, head=head) for rank in range(shard_size)]
    return {rank: shards[rank % shard_size] for rank in range(world_size)}


def fsdp_layout(network: Network, *, shard_size: int, shard_rank: int, head: Head = "lm") -> RankLayout:
    """All parameters of the rank at place ``shard_rank`` of the mesh's axis ``shard``, under transformers' names."""
    if not 0 <= shard_rank < shard_size:
        raise ValueError(f"no rank {shard_rank} among {shard_size} that shard")
    whole = hf_layout(network, head)
    rows = {name: shard_rows(shape[0], shard_size, shard_rank) for name, shape in whole.shapes.items()}
    cut = (_cut(block, rows[block.parameter]) for block in whole.blocks)
    shapes = {name: (rows[name][1] - rows[name][0], *shape[1:]) for name, shape in whole.shapes.items()}
    return RankLayout(tuple(block for block in cut if block is not None), shapes)


def shard_rows(num_rows: int, shard_size: int, shard_rank: int) -> Range:
    """Rows of a parameter that a rank holds; ranks past its end hold none."""
    each = -(-num_rows // shard_size)
    start = min(shard_rank * each, num_rows)
    return start, min(start + each, num_rows)


def fsdp_faults(world_size: int, shard_size: int) -> str:
    """Why ``world_size`` training ranks cannot shard over ``shard_size`` of them, in words; empty where they can."""
    if shard_size >= 1 and world_size % shard_size == 0:
        return ""
    good = [size for size in range(1, world_size + 1) if world_size % size == 0]
    return f"fsdp_shard_size = {shard_size}: replicas x shards = {world_size} training ranks, so it may be one of {good}"


def _cut(block: Block, rows: Range) -> Block | None:
    """The part of a whole parameter's block that lies in ``rows`` of the parameter."""
    first, last = block.local[0]
    low, high = max(first, rows[0]), min(last, rows[1])
    if low >= high:
        return None
    local = ((low - rows[0], high - rows[0]), *block.local[1:])
    if len(block.local) > len(block.canonical):  # a slot of a stack, which is 1 long: all of it or nothing
        return Block(block.name, block.canonical, block.parameter, local)
    start = block.canonical[0][0] - first
    return Block(block.name, ((start + low, start + high), *block.canonical[1:]), block.parameter, local)
