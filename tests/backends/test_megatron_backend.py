"""Parts of the Megatron backend that need no ranks: schedules of the learning rate, coordinates, checks, padding."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from megatron_ppo.backends.megatron_schedule import pad_micro_batch
from megatron_ppo.backends.megatron_setup import check_settings
from megatron_ppo.backends.optimizer_step import learning_rate
from megatron_ppo.config import Config, OptimizerConfig
from megatron_ppo.families import NetworkShape
from megatron_ppo.resharding.megatron_layout import check_megatron
from megatron_ppo.resharding.megatron_mesh import MegatronParallel, RankCoordinates, rank_coordinates
from megatron_ppo.types import MicroBatch


def test_b100_linear_decay_counts_optimizer_steps_and_ends_at_min_lr() -> None:
    config = Config().replace(prompts_per_iteration=16, samples_per_prompt=4, global_batch_size=16, ppo_epochs=2, train_iters=10)
    assert config.num_optimizer_steps == 80
    settings = OptimizerConfig(lr_decay_style="linear", lr_warmup_steps=8)
    rates = [learning_rate(n, 1e-3, settings, config.num_optimizer_steps) for n in range(82)]
    assert rates[8] == 1e-3, "the first step after the warm-up is at the peak"
    assert rates[0] == pytest.approx(1e-3 / 8), "no step is wasted at rate 0"
    assert rates[80] == rates[81] == 0.0
    assert rates[44] == pytest.approx(1e-3 / 2)
    assert all(a < b for a, b in itertools.pairwise(rates[:8])) and all(a > b for a, b in itertools.pairwise(rates[8:81]))


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_decay_runs_from_peak_to_min_lr_without_warmup(style: str) -> None:
    settings = OptimizerConfig(lr_decay_style=style, min_lr=1e-5)  # type: ignore[arg-type]
    rates = [learning_rate(n, 1e-3, settings, 10) for n in range(12)]
    assert rates[0] == 1e-3 and rates[5] == pytest.approx((1e-3 + 1e-5) / 2)
    assert rates[10] == pytest.approx(1e-5) and rates[11] == pytest.approx(1e-5)


def test_constant_rate_ignores_the_number_of_steps() -> None:
    settings = OptimizerConfig(lr_warmup_steps=2)
    assert [learning_rate(n, 2.0, settings, 3) for n in range(5)] == [1.0, 2.0, 2.0, 2.0, 2.0]


def test_warmup_longer_than_the_run_does_not_divide_by_zero() -> None:
    settings = OptimizerConfig(lr_warmup_steps=10, lr_decay_style="linear")
    assert learning_rate(4, 1.0, settings, 5) == 0.5
    assert learning_rate(10, 1.0, settings, 5) == 1.0


def test_rank_coordinates_are_megatrons_order_and_a_bijection() -> None:
    parallel = MegatronParallel(2, 2, context_parallel_size=2)
    places = [rank_coordinates(rank, 16, parallel) for rank in range(16)]
    assert len(set(places)) == 16
    assert places[1] == RankCoordinates(dp=0, pp=0, tp=1, cp=0, expert_tp=1)
    assert places[2] == RankCoordinates(dp=0, pp=0, tp=0, cp=1)
    assert places[4] == RankCoordinates(dp=1, pp=0, tp=0, cp=0)
    assert places[8] == RankCoordinates(dp=0, pp=1, tp=0, cp=0)


@pytest.mark.parametrize(
    ("fields", "world_size", "message"),
    [
        ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 6, r"6 training ranks.*2 x pipeline 2 x context 1 = 4"),
        ({"virtual_pipeline_model_parallel_size": 2}, 1, r"virtual_pipeline_model_parallel_size 2 with pipeline_model_parallel_size 1"),
        ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 1}, 2, "at least 2 of both"),
        ({"sequence_parallel": True}, 1, "tensor_model_parallel_size is 1"),
        ({"optimizer": "sgd"}, 1, "use_distributed_optimizer to false"),
        ({"expert_model_parallel_size": 2}, 3, "expert tensor 1 x expert 2 x pipeline 1 = 2 ranks each"),
        ({"transformer_overrides": {"overlap_p2p_comm": "false"}}, 1, "overlap_p2p_comm, which the pipeline schedule decides"),
    ],
)
def test_settings_that_megatron_would_run_wrongly_are_refused(fields: dict[str, object], world_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_settings(Config().replace(**fields), world_size)


def test_experts_that_are_cut_unlike_attention_must_be_spread_too() -> None:
    """megatron-core reduces experts' gradients over the ranks of the experts only where they are spread (expert parallelism above 1)."""
    mixture = NetworkShape("mixtral", 2, 64, 4, 2, 16, 96, 130, tied=False, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True)
    for tp, expert_tp in ((2, 1), (1, 2)):
        parallel = MegatronParallel(tp, expert_tensor_parallel_size=expert_tp)
        with pytest.raises(ValueError, match=f"= {expert_tp} differs from .* = {tp}, which needs expert_model_parallel_size > 1"):
            check_megatron(mixture, parallel)
        check_megatron(mixture, dataclasses.replace(parallel, expert_model_parallel_size=2))


def test_padding_for_the_interleaved_schedule_adds_nothing_that_is_trained_on() -> None:
    batch = MicroBatch(
        tokens=torch.tensor([[5, 6, 7]]),
        labels=torch.tensor([[6, 7, 0]]),
        loss_mask=torch.tensor([[False, True, False]]),
        rows=torch.tensor([4]),
        lengths=torch.tensor([3]),
        advantages=torch.ones(1, 3),
    )
    padded = pad_micro_batch(batch, 2, 5)
    assert padded.tokens.tolist() == [[5, 6, 7, 0, 0], [0] * 5]
    assert padded.loss_mask.sum() == 1 and padded.loss_mask.shape == (2, 5)
    assert padded.rows.tolist() == [4, -1] and padded.lengths.tolist() == [3, 1]
    assert padded.advantages is not None and padded.advantages.sum() == 3 and padded.returns is None
    assert pad_micro_batch(batch, 1, 3) is batch
    assert {f.name for f in dataclasses.fields(padded)} == {f.name for f in dataclasses.fields(batch)}
