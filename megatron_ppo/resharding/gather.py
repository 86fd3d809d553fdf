"""Whole canonical tensors out of the shards of the training mesh, one at a time: slow, plain, and the reference for everything else.

Used by the export to Hugging Face format, and to hold the shard-to-shard path (``executor.py``) to it. Collective over one process group
of the training mesh: each piece of a tensor travels from the lowest rank that holds it to the rank (or all ranks) that asked.

Left out: writing files (``hf_checkpoint.py``), and any overlap: one tensor is in memory at a time, and nothing else happens meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ppo.resharding.boxes import box_text, intersect, subtract
from megatron_ppo.resharding.checksum import tensor_checksum
from megatron_ppo.resharding.layout import Block, Ranges, RankLayout, box_shape, view

Pieces = dict[Ranges, dict[int, Block]]
"""Distinct canonical box -> rank -> the block in which that rank holds it."""
_DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def gather_canonical(
    layouts: Mapping[int, RankLayout],
    parameters: Mapping[str, Tensor],
    *,
    to: int | None,
    names: Sequence[str] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    check_replicas: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Iterator[tuple[str, Tensor | None]]:
    """Stream ``(canonical name, full tensor)``; collective, so that every rank of ``group`` must run it to its end.

    Args:
        layouts: rank in ``group`` -> layout, of all its ranks.
        parameters: this rank's live parameters.
        to: the rank in ``group`` that gets the tensors; the others get None in their place. None: every rank gets them.
        names: canonical names in the wanted order; None: all, in the order of the layouts of ranks 0, 1, ...
        shapes: canonical name -> shape that the model should have. Without it the end of a tensor that no rank holds goes unnoticed.
        check_replicas: compare all copies of every box bit by bit (by checksums) before the first tensor is sent.
        group: None is the default group.

    Tensors are contiguous, of the parameter's dtype and device, and the caller's to keep. All ranks must hold a tensor in one dtype.

    Raises:
        ValueError: a name that no rank holds, ranges that no rank holds, ranks without a layout, ranks that hold a tensor in
            different dtypes, or (``check_replicas``) copies that differ. Raised alike on all ranks, before anything is sent.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if set(layouts) != set(range(size)):
        raise ValueError(f"the group has ranks 0..{size - 1}, but layouts are given for {sorted(layouts)}; give one for each")
    held = _pieces(layouts)
    wanted = list(held) if names is None else list(names)
    spanned = _full_shapes(held, wanted)
    for name, shape in spanned.items():
        if shapes is not None and shapes.get(name) != shape:
            raise ValueError(f"what ranks hold of {name} spans {shape}, the model's is {shapes.get(name)}")
    dtypes = _agreed_dtypes(held, wanted, parameters, rank, group)
    if check_replicas:
        _check_replicas({name: held[name] for name in wanted}, parameters, rank, group)
    tensors = ((name, spanned[name], dtypes[name], held[name]) for name in wanted)
    return _Route(rank, to, group).stream(tensors, parameters)


@dataclass(frozen=True)
class _Route:
    """How pieces travel: from their owners to rank ``to`` of ``group``, or to all of it (None)."""

    rank: int
    to: int | None
    group: dist.ProcessGroup | None

    def stream(
        self, tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype, Pieces]], parameters: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor | None]]:
        """Assemble one tensor after another."""
        device = next(iter(parameters.values())).device
        for name, shape, dtype, pieces in tensors:
            full = torch.empty(shape, dtype=dtype, device=device) if self.to in (None, self.rank) else None
            for box in sorted(pieces):
                holders = pieces[box]
                owner = self.to if self.to in holders else min(holders)
                if self.rank == owner:
                    block = holders[self.rank]
                    held = view(parameters[block.parameter].detach(), block.local)
                    piece = held.reshape(box_shape(box)).contiguous()  # a parameter that stacks tensors has a dim more
                elif self.to in (None, self.rank):
                    piece = torch.empty(box_shape(box), dtype=dtype, device=device)
                else:
                    continue
                self._move(piece, owner)
                if full is not None:
                    view(full, box).copy_(piece)
            yield name, full

    def _move(self, piece: Tensor, owner: int) -> None:
        """Called by the owner and by whoever wants the piece."""
        raw = piece.reshape(-1).view(torch.uint8)  # bytes, as backends do not know every dtype
        if self.to is None:
            dist.broadcast(raw, group_src=owner, group=self.group)
        elif self.rank == owner != self.to:
            dist.send(raw, group_dst=self.to, group=self.group)
        elif self.rank != owner:
            dist.recv(raw, group_src=owner, group=self.group)


