"""The mathematics of PPO: masked reductions, token rewards, advantages, KL estimates, clipped losses.

Pure functions of tensors, used by ``experience.py`` (step 4 of the iteration, on all rows of the global batch) and
``losses.py`` (step 5, on one micro-batch). They know no model, process group or config, and do not reduce a loss: how tokens
are weighed is ``losses.py``'s matter.

Two rules hold for every function with a ``mask`` (1 = a response token, trained on):

* Masked entries never enter arithmetic. They are replaced with 0 before the first operation (``keep``), not multiplied with 0
  after the last, because ``NaN * 0`` is NaN in the value and again in the gradient. Results are 0 at masked entries.
* Arithmetic is in float32 (float64 where float64 comes in), whatever the dtype of the inputs.

Shapes: B responses, T padded length. Alignment does not matter here, as long as all tensors of a call have the same one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""|log-ratio| is clamped to this before ``exp`` (e^20 = 5e8): a far outlier gets a finite ratio and no gradient."""
K3_LINEAR_FROM = 10.0
"""From this log-ratio on k3 goes on as its tangent: neither value nor gradient (e^10 = 22026 < fp16's 65504) overflows."""
WHITEN_EPS = 1e-8

KLKind = Literal["k1", "k2", "k3"]


# -- masks ------------------------------------------------------------------------------------------------------------


def as_mask(mask: Tensor) -> Tensor:
    """``mask`` as bool. ``ValueError`` for a numeric one that holds more than 0 and 1: another tensor in the mask's place."""
    if mask.dtype == torch.bool:
        return mask
    if not bool(((mask == 0) | (mask == 1)).all()):
        strange = mask[(mask != 0) & (mask != 1)].flatten()[:4].tolist()
        raise ValueError(f"a mask holds 0 and 1 only, but this one holds {strange}; was another tensor passed in its place?")
    return mask.bool()


def keep(x: Tensor, mask: Tensor) -> Tensor:
    """``x`` in float32 (float64 stays) where mask is 1, and 0 elsewhere; the gradient at masked entries is exactly 0."""
    x = x if x.dtype == torch.float64 else x.float()
    return torch.where(as_mask(mask), x, torch.zeros((), dtype=x.dtype, device=x.device))


def check_finite(x: Tensor, mask: Tensor, name: str) -> None:
    """``FloatingPointError`` naming the tensor and the first place where a valid entry of it is NaN or infinite."""
    bad = as_mask(mask) & ~torch.isfinite(x)
    if bool(bad.any()):
        place = tuple(bad.nonzero()[0].tolist())
        raise FloatingPointError(
            f"{name} is {x[place].item()} at {place}; "
            f"{int(bad.sum())} of its {int(as_mask(mask).sum())} valid entries are not finite"
        )


def masked_sum(x: Tensor, mask: Tensor, name: str = "tensor") -> Tensor:
    """Sum of the valid entries ([]). ``FloatingPointError`` where one of them is not finite."""
    check_finite(x, mask, name)
    return keep(x, mask).sum()


def masked_mean(x: Tensor, mask: Tensor, name: str = "tensor") -> Tensor:
    """Mean of the valid entries ([]); 0 where there are none. ``FloatingPointError`` where one of them is not finite."""
    return masked_sum(x, mask, name) / as_mask(mask).sum().clamp(min=1)


# -- rewards and advantages -------------------------------------------------------------------------------------------


def last_token(mask: Tensor) -> Tensor:
    """[B, T] bool: the last valid entry of each row. A row without valid entries has none."""
    mask = as_mask(mask)
    after = mask.flip(1).cumsum(1).flip(1)  # valid entries from t on; 1 at the last of them and at the gap before it
    return mask & (after == 1)


def kl_penalty(old_log_probs: Tensor, ref_log_probs: Tensor | None, mask: Tensor, kl_coef: float) -> Tensor:
    """[B, T] ``kl_coef * (old - ref)``, the k1 estimate of KL(policy || reference) that the rewards lose (arXiv:1909.08593).

    Without a reference ``kl_coef`` must be 0 (``ValueError``), and so is the penalty.
    """
    if ref_log_probs is None:
        if kl_coef != 0:
            raise ValueError(f"kl_coef is {kl_coef}, but there are no reference log-probs; compute them or set kl_coef to 0")
        return keep(torch.zeros_like(old_log_probs), mask)
    return kl_coef * (keep(old_log_probs, mask) - keep(ref_log_probs, mask))


