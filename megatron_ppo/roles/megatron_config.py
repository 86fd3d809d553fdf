"""From a Hugging Face config and ours to megatron-core's TransformerConfig: what the network is, and how it is cut and
computed.

Families: Llama, Mistral, Qwen2, Qwen3 (dense). Whatever a config asks for that would silently be computed differently is
refused by name: sliding windows shorter than the run's sequences, RoPE variants other than default, linear and llama3,
further biases, other activations. Dropout is off in training too, whatever the Hugging Face config says: PPO's ratio must
be exactly 1 before the first step, so that scoring and updating have to be the same function. Import after
``device.prepare_megatron()``; this module calls it.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import math
import types
import typing
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_ppo import device
from megatron_ppo.config import Config

device.prepare_megatron()

from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402  the stand-ins must be there first

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""``model_type`` of the Hugging Face configs that are understood."""

NOT_OVERRIDABLE = frozenset(
    {
        "activation_func_clamp_value",
        "apply_query_key_layer_scaling",
        "attention_output_gate",
        "experimental_attention_variant",
        "glu_linear_offset",
        "heterogeneous_block_specs",
        "is_hybrid_model",
        "layernorm_zero_centered_gamma",
        "mtp_num_layers",
        "multi_latent_attention",
        "no_rope_freq",
        "num_moe_experts",
        "pipeline_model_parallel_layout",
        "qk_clip",
        "qk_l2_norm",
        "rotary_interleaved",
        "softmax_scale",
        "softmax_type",
        "transformer_impl",
        "window_size",
    }
)
"""Fields that make another network, or another split of it, than the families and the resharding layouts know (beside those that are
set from the model and the parallel section)."""


def transformer_config(hf_config: Any, config: Config) -> TransformerConfig:
    """The TransformerConfig of every role of this run that has ``hf_config``'s architecture.

    ``ValueError`` for an architecture that is not supported, sizes that the meshes do not divide, and overrides that do
    not exist.
    """
    check_architecture(hf_config, config)
    fixed = _architecture(hf_config) | _parallelism(config)
    chosen = _computation(config)
    overrides = _parse_overrides(config.model.transformer_overrides, fixed)
    return TransformerConfig(**(fixed | chosen | overrides))


def padded_vocab_size(vocab_size: int, divisible_by: int, tp: int) -> int:
    """Rows of the trainer's embedding and output matrices: the next multiple of ``divisible_by`` x ``tp`` (Megatron's rule)."""
    multiple = divisible_by * tp
    return math.ceil(vocab_size / multiple) * multiple


def head_dim(hf_config: Any) -> int:
    """Width of an attention head: the config's own word where it has one, hidden / heads otherwise."""
    explicit = getattr(hf_config, "head_dim", None)
    return explicit if explicit is not None else hf_config.hidden_size // hf_config.num_attention_heads


def num_kv_heads(hf_config: Any) -> int:
    """Key/value heads (query groups); all heads where the config does not say."""
    explicit = getattr(hf_config, "num_key_value_heads", None)
    return explicit if explicit is not None else hf_config.num_attention_heads


def transformer_impl(config: Config) -> Literal["local", "transformer_engine"]:
    """The layer spec that ``model.transformer_impl`` comes to on this machine."""
    asked = config.model.transformer_impl
    if asked == "transformer_engine" and not device.has_transformer_engine():
        raise ValueError(
            "transformer_impl is transformer_engine, but Transformer Engine is not usable here "
            f"({'it does not import' if device.has_cuda() else 'there is no CUDA device'}): install it, or use auto or local"
        )
    if asked == "local" or not device.has_transformer_engine():
        return "local"
    return "transformer_engine"


def rope_parameters(hf_config: Any) -> dict[str, Any]:
    """The RoPE block in the form of transformers 5, from whichever form the config has: at least rope_type and rope_theta."""
    block = dict(getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {})
    block.setdefault("rope_type", block.get("type", "default"))
    if "rope_theta" not in block:
        block["rope_theta"] = getattr(hf_config, "rope_theta", None) or 10000.0
    return block


