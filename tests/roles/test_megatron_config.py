"""From Hugging Face configs to TransformerConfig: what is taken over, what is refused, and the RoPE frequencies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_ppo import device
from megatron_ppo.config import Config
from megatron_ppo.roles.megatron_config import padded_vocab_size, rope_inverse_frequencies, transformer_config, transformer_impl

LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama(**changes: Any) -> LlamaConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(**(sizes | changes))


def config(**fields: Any) -> Config:
    return Config().replace(**fields)


def test_b01_vocabulary_padding() -> None:
    assert padded_vocab_size(32001, 128, 4) == 32256
    assert padded_vocab_size(32256, 128, 4) == 32256
    assert padded_vocab_size(152064, 128, 1) == 152064


def test_b16_llama31_frequencies() -> None:
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128}
    scaled = rope_inverse_frequencies(llama(**sizes, rope_parameters=LLAMA31))
    plain = rope_inverse_frequencies(llama(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 500000.0}))
    assert scaled[28].item() == pytest.approx(3.21145e-3, rel=1e-5)
    assert scaled[28] == plain[28]
    assert (scaled[30] / plain[30]).item() == pytest.approx(0.64374, rel=1e-4)
    assert scaled[63].item() == pytest.approx(3.06893e-7, rel=1e-5)


@pytest.mark.parametrize(
    "block",
    [LLAMA31, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}, {"rope_type": "default", "rope_theta": 1e6}],
    ids=lambda block: block["rope_type"],
)
def test_b16_frequencies_equal_hugging_face(block: dict[str, Any]) -> None:
    hf_config = llama(head_dim=128, rope_parameters=block)
    assert torch.allclose(rope_inverse_frequencies(hf_config), LlamaRotaryEmbedding(hf_config).inv_freq, rtol=1e-6, atol=0)


def test_b16_older_spelling_of_rope() -> None:
    old = PretrainedConfig(hidden_size=64, num_attention_heads=4, rope_theta=500000.0)
    old.rope_scaling = {key: value for key, value in LLAMA31.items() if key != "rope_theta"}
    assert torch.equal(rope_inverse_frequencies(old), rope_inverse_frequencies(llama(rope_parameters=LLAMA31)))


def test_b15_head_dim_null_falls_back() -> None:
    assert transformer_config(llama(head_dim=None), config()).kv_channels == 16
    assert transformer_config(llama(head_dim=32), config()).kv_channels == 32


def test_families_differ_in_biases_and_norms() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    qwen2 = transformer_config(Qwen2Config(**sizes), config())
    qwen3 = transformer_config(Qwen3Config(**sizes), config())
    assert (qwen2.add_qkv_bias, qwen2.qk_layernorm, qwen2.add_bias_linear) == (True, False, False)
    assert (qwen3.add_qkv_bias, qwen3.qk_layernorm, qwen3.add_bias_linear) == (False, True, False)


def test_b63_dropout_is_off_whatever_the_model_says() -> None:
    made = transformer_config(llama(attention_dropout=0.1), config())
    assert (made.attention_dropout, made.hidden_dropout) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "fields", "message"),
    [
        ({"hidden_act": "gelu"}, {}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, {}, "attention_bias = true"),
        ({"mlp_bias": True}, {}, "mlp_bias = true"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, {}, "rope_type 'yarn'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, {}, "partial_rotary_factor"),
        ({}, {"pipeline_model_parallel_size": 3}, "4 layers .* do not split into 3"),
        ({}, {"tensor_model_parallel_size": 3}, "num_attention_heads 4 is not a multiple of tensor_model_parallel_size 3"),
        (
            {},
            {"transformer_overrides": {"recompute_granularty": "full"}},
            "no field 'recompute_granularty'; perhaps .* recompute_granularity",
        ),
        ({}, {"transformer_overrides": {"hidden_dropout": "0.1"}}, "hidden_dropout follows from the model"),
        ({}, {"transformer_overrides": {"window_size": "8"}}, "window_size follows from the model"),
        ({}, {"transformer_overrides": {"bias_dropout_fusion": "maybe"}}, "bias_dropout_fusion = 'maybe' cannot be read"),
        ({}, {"transformer_overrides": {"init_method": "normal"}}, "init_method = 'normal' cannot be read"),
    ],
)
def test_what_would_be_computed_differently_is_refused(changes: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        transformer_config(llama(**changes), config(**fields))


def test_other_families_are_refused() -> None:
    hf_config = llama()
    hf_config.model_type = "gemma3"
    with pytest.raises(ValueError, match="model_type 'gemma3' is not supported"):
        transformer_config(hf_config, config())


def test_mistral_window_must_hold_the_sequences() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    hf_config = MistralConfig(**sizes, sliding_window=1000)
    assert transformer_config(hf_config, config(max_model_len=1000)).window_size is None
    with pytest.raises(ValueError, match=r"sliding_window.*1024.*max_model_len to 1000"):
        transformer_config(hf_config, config())


def test_overrides_are_read_as_their_fields_types() -> None:
    overrides = {
        "fp32_residual_connection": "true",
        "init_method_std": "0.01",
        "recompute_granularity": "selective",
        "recompute_modules": "core_attn,mlp",
        "recompute_method": "none",
        "cp_comm_type": "a2a",
    }
    made = transformer_config(llama(), config(transformer_overrides=overrides))
    assert made.fp32_residual_connection is True
    assert made.init_method_std == 0.01
    assert made.recompute_modules == ["core_attn", "mlp"]
    assert made.recompute_method is None
    assert made.cp_comm_type == "a2a"


def test_recomputation() -> None:
    assert transformer_config(llama(), config()).recompute_granularity is None
    full = transformer_config(llama(), config(recompute_granularity="full"))
    assert (full.recompute_granularity, full.recompute_method, full.recompute_num_layers) == ("full", "uniform", 1)
    assert transformer_config(llama(), config(recompute_granularity="selective")).recompute_modules == ["core_attn"]


@pytest.mark.skipif(device.has_transformer_engine(), reason="Transformer Engine is usable here")
def test_transformer_engine_is_taken_where_usable_and_refused_otherwise() -> None:
    assert transformer_impl(config()) == "local"
    with pytest.raises(ValueError, match="Transformer Engine is not usable here"):
        transformer_impl(config(transformer_impl="transformer_engine"))