def token_rewards(
    scores: Tensor, response_mask: Tensor, old_log_probs: Tensor, ref_log_probs: Tensor | None, kl_coef: float
) -> Tensor:
    """Rewards [B, T]: the response's score on its last token, minus ``kl_coef * (old - ref)`` on every token.

    ``scores`` [B] float, ``response_mask`` [B, T]. An empty response has no token to carry its score; its row is 0.
    """
    at_end = torch.where(last_token(response_mask), scores.float()[:, None], 0.0)
    return at_end - kl_penalty(old_log_probs, ref_log_probs, response_mask, kl_coef)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, *, final_values: Tensor | None = None
) -> Tensor:
    """Generalised advantage estimates [B, T] (arXiv:1506.02438).

    ``A_t = d_t + gamma * lam * A_t+1`` with ``d_t = r_t + gamma * V_t+1 - V_t``. "t + 1" is the next *valid* token: a masked
    step hands ``V`` and ``A`` on untouched, so that neither padding nor a gap in the response (the words of a tool, say)
    enters the recursion. ``final_values`` [B] is V after the last token; default 0, the response has ended.
    """
    mask = as_mask(mask)
    rewards, values = keep(rewards, mask), keep(values, mask)
    running = torch.zeros_like(values[:, 0])
    next_value = running if final_values is None else final_values.to(values.dtype)
    columns = []
    for valid, reward, value in zip(*(x.flip(1).unbind(1) for x in (mask, rewards, values)), strict=True):
        delta = reward + gamma * next_value - value
        running = torch.where(valid, delta + gamma * lam * running, running)
        next_value = torch.where(valid, value, next_value)
        columns.append(torch.where(valid, running, 0.0))
    return torch.stack(columns, dim=1).flip(1)


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Valid entries moved to mean 0 and deviation 1 (unbiased variance, eps 1e-8 inside the root); 0 elsewhere.

    Fewer than two valid entries have no deviation and are left as they are. Pass the rows of the *whole* batch: moments of a
    rank's share would weigh responses by the rank that they happened to land on. Moments are float64 over the valid entries
    alone, so that the amount of padding cannot change a bit of the result.
    """
    check_finite(x, mask, "the tensor to whiten")
    mask = as_mask(mask)
    valid = x[mask].double()
    if valid.numel() < 2:
        return keep(x, mask)
    variance, mean = torch.var_mean(valid, correction=1)
    whitened = (keep(x, mask).double() - mean) * torch.rsqrt(variance + WHITEN_EPS)
    return keep(whitened.to(keep(x, mask).dtype), mask)


def grpo_advantages(scores: Tensor, group_ids: Tensor, eps: float = 1e-6) -> Tensor:
    """Advantages [B]: ``(score - mean) / (std + eps)`` over the responses to the same prompt (arXiv:2402.03300).

    ``scores`` [B], ``group_ids`` [B] int, in any order. The deviation is the unbiased one (two scores 1, 0 give +-0.7071). A
    group of one, or of equal scores, teaches nothing and gets exactly 0.
    """
    group, size, mean = _group_means(scores, group_ids)
    centred = scores.double() - mean
    squares = torch.zeros(len(size), dtype=torch.float64, device=scores.device).index_add_(0, group, centred.square())
    std = (squares / (size - 1).clamp(min=1)).sqrt()[group]
    first = torch.zeros_like(squares).scatter_(0, group, scores.double())  # some score of each group
    different = torch.zeros(len(size), dtype=torch.bool, device=scores.device)
    different[group[scores.double() != first[group]]] = True
    equal = ~different[group]  # told by the scores: a rounded mean would turn equal scores into noise / eps
    return torch.where(equal, 0.0, centred / (std + eps)).float()


def rloo_advantages(scores: Tensor, group_ids: Tensor) -> Tensor:
    """Advantages [B]: score minus mean score of the *other* responses to the prompt (arXiv:2402.14740); 0 in a group of one."""
    group, size, mean = _group_means(scores, group_ids)
    count = size[group]
    # score - (n * mean - score) / (n - 1) = n / (n - 1) * (score - mean)
    return torch.where(count > 1, (scores.double() - mean) * count / (count - 1).clamp(min=1), 0.0).float()


def _group_means(scores: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Group number of each row [B], size of each group [G], mean of each row's group [B] float64."""
    check_finite(scores, torch.ones_like(scores, dtype=torch.bool), "scores")
    if scores.shape != group_ids.shape:
        raise ValueError(
            f"each score needs the id of its group, but scores are {tuple(scores.shape)}, ids {tuple(group_ids.shape)}"
        )
    _, group, size = torch.unique(group_ids, return_inverse=True, return_counts=True)
    total = torch.zeros(len(size), dtype=torch.float64, device=scores.device).index_add_(0, group, scores.double())
    return group, size, (total / size)[group]


