"""Drawing a token from logits, as vLLM does it: temperature, then top_k, then top_p, and log-probs of what is left.

Step 2 of an iteration, for the Hugging Face rollout and for the slow generation of a training backend. One uniform number of the request's
own generator is used up a token, and every row is computed by itself in float64, so that a draw does not depend on the rows beside it.
Left out: the numbers that vLLM draws from the same seed (it draws by another method).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ppo.types import Sampling

_CHUNK_ELEMENTS = 2**22
"""Logits that are held in float64 at one time."""
_CANDIDATES = 256
"""Most likely tokens that are looked at first for top_p: sorting a whole vocabulary takes longer than a small model's step."""


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[int, float]:
    """Draw one token from ``logits`` [V]; returns it and its log-probability. See ``draw_rows``."""
    uniform = torch.rand(1, dtype=torch.float64, generator=generator)
    tokens, log_probs = draw_rows(logits[None, :], sampling, uniform)
    return tokens[0], log_probs[0]


def draw_rows(logits: Tensor, sampling: Sampling, uniforms: Tensor) -> tuple[list[int], list[float]]:
    """One token a row of ``logits`` [n, V], and its log-probability under the distribution drawn from.

    That is logits / temperature, cut by ``cut_logits`` and renormalised: vLLM's "processed_logprobs". ``uniforms`` [n] float64 in [0, 1)
    are turned into tokens by inversion: each against its row's cumulated probabilities. Greedy: the most likely token, under the logits
    themselves; ``uniforms`` are not looked at.
    """
    tokens: list[int] = []
    log_probs: list[float] = []
    num_rows = max(_CHUNK_ELEMENTS // logits.shape[-1], 1)
    for rows, numbers in zip(logits.split(num_rows), uniforms.split(num_rows), strict=True):
        drawn, given = _draw(rows.double(), sampling, numbers.to(rows.device))
        tokens += drawn.tolist()
        log_probs += given.tolist()
    return tokens, log_probs


def cut_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """``logits`` [..., V], divided by the temperature already, with -inf outside ``top_k``, then outside ``top_p``.

    That is the ``top_k`` most likely tokens, and of these the smallest set that holds ``top_p`` of their probability (arXiv:1904.09751).
    """
    if 0 < sampling.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[..., -1:], -torch.inf)
    if sampling.top_p < 1:
        logits = _cut_nucleus(logits, sampling.top_p)
    return logits


def _draw(logits: Tensor, sampling: Sampling, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    if sampling.greedy:
        log_probs = logits.log_softmax(-1)
        tokens = log_probs.argmax(-1, keepdim=True)
    else:
        log_probs = cut_logits(logits / sampling.temperature, sampling).log_softmax(-1)
        cumulated = log_probs.exp().cumsum(-1)
        target = uniforms[:, None] * cumulated[:, -1:]
        tokens = torch.searchsorted(cumulated, target, right=True)  # the first whose sum is above: never one of probability 0
    return tokens[:, 0], log_probs.gather(-1, tokens)[:, 0]


def _cut_nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Tokens are kept, from the most likely on, while those before them hold less than ``top_p``; the first always is."""
    probabilities = logits.softmax(-1)
    ranked, order = probabilities.topk(min(_CANDIDATES, logits.shape[-1]))
    if bool((ranked.sum(-1) < top_p).any()):
        ranked, order = probabilities.sort(descending=True)
    kept = ranked.cumsum(-1) - ranked < top_p
    kept[..., 0] = True
    inside = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, kept)
    return logits.masked_fill(~inside, -torch.inf)
