"""What a rank sets up before its models: the launcher's variables as vLLM reads them, and how long ranks wait for each other."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from launch_config import two_by_two
from spawn import run_ranks

from megatron_ppo.world import close_world, init_world


def _join_by_srun(rank: int, world_size: int, folder: str) -> tuple[str, str, str, timedelta]:
    """As srun starts a rank: none of torchrun's variables but the master's address, which the batch script exports."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.update(SLURM_PROCID=str(rank), SLURM_NTASKS=str(world_size), SLURM_LOCALID=str(rank), SLURM_JOB_ID="7")
    world = init_world(two_by_two(folder).replace(distributed_timeout_minutes=42))
    seen = (os.environ["LOCAL_RANK"], os.environ["RANK"], os.environ["WORLD_SIZE"], world.store.timeout)
    dist.barrier()
    close_world(world)
    return seen


def test_b98_srun_ranks_have_what_vllm_reads(tmp_path: Path) -> None:
    """vLLM asks for LOCAL_RANK, RANK and WORLD_SIZE, which srun spells otherwise; and slow starts have the configured time."""
    two_by_two(str(tmp_path))
    found = run_ranks(_join_by_srun, 4, str(tmp_path))
    assert [one[:3] for one in found] == [("0", "0", "2"), ("1", "1", "2"), ("2", "0", "2"), ("3", "1", "2")]
    assert {one[3] for one in found} == {timedelta(minutes=42)}
