"""Loss functions of the update (step 5 of the iteration), to the contract of ``backends.base.LossFunction``.

``ppo.py`` has the token-wise mathematics; here tokens are put together: which terms, with which weights, and by what the sum
is divided. A loss returns a sum and a count, never a mean: the backend adds both over micro-batches and data-parallel ranks
and divides once, so that no split of a mini-batch changes a gradient. Everything is aligned like ``MicroBatch`` (position s
speaks of ``labels[:, s]``).

A NaN or infinity in a valid entry of the network's output is not an exception here, for other ranks would wait for this one:
it makes the loss NaN, and the backend lets all ranks skip the step together. ``experience.py`` has checked the inputs before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ppo import ppo
from megatron_ppo.backends.base import LossFunction, LossMetrics
from megatron_ppo.config import AlgorithmConfig
from megatron_ppo.types import MicroBatch, RoleOutput


def aggregate(x: Tensor, mask: Tensor, how: str) -> tuple[Tensor, Tensor]:
    """(sum, count) of token-wise ``x`` [b, T] (0 where masked): the mean in the sense of ``loss_aggregation`` is sum / count.

    token_mean counts tokens. sequence_mean and sequence_sum count the responses that have a token, and add up each one's
    token mean or sum; for these two a row must be whole, so a context-parallel rank joins its parts first.
    """
    if how == "token_mean":
        return x.sum(), mask.sum()
    if how not in ("sequence_mean", "sequence_sum"):
        raise ValueError(f"there is no loss_aggregation {how!r}; choose token_mean, sequence_mean or sequence_sum")
    per_row = x.sum(dim=1)
    if how == "sequence_mean":
        per_row = per_row / mask.sum(dim=1).clamp(min=1)
    return per_row.sum(), mask.any(dim=1).sum()


def make_actor_loss(algorithm: AlgorithmConfig, *, critic_shared: bool) -> LossFunction:
    """The actor's loss: clipped surrogate - entropy_coef * entropy + kl_loss_coef * KL; shared: + value_loss_coef * value loss.

    Metrics ([2] sum and count): ``loss/policy`` and, where there are such terms, ``loss/value`` and ``kl_loss`` are
    aggregated like the loss itself and without their weights; ``entropy/mean``, ``clip_frac``, ``ratio/mean``, ``kl/approx``
    (k3 of old against new policy), ``importance_weight/mean`` and ``value/clip_frac`` are means over tokens.
    """

    def loss_fn(output: RoleOutput, batch: MicroBatch) -> tuple[Tensor, Tensor, LossMetrics]:
        mask, how = batch.loss_mask, algorithm.loss_aggregation
        policy, metrics = _policy_term(algorithm, output, batch)
        metrics["loss/policy"] = _pair(*aggregate(policy, mask, how))
        total = policy
        if output.entropy is not None:
            entropy = ppo.keep(output.entropy, mask)
            metrics["entropy/mean"] = _pair(entropy.sum(), mask.sum())
            if algorithm.entropy_coef:
                total = total - algorithm.entropy_coef * entropy
        elif algorithm.entropy_coef:
            raise RuntimeError(f"entropy_coef is {algorithm.entropy_coef}, but the role was not asked for entropies")
        if algorithm.kl_loss_coef:
            log_probs = _need(output.log_probs, "log_probs of the actor")
            kl = ppo.kl_estimate(log_probs, _need(batch.ref_log_probs, "ref_log_probs"), mask, algorithm.kl_loss_type)
            metrics["kl_loss"] = _pair(*aggregate(kl, mask, how))
            total = total + algorithm.kl_loss_coef * kl
        if critic_shared:
            value, value_metrics = _value_term(algorithm, output, batch)
            metrics |= value_metrics
            total = total + algorithm.value_loss_coef * value
        return *aggregate(total, mask, how), metrics

    return loss_fn


def make_critic_loss(algorithm: AlgorithmConfig) -> LossFunction:
    """The separate critic's loss, ``0.5 * max`` of clipped and free square; metrics ``loss/value`` and ``value/clip_frac``."""

    def loss_fn(output: RoleOutput, batch: MicroBatch) -> tuple[Tensor, Tensor, LossMetrics]:
        value, metrics = _value_term(algorithm, output, batch)
        return *aggregate(value, batch.loss_mask, algorithm.loss_aggregation), metrics

    return loss_fn


def _policy_term(algorithm: AlgorithmConfig, output: RoleOutput, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    mask, old = batch.loss_mask, _need(batch.old_log_probs, "old_log_probs")
    log_probs = _need(output.log_probs, "log_probs of the actor")
    loss, ratio, clipped = ppo.policy_loss(
        log_probs,
        old,
        _need(batch.advantages, "advantages"),
        mask,
        clip_low=algorithm.clip_ratio[0],
        clip_high=algorithm.clip_ratio[1],
        dual_clip=algorithm.dual_clip_ratio,
    )
    approx_kl = ppo.kl_estimate(old, log_probs.detach(), mask, "k3")
    token_means = {"ratio/mean": ratio, "clip_frac": clipped, "kl/approx": approx_kl}
    if algorithm.importance_weight_cap is not None:
        rollout = _need(batch.rollout_log_probs, "rollout_log_probs")
        weights = ppo.importance_weights(old, rollout, mask, algorithm.importance_weight_cap)
        token_means["importance_weight/mean"] = weights
        loss = loss * weights
    return loss, {name: _pair(x.sum(), mask.sum()) for name, x in token_means.items()}


def _value_term(algorithm: AlgorithmConfig, output: RoleOutput, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    mask = batch.loss_mask
    loss, clipped = ppo.value_loss(
        _need(output.values, "values of the critic"),
        _need(batch.values, "old values"),
        _need(batch.returns, "returns"),
        mask,
        algorithm.value_clip,
    )
    metrics = {
        "loss/value": _pair(*aggregate(loss, mask, algorithm.loss_aggregation)),
        "value/clip_frac": _pair(clipped.sum(), mask.sum()),
    }
    return loss, metrics


def _pair(total: Tensor, count: Tensor) -> Tensor:
    """[2] float32 (sum, count), without gradient."""
    return torch.stack([total.detach().float(), count.float()])


def _need(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise RuntimeError(f"the loss needs the {name}, which this micro-batch or role output does not have")
    return tensor