# -- KL ---------------------------------------------------------------------------------------------------------------


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, kind: KLKind) -> Tensor:
    """Per-token estimates [B, T] of KL(policy || reference) from tokens that the policy sampled.

    See http://joschu.net/blog/kl-approx.html. With ``d = ref - log_prob``: k1 ``-d`` (unbiased, noisy, may be negative), k2
    ``d^2 / 2`` (small bias), k3 ``e^d - 1 - d`` (unbiased, never negative). Above d = 10 k3 goes on as its tangent; a clamp
    would be as finite, but would let go of the policy just where it is furthest from the reference. For KL(old || new) over
    tokens of the old policy pass (old, new).
    """
    d = keep(ref_log_probs, mask) - keep(log_probs, mask)
    if kind == "k1":
        return -d
    if kind == "k2":
        return 0.5 * d.square()
    if kind != "k3":
        raise ValueError(f"there is no KL estimator {kind!r}; choose k1, k2 or k3")
    inner = d.clamp(max=K3_LINEAR_FROM)
    slope = math.expm1(K3_LINEAR_FROM)
    line = slope - K3_LINEAR_FROM + slope * (d - K3_LINEAR_FROM)
    # chosen, not added: in float32 the slope's gradient, +22025 - 22025, would leave its rounding in that of every token
    return torch.where(d > K3_LINEAR_FROM, line, torch.expm1(inner) - inner)


@dataclass
class KLController:
    """The weight of the KL penalty in the reward; ``kl_coef`` is all its state (save it with a checkpoint).

    Fixed where ``target`` is None. Otherwise the proportional controller of arXiv:1909.08593, section 2.2:
    ``kl_coef *= 1 + clip(kl / target - 1, +-0.2) * num_responses / horizon``.
    """

    kl_coef: float
    target: float | None = None
    """Nats per response."""
    horizon: int = 10000
    """Responses."""

    def update(self, kl_per_response: float, num_responses: int) -> None:
        """Learn from one batch: the mean over its responses of the summed per-token KL, and how many responses it had."""
        if self.target is None or num_responses == 0:
            return
        if not math.isfinite(kl_per_response):
            raise FloatingPointError(
                f"the measured KL per response is {kl_per_response}; kl_coef {self.kl_coef} cannot follow it"
            )
        error = min(max(kl_per_response / self.target - 1.0, -0.2), 0.2)
        self.kl_coef *= 1.0 + error * num_responses / self.horizon


# -- losses, token by token -------------------------------------------------------------------------------------------


class PolicyLoss(NamedTuple):
    """Token-wise results of ``policy_loss``, [B, T] each, 0 where masked."""

    loss: Tensor
    ratio: Tensor
    """new / old probability of the token, without gradient."""
    clipped: Tensor
    """1.0 where a clip decides the loss, without gradient."""


def log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """``log_probs - old_log_probs`` [B, T], clamped to +-20. A difference that is not finite gives NaN: not hidden."""
    difference = keep(log_probs, mask) - keep(old_log_probs, mask)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT) + (difference - difference).detach()


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """The clipped surrogate ``max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))`` (arXiv:1707.06347), to be minimised; [B, T].

    ``dual_clip`` (arXiv:1912.09729), above 1, bounds the loss of tokens with a negative advantage by ``-dual_clip * A``.
    """
    ratio = log_ratio(log_probs, old_log_probs, mask).exp()
    advantages = keep(advantages, mask).to(ratio.dtype)
    free = -advantages * ratio
    held = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss, clipped = torch.maximum(free, held), held > free
    if dual_clip is not None:
        if dual_clip <= 1:
            raise ValueError(f"dual_clip_ratio must be above 1 (the ratio of an unchanged policy), but is {dual_clip}")
        bound = -dual_clip * advantages
        over = (advantages < 0) & (loss > bound)
        loss, clipped = torch.where(over, bound, loss), clipped | over
    return PolicyLoss(keep(loss, mask), keep(ratio.detach(), mask), keep(clipped, mask))


def importance_weights(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, cap: float) -> Tensor:
    """Truncated importance weights [B, T], ``min(trainer / rollout probability, cap)``, without gradient.

    They correct for tokens having been drawn by the rollout engine's numbers, not by the trainer's (Ionides, Truncated
    Importance Sampling, 2008).
    """
    return keep(log_ratio(old_log_probs, rollout_log_probs, mask).exp().clamp(max=cap).detach(), mask)


class ValueLoss(NamedTuple):
    """Token-wise results of ``value_loss``, [B, T] each, 0 where masked."""

    loss: Tensor
    clipped: Tensor
    """1.0 where the clipped square is the larger one, without gradient."""


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None) -> ValueLoss:
    """``0.5 * max((V - R)^2, (V_old + clip(V - V_old, +-clip) - R)^2)`` [B, T]; with ``clip`` None the first square alone."""
    values, old_values, returns = keep(values, mask), keep(old_values, mask), keep(returns, mask)
    free = (values - returns).square()
    if clip is None:
        return ValueLoss(0.5 * free, torch.zeros_like(free))
    # Within the range this is V to the bit. V_old + (V - V_old) is not, and its rounding would be counted as clipping.
    held = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return ValueLoss(0.5 * torch.maximum(free, held), (held > free).to(free.dtype))
