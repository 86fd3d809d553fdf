"""From Hugging Face configs to TransformerConfig: what is taken over, what is refused, and the RoPE frequencies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy_models import LLAMA31
from transformers import LlamaConfig, MistralConfig, MixtralConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_ppo import device
from megatron_ppo.config import Config
from megatron_ppo.families import network_shape
from megatron_ppo.roles.megatron_config import padded_vocab_size, rope_inverse_frequencies, transformer_config, transformer_impl


def llama(**changes: Any) -> LlamaConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(**(sizes | changes))


def sizes(**changes: Any) -> dict[str, Any]:
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return small | changes


def made(hf_config: PretrainedConfig, **fields: Any) -> Any:
    return transformer_config(network_shape(hf_config), config(**fields))


def frequencies(hf_config: Any) -> torch.Tensor:
    return rope_inverse_frequencies(network_shape(hf_config))


def config(**fields: Any) -> Config:
    return Config().replace(**fields)


def test_b01_vocabulary_padding() -> None:
    assert padded_vocab_size(32001, 128, 4) == 32256
    assert padded_vocab_size(32256, 128, 4) == 32256
    assert padded_vocab_size(152064, 128, 1) == 152064


def test_b16_llama31_frequencies() -> None:
    large = {"hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128}
    scaled = frequencies(llama(**large, rope_parameters=LLAMA31))
    plain = frequencies(llama(**large, rope_parameters={"rope_type": "default", "rope_theta": 500000.0}))
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
    assert torch.allclose(frequencies(hf_config), LlamaRotaryEmbedding(hf_config).inv_freq, rtol=1e-6, atol=0)


def test_b16_older_spelling_of_rope() -> None:
    old = llama().to_dict() | {"rope_theta": 500000.0, "rope_parameters": None}
    old["rope_scaling"] = {key: value for key, value in LLAMA31.items() if key != "rope_theta"}
    assert torch.equal(frequencies(old), frequencies(llama(rope_parameters=LLAMA31)))


def test_b15_head_dim_null_falls_back() -> None:
    assert made(llama(head_dim=None)).kv_channels == 16
    assert made(llama(head_dim=32)).kv_channels == 32


def test_families_differ_in_biases_and_norms() -> None:
    qwen2, qwen3 = made(Qwen2Config(**sizes())), made(Qwen3Config(**sizes()))
    assert (qwen2.add_qkv_bias, qwen2.qk_layernorm, qwen2.add_bias_linear) == (True, False, False)
    assert (qwen3.add_qkv_bias, qwen3.qk_layernorm, qwen3.add_bias_linear) == (False, True, False)


def test_b63_dropout_is_off_whatever_the_model_says() -> None:
    found = made(llama(attention_dropout=0.1))
    assert (found.attention_dropout, found.hidden_dropout) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "fields", "message"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, {}, "rope_type 'yarn'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, {}, "partial_rotary_factor"),
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
        made(llama(**changes), **fields)


def test_a_mixture_is_routed_as_its_family_says_and_without_an_auxiliary_loss() -> None:
    mixtral = made(MixtralConfig(**sizes(), num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.1))
    assert (mixtral.num_moe_experts, mixtral.moe_ffn_hidden_size, mixtral.moe_router_topk) == (4, 96, 2)
    assert (mixtral.moe_router_pre_softmax, mixtral.moe_input_jitter_eps) == (False, None)
    for renormalised in (True, False):
        options = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": renormalised}
        qwen3 = made(Qwen3MoeConfig(**sizes(), **options))
        assert (qwen3.num_moe_experts, qwen3.moe_ffn_hidden_size, qwen3.moe_router_topk) == (8, 32, 3)
        assert (qwen3.moe_router_pre_softmax, qwen3.qk_layernorm) == (not renormalised, True)
    assert (mixtral.moe_router_load_balancing_type, mixtral.moe_aux_loss_coeff) == ("none", 0.0)
    assert mixtral.moe_expert_capacity_factor is None and mixtral.calculate_per_token_loss
    balanced = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": "0.01"}
    found = made(MixtralConfig(**sizes()), transformer_overrides=balanced)
    assert (found.moe_router_load_balancing_type, found.moe_aux_loss_coeff) == ("aux_loss", 0.01)


@pytest.mark.parametrize(
    ("changes", "fields", "message"),
    [
        ({}, {"tensor_model_parallel_size": 2}, "tensor_model_parallel_size = 2 needs sequence_parallel"),
        ({"num_experts_per_tok": 1}, {}, "num_experts_per_tok = 1 .* could not learn"),
        ({}, {"transformer_overrides": {"moe_token_dispatcher_type": "allgather"}}, "take alltoall or flex"),
        ({}, {"transformer_overrides": {"moe_router_load_balancing_type": "sinkhorn"}}, "route differently in training"),
        ({}, {"transformer_overrides": {"moe_expert_capacity_factor": "1.0"}}, "moe_expert_capacity_factor follows from the model"),
        ({}, {"transformer_overrides": {"moe_router_pre_softmax": "true"}}, "moe_router_pre_softmax follows from the model"),
    ],
)
def test_what_would_make_another_mixture_is_refused(changes: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(MixtralConfig(**sizes(), **changes), **fields)


def test_mistral_window_must_hold_the_sequences() -> None:
    hf_config = MistralConfig(**sizes(), sliding_window=1000)
    assert made(hf_config, max_prompt_length=900, max_response_length=100).window_size is None
    with pytest.raises(ValueError, match=r"sliding_window.*1024.*max_prompt_length \+ max_response_length to 1000"):
        made(hf_config)


def test_overrides_are_read_as_their_fields_types() -> None:
    overrides = {
        "fp32_residual_connection": "true",
        "init_method_std": "0.01",
        "recompute_granularity": "selective",
        "recompute_modules": "core_attn,mlp",
        "recompute_method": "none",
        "cp_comm_type": "a2a",
    }
    found = made(llama(), transformer_overrides=overrides)
    assert found.fp32_residual_connection is True
    assert found.init_method_std == 0.01
    assert found.recompute_modules == ["core_attn", "mlp"]
    assert found.recompute_method is None
    assert found.cp_comm_type == "a2a"


def test_recomputation() -> None:
    assert made(llama()).recompute_granularity is None
    full = made(llama(), recompute_granularity="full")
    assert (full.recompute_granularity, full.recompute_method, full.recompute_num_layers) == ("full", "uniform", 1)
    assert made(llama(), recompute_granularity="selective").recompute_modules == ["core_attn"]


@pytest.mark.skipif(device.has_transformer_engine(), reason="Transformer Engine is usable here")
def test_transformer_engine_is_taken_where_usable_and_refused_otherwise() -> None:
    assert transformer_impl(config()) == "local"
    with pytest.raises(ValueError, match="Transformer Engine is not usable here"):
        transformer_impl(config(transformer_overrides={"transformer_impl": "transformer_engine"}))
