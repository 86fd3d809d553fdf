"""The mathematics against values worked out by hand, and against properties: padding and masked garbage never matter."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from megatron_ppo import ppo

NAN = float("nan")


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float32)


def surrogate(ratio: float, advantage: float, *, dual_clip: float | None = None) -> tuple[float, float]:
    """Loss and whether a clip decided it, of one token."""
    new, old = row(math.log(ratio)), row(0)
    result = ppo.policy_loss(new, old, row(advantage), row(1), clip_low=0.2, clip_high=0.2, dual_clip=dual_clip)
    return result.loss.item(), result.clipped.item()


# -- masks ------------------------------------------------------------------------------------------------------------


def test_b48_mask_decides_what_is_averaged() -> None:
    zeros, advantages = row(0, 0), row(1, 3)
    for mask, expected in [(row(1, 1), -2.0), (row(1, 0), -1.0)]:
        loss = ppo.policy_loss(zeros, zeros, advantages, mask, clip_low=0.2, clip_high=0.2).loss
        assert ppo.masked_mean(loss, mask).item() == expected
    balanced = ppo.policy_loss(zeros, zeros, row(1, -1), row(1, 1), clip_low=0.2, clip_high=0.2).loss
    assert ppo.masked_mean(balanced, row(1, 1)).item() == 0.0


@pytest.mark.parametrize("mistaken", [row(1, 3), row(1, -1), row(0.5, 1), row(NAN, 1)])
def test_b48_another_tensor_as_the_mask_is_refused(mistaken: Tensor) -> None:
    with pytest.raises(ValueError, match="0 and 1 only"):
        ppo.masked_mean(row(1, 3), mistaken)
    with pytest.raises(ValueError, match="0 and 1 only"):
        ppo.policy_loss(row(0, 0), row(0, 0), row(1, 1), mistaken, clip_low=0.2, clip_high=0.2)


def test_b49_nan_in_a_masked_slot_is_harmless() -> None:
    log_probs = row(0, 0).requires_grad_()
    mask = row(1, 0)
    loss = ppo.policy_loss(log_probs, row(0, NAN), row(1, NAN), mask, clip_low=0.2, clip_high=0.2).loss
    total = ppo.masked_mean(loss, mask)
    total.backward()
    assert total.item() == -1.0
    assert_close(log_probs.grad, row(-1, 0))
    for kind in ("k1", "k2", "k3"):
        log_probs.grad = None
        kl = ppo.kl_estimate(log_probs, row(0, NAN), mask, kind)  # type: ignore[arg-type]
        assert ppo.masked_mean(kl, mask).item() == 0.0
        kl.sum().backward()
        assert log_probs.grad is not None and torch.isfinite(log_probs.grad).all() and log_probs.grad[0, 1] == 0


def test_b49_nan_of_the_network_in_a_masked_slot_is_harmless() -> None:
    values = row(1, NAN).requires_grad_()
    loss, _ = ppo.value_loss(values, row(0, 0), row(3, 0), row(1, 0), None)
    loss.sum().backward()
    assert loss.sum().item() == 2.0
    assert_close(values.grad, row(-2, 0))


def test_b49_nan_in_the_kl_of_the_reward() -> None:
    rewards = ppo.token_rewards(torch.tensor([7.0]), row(1, 0), row(0, NAN), row(0, NAN), 0.5)
    assert rewards.tolist() == [[7.0, 0.0]]


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_b49_nan_in_a_valid_slot_surfaces(bad: float) -> None:
    with pytest.raises(FloatingPointError, match=r"advantages is .* at \(0, 1\); 1 of its 2"):
        ppo.masked_mean(row(1, bad, bad), row(1, 1, 0), "advantages")
    with pytest.raises(FloatingPointError, match="whiten"):
        ppo.whiten(row(1, bad), row(1, 1))
    loss = ppo.policy_loss(row(0, bad), row(0, 0), row(1, 1), row(1, 1), clip_low=0.2, clip_high=0.2).loss
    assert math.isnan(loss.sum().item()), "the clamp of the log-ratio must not hide it"


def test_b40_empty_reductions() -> None:
    nothing = torch.zeros(2, 3)
    assert ppo.masked_mean(torch.full((2, 3), NAN), nothing).item() == 0.0
    assert ppo.whiten(torch.full((2, 3), NAN), nothing).tolist() == nothing.tolist()
    assert ppo.gae(nothing, nothing, nothing, 1.0, 0.95).tolist() == nothing.tolist()
    assert ppo.token_rewards(torch.tensor([1.0, 2.0]), nothing, nothing, None, 0.0).tolist() == nothing.tolist()


# -- rewards and advantages -------------------------------------------------------------------------------------------


def test_b56_score_on_the_last_response_token() -> None:
    zeros = torch.zeros(3, 5)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    rewards = ppo.token_rewards(torch.tensor([2.0, 3.0, 4.0]), mask, zeros, None, 0.0)
    assert rewards.tolist() == [[0, 0, 2, 0, 0], [0, 0, 0, 0, 3], [0, 0, 0, 0, 0]]


def test_b61_kl_in_the_reward_subtracts() -> None:
    rewards = ppo.token_rewards(torch.tensor([1.0]), row(0, 1, 1), row(9, -1, -2), row(9, -3, -1), 0.5)
    assert rewards.tolist() == [[0.0, -1.0, 1.5]]
    with pytest.raises(ValueError, match=r"kl_coef is 0\.5"):
        ppo.token_rewards(torch.tensor([1.0]), row(1), row(0), None, 0.5)


def test_score_sits_on_the_last_valid_token_behind_a_gap() -> None:
    mask = torch.tensor([[0, 1, 0, 1, 0, 0]])
    assert ppo.last_token(mask).tolist() == [[False, False, False, True, False, False]]


@pytest.mark.parametrize(
    ("mask", "rewards", "values", "discounts", "expected"),
    [
        ([1, 1, 0], [0, 1, 0], [0, 0, 100], (1.0, 0.95), [0.95, 1.0, 0]),
        ([1, 1, 1, 0, 0], [0, 0, 1, 0, 0], [0.5, 0.4, 0.2, 100, 100], (1.0, 0.95), [0.432, 0.56, 0.8, 0, 0]),
        ([1, 1, 1, 0, 0], [0.1, -0.2, 1, 0, 0], [0.5, 0.4, 0.2, 100, 100], (0.9, 0.8), [0.07232, 0.156, 0.8, 0, 0]),
        ([1, 1, 0], [0, 1, NAN], [0, 0, NAN], (1.0, 0.95), [0.95, 1.0, 0]),
    ],
)
def test_b45_masked_values_do_not_bootstrap(
    mask: list[float], rewards: list[float], values: list[float], discounts: tuple[float, float], expected: list[float]
) -> None:
    advantages = ppo.gae(row(*rewards), row(*values), row(*mask), *discounts)
    assert_close(advantages, row(*expected))
    if discounts == (1.0, 0.95) and len(mask) == 5:
        assert_close((advantages + row(*values))[:, :3], row(0.932, 0.96, 1.0))


def test_b45_a_gap_is_skipped_not_bootstrapped() -> None:
    whole = ppo.gae(row(0.1, -0.2, 1), row(0.5, 0.4, 0.2), row(1, 1, 1), 0.9, 0.8)
    gap = ppo.gae(row(0.1, 5, -0.2, 7, 1), row(0.5, 9, 0.4, NAN, 0.2), row(1, 0, 1, 0, 1), 0.9, 0.8)
    assert torch.equal(gap[:, [0, 2, 4]], whole)
    assert gap[:, [1, 3]].tolist() == [[0, 0]]


def test_final_values_are_the_future_of_a_cut_response() -> None:
    ended, cut = ppo.gae(
        torch.zeros(2, 3), torch.ones(2, 3), torch.tensor([[1, 1, 0]] * 2), 0.5, 1.0, final_values=torch.tensor([0.0, 1.0])
    )
    assert_close(ended, torch.tensor([-1.0, -1.0, 0.0]))  # returns 0
    assert_close(cut, torch.tensor([-0.75, -0.5, 0.0]))  # returns 0.25, 0.5


small = st.floats(-5, 5, width=32)
steps_of_a_row = st.lists(st.tuples(st.booleans(), small, small), min_size=1, max_size=7)
"""(valid, reward, value) of each step."""


@settings(deadline=None, max_examples=60)
@given(steps_of_a_row, st.floats(0, 1), st.floats(0, 1), st.sampled_from([0, 1, 50]))
def test_b59_gae_is_the_discounted_sum_of_deltas_whatever_the_padding(
    steps: list[tuple[bool, float, float]], gamma: float, lam: float, padding: int
) -> None:
    kept = [(reward, value) for valid, reward, value in steps if valid]
    future = [value for _, value in kept[1:]] + [0.0]
    deltas = [reward + gamma * after - value for (reward, value), after in zip(kept, future, strict=True)] if kept else []
    expected = [sum((gamma * lam) ** i * d for i, d in enumerate(deltas[t:])) for t in range(len(deltas))]
    garbage = [1e9] * padding
    mask = row(*[float(s[0]) for s in steps], *[0.0] * padding)
    found = ppo.gae(row(*[s[1] for s in steps], *garbage), row(*[s[2] for s in steps], *garbage), mask, gamma, lam)
    assert_close(found[mask.bool()].double(), torch.tensor(expected, dtype=torch.float64), atol=1e-4, rtol=1e-4)
    assert bool((found[~mask.bool()] == 0).all())


def test_b50_whitening_sees_valid_tokens_only() -> None:
    """The unbiased variance is the documented one: [1, 2, 3] -> [-1, 0, 1]."""
    expected = ppo.whiten(row(1, 2, 3, 0, 0), row(1, 1, 1, 0, 0))
    assert_close(expected, row(-1, 0, 1, 0, 0))
    for garbage in (0.0, 1e9, NAN):
        wide = ppo.whiten(row(1, 2, 3, *[garbage] * 200), row(1, 1, 1, *[0] * 200))
        assert torch.equal(wide[:, :3], expected[:, :3])
        assert not wide[:, 3:].any()


def test_b52_moments_are_of_all_rows() -> None:
    whitened = ppo.whiten(torch.tensor([[0.0, 1.0], [10.0, 11.0]]), torch.ones(2, 2))
    assert_close(whitened, torch.tensor([[-0.9479, -0.7756], [0.7756, 0.9479]]), atol=5e-5, rtol=0)
    half = ppo.whiten(torch.tensor([[0.0, 1.0], [10.0, 11.0]]), torch.tensor([[1, 1], [0, 0]]))
    assert_close(half, torch.tensor([[-0.7071, 0.7071], [0, 0]]), atol=5e-5, rtol=0)


def test_whitening_of_one_token_and_of_equal_tokens() -> None:
    assert ppo.whiten(row(5, 1), row(1, 0)).tolist() == [[5.0, 0.0]]
    assert ppo.whiten(row(*[0.1] * 7), torch.ones(1, 7)).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("scores", "groups", "expected"),
    [
        ([1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]),
        ([0.1, 0.1, 0.1], [0, 0, 0], [0, 0, 0]),
        ([1, 0], [0, 0], [0.70711, -0.70711]),
        ([1, 0, 0, 0], [5, 5, 5, 5], [1.5, -0.5, -0.5, -0.5]),
        ([3], [0], [0]),
        ([1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]),
    ],
)
def test_b53_group_advantages(scores: list[float], groups: list[int], expected: list[float]) -> None:
    """The unbiased deviation is the documented one."""
    found = ppo.grpo_advantages(torch.tensor(scores, dtype=torch.float32), torch.tensor(groups))
    assert_close(found, torch.tensor(expected, dtype=torch.float32), atol=1e-5, rtol=0)
    if len(set(expected)) == 1:
        assert found.tolist() == expected, "exactly 0, not almost"


def test_leave_one_out_baseline() -> None:
    found = ppo.rloo_advantages(torch.tensor([1.0, 4.0, 1.0, 0.0, 7.0]), torch.tensor([0, 9, 0, 0, 9]))
    assert_close(found, torch.tensor([0.5, -3.0, 0.5, -1.0, 3.0]))
    assert ppo.rloo_advantages(torch.tensor([3.0]), torch.tensor([0])).tolist() == [0.0]


@pytest.mark.parametrize("estimator", [ppo.grpo_advantages, ppo.rloo_advantages])
def test_b43_order_of_rows_does_not_matter(estimator) -> None:  # type: ignore[no-untyped-def]
    scores, groups = torch.randn(12, generator=torch.Generator().manual_seed(0)), torch.arange(12) // 3
    shuffled = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    assert_close(estimator(scores[shuffled], groups[shuffled]), estimator(scores, groups)[shuffled])


def test_b49_a_score_that_is_nan_is_refused() -> None:
    with pytest.raises(FloatingPointError, match="scores"):
        ppo.grpo_advantages(torch.tensor([1.0, NAN]), torch.tensor([0, 0]))


# -- KL ---------------------------------------------------------------------------------------------------------------


def test_b61_k3_values_and_gradient() -> None:
    log_probs = row(0, 0).requires_grad_()
    kl = ppo.kl_estimate(log_probs, row(0, 0.5), row(1, 1), "k3")
    assert_close(kl.detach(), row(0, 0.148721), atol=1e-6, rtol=0)
    kl.sum().backward()
    assert_close(log_probs.grad, row(0, -0.648721), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 120.0), (torch.float16, 12.0)])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_b61_far_outliers_stay_finite(dtype: torch.dtype, size: float, kind: ppo.KLKind) -> None:
    log_probs = torch.zeros(1, 2, dtype=dtype, requires_grad=True)
    kl = ppo.kl_estimate(log_probs, torch.tensor([[size, -size]], dtype=dtype), torch.ones(1, 2), kind)
    kl.sum().backward()
    assert torch.isfinite(kl).all() and kl.dtype == torch.float32
    assert log_probs.grad is not None and torch.isfinite(log_probs.grad).all()
    if kind == "k3":
        assert log_probs.grad[0, 0] < -20000, "still pulled to the reference beyond the limit"
        assert_close(log_probs.grad[0, 1].float().item(), 1.0, atol=1e-4, rtol=0)


@settings(deadline=None, max_examples=80)
@given(st.lists(st.floats(-200, 200, width=32) | st.floats(-0.0009765625, 0.0009765625, width=32), min_size=1, max_size=8))
def test_b61_k3_is_never_negative(differences: list[float]) -> None:
    d = row(*differences)
    kl = ppo.kl_estimate(torch.zeros_like(d), d, torch.ones_like(d), "k3")
    assert bool((kl >= 0).all()) and torch.isfinite(kl).all()


def test_kl_kinds_and_an_unknown_one() -> None:
    assert ppo.kl_estimate(row(-1, 0), row(-3, 9), row(1, 0), "k1").tolist() == [[2.0, 0.0]]
    assert ppo.kl_estimate(row(-1, 0), row(-3, 9), row(1, 0), "k2").tolist() == [[2.0, 0.0]]
    with pytest.raises(ValueError, match="k4"):
        ppo.kl_estimate(row(0), row(0), row(1), "k4")  # type: ignore[arg-type]


def test_kl_controller_moves_towards_the_target() -> None:
    controller = ppo.KLController(0.1, target=6.0, horizon=1000)
    controller.update(60.0, 100)  # error clipped to 0.2
    assert_close(controller.kl_coef, 0.1 * 1.02)
    controller.update(5.4, 100)  # error -0.1
    assert_close(controller.kl_coef, 0.1 * 1.02 * 0.99)
    with pytest.raises(FloatingPointError):
        controller.update(NAN, 100)
    fixed = ppo.KLController(0.1)
    fixed.update(60.0, 100)
    assert fixed.kl_coef == 0.1


# -- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"), [(1.5, 1, -1.2, 1), (1.5, -1, 1.5, 0), (0.5, -1, 0.8, 1), (0.5, 1, -0.5, 0)]
)
def test_b62_clipped_surrogate(ratio: float, advantage: float, loss: float, clipped: float) -> None:
    assert_close(surrogate(ratio, advantage), (loss, float(clipped)), atol=1e-6, rtol=0)


def test_b62_lower_and_upper_clip_are_separate() -> None:
    new = torch.log(row(1.5, 0.5))
    result = ppo.policy_loss(new, row(0, 0), row(1, -1), row(1, 1), clip_low=0.1, clip_high=0.3)
    assert_close(result.loss, row(-1.3, 0.9))


def test_dual_clip_bounds_the_loss_of_bad_tokens() -> None:
    assert_close(surrogate(5.0, -1, dual_clip=3.0), (3.0, 1.0))
    assert_close(surrogate(2.0, -1, dual_clip=3.0), (2.0, 0.0))
    assert_close(surrogate(5.0, 1, dual_clip=3.0), (-1.2, 1.0))
    with pytest.raises(ValueError, match="dual_clip_ratio"):
        surrogate(2.0, -1, dual_clip=0.9)


def test_b62_value_clip() -> None:
    loss, clipped = ppo.value_loss(row(1), row(5), row(10), row(1), 0.2)
    assert_close((loss.item(), clipped.item()), (40.5, 0.0))
    loss, clipped = ppo.value_loss(row(9), row(5), row(10), row(1), 0.2)  # clipped to 5.2: square 23.04 against 1
    assert_close((loss.item(), clipped.item()), (11.52, 1.0))
    loss, clipped = ppo.value_loss(row(9), row(5), row(10), row(1), None)
    assert_close((loss.item(), clipped.item()), (0.5, 0.0))


def test_b63_an_unchanged_policy_has_ratio_exactly_one() -> None:
    log_probs = torch.log_softmax(torch.randn(4, 7, generator=torch.Generator().manual_seed(0)) * 9, dim=1)
    ones = torch.ones(4, 7)
    result = ppo.policy_loss(log_probs, log_probs.clone(), ones, ones, clip_low=0.2, clip_high=0.2)
    assert torch.equal(result.ratio, ones) and not result.clipped.any()
    assert not ppo.kl_estimate(log_probs, log_probs.clone(), ones, "k3").any()


def test_a_far_log_ratio_is_finite_and_teaches_nothing() -> None:
    log_probs = row(0, -300).requires_grad_()
    result = ppo.policy_loss(log_probs, row(-300, 0), row(-1, -1), row(1, 1), clip_low=0.2, clip_high=0.2)
    result.loss.sum().backward()
    assert_close(result.ratio, torch.exp(row(20, -20)))
    assert log_probs.grad is not None and log_probs.grad.tolist() == [[0, 0]]


def test_b102_importance_weights_are_capped_and_constant() -> None:
    old = row(-1, -1, -1).requires_grad_()
    weights = ppo.importance_weights(old, row(-1, -3, NAN), row(1, 1, 0), 2.0)
    assert_close(weights, row(1, 2, 0))
    assert not weights.requires_grad


def test_gradients_are_those_of_the_formulas() -> None:
    generator = torch.Generator().manual_seed(3)
    new, old, other, advantages = (torch.randn(2, 5, dtype=torch.float64, generator=generator) for _ in range(4))
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
    new.requires_grad_()
    check = torch.autograd.gradcheck
    for dual_clip in (None, 1.5):
        clips = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": dual_clip}
        assert check(lambda x, c=clips: ppo.policy_loss(x, old, advantages, mask, **c).loss, new)
    for clip in (None, 0.2):
        assert check(lambda x, c=clip: ppo.value_loss(x, old, other, mask, c).loss, new)
    for kind in ("k1", "k2", "k3"):
        assert check(lambda x, k=kind: ppo.kl_estimate(x, other, mask, k), new)
