"""From a batch of rows to micro-batches in step on all ranks, and back. The one place where tokens are shifted.

    batch [B, T]      --split_mini_batches-->  rows of each optimizer step     (by the seed alone)
    rows of a step    --partition_rows----->   rows of each data-parallel rank (token-balanced)
    rows of a rank    --plan_micro_batches-->  rows of each pass               (the same number on every rank)
    rows of a pass    --make_micro_batch--->   MicroBatch, aligned with the network's outputs
    outputs           --scatter_back------->   [B, T], aligned with tokens

Used by the training engine in steps 3 and 5 of the iteration. It moves no data between ranks: each rank computes the same
plan from the same lengths and takes its own part. Sequences are padded row by row, not joined into one: causal attention then
needs no mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_ppo.types import Experience, MicroBatch, TrajectoryBatch, response_mask

DUMMY_ROW = -1
"""``MicroBatch.rows`` of a dummy: no row of any batch."""


def shift_left(x: Tensor) -> Tensor:
    """[b, T] from token alignment to output alignment: position s gets what index s + 1 held; the last column is 0."""
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], dim=1)


def shift_right(x: Tensor) -> Tensor:
    """[b, T] from output alignment to token alignment: index t gets what position t - 1 held; the first column is 0."""
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``number``."""
    return -(-number // multiple) * multiple


def split_mini_batches(num_rows: int, global_batch_size: int, seed: int) -> list[Tensor]:
    """Rows of each optimizer step, [global_batch_size] int64: a permutation of 0..num_rows-1 that depends on the seed alone.

    So the same run on another number of ranks takes the same steps. ``ValueError`` where the mini-batches would not be of one
    size.
    """
    if global_batch_size < 1 or num_rows % global_batch_size:
        raise ValueError(
            f"{num_rows} responses do not make whole mini-batches of global_batch_size {global_batch_size}: "
            f"choose a divisor of prompts_per_iteration x samples_per_prompt = {num_rows}"
        )
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))
    return list(order.split(global_batch_size))


def partition_rows(lengths: Tensor, dp_size: int) -> list[Tensor]:
    """Share rows out to ranks: positions in ``lengths`` ([n] int64, tokens of each row), one ascending int64 tensor a rank.

    Every row goes to exactly one rank; ranks' row counts differ by at most 1, and their tokens as little as giving the
    longest row left to the lightest rank achieves. With fewer rows than ranks some get none. For the rows of a mini-batch:
    ``mini_batch[positions]``.
    """
    if dp_size < 1:
        raise ValueError(f"rows are shared out to at least one rank, not {dp_size}")
    sizes = lengths.tolist()
    base, extra = divmod(len(sizes), dp_size)
    rows: list[list[int]] = [[] for _ in range(dp_size)]
    tokens = [0] * dp_size
    for row in sorted(range(len(sizes)), key=lambda r: (-sizes[r], r)):
        open_ranks = [rank for rank in range(dp_size) if len(rows[rank]) < base + (extra > 0)]
        rank = min(open_ranks, key=lambda r: (tokens[r], len(rows[r]), r))
        extra -= len(rows[rank]) == base
        rows[rank].append(row)
        tokens[rank] += sizes[row]
    return [torch.tensor(sorted(own), dtype=torch.int64) for own in rows]


def plan_micro_batches(
    lengths: Tensor,
    rank_rows: Sequence[Tensor],
    micro_batch_size: int,
    max_tokens: int | None = None,
    *,
    length_multiple: int = 1,
    multiple_of: int = 1,
) -> list[list[Tensor]]:
    """Rows of every pass of every rank, ``plan[rank][pass]``, the same number of passes on each rank.

    ``lengths`` [B] int64 is indexed by the rows in ``rank_rows`` (one tensor a rank). A pass holds at most
    ``micro_batch_size`` rows and ``max_tokens`` tokens, padding to ``length_multiple`` counted. Rows of like length go
    together, the longest first, so that padding is little and a lack of memory shows at once. Ranks with fewer passes, and
    all ranks up to a multiple of ``multiple_of`` (the interleaved pipeline schedule), end with empty passes, from which
    ``make_micro_batch`` makes dummies. ``ValueError`` for a row longer than ``max_tokens``.
    """
    if micro_batch_size < 1:
        raise ValueError(f"micro_batch_size must be at least 1, but is {micro_batch_size}")
    plan = [_passes(lengths, rows, micro_batch_size, max_tokens, length_multiple) for rows in rank_rows]
    num_passes = round_up(max([1, *(len(passes) for passes in plan)]), multiple_of)
    empty = torch.empty(0, dtype=torch.int64)
    return [passes + [empty] * (num_passes - len(passes)) for passes in plan]


