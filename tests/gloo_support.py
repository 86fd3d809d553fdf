"""Ranks of a launch that only move weights: no configuration, no engine, no watchdog. Test support only."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from dense_layouts import Dense
from torch import Tensor

from megatron_ppo.world import World

PADDING = -3.0


def a_world(rank: int, world_size: int, num_training: int) -> World:
    """This rank's place where the first ranks train and the others are replicas of one rank; rank 0 hosts the store."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = dist.TCPStore(*address, world_size, is_master=rank == 0, timeout=timedelta(seconds=60))
    trains = rank < num_training
    return World(
        global_rank=rank,
        world_size=world_size,
        local_rank=rank,
        mesh="training" if trains else "rollout",
        rank=rank if trains else rank - num_training,
        mesh_size=num_training if trains else world_size - num_training,
        training_ranks=range(num_training),
        rollout_ranks=range(num_training, world_size),
        rollout_tensor_parallel_size=1,
        store=store,
        run_id="test",
    )


def values(model: Dense, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random values with many bits, so that a cast to bfloat16 rounds."""
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in model.shapes().items()}


def transposed(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same values, column-major."""
    return {name: t.t().contiguous().t() if t.dim() == 2 else t for name, t in parameters.items()}


def allocated_bytes(function: Callable[[], object]) -> list[int]:
    """Sizes of all tensor memory that torch allocates in a call, whether or not it is given back."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    sizes = [event.cpu_memory_usage for event in profile.events() if event.name == "[memory]"] or [
        event.self_cpu_memory_usage for event in profile.events()
    ]
    return [size for size in sizes if size > 0]
