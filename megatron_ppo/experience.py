"""Scores, log-probs and values of a batch -> advantages and returns (step 4 of the iteration, on the training mesh).

Every training rank calls this with all rows of the global batch, so that group baselines and whitening need no collective and
come out the same on each. It computes no network's output and takes no gradient; the mathematics is ``ppo.py``'s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ppo import ppo
from megatron_ppo.config import AlgorithmConfig
from megatron_ppo.types import Experience, TrajectoryBatch


def make_experience(  # the order of the iteration: sampled, scored, configured
    trajectories: TrajectoryBatch,
    old_log_probs: Tensor,
    values: Tensor | None,
    ref_log_probs: Tensor | None,
    model_scores: Tensor | None,
    algorithm: AlgorithmConfig,
    kl_coef: float,
) -> tuple[Experience, dict[str, float]]:
    """What the update learns from, and its statistics.

    ``old_log_probs``, ``values``, ``ref_log_probs`` [B, T] float32 in token alignment; ``model_scores`` [B] float32, the
    reward model's, added to the function rewards; ``kl_coef`` is the KL controller's present weight. gae needs values; with
    grpo and rloo, where every token gets the advantage of its response, values are not used and the experience has none.

    Metrics, over all rows or all response tokens (0 where there are none): ``reward/mean|max|min|std`` (and
    ``reward/function``, ``reward/model``, the two parts, where there is a reward model), ``kl/mean`` (per token: old - ref,
    or without a reference the k3 estimate of rollout engine against trainer), ``kl/per_response`` (the same, summed over a
    response: what the KL controller wants), ``advantage/mean|std`` (before whitening), ``response_length/mean|max``,
    ``truncated_frac``, ``logprob_diff/mean|max`` (|trainer - rollout|) and ``logprob_diff/k3``; with gae ``values/mean``,
    ``returns/mean`` and, where the returns vary, ``explained_variance``.

    Raises ``ValueError`` for a tensor of another shape or one that is missing, ``FloatingPointError`` for a NaN or infinity
    in a valid entry.
    """
    mask = trajectories.response_mask
    _check(trajectories, mask, {"old_log_probs": old_log_probs, "values": values, "ref_log_probs": ref_log_probs})
    scores = _total_scores(trajectories, model_scores)
    old_log_probs = ppo.keep(old_log_probs, mask)
    ref_log_probs = None if ref_log_probs is None else ppo.keep(ref_log_probs, mask)
    returns = None
    if algorithm.advantage_estimator == "gae":
        if values is None:
            raise ValueError(
                "advantage_estimator gae needs a critic's values; choose critic shared or separate, or another estimator"
            )
        values = ppo.keep(values, mask)
        rewards = ppo.token_rewards(scores, mask, old_log_probs, ref_log_probs, kl_coef)
        final = _final_values(trajectories, values, mask) if algorithm.bootstrap_truncated else None
        raw = ppo.gae(rewards, values, mask, algorithm.gamma, algorithm.gae_lambda, final_values=final)
        returns = ppo.keep(raw + values, mask)
        advantages = ppo.whiten(raw, mask) if algorithm.whiten_advantages else raw
    else:
        values = None
        outcomes = scores - ppo.kl_penalty(old_log_probs, ref_log_probs, mask, kl_coef).sum(dim=1)
        advantages = raw = _group_advantages(algorithm.advantage_estimator, outcomes, trajectories.prompt_ids, mask)
    experience = Experience(trajectories, old_log_probs, advantages, returns, values, ref_log_probs)
    metrics = _reward_metrics(trajectories, scores, model_scores) | _policy_metrics(experience, mask)
    metrics |= {"advantage/mean": _mean(raw[mask]), "advantage/std": _std(raw[mask])}
    if values is not None and returns is not None:
        metrics |= _value_metrics(values[mask], returns[mask])
    return experience, metrics


def _check(trajectories: TrajectoryBatch, mask: Tensor, tensors: dict[str, Tensor | None]) -> None:
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.shape != mask.shape:
            raise ValueError(f"{name} must be [B, T] = {tuple(mask.shape)} like the tokens, but is {tuple(tensor.shape)}")
        ppo.check_finite(tensor, mask, name)
    ppo.check_finite(trajectories.rollout_log_probs, mask, "rollout_log_probs")


def _total_scores(trajectories: TrajectoryBatch, model_scores: Tensor | None) -> Tensor:
    every_row = torch.ones(trajectories.num_rows, dtype=torch.bool)
    ppo.check_finite(trajectories.scores, every_row, "function rewards")
    if model_scores is None:
        return trajectories.scores.float()
    if model_scores.shape != trajectories.scores.shape:
        raise ValueError(f"model_scores must be [B] = {tuple(trajectories.scores.shape)}, but is {tuple(model_scores.shape)}")
    ppo.check_finite(model_scores, every_row, "reward-model scores")
    return trajectories.scores.float() + model_scores.float()


def _final_values(trajectories: TrajectoryBatch, values: Tensor, mask: Tensor) -> Tensor:
    """[B]: V after the last token: 0 where the response has ended, the last known (V before that token) where cut off."""
    last = torch.where(ppo.last_token(mask), values, 0.0).sum(dim=1)
    return torch.where(trajectories.truncated, last, 0.0)


def _group_advantages(estimator: str, outcomes: Tensor, group_ids: Tensor, mask: Tensor) -> Tensor:
    if estimator == "grpo":
        per_response = ppo.grpo_advantages(outcomes, group_ids)
    elif estimator == "rloo":
        per_response = ppo.rloo_advantages(outcomes, group_ids)
    else:
        raise ValueError(f"there is no advantage_estimator {estimator!r}; choose gae, grpo or rloo")
    return ppo.keep(per_response[:, None].expand_as(mask), mask)


def _reward_metrics(trajectories: TrajectoryBatch, scores: Tensor, model_scores: Tensor | None) -> dict[str, float]:
    lengths = trajectories.response_lengths
    metrics = {
        "reward/mean": _mean(scores),
        "reward/max": float(scores.max()) if len(scores) else 0.0,
        "reward/min": float(scores.min()) if len(scores) else 0.0,
        "reward/std": _std(scores),
        "response_length/mean": _mean(lengths),
        "response_length/max": float(lengths.max()) if len(lengths) else 0.0,
        "truncated_frac": _mean(trajectories.truncated),
    }
    if model_scores is not None:
        metrics |= {"reward/function": _mean(trajectories.scores), "reward/model": _mean(model_scores)}
    return metrics


def _policy_metrics(experience: Experience, mask: Tensor) -> dict[str, float]:
    old, rollout = experience.old_log_probs, experience.trajectories.rollout_log_probs
    difference = (old - ppo.keep(rollout, mask)).abs()[mask]
    mismatch = ppo.kl_estimate(rollout, old, mask, "k3")
    reference = experience.ref_log_probs
    kl = mismatch if reference is None else old - reference
    return {
        "kl/mean": _mean(kl[mask]),
        "kl/per_response": _mean(kl.double().sum(dim=1)),
        "logprob_diff/mean": _mean(difference),
        "logprob_diff/max": float(difference.max()) if len(difference) else 0.0,
        "logprob_diff/k3": _mean(mismatch[mask]),
    }


def _value_metrics(values: Tensor, returns: Tensor) -> dict[str, float]:
    """Of the valid entries; the explained variance is ``1 - var(returns - values) / var(returns)``."""
    metrics = {"values/mean": _mean(values), "returns/mean": _mean(returns)}
    spread = _std(returns)
    if spread > 0:
        metrics["explained_variance"] = 1.0 - (_std(returns - values) / spread) ** 2
    return metrics


def _mean(x: Tensor) -> float:
    return float(x.double().mean()) if x.numel() else 0.0


def _std(x: Tensor) -> float:
    """Unbiased; 0 for fewer than two."""
    return float(x.double().std(correction=1)) if x.numel() > 1 else 0.0
