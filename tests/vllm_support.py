"""Configurations, weights and the log-probs of transformers for tests of real vLLM engines. Test support only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_ppo.backends.base import InferenceBackend
from megatron_ppo.config import Config
from megatron_ppo.packing import make_micro_batch, scatter_back
from megatron_ppo.resharding.layout import RankLayout, view
from megatron_ppo.roles.actor_critic import ActorCritic
from megatron_ppo.roles.sampling import cut_logits
from megatron_ppo.rollout_engine import make_trajectories
from megatron_ppo.types import Completion, Prompt, Sampling

SIZES: dict[str, Any] = {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "ffn": 96, "vocab_size": 130}
PROMPTS = [[1, 5, 7], [3, 2, 5, 6, 7, 8], [9], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]]
SEEDS = [101, 102, 103, 104]
SAMPLING = Sampling(max_response_length=12)


def engine_config(folder: str, **fields: object) -> Config:
    """Room for prompts of 220 tokens and a small cache."""
    sizes = {"max_prompt_length": 220, "max_response_length": 12, "vllm_overrides": {"kv_cache_memory_bytes": "53687091"}}
    return Config().replace(**{"model_path": folder, **sizes, **fields})


def hf_state(folder: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The model's state dict, tied heads listed twice; canonical names for dense families."""
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict())


def write(backend: InferenceBackend, tensors: Mapping[str, Tensor], layout: RankLayout) -> None:
    """Canonical tensors into the live parameters, as a sync does."""
    live = backend.weights()
    for block in layout.blocks:
        view(live[block.parameter], block.local).copy_(view(tensors[block.name], block.canonical))


def mean_error(model: PreTrainedModel, prompts: list[list[int]], completions: list[Completion], sampling: Sampling) -> float:
    """Mean distance of the completions' log-probs from those of transformers for the same tokens."""
    errors = [
        (_hf_log_probs(model, prompt, c.token_ids, sampling) - torch.tensor(c.log_probs).double()).abs()
        for prompt, c in zip(prompts, completions, strict=True)
    ]
    return float(torch.cat(errors).mean())


def worst_difference(folder: str, prompts: list[list[int]], completions: list[Completion], temperature: float) -> float:
    """Largest distance of the completions' log-probs (fp32, nothing cut) from those that ``ActorCritic`` gives the same tokens."""
    requests = [(Prompt(number, tuple(prompt), ""), 0) for number, prompt in enumerate(prompts)]
    batch = make_trajectories(requests, completions, [0.0] * len(prompts), version=0, metrics={})
    micro_batch = make_micro_batch(batch, torch.arange(batch.num_rows))
    with torch.no_grad():
        output = ActorCritic.from_folder(folder, dtype=torch.float32).forward(micro_batch, temperature=temperature)
    assert output.log_probs is not None
    found = scatter_back([output.log_probs], [micro_batch], batch.num_rows, batch.tokens.shape[1])
    return float((found - batch.rollout_log_probs).abs().max())


def _hf_log_probs(model: PreTrainedModel, prompt: list[int], ids: list[int], sampling: Sampling) -> Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].double()
    if not sampling.greedy:
        logits = torch.stack([cut_logits(row / sampling.temperature, sampling) for row in logits])
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Same names, same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def refusal(kind: type[Exception], function: Any, *args: Any) -> str:
    """The text of the error, or that there was none."""
    try:
        function(*args)
    except kind as error:
        return str(error)
    return "not refused"
