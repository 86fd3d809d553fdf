"""Canonical tensors of each family, against transformers' own models."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from layout_support import tiny
from safetensors import safe_open
from toy_models import CLASSES, make_toy
from transformers import AutoConfig, LlamaConfig

from megatron_ppo.families import (
    FAMILIES,
    canonical_name,
    canonical_names,
    canonical_tensors,
    check_tensors,
    network_shape,
)


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (safe_open is no dict)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_b05_the_tables_are_what_transformers_writes(tmp_path: Path, family: str, tied: bool) -> None:
    folder = make_toy(tmp_path, family, tied=tied, head_dim=32)
    network = network_shape(folder)
    assert {t.name: t.shape for t in canonical_tensors(network)} == stored_shapes(folder)
    assert network.tied == tied and network.head_dim == 32


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_score_head_is_what_transformers_writes(tmp_path: Path, family: str) -> None:
    folder = make_toy(tmp_path, family, score_head=True)
    assert {t.name: t.shape for t in canonical_tensors(network_shape(folder), "score")} == stored_shapes(folder)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_raw_json_and_transformers_object_agree(tmp_path: Path, family: str) -> None:
    folder = make_toy(tmp_path, family)
    assert network_shape(folder) == network_shape(AutoConfig.from_pretrained(folder)) == network_shape(str(folder))
    assert set(CLASSES) == set(FAMILIES)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_an_absent_key_means_what_transformers_takes_it_for_or_is_refused(tmp_path: Path, family: str) -> None:
    file = make_toy(tmp_path, family, head_dim=16) / "config.json"
    full = json.loads(file.read_text())
    refused: dict[str, str] = {}
    for key in sorted(full.keys() - {"model_type"}):
        file.write_text(json.dumps({k: v for k, v in full.items() if k != key}))
        try:
            network = network_shape(tmp_path)
        except ValueError as error:
            refused[key] = str(error)
            continue
        assert network == network_shape(AutoConfig.from_pretrained(tmp_path)), key
    sizes = {"hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers", "vocab_size"}
    assert all(key in message for key, message in refused.items())
    wanted = sizes | ({"num_key_value_heads"} if family != "llama" else set())
    if family in ("mixtral", "qwen3_moe"):
        wanted |= {"num_local_experts", "num_experts_per_tok"}
    if family == "qwen3_moe":  # the width of its dense layers, of which it has none
        wanted = wanted - {"intermediate_size"} | {"moe_intermediate_size"}
    assert refused.keys() == wanted


def test_b05_llama_gains_no_bias_and_qwen2_none_on_o_proj() -> None:
    assert not [t.name for t in canonical_tensors(tiny("llama")) if t.name.endswith("bias")]
    biases = {t.name.split(".")[-2] for t in canonical_tensors(tiny("qwen2")) if t.name.endswith("bias")}
    assert biases == {"q_proj", "k_proj", "v_proj"}


def test_b05_unconsumed_missing_and_misshapen_tensors_are_all_listed() -> None:
    tensors = canonical_tensors(tiny("llama"))
    found = {t.name: t.shape for t in tensors}
    check_tensors(tensors, found | {"model.layers.0.self_attn.rotary_emb.inv_freq": (2,)}, "x")
    bad = found | {"model.layers.0.self_attn.q_proj.bias": (16,), "model.norm.weight": (17,)}
    del bad["model.layers.3.mlp.up_proj.weight"]
    with pytest.raises(ValueError) as error:
        check_tensors(tensors, bad, "the folder")
    for part in (
        "not consumed: model.layers.0.self_attn.q_proj.bias",
        "missing: model.layers.3.mlp.up_proj.weight (24, 16)",
        "shape of model.norm.weight: (17,), but the config says (16,)",
    ):
        assert part in str(error.value)


def test_b15_head_dim_is_read_and_null_falls_back() -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 64,
        "vocab_size": 100,
        "max_position_embeddings": 64,
    }
    shapes = {t.name.removeprefix("model.layers.0.self_attn."): t.shape for t in canonical_tensors(network_shape(config))}
    assert shapes["q_proj.weight"] == (2048, 1024) and shapes["o_proj.weight"] == (1024, 2048)
    assert network_shape(config | {"head_dim": None}).head_dim == 64
    assert network_shape({k: v for k, v in config.items() if k != "head_dim"}).head_dim == 64
    with pytest.raises(ValueError, match="1024 is not a multiple of num_attention_heads 15"):
        network_shape(config | {"head_dim": None, "num_attention_heads": 15})
    assert network_shape({k: v for k, v in config.items() if k != "num_key_value_heads"}).num_key_value_heads == 16


def test_b16_rope_block_in_both_spellings(tmp_path: Path) -> None:
    block = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    new = network_shape(LlamaConfig(rope_parameters=block | {"rope_theta": 500000.0}, vocab_size=64))
    assert new.rope_theta == 500000.0 and dict(new.rope_scaling) == block
    config = LlamaConfig(vocab_size=64).to_dict()
    del config["rope_parameters"]
    old = network_shape(config | {"rope_theta": 500000.0, "rope_scaling": block})
    assert dataclasses.replace(old, max_position_embeddings=0) == dataclasses.replace(new, max_position_embeddings=0)
    oldest = network_shape(config | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert dict(oldest.rope_scaling) == {"rope_type": "linear", "factor": 2.0}
    assert network_shape(config | {"rope_scaling": None}).rope_scaling == ()


def test_sliding_window_counts_only_where_it_is_switched_on() -> None:
    from transformers import MistralConfig, Qwen2Config

    assert network_shape(MistralConfig(sliding_window=512)).sliding_window == 512
    assert network_shape(MistralConfig(sliding_window=None)).sliding_window is None
    assert network_shape(Qwen2Config(use_sliding_window=True, sliding_window=256)).sliding_window == 256
    assert network_shape(Qwen2Config(use_sliding_window=False, sliding_window=256)).sliding_window is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mixtral"}, "mixture of experts needs their number"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok 3 exceeds num_local_experts 2"),
        ({"model_type": "qwen3_moe", "moe_intermediate_size": 8, "mlp_only_layers": [0]}, "in some layers only"),
        ({"model_type": "qwen3_moe", "moe_intermediate_size": 8, "decoder_sparse_step": 2}, "in some layers only"),
        ({"num_local_experts": 8}, "'llama' is a dense family"),
        ({"model_type": "gpt2"}, "gpt2.*supported: llama, mistral, mixtral, qwen2, qwen3, qwen3_moe"),
        ({"model_type": None}, "None"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"vocab_size": "32000"}, "vocab_size.*'32000'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 5}, "32 is not a multiple of num_key_value_heads 5"),
    ],
)
def test_unsupported_configs_are_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        network_shape(LlamaConfig().to_dict() | change)


def test_config_files_that_are_no_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        network_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        network_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="JSON list, not an object"):
        network_shape(tmp_path)


def test_b26_wrapper_prefixes_are_stripped_and_collisions_refused() -> None:
    plain = "model.layers.0.mlp.up_proj.weight"
    for name in (
        f"module.{plain}",
        f"module.module.{plain}",
        f"_orig_mod._fsdp_wrapped_module.{plain}",
        "_fsdp_wrapped_module.model.layers.0._checkpoint_wrapped_module.mlp._orig_mod.up_proj.weight",
        plain,
    ):
        assert canonical_name(name) == plain
    assert canonical_names(["module.a.weight", "b.weight"]) == {"module.a.weight": "a.weight", "b.weight": "b.weight"}
    with pytest.raises(ValueError, match=r"_orig_mod\.a\.weight and a\.weight are both a\.weight"):
        canonical_names(["_orig_mod.a.weight", "a.weight"])
