"""Scores to advantages: placement, grouping, whitening over all rows, statistics; nothing depends on padding or row order."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from toy_batches import make_trajectories

from megatron_ppo.config import AlgorithmConfig
from megatron_ppo.experience import make_experience
from megatron_ppo.types import TrajectoryBatch

NAN = float("nan")
GAE = AlgorithmConfig()
GRPO = AlgorithmConfig(advantage_estimator="grpo")
RLOO = AlgorithmConfig(advantage_estimator="rloo")


def scored(trajectories: TrajectoryBatch, *scores: float) -> TrajectoryBatch:
    return replace(trajectories, scores=torch.tensor(scores))


def columns(trajectories: TrajectoryBatch, garbage: float = 0.0) -> list[Tensor]:
    """Random old log-probs, values and reference log-probs, the same whatever T is; ``garbage`` outside the responses."""
    mask = trajectories.response_mask
    found = []
    for seed in range(3):
        content = torch.full(mask.shape, garbage)
        for row in range(trajectories.num_rows):
            generator = torch.Generator().manual_seed(100 * seed + row)
            content[row, mask[row]] = torch.randn(60, generator=generator)[: int(mask[row].sum())] - 2
        found.append(content)
    return found


# -- advantages -------------------------------------------------------------------------------------------------------


def test_b56_b45_score_to_advantages_and_returns() -> None:
    trajectories = scored(make_trajectories([2], [3], length=7), 1.0)
    values = torch.tensor([[9, 9, 0.5, 0.4, 0.2, 100, 100]])
    zeros = torch.zeros(1, 7)
    experience, metrics = make_experience(trajectories, zeros, values, None, None, replace(GAE, whiten_advantages=False), 0.0)
    assert experience.returns is not None and experience.values is not None
    assert_close(experience.advantages, torch.tensor([[0, 0, 0.432, 0.56, 0.8, 0, 0]]))
    assert_close(experience.returns, torch.tensor([[0, 0, 0.932, 0.96, 1.0, 0, 0]]))
    assert metrics["values/mean"] == pytest.approx(1.1 / 3)
    whitened, _ = make_experience(trajectories, zeros, values, None, None, GAE, 0.0)
    assert whitened.returns is not None
    assert_close(whitened.returns, experience.returns, msg="returns come before whitening")
    assert whitened.advantages[0, 2:5].mean().abs() < 1e-6 and abs(whitened.advantages[0, 2:5].std() - 1) < 1e-5


def test_b52_whitening_is_over_the_rows_of_all_ranks() -> None:
    trajectories = scored(make_trajectories([1] * 4, [1] * 4), 0.0, 1.0, 10.0, 11.0)
    zeros = torch.zeros(4, 2)
    experience, metrics = make_experience(trajectories, zeros, zeros, None, None, GAE, 0.0)
    assert_close(experience.advantages[:, 1], torch.tensor([-0.9479, -0.7756, 0.7756, 0.9479]), atol=5e-5, rtol=0)
    assert metrics["advantage/mean"] == pytest.approx(5.5), "statistics are of the advantages before whitening"


def test_b53_groups_are_the_prompts() -> None:
    trajectories = scored(make_trajectories([1] * 5, [2, 1, 3, 2, 1], group_size=4), 1, 0, 0, 0, 7)
    experience, _ = make_experience(trajectories, torch.zeros(5, 4), None, None, None, GRPO, 0.0)
    assert_close(experience.advantages[2], torch.tensor([0, -0.5, -0.5, -0.5]), atol=1e-5, rtol=0)
    assert_close(experience.advantages[0], torch.tensor([0, 1.5, 1.5, 0]), atol=1e-5, rtol=0)
    assert not experience.advantages[4].any(), "a group of one teaches nothing"
    assert experience.values is None and experience.returns is None
    left_out, _ = make_experience(trajectories, torch.zeros(5, 4), None, None, None, RLOO, 0.0)
    assert_close(left_out.advantages[:, 1], torch.tensor([1, -1 / 3, -1 / 3, -1 / 3, 0]))


@pytest.mark.parametrize("algorithm", [GAE, GRPO, RLOO])
def test_b43_shuffled_rows_keep_their_advantage(algorithm: AlgorithmConfig) -> None:
    trajectories = make_trajectories([2, 2, 3, 3, 1, 1], [3, 5, 1, 0, 4, 2], group_size=2)
    old, values, reference = columns(trajectories)
    order = torch.tensor([4, 0, 3, 5, 2, 1])
    plain, metrics = make_experience(trajectories, old, values, reference, None, algorithm, 0.1)
    mixed, mixed_metrics = make_experience(
        trajectories.select(order), old[order], values[order], reference[order], None, algorithm, 0.1
    )
    assert plain.advantages.any()
    assert_close(mixed.advantages, plain.advantages[order])
    assert mixed_metrics == pytest.approx(metrics)


def test_kl_penalty_reaches_every_estimator() -> None:
    trajectories = scored(make_trajectories([1, 1], [2, 2], group_size=2), 1.0, 1.0)
    old, reference = torch.tensor([[0, -1.0, -1.0], [0, -1.0, -1.0]]), torch.tensor([[0, -2.0, -1.5], [0, -1.0, -1.0]])
    zeros = torch.zeros(2, 3)
    plain = replace(GAE, whiten_advantages=False, gae_lambda=1.0)
    experience, metrics = make_experience(trajectories, old, zeros, reference, None, plain, 0.1)
    assert_close(experience.advantages, torch.tensor([[0, 0.85, 0.95], [0, 1.0, 1.0]]))
    assert (metrics["kl/mean"], metrics["kl/per_response"]) == (pytest.approx(1.5 / 4), pytest.approx(0.75))
    left_out, _ = make_experience(trajectories, old, None, reference, None, RLOO, 0.1)
    assert_close(left_out.advantages[:, 1], torch.tensor([-0.15, 0.15]))
    with pytest.raises(ValueError, match=r"kl_coef is 0\.1"):
        make_experience(trajectories, old, None, None, None, RLOO, 0.1)


def test_reward_model_scores_are_added() -> None:
    trajectories = scored(make_trajectories([1, 1], [1, 1], group_size=2), 1.0, 0.0)
    experience, metrics = make_experience(trajectories, torch.zeros(2, 2), None, None, torch.tensor([2.0, 5.0]), RLOO, 0.0)
    assert_close(experience.advantages[:, 1], torch.tensor([-2.0, 2.0]))
    assert (metrics["reward/mean"], metrics["reward/function"], metrics["reward/model"]) == (4.0, 0.5, 3.5)


def test_a_cut_response_is_bootstrapped_only_if_asked() -> None:
    trajectories = replace(scored(make_trajectories([1, 1], [2, 2]), 0.0, 0.0), truncated=torch.tensor([True, False]))
    values = torch.tensor([[0, 1.0, 2.0], [0, 1.0, 2.0]])
    algorithm = replace(GAE, whiten_advantages=False, gae_lambda=1.0)
    plain, metrics = make_experience(trajectories, torch.zeros(2, 3), values, None, None, algorithm, 0.0)
    asked, _ = make_experience(
        trajectories, torch.zeros(2, 3), values, None, None, replace(algorithm, bootstrap_truncated=True), 0.0
    )
    assert plain.returns is not None and asked.returns is not None
    assert plain.returns.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert asked.returns.tolist() == [[0, 2, 2], [0, 0, 0]]
    assert metrics["truncated_frac"] == 0.5


# -- empty, broken ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [GAE, GRPO, RLOO])
@pytest.mark.parametrize("responses", [[3, 0], [0, 0]])
def test_b40_empty_responses_leave_everything_finite(algorithm: AlgorithmConfig, responses: list[int]) -> None:
    trajectories = scored(make_trajectories([2, 2], responses, group_size=2), 1.0, 0.0)
    old, values, reference = columns(trajectories, garbage=NAN)
    experience, metrics = make_experience(trajectories, old, values, reference, None, algorithm, 0.1)
    assert torch.isfinite(experience.advantages).all() and not experience.advantages[1].any()
    assert all(math.isfinite(number) for number in metrics.values())
    assert metrics["response_length/mean"] == sum(responses) / 2
    assert metrics["reward/mean"] == 0.5
    if algorithm is RLOO and responses[0]:
        plain, _ = make_experience(trajectories, old, None, None, None, RLOO, 0.0)
        assert plain.advantages[0, 2] == 1.0, "an empty response still stands in its group's baseline"


def test_b49_nan_is_harmless_where_masked_and_named_where_valid() -> None:
    trajectories = scored(make_trajectories([1], [1], length=3), 2.0)
    old = torch.tensor([[NAN, 0.0, NAN]])
    algorithm = replace(GAE, whiten_advantages=False)
    experience, metrics = make_experience(trajectories, old, old, old, None, algorithm, 0.3)
    assert experience.advantages.tolist() == [[0.0, 2.0, 0.0]]
    assert metrics["kl/mean"] == 0.0
    zeros, bad = torch.zeros(1, 3), torch.tensor([[0.0, NAN, 0.0]])
    for name, arguments in {
        "old_log_probs": (bad, zeros, zeros, None),
        "values": (zeros, bad, zeros, None),
        "ref_log_probs": (zeros, zeros, bad, None),
        "reward-model scores": (zeros, zeros, zeros, torch.tensor([math.inf])),
    }.items():
        with pytest.raises(FloatingPointError, match=name):
            make_experience(trajectories, *arguments, GAE, 0.0)
    for name, field in {
        "function rewards": {"scores": torch.tensor([NAN])},
        "rollout_log_probs": {"rollout_log_probs": bad},
    }.items():
        with pytest.raises(FloatingPointError, match=name):
            make_experience(replace(trajectories, **field), zeros, zeros, None, None, GAE, 0.0)


def test_missing_values_and_other_shapes_are_refused() -> None:
    trajectories = make_trajectories([1, 1], [2, 2])
    zeros = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="critic's values"):
        make_experience(trajectories, zeros, None, None, None, GAE, 0.0)
    with pytest.raises(ValueError, match=r"values must be \[B, T\] = \(2, 3\) .* is \(2, 4\)"):
        make_experience(trajectories, zeros, torch.zeros(2, 4), None, None, GAE, 0.0)
    with pytest.raises(ValueError, match=r"model_scores must be \[B\] = \(2,\), but is \(1,\)"):
        make_experience(trajectories, zeros, zeros, None, torch.zeros(1), GAE, 0.0)


# -- statistics -------------------------------------------------------------------------------------------------------


def test_statistics_by_hand() -> None:
    trajectories = replace(
        scored(make_trajectories([1, 2], [2, 1]), 1.0, 3.0),
        rollout_log_probs=torch.tensor([[0, -1.0, -2.0], [0, 0, -3.0]]),
    )
    old = torch.tensor([[9, -1.0, -2.5], [9, 9, -3.0]])
    values = torch.tensor([[9, 1.0, 2.0], [9, 9, 2.0]])
    _, metrics = make_experience(trajectories, old, values, None, None, replace(GAE, gae_lambda=1.0), 0.0)
    k3 = math.exp(-0.5) + 0.5 - 1
    returns, errors = torch.tensor([1.0, 1.0, 3.0]), torch.tensor([0.0, -1.0, 1.0])
    assert metrics == pytest.approx(
        {
            "reward/mean": 2.0,
            "reward/max": 3.0,
            "reward/min": 1.0,
            "reward/std": math.sqrt(2),
            "response_length/mean": 1.5,
            "response_length/max": 2.0,
            "truncated_frac": 0.0,
            "kl/mean": k3 / 3,
            "kl/per_response": k3 / 2,
            "logprob_diff/mean": 0.5 / 3,
            "logprob_diff/max": 0.5,
            "logprob_diff/k3": k3 / 3,
            "advantage/mean": 0.0,
            "advantage/std": 1.0,
            "values/mean": 5 / 3,
            "returns/mean": 5 / 3,
            "explained_variance": 1 - float(errors.var() / returns.var()),
        },
        abs=1e-6,
    )


def test_kl_is_against_the_reference_where_there_is_one() -> None:
    trajectories = make_trajectories([1], [2])
    old, reference = torch.tensor([[0, -1.0, -2.0]]), torch.tensor([[0, -2.0, -1.5]])
    _, metrics = make_experience(trajectories, old, None, reference, None, RLOO, 0.0)
    assert metrics["kl/mean"] == pytest.approx(0.25)
    assert "values/mean" not in metrics and "explained_variance" not in metrics


@settings(deadline=None, max_examples=30)
@given(
    responses=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    padding=st.sampled_from([1, 50]),
    garbage=st.sampled_from([1e9, NAN]),
    algorithm=st.sampled_from([GAE, GRPO, RLOO, replace(GAE, bootstrap_truncated=True, gamma=0.9)]),
)
def test_b59_padding_and_what_stands_in_it_do_not_matter(
    responses: list[int], padding: int, garbage: float, algorithm: AlgorithmConfig
) -> None:
    prompts = [1 + row % 3 for row in range(len(responses))]
    cut = torch.arange(len(responses)) % 2 == 0
    results = []
    for extra, content in [(0, 0.0), (padding, garbage)]:
        plain = make_trajectories(prompts, responses, group_size=3)
        trajectories = replace(
            make_trajectories(prompts, responses, group_size=3, length=plain.tokens.shape[1] + extra, pad_token=-1),
            truncated=cut,
        )
        old, values, reference = columns(trajectories, content)
        results.append(make_experience(trajectories, old, values, reference, None, algorithm, 0.1))
    (short, metrics), (long, long_metrics) = results
    width = short.advantages.shape[1]
    for name in ("old_log_probs", "ref_log_probs", "advantages", "returns", "values"):
        before, after = getattr(short, name), getattr(long, name)
        assert (before is None) == (after is None)
        if before is not None:
            assert_close(after[:, :width], before, atol=1e-6, rtol=1e-6)
            assert not after[:, width:].any()
    assert long_metrics == pytest.approx(metrics, abs=1e-6, rel=1e-6)