def rope_inverse_frequencies(hf_config: Any) -> Tensor:
    """[head_dim / 2] fp32: theta^(-2i / head_dim), scaled as the config's rope_type says.

    linear divides all by ``factor``. llama3 (Llama 3.1) keeps wavelengths below original_max / high_freq_factor, divides
    those above original_max / low_freq_factor, and blends between.
    """
    block, width = rope_parameters(hf_config), head_dim(hf_config)
    frequencies = 1.0 / block["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width)
    if block["rope_type"] == "default":
        return frequencies
    if block["rope_type"] == "linear":
        return frequencies / block["factor"]
    if block["rope_type"] != "llama3":
        raise ValueError(f"rope_type {block['rope_type']!r} is not supported: use a model with default, linear or llama3")
    low, high = block["low_freq_factor"], block["high_freq_factor"]
    turns = block["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / block["factor"]


def check_architecture(hf_config: Any, config: Config) -> None:
    """Refuse, by name, what would be computed differently from Hugging Face."""
    family = hf_config.model_type
    if family not in FAMILIES:
        raise ValueError(f"model_type {family!r} is not supported by the Megatron backend; supported: {', '.join(FAMILIES)}")
    if hf_config.hidden_act != "silu":
        raise ValueError(f"hidden_act {hf_config.hidden_act!r} is not supported: the {family} family is computed with silu")
    for name in ("attention_bias", "mlp_bias"):
        if getattr(hf_config, name, False):
            raise ValueError(f"{name} = true in the config of this {family} model is not supported")
    if rope_parameters(hf_config).get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("a partial_rotary_factor other than 1 is not supported")
    window = getattr(hf_config, "sliding_window", None)
    uses_window = family == "mistral" or getattr(hf_config, "use_sliding_window", False)
    if window is not None and uses_window and window < config.max_model_len:
        raise ValueError(
            f"the model attends to {window} tokens at most (sliding_window), but prompt plus response may have "
            f"{config.max_model_len}: set max_model_len to {window} or less"
        )
    _check_divisibility(hf_config, config)
    rope_inverse_frequencies(hf_config)


def _check_divisibility(hf_config: Any, config: Config) -> None:
    parallel = config.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    chunks = pp * (parallel.virtual_pipeline_model_parallel_size or 1)
    if hf_config.num_hidden_layers % chunks:
        raise ValueError(
            f"{hf_config.num_hidden_layers} layers (num_hidden_layers) do not split into {chunks} pipeline chunks "
            "(pipeline_model_parallel_size x virtual_pipeline_model_parallel_size)"
        )
    for name, size in (
        ("num_attention_heads", hf_config.num_attention_heads),
        ("intermediate_size", hf_config.intermediate_size),
        ("hidden_size", hf_config.hidden_size),
    ):
        if size % tp:
            raise ValueError(f"{name} {size} is not a multiple of tensor_model_parallel_size {tp}")
    groups = num_kv_heads(hf_config)
    if groups % tp and tp % groups:
        raise ValueError(f"of {groups} key/value heads and tensor_model_parallel_size {tp} neither divides the other")


def _architecture(hf_config: Any) -> dict[str, Any]:
    return {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "ffn_hidden_size": hf_config.intermediate_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "num_query_groups": num_kv_heads(hf_config),
        "kv_channels": head_dim(hf_config),
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": hf_config.model_type == "qwen2",
        "qk_layernorm": hf_config.model_type == "qwen3",
        # Off whatever the Hugging Face config says: see the module's docstring.
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _parallelism(config: Config) -> dict[str, Any]:
    """What shapes the network; what only pipeline schedules read is set by ``backends/megatron_setup.configure_schedule``."""
    parallel = config.parallel
    dtype = getattr(torch, config.model.params_dtype)
    return {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline_model_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
        "sequence_parallel": parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "pipeline_dtype": dtype,
    }


def _computation(config: Config) -> dict[str, Any]:
    """How things are computed: defaults that ``transformer_overrides`` may change."""
    on_cpu = not device.has_cuda()
    settings: dict[str, Any] = {
        "transformer_impl": transformer_impl(config),
        "use_cpu_initialization": on_cpu,
        # Fused kernels need CUDA extensions; where they are, they can be switched on by name.
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        # The default, "full", is deprecated by megatron itself and warns.
        "cuda_graph_scope": [],
    }
    granularity = config.model.recompute_granularity
    if granularity != "none":
        settings["recompute_granularity"] = granularity
    if granularity == "full":
        settings |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    return settings


# -- transformer_overrides --------------------------------------------------------------------------------------------


def _parse_overrides(overrides: dict[str, str], fixed: dict[str, Any]) -> dict[str, Any]:
    """The overrides with values of their fields' types; ``fixed`` names what the model or the parallel section decides."""
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    hints = typing.get_type_hints(TransformerConfig)
    parsed = {}
    for name, text in overrides.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; perhaps you meant {near[0]}" if near else ""
            raise ValueError(f"transformer_overrides: megatron-core's TransformerConfig has no field {name!r}{hint}")
        if name in fixed or name in NOT_OVERRIDABLE:
            raise ValueError(f"transformer_overrides: {name} follows from the model or from another field, and cannot be overridden")
        parsed[name] = _parse(name, text, hints[name])
    return parsed


def _parse(name: str, text: str, hint: Any) -> Any:
    """``text`` as the first type of ``hint`` that it can be read as."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    for option in options:
        try:
            return _parse_as(str(text), option)
        except (ValueError, KeyError):
            continue
    raise ValueError(f"transformer_overrides: {name} = {text!r} cannot be read as {hint}")


def _parse_as(text: str, kind: Any) -> Any:
    """``ValueError`` or ``KeyError`` where ``text`` is not a ``kind``, or ``kind`` has no text form (functions)."""
    if kind is type(None):
        return {"none": None, "null": None}[text.lower()]
    if kind is bool:
        return {"true": True, "false": False}[text.lower()]
    if typing.get_origin(kind) is Literal:
        return {str(value): value for value in typing.get_args(kind)}[text]
    if typing.get_origin(kind) is list:
        (item,) = typing.get_args(kind)
        return [_parse_as(part.strip(), item) for part in text.strip("[]").split(",")]
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind[text]
    if kind in (int, float, str):
        return kind(text)
    raise ValueError(f"{kind} has no text form")
