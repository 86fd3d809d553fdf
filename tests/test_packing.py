"""Rows to micro-batches and back: nothing is lost, doubled, shifted wrongly or out of step, on any topology."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from toy_batches import make_trajectories

from megatron_ppo import packing
from megatron_ppo.types import Experience, MicroBatch, TrajectoryBatch

lengths_of_rows = st.lists(st.integers(1, 40), min_size=0, max_size=24)


def network(batch: MicroBatch) -> Tensor:
    """[b, T] in place of log-probs: at position s a number that tells input, label and position; NaN where nothing is valid."""
    position = torch.arange(batch.tokens.shape[1])
    output = batch.tokens + 0.01 * batch.labels + 1000.0 * position
    return torch.where(batch.loss_mask, output, float("nan"))


def expected_of(trajectories: TrajectoryBatch) -> Tensor:
    """What ``network`` must come to, computed in token alignment with loops."""
    result = torch.zeros(trajectories.tokens.shape)
    for row in range(trajectories.num_rows):
        start = int(trajectories.prompt_lengths[row])
        for t in range(start, start + int(trajectories.response_lengths[row])):
            result[row, t] = trajectories.tokens[row, t - 1] + 0.01 * trajectories.tokens[row, t] + 1000.0 * (t - 1)
    return result


def micro_batches_of(trajectories: TrajectoryBatch, plan: list[Tensor], length_multiple: int = 1) -> list[MicroBatch]:
    return [packing.make_micro_batch(trajectories, rows, length_multiple) for rows in plan]


def test_shifts_are_inverse_but_for_the_edges() -> None:
    x = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert packing.shift_left(x).tolist() == [[2, 3, 0], [5, 6, 0]]
    assert packing.shift_right(x).tolist() == [[0, 1, 2], [0, 4, 5]]
    assert packing.shift_right(packing.shift_left(x)).tolist() == [[0, 2, 3], [0, 5, 6]]


def test_b47_positions_that_predict_the_response() -> None:
    """Prompt 3, response 2, 2 columns of padding: the network's positions 2 and 3 are trained on, and no other."""
    trajectories = make_trajectories([3], [2], length=7, pad_token=-1)
    batch = packing.make_micro_batch(trajectories, torch.tensor([0]), length_multiple=7)
    tokens = trajectories.tokens[0].tolist()
    assert batch.loss_mask.tolist() == [[False, False, True, True, False, False, False]]
    assert batch.tokens[0].tolist() == tokens[:5] + [0, 0]
    assert batch.labels[0].tolist() == tokens[1:5] + [0, 0, 0]
    assert batch.rollout_log_probs is not None
    assert batch.rollout_log_probs[0, 2:4].tolist() == trajectories.rollout_log_probs[0, 3:5].tolist()
    assert (batch.rows.tolist(), batch.lengths.tolist()) == ([0], [5])


def test_every_field_of_an_experience_is_moved_alike() -> None:
    trajectories = make_trajectories([2, 3], [3, 1], length=9)
    fields = [torch.arange(18.0).reshape(2, 9) + 100 * i for i in range(5)]
    experience = Experience(trajectories, *fields)
    batch = packing.make_micro_batch(experience, torch.tensor([1, 0]), length_multiple=4)
    assert batch.tokens.shape == (2, 8) and batch.rows.tolist() == [1, 0]
    moved = [batch.old_log_probs, batch.advantages, batch.returns, batch.values, batch.ref_log_probs]
    for before, after in zip(fields, moved, strict=True):
        assert after is not None
        assert after[:, :7].tolist() == before[[1, 0], 1:8].tolist()
    without = packing.make_micro_batch(Experience(trajectories, fields[0], fields[1], None, None, None), torch.tensor([0]))
    assert without.returns is None and without.values is None and without.ref_log_probs is None


def test_the_padded_length_may_exceed_that_of_the_batch() -> None:
    trajectories = make_trajectories([2], [3])
    batch = packing.make_micro_batch(trajectories, torch.tensor([0]), length_multiple=8)
    assert batch.tokens.shape == batch.loss_mask.shape == (1, 8)
    assert int(batch.loss_mask.sum()) == 3


def test_b66_a_dummy_is_a_row_that_trains_nothing() -> None:
    trajectories = make_trajectories([2], [3])
    experience = Experience(trajectories, *[torch.ones(1, 5)] * 5)
    dummy = packing.make_micro_batch(experience, torch.empty(0, dtype=torch.int64), length_multiple=4)
    assert dummy.tokens.shape == (1, 4) and not dummy.loss_mask.any() and not dummy.tokens.any()
    assert dummy.rows.tolist() == [packing.DUMMY_ROW] and dummy.lengths.tolist() == [1]
    assert dummy.advantages is not None and not dummy.advantages.any()


def test_b66_ranks_run_the_same_number_of_passes() -> None:
    lengths = torch.tensor([100, 100, 100, 10])
    plan = packing.plan_micro_batches(lengths, [torch.tensor([0, 1, 2]), torch.tensor([3])], 8, max_tokens=100)
    assert [[rows.tolist() for rows in passes] for passes in plan] == [[[0], [1], [2]], [[3], [], []]]


