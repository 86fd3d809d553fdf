"""Generation with a Megatron role: a plain loop without a cache, under any TP, PP, CP and virtual pipeline. Slow, and the
oracle for vLLM.

    each step:  chunk 0 -> chunk 1 -> ... -> last chunk -> logits gathered over TP -> one token a row -> sent to all stages
                (hidden states travel by broadcast in the pipeline group)

Each request has a generator of its own on the CPU, seeded by its seed, and all ranks of the last stage sample from the same
bits, so that all draw the same token. The numbers are not those that vLLM draws from the same seed; distributions are
compared, or greedy tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ppo import device
from megatron_ppo.roles.megatron_actor_critic import MegatronActorCritic
from megatron_ppo.roles.megatron_spec import context_parallel_part
from megatron_ppo.types import Completion, Sampling


@dataclass
class _Request:
    """A row on its way."""

    tokens: list[int]
    generator: torch.Generator
    response: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finished: bool = False


@torch.no_grad()
def generate(
    chunks: Sequence[MegatronActorCritic], prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
) -> list[Completion]:
    """One response to each prompt, the same list on every rank of the model. ``chunks`` are this stage's, in order.

    Collective over the ranks of one data-parallel replica; over the whole training mesh where experts are spread over ranks, because
    replicas then compute each other's tokens. Log-probs are of the full distribution at the sampling temperature, whatever top_p and
    top_k left out. Rows that have ended leave the batch.
    """
    _check(prompts, sampling, seeds)
    idle = _Request([0], torch.Generator())
    requests = [_Request(list(prompt), torch.Generator().manual_seed(seed)) for prompt, seed in zip(prompts, seeds, strict=True)]
    for _ in range(sampling.max_response_length):
        active = [request for request in requests if not request.finished]
        if not _anyone(chunks, bool(active)):
            break
        tokens, log_probs = _next_tokens(chunks, active or [idle], sampling)
        for request, token, log_prob in zip(active, tokens, log_probs, strict=bool(active)):
            request.tokens.append(token)
            request.response.append(token)
            request.log_probs.append(log_prob)
            request.finished = token in sampling.stop_token_ids
    return [Completion(request.response, request.log_probs, truncated=not request.finished) for request in requests]


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[int, float]:
    """One token of ``logits`` [V] (CPU), and its log-probability at the sampling temperature before top_k and top_p.

    top_p keeps the smallest set of most likely tokens whose probability reaches it (arXiv:1904.09751).
    """
    log_probs = (logits.float() / sampling.temperature).log_softmax(dim=-1)
    if sampling.greedy:
        token = int(logits.argmax())
    else:
        probabilities, ids = log_probs.exp().sort(descending=True, stable=True)
        if sampling.top_k > 0:
            probabilities, ids = probabilities[: sampling.top_k], ids[: sampling.top_k]
            probabilities = probabilities / probabilities.sum()
        before = probabilities.cumsum(0) - probabilities
        probabilities = torch.where(before < sampling.top_p, probabilities, 0.0)
        token = int(ids[torch.multinomial(probabilities, 1, generator=generator)])
    return token, float(log_probs[token])


def _check(prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> None:
    if len(prompts) != len(seeds):
        raise ValueError(f"{len(prompts)} prompts and {len(seeds)} seeds: each prompt needs one")
    if not all(len(prompt) for prompt in prompts):
        raise ValueError("an empty prompt gives the model nothing to continue: begin it with the BOS token")
    if not sampling.temperature > 0 or not sampling.top_p > 0:
        raise ValueError(f"temperature {sampling.temperature} and top_p {sampling.top_p} must be above 0 (or take greedy)")


def _anyone(chunks: Sequence[MegatronActorCritic], active: bool) -> bool:
    """Whether a pass has to be made: by this replica for itself, or for experts of its own that others ask for."""
    if chunks[0].config.expert_model_parallel_size == 1:
        return active
    flag = torch.tensor([int(active)], device=device.device())
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def _next_tokens(chunks: Sequence[MegatronActorCritic], requests: Sequence[_Request], sampling: Sampling) -> tuple[list[int], list[float]]:
    """The next token of each request and its log-prob, on every rank of the model."""
    role, where = chunks[-1], device.device()
    lengths = torch.tensor([len(request.tokens) for request in requests], device=where)
    hidden = _run_pipeline(chunks, _pad(role, [request.tokens for request in requests], where))
    drawn = torch.zeros(2, len(requests), dtype=torch.float64, device=where)  # exact for any token id
    if role.post_process:
        logits = role.next_token_logits(hidden, lengths).cpu()
        pairs = [sample(row, sampling, request.generator) for row, request in zip(logits, requests, strict=True)]
        drawn = torch.tensor(pairs, dtype=torch.float64, device=where).T.contiguous()
    pipeline = role.pg_collection.pp
    if pipeline.size() > 1:
        dist.broadcast(drawn, group_src=pipeline.size() - 1, group=pipeline)
    return [int(token) for token in drawn[0].tolist()], drawn[1].tolist()


def _pad(role: MegatronActorCritic, rows: Sequence[list[int]], where: torch.device) -> Tensor:
    """This context-parallel rank's part of the rows, right-padded with id 0 to a length that every axis divides."""
    cp = role.pg_collection.cp
    parts = role.config.tensor_model_parallel_size if role.config.sequence_parallel else 1
    multiple = math.lcm(2 * cp.size() if cp.size() > 1 else 1, cp.size() * parts)
    length = math.ceil(max(map(len, rows)) / multiple) * multiple
    tokens = torch.tensor([row + [0] * (length - len(row)) for row in rows], device=where)
    return context_parallel_part(tokens, 1, cp.rank(), cp.size())


def _run_pipeline(chunks: Sequence[MegatronActorCritic], tokens: Tensor) -> Tensor:
    """Hidden states after the last chunk (valid on the last stage). Chunk v of stage p is number v * PP + p of the network."""
    config, pipeline = chunks[0].config, chunks[0].pg_collection.pp
    parts = config.tensor_model_parallel_size if config.sequence_parallel else 1
    hidden = torch.empty(tokens.shape[1] // parts, tokens.shape[0], config.hidden_size, dtype=config.params_dtype, device=tokens.device)
    last = len(chunks) * pipeline.size() - 1
    for number in range(last + 1):
        stage = number % pipeline.size()
        if stage == pipeline.rank():
            chunk = chunks[number // pipeline.size()]
            chunk.set_input_tensor(None if chunk.pre_process else hidden)
            hidden = chunk.run_network(tokens).contiguous()
            chunk.set_input_tensor(None)
        if number < last and pipeline.size() > 1:
            dist.broadcast(hidden, group_src=stage, group=pipeline)
    return hidden