def _pieces(layouts: Mapping[int, RankLayout]) -> dict[str, Pieces]:
    found: dict[str, Pieces] = {}
    for rank in sorted(layouts):
        for block in layouts[rank].blocks:
            holders = found.setdefault(block.name, {}).setdefault(block.canonical, {})
            if rank in holders:
                raise ValueError(
                    f"rank {rank} names {block.name} {box_text(block.canonical)} twice: {holders[rank].parameter} and {block.parameter}"
                )
            holders[rank] = block
    return found


def _full_shapes(held: Mapping[str, Pieces], wanted: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Canonical shapes, after a check that the pieces leave no hole."""
    unknown = [name for name in wanted if name not in held]
    if unknown:
        raise ValueError(f"no rank holds {', '.join(unknown)}")
    shapes: dict[str, tuple[int, ...]] = {}
    for name in wanted:
        shapes[name] = tuple(max(stop for _, stop in column) for column in zip(*held[name], strict=True))
        holes: list[Ranges] = [tuple((0, size) for size in shapes[name])]
        for box in held[name]:
            holes = [rest for hole in holes for rest in _without(hole, box)]
        if holes:
            raise ValueError(f"no rank holds {name} {', '.join(box_text(hole) for hole in holes[:8])}")
    return shapes


def _without(hole: Ranges, box: Ranges) -> list[Ranges]:
    common = intersect(hole, box)
    return [hole] if common is None else subtract(hole, common)


def _agreed_dtypes(
    held: Mapping[str, Pieces],
    wanted: Sequence[str],
    parameters: Mapping[str, Tensor],
    rank: int,
    group: dist.ProcessGroup | None,
) -> dict[str, torch.dtype]:
    """The one dtype in which ranks hold each tensor, told also to those that hold nothing of it."""
    numbers = []  # (number of the dtype, minus that number): the maxima of both are the highest and the lowest
    for name in wanted:
        own = {parameters[holders[rank].parameter].dtype for holders in held[name].values() if rank in holders}
        own_numbers = [_DTYPES.index(dtype) if dtype in _DTYPES else len(_DTYPES) for dtype in own] or [-len(_DTYPES) - 1]
        numbers.append((max(own_numbers), max(-number if own else number for number in own_numbers)))
    bounds = torch.tensor(numbers, dtype=torch.int32, device=next(iter(parameters.values())).device)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    faults = [name for name, (high, low) in zip(wanted, bounds.tolist(), strict=True) if high != -low or high == len(_DTYPES)]
    if faults:
        raise ValueError(f"ranks hold {', '.join(faults[:8])} in different dtypes, or in none of {_DTYPES}; cast them to one")
    return {name: _DTYPES[high] for name, (high, _) in zip(wanted, bounds.tolist(), strict=True)}


def _check_replicas(held: Mapping[str, Pieces], parameters: Mapping[str, Tensor], rank: int, group: dist.ProcessGroup | None) -> None:
    """Checksums of every box that more than one rank holds, compared on all ranks."""
    shared = [(name, box) for name, pieces in held.items() for box, holders in pieces.items() if len(holders) > 1]
    own: dict[int, list[int]] = {}
    for number, (name, box) in enumerate(shared):
        block = held[name][box].get(rank)
        if block is not None:
            own[number] = tensor_checksum(view(parameters[block.parameter].detach(), block.local))
    everyone: list[dict[int, list[int]]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, own, group=group)
    faults = []
    for number, (name, box) in enumerate(shared):
        sums = {holder: everyone[holder][number] for holder in held[name][box]}
        odd = [holder for holder, value in sums.items() if value != sums[min(sums)]]
        if odd:
            faults.append(f"{name} {box_text(box)}: ranks {odd} differ from rank {min(sums)}")
    if faults:
        more = f"; and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise ValueError(f"replicas hold different weights: {'; '.join(faults[:8])}{more}")
