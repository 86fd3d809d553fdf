"""Losses: values by hand, and the property that matters: no split and no padding changes the gradient of a mini-batch."""

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

from megatron_ppo import packing
from megatron_ppo.backends.base import LossFunction
from megatron_ppo.config import AlgorithmConfig
from megatron_ppo.losses import aggregate, make_actor_loss, make_critic_loss
from megatron_ppo.types import Experience, MicroBatch, RoleOutput

NAN = float("nan")
EVERYTHING = AlgorithmConfig(
    entropy_coef=0.1, kl_loss_coef=0.2, value_loss_coef=0.5, importance_weight_cap=1.5, dual_clip_ratio=3.0, value_clip=0.1
)
"""Every term of the loss switched on."""


class ToyNetwork:
    """A causal "model" of two small tables: logits and value at a position are functions of its input id."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.logits = torch.randn(11, 11, generator=generator, dtype=torch.float64).requires_grad_()
        self.value = torch.randn(11, generator=generator, dtype=torch.float64).requires_grad_()

    def __call__(self, batch: MicroBatch) -> RoleOutput:
        log_softmax = torch.log_softmax(self.logits[batch.tokens], dim=-1)
        log_probs = log_softmax.gather(-1, batch.labels[..., None]).squeeze(-1)
        entropy = -(log_softmax.exp() * log_softmax).sum(-1)
        return RoleOutput(log_probs=log_probs, entropy=entropy, values=self.value[batch.tokens])

    def step(self, loss_fn: LossFunction, batches: list[MicroBatch]) -> tuple[Tensor, dict[str, float]]:
        """Gradient of (sum of loss sums) / (sum of counts), and metrics: what a backend does over micro-batches and ranks."""
        self.logits.grad = self.value.grad = None
        count, sums = torch.zeros(()), dict[str, Tensor]()
        for batch in batches:
            loss_sum, num_tokens, metrics = loss_fn(self(batch), batch)
            assert not num_tokens.is_floating_point()
            loss_sum.backward()
            count = count + num_tokens
            for name, pair in metrics.items():
                assert pair.shape == (2,) and not pair.requires_grad
                sums[name] = sums.get(name, torch.zeros(2)) + pair
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in (self.logits, self.value)]
        gradient = torch.cat([g.flatten() for g in grads]) / count.clamp(min=1)
        return gradient, {name: float(total / n) for name, (total, n) in sums.items() if n > 0}


def make_experience_of(
    prompts: list[int], responses: list[int], *, length: int | None = None, garbage: float = 0.0
) -> Experience:
    """Random content that does not depend on ``length``; outside the responses stands ``garbage``."""
    trajectories = make_trajectories(prompts, responses, length=length, pad_token=3)
    mask = trajectories.response_mask

    def column(seed: int, scale: float, shift: float) -> Tensor:
        content = torch.full(mask.shape, garbage)
        for row in range(len(prompts)):
            generator = torch.Generator().manual_seed(100 * seed + row)
            numbers = shift + scale * torch.randn(60, generator=generator)
            content[row, mask[row]] = numbers[: responses[row]]
        return content

    return Experience(
        trajectories, column(1, 0.5, -2.5), column(2, 1, 0), column(3, 1, 0), column(4, 1, 0), column(5, 0.5, -2.5)
    )


def one_row(mask: list[int], **tensors: list[float]) -> MicroBatch:
    """A micro-batch of one row; only the named tensors are set."""
    length = len(mask)
    return MicroBatch(
        tokens=torch.zeros(1, length, dtype=torch.int64),
        labels=torch.zeros(1, length, dtype=torch.int64),
        loss_mask=torch.tensor([mask]).bool(),
        rows=torch.tensor([0]),
        lengths=torch.tensor([length]),
        **{name: torch.tensor([numbers]) for name, numbers in tensors.items()},  # type: ignore[arg-type]
    )


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_aggregations_by_hand() -> None:
    x = torch.tensor([[4.0, 0, 0], [1, 2, 6], [0, 0, 0]])
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [0, 0, 0]]).bool()
    found = {how: [t.item() for t in aggregate(x, mask, how)] for how in ("token_mean", "sequence_mean", "sequence_sum")}
    assert found == {"token_mean": [13.0, 4], "sequence_mean": [7.0, 2], "sequence_sum": [13.0, 2]}
    with pytest.raises(ValueError, match="median"):
        aggregate(x, mask, "median")


def test_b60_the_token_mean_is_global() -> None:
    """A: 1 token of loss 4. B: 3 tokens of loss 0. The mean is 1, not the mean 2 of the two means."""
    loss_fn = make_critic_loss(AlgorithmConfig(value_clip=None))
    parts = []
    for mask, error in [([1, 0, 0], math.sqrt(8)), ([1, 1, 1], 0.0)]:
        batch = one_row(mask, values=[0.0] * 3, returns=[0.0] * 3)
        parts.append(loss_fn(RoleOutput(values=torch.full((1, 3), error)), batch))
    total = sum(p[0] for p in parts) / sum(p[1] for p in parts)
    assert_close(total, torch.tensor(1.0))
    pair = sum(p[2]["loss/value"] for p in parts)
    assert_close(pair[0] / pair[1], torch.tensor(1.0))  # type: ignore[index]


def test_b47_value_loss_counts_the_response_alone() -> None:
    """Prompt 3, response 2, padding 2: two positions, whatever stands at the others."""
    trajectories = make_trajectories([3], [2], length=7)
    results = []
    for garbage in (0.0, 1e9, NAN):
        content = torch.full((1, 7), garbage)
        content[0, 3:5] = 1.0
        experience = Experience(trajectories, content, content, content, content, None)
        batch = packing.make_micro_batch(experience, torch.tensor([0]), length_multiple=7)
        values = torch.full((1, 7), garbage)
        values[0, 2:4] = torch.tensor([2.0, 4.0])
        loss_sum, num_tokens, _ = make_critic_loss(AlgorithmConfig(value_clip=None))(RoleOutput(values=values), batch)
        results.append((loss_sum.item(), num_tokens.item()))
    assert results == [(5.0, 2)] * 3


def test_b62_metrics_count_valid_tokens_only() -> None:
    ratios = [1.5, 1.5, 0.5, 9.0]
    batch = one_row([1, 1, 1, 0], old_log_probs=[0.0] * 4, advantages=[1.0, -1.0, 1.0, 1.0])
    output = RoleOutput(log_probs=torch.tensor([ratios]).log())
    loss_sum, num_tokens, metrics = make_actor_loss(AlgorithmConfig(), critic_shared=False)(output, batch)
    assert_close(loss_sum, torch.tensor(-1.2 + 1.5 - 0.5))
    assert num_tokens.item() == 3
    assert_close(metrics["clip_frac"], torch.tensor([1.0, 3.0]))
    assert_close(metrics["ratio/mean"], torch.tensor([3.5, 3.0]))
    assert_close(metrics["kl/approx"], torch.tensor([2 * (0.5 - math.log(1.5)) + (-0.5 - math.log(0.5)), 3.0]))
    assert set(metrics) == {"loss/policy", "clip_frac", "ratio/mean", "kl/approx"}


def test_terms_and_their_signs() -> None:
    batch = one_row(
        [1, 0],
        old_log_probs=[-1.0, NAN],
        advantages=[2.0, NAN],
        ref_log_probs=[-1.5, NAN],
        rollout_log_probs=[-9.0, NAN],
        values=[0.0, NAN],
        returns=[3.0, NAN],
    )
    output = RoleOutput(
        log_probs=torch.tensor([[-1.0, NAN]]), entropy=torch.tensor([[0.7, NAN]]), values=torch.tensor([[1.0, NAN]])
    )
    algorithm = replace(EVERYTHING, kl_loss_type="k1", value_clip=None)
    loss_sum, num_tokens, metrics = make_actor_loss(algorithm, critic_shared=True)(output, batch)
    policy, entropy, kl, value = -2.0 * 1.5, 0.7, 0.5, 2.0  # the importance weight e^8 is capped at 1.5
    assert_close(loss_sum, torch.tensor(policy - 0.1 * entropy + 0.2 * kl + 0.5 * value))
    assert num_tokens.item() == 1
    expected = {
        "loss/policy": policy,
        "loss/value": value,
        "kl_loss": kl,
        "entropy/mean": entropy,
        "importance_weight/mean": 1.5,
        "ratio/mean": 1.0,
        "kl/approx": 0.0,
        "clip_frac": 0.0,
        "value/clip_frac": 0.0,
    }
    assert {name: pair.tolist() for name, pair in metrics.items()} == {
        name: [pytest.approx(number), 1.0] for name, number in expected.items()
    }


def test_b63_before_any_step_the_policy_is_the_old_one() -> None:
    network = ToyNetwork()
    experience = make_experience_of([2, 3], [4, 2])
    batch = packing.make_micro_batch(experience, torch.tensor([0, 1]))
    batch = replace(batch, old_log_probs=network(batch).log_probs)
    _, metrics = network.step(make_actor_loss(AlgorithmConfig(), critic_shared=False), [batch])
    assert (metrics["ratio/mean"], metrics["kl/approx"], metrics["clip_frac"]) == (1.0, 0.0, 0.0)


# -- nothing to learn from, nothing to trust --------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["token_mean", "sequence_mean", "sequence_sum"])
def test_b40_empty_responses_add_nothing(how: str) -> None:
    network, loss_fn = ToyNetwork(), make_actor_loss(replace(EVERYTHING, loss_aggregation=how), critic_shared=True)
    experience = make_experience_of([2, 3], [4, 0])
    both, alone = (packing.make_micro_batch(experience, rows) for rows in (torch.tensor([0, 1]), torch.tensor([0])))
    gradient, metrics = network.step(loss_fn, [both])
    assert_close(gradient, network.step(loss_fn, [alone])[0])
    assert all(math.isfinite(number) for number in metrics.values())
    empty = packing.make_micro_batch(experience, torch.tensor([1]))
    loss_sum, num_tokens, _ = loss_fn(network(empty), empty)
    assert (loss_sum.item(), num_tokens.item()) == (0.0, 0)
    gradient, metrics = network.step(loss_fn, [empty])
    assert not gradient.any() and metrics == {}


def test_b49_a_nan_of_the_network_in_a_valid_slot_is_not_hidden() -> None:
    batch = one_row([1, 1], old_log_probs=[0.0, 0.0], advantages=[1.0, 1.0])
    for bad in (NAN, math.inf, -math.inf):
        log_probs = torch.tensor([[0.0, bad]]).requires_grad_()
        loss_sum, _, _ = make_actor_loss(AlgorithmConfig(), critic_shared=False)(RoleOutput(log_probs=log_probs), batch)
        assert not math.isfinite(loss_sum.item())


def test_b53_a_group_without_spread_gives_no_gradient() -> None:
    log_probs = torch.zeros(1, 2, requires_grad=True)
    batch = one_row([1, 1], old_log_probs=[-0.3, 0.4], advantages=[0.0, 0.0])
    loss_sum, _, _ = make_actor_loss(AlgorithmConfig(), critic_shared=False)(RoleOutput(log_probs=log_probs), batch)
    loss_sum.backward()
    assert loss_sum.item() == 0.0
    assert log_probs.grad is not None and not log_probs.grad.any()


@pytest.mark.parametrize("missing", ["old_log_probs", "advantages", "ref_log_probs", "rollout_log_probs", "returns", "values"])
def test_a_missing_tensor_is_named(missing: str) -> None:
    network, batch = ToyNetwork(), packing.make_micro_batch(make_experience_of([2], [3]), torch.tensor([0]))
    with pytest.raises(RuntimeError, match=missing):
        make_actor_loss(EVERYTHING, critic_shared=True)(network(batch), replace(batch, **{missing: None}))


def test_a_missing_entropy_is_named() -> None:
    network, batch = ToyNetwork(), packing.make_micro_batch(make_experience_of([2], [3]), torch.tensor([0]))
    with pytest.raises(RuntimeError, match="entropy_coef"):
        make_actor_loss(EVERYTHING, critic_shared=True)(replace(network(batch), entropy=None), batch)


# -- invariance -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["token_mean", "sequence_mean", "sequence_sum"])
@settings(deadline=None, max_examples=15)
@given(
    responses=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    split=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    padding=st.sampled_from([(0, 1), (1, 2), (50, 8)]),
    garbage=st.sampled_from([0.0, 1e9, NAN]),
)
def test_b59_b60_b66_b67_no_split_and_no_padding_changes_a_step(
    how: str, responses: list[int], split: tuple[int, int], padding: tuple[int, int], garbage: float
) -> None:
    """One pass of all rows, against ranks x micro-batches with dummies, more padding, and garbage outside the responses."""
    (dp_size, micro_batch_size), (extra, multiple) = split, padding
    prompts = [1 + row % 4 for row in range(len(responses))]
    network, loss_fn = ToyNetwork(), make_actor_loss(replace(EVERYTHING, loss_aggregation=how), critic_shared=True)
    plain = make_experience_of(prompts, responses)
    gradient, metrics = network.step(loss_fn, [packing.make_micro_batch(plain, torch.arange(len(responses)))])

    wide = make_experience_of(prompts, responses, length=plain.trajectories.tokens.shape[1] + extra, garbage=garbage)
    lengths = wide.trajectories.lengths
    plan = packing.plan_micro_batches(
        lengths, packing.partition_rows(lengths, dp_size), micro_batch_size, length_multiple=multiple, multiple_of=2
    )
    batches = [packing.make_micro_batch(wide, rows, multiple) for passes in plan for rows in passes]
    split_gradient, split_metrics = network.step(loss_fn, batches)
    assert_close(split_gradient, gradient, atol=1e-6, rtol=1e-6)
    assert split_metrics == pytest.approx(metrics, abs=1e-5, rel=1e-5)


def test_b60_grads_of_1x4_2x2_4x1_and_of_two_ranks_with_5_and_1_tokens() -> None:
    network, loss_fn = ToyNetwork(), make_actor_loss(AlgorithmConfig(), critic_shared=False)
    experience = make_experience_of([2, 1, 3, 2], [5, 1, 2, 4])

    def gradient(*passes: list[int]) -> Tensor:
        return network.step(loss_fn, [packing.make_micro_batch(experience, torch.tensor(rows)) for rows in passes])[0]

    whole = gradient([0, 1, 2, 3])
    assert whole.abs().max() > 1e-3
    assert_close(gradient([0, 1], [2, 3]), whole)
    assert_close(gradient([0], [1], [2], [3]), whole)
    assert_close(gradient([0], [1]), gradient([0, 1]))