def _passes(lengths: Tensor, rows: Tensor, micro_batch_size: int, max_tokens: int | None, length_multiple: int) -> list[Tensor]:
    real, own = lengths.tolist(), rows.tolist()
    size = {row: round_up(real[row], length_multiple) for row in own}
    passes: list[list[int]] = []
    for row in sorted(own, key=lambda r: (-size[r], r)):
        if max_tokens is not None and size[row] > max_tokens:
            raise ValueError(
                f"row {row} has {real[row]} tokens, {size[row]} padded to a multiple of {length_multiple}, above "
                f"max_tokens_per_micro_batch {max_tokens}; raise that, or lower max_prompt_length or max_response_length"
            )
        open_pass = passes[-1] if passes else None
        # rows come longest first, so the first row of a pass tells its padded length
        if (
            open_pass is None
            or len(open_pass) == micro_batch_size
            or (max_tokens is not None and size[open_pass[0]] * (len(open_pass) + 1) > max_tokens)
        ):
            passes.append([row])
        else:
            open_pass.append(row)
    return [torch.tensor(rows_of_pass, dtype=torch.int64) for rows_of_pass in passes]


def make_micro_batch(
    source: Experience | TrajectoryBatch, rows: Tensor, length_multiple: int = 1, device: torch.device | str = "cpu"
) -> MicroBatch:
    """The given rows ([n] int64) of a batch, moved to the network's alignment and to ``device``.

    T is the longest row, rounded up to ``length_multiple``: what else the batch holds does not matter. Padding tokens are id
    0, so that any id may stand there in the batch. No rows give a dummy: one row of one token, ``rows`` -1, ``loss_mask`` all
    0.
    """
    batch = source.trajectories if isinstance(source, Experience) else source
    dummy = len(rows) == 0
    if dummy and batch.num_rows == 0:
        raise ValueError("a batch without rows cannot give a dummy micro-batch")
    picked = torch.zeros(1, dtype=torch.int64) if dummy else rows.cpu()
    lengths = torch.ones(1, dtype=torch.int64) if dummy else batch.lengths[picked]
    length = round_up(int(lengths.max()), length_multiple)

    def cut(x: Tensor) -> Tensor:
        part = x[picked, :length]
        part = torch.nn.functional.pad(part, (0, length - part.shape[1]))
        return torch.zeros_like(part) if dummy else part

    def aligned(x: Tensor | None) -> Tensor | None:
        return None if x is None else shift_left(cut(x).float()).to(device)

    tokens = torch.where(torch.arange(length) < lengths[:, None], cut(batch.tokens), 0)
    mask = response_mask(batch.prompt_lengths[picked], batch.response_lengths[picked], length) & (not dummy)
    experience = source if isinstance(source, Experience) else None
    return MicroBatch(
        tokens=tokens.to(device),
        labels=shift_left(tokens).to(device),
        loss_mask=shift_left(mask).to(device),
        rows=(torch.full((1,), DUMMY_ROW) if dummy else picked).to(device),
        lengths=lengths.to(device),
        rollout_log_probs=aligned(batch.rollout_log_probs),
        old_log_probs=aligned(experience.old_log_probs) if experience else None,
        ref_log_probs=aligned(experience.ref_log_probs) if experience else None,
        advantages=aligned(experience.advantages) if experience else None,
        returns=aligned(experience.returns) if experience else None,
        values=aligned(experience.values) if experience else None,
    )


def scatter_back(outputs: Sequence[Tensor], micro_batches: Sequence[MicroBatch], num_rows: int, length: int) -> Tensor:
    """Token-wise outputs ([b, T] each, as its micro-batch) as one [num_rows, length] float32 CPU tensor, aligned with tokens.

    0 outside the responses and in rows that no micro-batch holds, so that ranks' results may be added to make the whole.
    Dummies are dropped.
    """
    result = torch.zeros(num_rows, length)
    for output, batch, real in _real_rows(outputs, micro_batches, num_rows):
        mask = batch.loss_mask.cpu()
        moved = shift_right(torch.where(mask, output.detach().float().cpu(), 0.0))[real]
        width = min(length, moved.shape[1])
        result[batch.rows.cpu()[real], :width] = moved[:, :width]
    return result


def scatter_scores(outputs: Sequence[Tensor], micro_batches: Sequence[MicroBatch], num_rows: int) -> Tensor:
    """Row-wise outputs ([b] each) as one [num_rows] float32 CPU tensor; 0 in rows of no micro-batch. Dummies are dropped."""
    result = torch.zeros(num_rows)
    for output, batch, real in _real_rows(outputs, micro_batches, num_rows):
        result[batch.rows.cpu()[real]] = output.detach().float().cpu()[real]
    return result


def _real_rows(
    outputs: Sequence[Tensor], micro_batches: Sequence[MicroBatch], num_rows: int
) -> list[tuple[Tensor, MicroBatch, Tensor]]:
    """Each output with its micro-batch and the bool mask [b] of its real rows; no row may come twice."""
    found = [(output, batch, batch.rows.cpu() != DUMMY_ROW) for output, batch in zip(outputs, micro_batches, strict=True)]
    rows = torch.cat([batch.rows.cpu()[real] for _, batch, real in found]) if found else torch.empty(0, dtype=torch.int64)
    if len(rows.unique()) != len(rows):
        raise ValueError(f"{len(rows)} rows came back, but only {len(rows.unique())} different ones: a row was planned twice")
    if len(rows) and int(rows.max()) >= num_rows:
        raise ValueError(f"row {int(rows.max())} came back, but the batch has {num_rows} rows only")
    return found
