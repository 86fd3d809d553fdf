"""Log-probabilities and entropy of logits that are split over the vocabulary, in fp32 whatever the logits' dtype.

Every log-prob that the trainer computes comes from here (scoring and update alike), so that the first update's ratio is
exactly 1. The vocabulary may be split over a tensor-parallel group, with padding columns at its end that belong to no
token: they are left out of the sum. Two collectives a call, none in the backward pass. fp32 copies exist for
``chunk_size`` tokens at a time only; the logits themselves (in their own dtype) are kept whole between the passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_SIZE = 1024
"""Tokens whose logits are held in fp32 at one time."""


def log_probs_and_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of ``labels``, and entropy in nats, of softmax(``logits`` / ``temperature``). Both fp32, shaped
    like labels.

    ``logits`` [..., V_r] is this rank's shard: rank r of ``group`` holds columns r * V_r to (r + 1) * V_r of the padded
    vocabulary (``group`` None: all of it). Columns from ``vocab_size`` on are padding and count for nothing. ``labels``
    [...] int64 are ids of the whole vocabulary; at a masked position any id below ``vocab_size`` will do.

    Gradients flow to the logits from both results: d log p_y / dz_j = [j = y] - p_j and dH / dz_j = -p_j (log p_j + H),
    over the temperature. Each rank gets the gradient of its own columns; the results' gradients must be equal on all
    ranks of the group. A logit of -inf has probability 0 and contributes nothing to entropy or gradient.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, but is {temperature}; greedy decoding has an option of its own")
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} do not fit together")
    shard = _Shard(logits.shape[-1], vocab_size, group, temperature)
    log_probs, entropy = _VocabParallelLogProbs.apply(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), shard, with_entropy)
    return log_probs.view(labels.shape), entropy.view(labels.shape) if with_entropy else None


def gather_vocab(logits: Tensor, vocab_size: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """The whole rows: [..., V_r] of each rank of ``group`` -> [..., vocab_size], the same on all ranks. Not differentiable."""
    if group is None or group.size() == 1:
        return logits[..., :vocab_size]
    shards = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(shards, logits.contiguous(), group=group)
    return torch.cat(shards, dim=-1)[..., :vocab_size]


class _Shard:
    """The columns of one rank (ids ``start`` to ``start + num_real``, then padding), and the temperature its logits are
    divided by."""

    def __init__(self, width: int, vocab_size: int, group: dist.ProcessGroup | None, temperature: float) -> None:
        self.temperature = temperature
        self.group = group if group is not None and group.size() > 1 else None
        rank, size = (group.rank(), group.size()) if self.group is not None and group is not None else (0, 1)
        if vocab_size > width * size:
            raise ValueError(f"{size} shards of {width} columns do not hold a vocabulary of {vocab_size}")
        self.start = rank * width
        self.num_real = min(max(vocab_size - self.start, 0), width)

    def reduce(self, tensor: Tensor, operation: Any) -> None:
        """All-reduce in place over the group."""
        if self.group is not None:
            dist.all_reduce(tensor, op=operation, group=self.group)

    def local_labels(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each label (0 where another rank has it), and whether it is here. Only for a shard with real columns."""
        local = labels - self.start
        here = (local >= 0) & (local < self.num_real)
        return torch.where(here, local, 0), here


class _VocabParallelLogProbs(torch.autograd.Function):
    """Rows in, (log_probs, entropy) out; see ``log_probs_and_entropy``. Without entropy the second result is empty."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, shard: _Shard, with_entropy: bool) -> tuple[Tensor, Tensor]:
        num_rows = labels.shape[0]
        maximum = torch.full((num_rows,), -torch.inf, device=logits.device)
        for rows, scaled in _chunks(logits, shard):
            maximum[rows] = scaled.amax(dim=-1)
        shard.reduce(maximum, dist.ReduceOp.MAX)

        # sums[0]: of exp(z - max). sums[1]: the label's z - max, from the one rank that has it. sums[2]: of exp(z - max)
        # * (z - max).
        sums = torch.zeros(3 if with_entropy else 2, num_rows, device=logits.device)
        for rows, scaled in _chunks(logits, shard):
            scaled.sub_(maximum[rows, None])
            column, here = shard.local_labels(labels[rows])
            sums[1, rows] = torch.where(here, scaled.gather(-1, column[:, None]).squeeze(-1), 0.0)
            weights = scaled.exp()
            sums[0, rows] = weights.sum(dim=-1)
            if with_entropy:
                sums[2, rows] = _zero_where_zero(weights, weights * scaled).sum(dim=-1)
        shard.reduce(sums, dist.ReduceOp.SUM)

        log_normaliser = sums[0].log()
        entropy = log_normaliser - sums[2] / sums[0] if with_entropy else log_normaliser.new_empty(0)
        ctx.save_for_backward(logits, labels, maximum + log_normaliser, entropy)
        ctx.shard, ctx.with_entropy = shard, with_entropy
        return sums[1] - log_normaliser, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, log_sum_exp, entropy = ctx.saved_tensors
        shard: _Shard = ctx.shard
        grad_logits = torch.zeros_like(logits)
        for rows, scaled in _chunks(logits, shard):
            log_probabilities = scaled.sub_(log_sum_exp[rows, None])
            probabilities = log_probabilities.exp()
            grad = -probabilities * grad_log_probs[rows, None]
            column, here = shard.local_labels(labels[rows])
            grad.scatter_add_(-1, column[:, None], torch.where(here, grad_log_probs[rows], 0.0)[:, None])
            if ctx.with_entropy:
                slope = probabilities * (log_probabilities + entropy[rows, None])
                grad -= _zero_where_zero(probabilities, slope) * grad_entropy[rows, None]
            grad_logits[rows, : shard.num_real] = (grad / shard.temperature).to(logits.dtype)
        return grad_logits, None, None, None


def _chunks(logits: Tensor, shard: _Shard) -> Iterator[tuple[slice, Tensor]]:
    """(rows, fp32 copy of their real columns over the temperature), chunk by chunk; none where the shard is all padding."""
    if shard.num_real == 0:
        return
    for start in range(0, logits.shape[0], CHUNK_SIZE):
        rows = slice(start, start + CHUNK_SIZE)
        yield rows, logits[rows, : shard.num_real].to(torch.float32, copy=True).div_(shard.temperature)


def _zero_where_zero(probabilities: Tensor, product: Tensor) -> Tensor:
    """0 * -inf is NaN, but its limit here is 0."""
    return torch.where(probabilities == 0, 0.0, product)
