"""Tiny random models of families that no table knows, written by transformers. Test support only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSequenceClassification

COMMON: dict[str, Any] = {
    "vocab_size": 130,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OPT = {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 256}

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,  # tied, learned positions, transposed matrices, query, key and value in one
    "opt": OPT | {"word_embed_proj_dim": 32},  # an embedding narrower than the layers
    "gemma2": COMMON | {"final_logit_softcapping": 30.0},  # logits are changed after the head
    "phi3": COMMON,  # query, key and value in one, gate and up in one
    "gpt_neox": COMMON,  # the head has another name in checkpoints
    "granite": COMMON | {"logits_scaling": 4.0, "embedding_multiplier": 2.0},
    "olmo2": COMMON,
    "smollm3": COMMON,
    "olmoe": COMMON | {"num_experts": 4, "num_experts_per_tok": 2},  # experts that are stacked in memory
}


def make_other(folder: Path | str, kind: str, *, score_head: bool = False, seed: int = 0, **changes: Any) -> Path:
    """Write config.json and model.safetensors and return the folder. The same arguments give the same bytes."""
    settings = CONFIG_MAPPING[kind](**{"vocab_size": 130, **CONFIGS[kind], **({"num_labels": 1} if score_head else {}), **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = (AutoModelForSequenceClassification if score_head else AutoModelForCausalLM).from_config(settings)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
                elif kind in ("gpt2", "opt"):  # 0.02 at first: every token would be about as likely as any other
                    parameter.mul_(4)
    model.save_pretrained(folder)
    return Path(folder)
