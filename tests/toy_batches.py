"""Small trajectory batches for tests, with given lengths and random content."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_ppo.types import TrajectoryBatch, response_mask


def make_trajectories(
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    *,
    length: int | None = None,
    seed: int = 0,
    pad_token: int = 0,
    group_size: int = 1,
) -> TrajectoryBatch:
    """One row for each pair of lengths; what a row holds depends on ``seed`` and its place, not on ``length`` or neighbours."""
    prompts, responses = torch.tensor(prompt_lengths), torch.tensor(response_lengths)
    longest = max(1, int((prompts + responses).max()))
    length = longest if length is None else length
    tokens = torch.full((len(prompts), length), pad_token)
    log_probs = torch.zeros(len(prompts), length)
    scores = torch.zeros(len(prompts))
    for row, real in enumerate((prompts + responses).tolist()):
        generator = torch.Generator().manual_seed(1000 * seed + row)
        tokens[row, :real] = torch.randint(1, 11, (real,), generator=generator)
        log_probs[row, :real] = -3 * torch.rand(real, generator=generator)
        scores[row] = torch.randn((), generator=generator)
    mask = response_mask(prompts, responses, length)
    return TrajectoryBatch(
        tokens=tokens,
        prompt_lengths=prompts,
        response_lengths=responses,
        rollout_log_probs=torch.where(mask, log_probs, 0.0),
        scores=scores,
        truncated=torch.zeros(len(prompts), dtype=torch.bool),
        prompt_ids=torch.arange(len(prompts)) // group_size,
        sample_indices=torch.arange(len(prompts)) % group_size,
        version=0,
    )
