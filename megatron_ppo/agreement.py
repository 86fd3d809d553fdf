"""Decisions that every rank must take alike: was anyone asked to stop, to save?

A signal reaches one process, but the whole launch has to act on it at the same boundary. Each mesh reduces its ranks' wish on its own
default group, the two rank 0s exchange the results over the control bridge, and each mesh spreads the common answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_ppo.bridge import Bridge


def all_agree(control: Bridge | None, wishes: Sequence[bool], device: torch.device) -> list[bool]:
    """For each wish, whether any rank of the launch has it. Collective over the world.

    Args:
        control: the bridge that joins rank 0 of both meshes; None on all other ranks.
        wishes: this rank's, in an order common to all ranks.
        device: where the mesh's default group expects tensors.
    """
    flags = torch.tensor([int(wish) for wish in wishes], dtype=torch.int32, device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    if control is not None:
        on_cpu = flags.cpu()
        control.all_reduce(on_cpu, dist.ReduceOp.MAX)
        flags.copy_(on_cpu)
    dist.broadcast(flags, src=0)
    return [bool(flag) for flag in flags.tolist()]