def test_b67_five_rows_on_four_ranks_and_three_on_eight() -> None:
    for num_rows, dp_size in [(5, 4), (3, 8)]:
        trajectories = make_trajectories([2, 1, 4, 3, 2][:num_rows], [3, 5, 0, 2, 1][:num_rows])
        shares = packing.partition_rows(trajectories.lengths, dp_size)
        assert sorted(len(share) for share in shares) == sorted(
            [num_rows // dp_size + (r < num_rows % dp_size) for r in range(dp_size)]
        )
        plan = packing.plan_micro_batches(trajectories.lengths, shares, micro_batch_size=2)
        assert {len(passes) for passes in plan} == {1}
        whole = torch.zeros(trajectories.tokens.shape)
        for passes in plan:
            batches = micro_batches_of(trajectories, passes)
            whole += packing.scatter_back([network(b) for b in batches], batches, num_rows, whole.shape[1])
        assert torch.equal(whole, expected_of(trajectories))


@pytest.mark.parametrize("lengths", [[5, 3], [5], [3]])
def test_b68_rows_are_padded_to_the_multiple_that_the_model_needs(lengths: list[int]) -> None:
    """Rows are padded one by one here, not packed into one sequence with cu_seqlens, so this is the row-wise equivalent.

    TP 2 with sequence parallelism and CP 2 ask for a multiple of 2 * CP * TP = 8; 5 and 3 log-probs come back, as unpadded.
    """
    trajectories = make_trajectories([1] * len(lengths), lengths)
    rows = torch.arange(len(lengths))
    padded = packing.make_micro_batch(trajectories, rows, length_multiple=8)
    plain = packing.make_micro_batch(trajectories, rows)
    assert padded.tokens.shape[1] == 8
    assert plain.tokens.shape[1] == max(lengths) + 1
    back = [packing.scatter_back([network(b)], [b], len(lengths), trajectories.tokens.shape[1]) for b in (padded, plain)]
    assert torch.equal(back[0], back[1])
    assert back[0].count_nonzero(dim=1).tolist() == lengths


def test_mini_batches_depend_on_the_seed_alone() -> None:
    first, again, other = (packing.split_mini_batches(12, 4, seed) for seed in (7, 7, 8))
    assert [m.tolist() for m in first] == [m.tolist() for m in again] != [m.tolist() for m in other]
    assert [len(m) for m in first] == [4, 4, 4]
    assert sorted(torch.cat(first).tolist()) == list(range(12))
    with pytest.raises(ValueError, match=r"10 responses .* global_batch_size 4"):
        packing.split_mini_batches(10, 4, 0)


@settings(deadline=None, max_examples=60)
@given(lengths_of_rows, st.integers(1, 6))
def test_partition_uses_every_row_once_and_evenly(lengths: list[int], dp_size: int) -> None:
    shares = packing.partition_rows(torch.tensor(lengths, dtype=torch.int64), dp_size)
    assert sorted(row for share in shares for row in share.tolist()) == list(range(len(lengths)))
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1


def test_partition_balances_tokens() -> None:
    shares = packing.partition_rows(torch.tensor([90, 80, 10, 20]), 2)
    assert [share.tolist() for share in shares] == [[0, 2], [1, 3]]
    lengths = torch.randint(10, 1000, (512,), generator=torch.Generator().manual_seed(0))
    tokens = [int(lengths[share].sum()) for share in packing.partition_rows(lengths, 8)]
    assert max(tokens) - min(tokens) < 0.01 * min(tokens)


@settings(deadline=None, max_examples=60)
@given(
    lengths_of_rows,
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from([None, 48, 100]),
    st.sampled_from([1, 2, 8]),
    st.integers(1, 4),
)
def test_b59_no_plan_changes_what_comes_back(  # hypothesis passes by position
    lengths: list[int], dp_size: int, micro_batch_size: int, max_tokens: int | None, length_multiple: int, multiple_of: int
) -> None:
    if not lengths:
        return
    prompts = [1 + n // 3 for n in lengths]
    trajectories = make_trajectories(
        prompts, [n - p if n > p else 0 for n, p in zip(lengths, prompts, strict=True)], pad_token=-7
    )
    plan = packing.plan_micro_batches(
        trajectories.lengths,
        packing.partition_rows(trajectories.lengths, dp_size),
        micro_batch_size,
        max_tokens,
        length_multiple=length_multiple,
        multiple_of=multiple_of,
    )
    (num_passes,) = {len(passes) for passes in plan}
    assert num_passes > 0 and num_passes % multiple_of == 0
    whole, scores = torch.zeros(trajectories.tokens.shape), torch.zeros(len(lengths))
    for passes in plan:
        batches = micro_batches_of(trajectories, passes, length_multiple)
        for batch in batches:
            assert batch.tokens.shape[0] <= micro_batch_size and batch.tokens.shape[1] % length_multiple == 0
            assert max_tokens is None or batch.tokens.numel() <= max_tokens
            assert int(batch.tokens.min()) >= 0, "padding ids of the batch do not reach the network"
        whole += packing.scatter_back([network(b) for b in batches], batches, len(lengths), whole.shape[1])
        scores += packing.scatter_scores([b.lengths * 1.0 for b in batches], batches, len(lengths))
    assert torch.equal(whole, expected_of(trajectories))
    assert scores.tolist() == trajectories.lengths.tolist()


def test_a_row_above_the_token_limit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"row 1 has 41 tokens, 48 padded .* max_tokens_per_micro_batch 47"):
        packing.plan_micro_batches(torch.tensor([8, 41]), [torch.tensor([0, 1])], 4, 47, length_multiple=8)


def test_a_row_that_comes_back_twice_is_refused() -> None:
    trajectories = make_trajectories([1, 1], [2, 2])
    batches = micro_batches_of(trajectories, [torch.tensor([0, 1]), torch.tensor([1])])
    with pytest.raises(ValueError, match="planned twice"):
        packing.scatter_back([network(b) for b in batches], batches, 2, 3)
    with pytest.raises(ValueError, match="has 1 rows only"):
        packing.scatter_scores([torch.zeros(2)], batches[:1], 1)
