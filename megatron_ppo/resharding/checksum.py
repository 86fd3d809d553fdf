"""Proof that a sync arrived: exact checksums of the bits of every transferred box, at its source and at its destinations.

Runs after ``executor.py`` where the config asks for it (always for the first sync). A checksum is two sums modulo 2^64 over the elements'
bits, read as integers: the plain sum, and the sum of each element's bits mixed with its place in the box, so that swapped, shifted or
repeated elements show. Sums of integers do not depend on order, so that a GPU and a CPU agree to the bit. Works in slices of 2^20 elements.

Left out: how checksums travel (any channel for JSON will do), and whether the plan covers every parameter (``plan.py`` refuses one that
does not).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_ppo.resharding.boxes import box_text
from megatron_ppo.resharding.executor import slice_boxes
from megatron_ppo.resharding.layout import view
from megatron_ppo.resharding.plan import Group, ReshardPlan, Transfer

Checksums = dict[str, list[int]]
"""Transfer (in words) -> its two sums. Plain data, fit for JSON."""

_SLICE = 1 << 20
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WEYL = 0x9E3779B97F4A7C15 - (1 << 64)  # the odd constants of SplitMix64 (Steele, Lea and Flood, 2014), as signed numbers
_MIX = 0xBF58476D1CE4E5B9 - (1 << 64)


def source_checksums(plan: ReshardPlan, rank: int, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> Checksums:
    """Checksums of all that this rank sends, of the values cast to ``dtype`` (the wire's)."""
    known: dict[tuple[object, object], list[int]] = {}
    found: Checksums = {}
    for group in plan.groups:
        if group.source == rank:
            for transfer in group.transfers:
                place = (transfer.source_parameter, transfer.source)
                if place not in known:
                    known[place] = tensor_checksum(view(parameters[transfer.source_parameter], transfer.source), dtype)
                found[_key(group, transfer)] = known[place]
    return found


def destination_checksums(plan: ReshardPlan, rank: int, parameters: Mapping[str, Tensor]) -> Checksums:
    """Checksums of all that this rank has received, of the live parameters as they are."""
    return {
        _key(group, transfer): tensor_checksum(view(parameters[transfer.destination_parameter], transfer.destination))
        for group in plan.groups
        if rank in group.destinations
        for transfer in group.transfers
    }


def compare_checksums(plan: ReshardPlan, sources: Mapping[int, Checksums], destinations: Mapping[int, Checksums]) -> list[str]:
    """What differs, in words with canonical name, range and ranks; empty where all is equal.

    ``sources`` and ``destinations`` map global ranks to their checksums. Each destination given is held to all that the plan says it
    gets; a checksum that is absent on either side counts as a difference.
    """
    differences = []
    for group in plan.groups:
        for rank in group.destinations:
            if rank not in destinations:
                continue
            for transfer in group.transfers:
                key = _key(group, transfer)
                sent, got = sources.get(group.source, {}).get(key), destinations[rank].get(key)
                if sent is None or got is None or list(sent) != list(got):
                    differences.append(
                        f"{transfer.name} {box_text(transfer.canonical)}: {_text(sent)} at rank {group.source} "
                        f"({transfer.source_parameter}), {_text(got)} at rank {rank} ({transfer.destination_parameter})"
                    )
    return differences


@torch.no_grad()
def tensor_checksum(tensor: Tensor, dtype: torch.dtype | None = None) -> list[int]:
    """The two sums of a tensor of any strides, of its values cast to ``dtype`` (None: as they are)."""
    plain = torch.zeros((), dtype=torch.int64, device=tensor.device)
    mixed = torch.zeros_like(plain)
    for start in range(0, tensor.numel(), _SLICE):
        at = start
        for box in slice_boxes(tensor.shape, start, min(start + _SLICE, tensor.numel())):
            part = view(tensor, box).to(dtype or tensor.dtype).contiguous()
            bits = part.view(BITS[part.element_size()]).reshape(-1).to(torch.int64)
            plain += bits.sum()
            place = torch.arange(at + 1, at + 1 + bits.numel(), dtype=torch.int64, device=tensor.device)
            hashed = place.mul_(_WEYL).add_(bits).mul_(_MIX)
            mixed += hashed.bitwise_xor_(hashed >> 31).mul_(_WEYL).sum()
            at += bits.numel()
    return [int(plain), int(mixed)]


def non_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that hold a NaN or an infinity."""
    return [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]


def _key(group: Group, transfer: Transfer) -> str:
    return f"{group.name} {transfer.name}{box_text(transfer.canonical)} {transfer.destination_parameter}"


def _text(sums: list[int] | None) -> str:
    return "no checksum" if sums is None else "/".join(f"{value & ((1 << 64) - 1):016x}" for value in sums)
