"""Tiny Hugging Face models with random weights, written to a folder the way transformers writes real ones.

Tests of all floors start from such a folder. Biases and norm weights are random too (transformers starts them at 0 and 1), so that
a forgotten one changes the result. No tokenizer is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForCausalLM,
    MistralForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    MixtralForSequenceClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3MoeForSequenceClassification,
)

Family = Literal["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"]

CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification),
    "mistral": (MistralConfig, MistralForCausalLM, MistralForSequenceClassification),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification),
    "mixtral": (MixtralConfig, MixtralForCausalLM, MixtralForSequenceClassification),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3MoeForSequenceClassification),
}

LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The rope block of Llama 3.1."""


def make_toy(
    folder: Path | str,
    family: Family = "llama",
    *,
    tied: bool = False,
    num_layers: int = 2,
    hidden_size: int = 64,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    ffn: int = 96,
    vocab_size: int = 130,
    num_experts: int = 4,
    num_experts_per_tok: int = 2,
    seed: int = 0,
    dtype: Literal["float32", "bfloat16"] = "float32",
    rope_scaling: Mapping[str, object] | None = None,
    score_head: bool = False,
) -> Path:
    """Write config.json and model.safetensors (one file) and return the folder.

    ``head_dim`` None means hidden_size / num_heads. ``ffn`` is the width of the MLP, or of each expert of a mixture; dense families have
    no experts. ``rope_scaling`` is the rope block (``rope_type``, ``rope_theta``, ...; default:
    plain RoPE, theta 10000). ``score_head`` writes a one-label sequence classifier (a reward model) in place of the language-model
    head. The same arguments give the same bytes. The global random state is left as it was.
    """
    config_class, causal_class, classifier_class = CLASSES[family]
    options: dict[str, object] = {"num_labels": 1} if score_head else {}
    if family in ("mixtral", "qwen3_moe"):
        options |= {"num_local_experts": num_experts, "num_experts_per_tok": num_experts_per_tok}
    if family == "qwen3_moe":
        options |= {"moe_intermediate_size": ffn, "norm_topk_prob": True}
    config = config_class(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=ffn,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim if head_dim is not None else hidden_size // num_heads,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        rope_parameters=dict(rope_scaling or {"rope_type": "default", "rope_theta": 10000.0}),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **options,
    )
    target = Path(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = (classifier_class if score_head else causal_class)(config)
        _randomise_vectors(model)
    model.to(getattr(torch, dtype)).save_pretrained(target)
    return target


def _randomise_vectors(model: torch.nn.Module) -> None:
    """Give every 1-d parameter (norm weights, biases) random values near those it starts from."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
