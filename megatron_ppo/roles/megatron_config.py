"""From the shape of a network and our configuration to megatron-core's TransformerConfig: what the network is, and how it is cut and
computed.

Families are those of ``families.py``, dense and mixtures of experts. Whatever a config asks for that would silently be computed
differently is refused by name: sliding windows shorter than the run's sequences, RoPE variants other than default, linear and llama3.
Dropout and router jitter are off in training too, whatever the Hugging Face config says: PPO's ratio must be exactly 1 before the first
step, so that scoring and updating have to be the same function. Import after ``device.prepare_megatron()``; this module calls it. Left
out: whether sizes divide (``resharding/megatron_layout.py``, asked before a network is built).
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
from megatron_ppo.families import NetworkShape, mixture_faults

device.prepare_megatron()

from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402  the stand-ins must be there first

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
        "moe_apply_probs_on_input",
        "moe_enable_routing_replay",
        "moe_expert_capacity_factor",
        "moe_grouped_gemm",
        "moe_input_jitter_eps",
        "moe_latent_size",
        "moe_layer_freq",
        "moe_pad_expert_input_to_capacity",
        "moe_router_enable_expert_bias",
        "moe_router_force_load_balancing",
        "moe_router_group_topk",
        "moe_router_num_groups",
        "moe_router_score_function",
        "moe_router_topk_limited_devices",
        "moe_router_topk_scaling_factor",
        "moe_shared_expert_gate",
        "moe_shared_expert_intermediate_size",
        "moe_token_dropping",
        "moe_use_legacy_grouped_gemm",
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
        "window_size",
    }
)
"""Fields that make another network, or another split of it, than the families and the resharding layouts know (beside those that are
set from the model and the parallel section)."""

LOAD_BALANCING = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss")
"""Values of ``moe_router_load_balancing_type`` that leave the routing as it is; "sinkhorn" routes differently in training."""


def transformer_config(network: NetworkShape, config: Config) -> TransformerConfig:
    """The TransformerConfig of every role of this run that has this network.

    ``ValueError`` for what would be computed differently, or not at all, and for overrides that do not exist.
    """
    check_architecture(network, config)
    fixed = _architecture(network) | _parallelism(config)
    chosen = _computation(network, config)
    chosen_elsewhere = ("transformer_impl", "overlap_grad_reduce")
    named = {name: text for name, text in config.model.transformer_overrides.items() if name not in chosen_elsewhere}
    overrides = _parse_overrides(named, fixed)
    _check_expert_overrides(overrides)
    return TransformerConfig(**(fixed | chosen | overrides))


def padded_vocab_size(vocab_size: int, divisible_by: int, tp: int) -> int:
    """Rows of the trainer's embedding and output matrices: the next multiple of ``divisible_by`` x ``tp`` (Megatron's rule)."""
    multiple = divisible_by * tp
    return math.ceil(vocab_size / multiple) * multiple


def transformer_impl(config: Config) -> Literal["local", "transformer_engine"]:
    """The layer spec that the configuration's ``transformer_impl`` comes to on this machine."""
    asked = config.transformer_impl
    if asked == "transformer_engine" and not device.has_transformer_engine():
        raise ValueError(
            "transformer_impl is transformer_engine, but Transformer Engine is not usable here "
            f"({'it does not import' if device.has_cuda() else 'there is no CUDA device'}): install it, or use auto or local"
        )
    if asked == "local" or not device.has_transformer_engine():
        return "local"
    return "transformer_engine"


def rope_inverse_frequencies(network: NetworkShape) -> Tensor:
    """[head_dim / 2] fp32: theta^(-2i / head_dim), scaled as the network's rope_type says.

    linear divides all by ``factor``. llama3 (Llama 3.1) keeps wavelengths below original_max / high_freq_factor, divides
    those above original_max / low_freq_factor, and blends between.
    """
    block, width = dict(network.rope_scaling), network.head_dim
    rope_type = block.get("rope_type", "default")
    frequencies = 1.0 / network.rope_theta ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width)
    if rope_type == "default":
        return frequencies
    if rope_type == "linear":
        return frequencies / float(block["factor"])
    if rope_type != "llama3":
        raise ValueError(f"rope_type {rope_type!r} is not supported: use a model with default, linear or llama3")
    low, high = float(block["low_freq_factor"]), float(block["high_freq_factor"])
    turns = float(block["original_max_position_embeddings"]) * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / float(block["factor"])


def check_architecture(network: NetworkShape, config: Config) -> None:
    """``ValueError`` for what would be computed differently from Hugging Face, or not at all."""
    if dict(network.rope_scaling).get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("a partial_rotary_factor other than 1 is not supported")
    if network.sliding_window is not None and network.sliding_window < config.max_model_len:
        raise ValueError(
            f"the model attends to {network.sliding_window} tokens at most (sliding_window), but prompt plus response may have "
            f"{config.max_model_len}: shorten max_prompt_length + max_response_length to {network.sliding_window} or less"
        )
    rope_inverse_frequencies(network)
    parallel = config.parallel
    for fault in mixture_faults(network, parallel.tensor_model_parallel_size, parallel.sequence_parallel):
        raise ValueError(fault)


def _architecture(network: NetworkShape) -> dict[str, Any]:
    found = {
        "num_layers": network.num_layers,
        "hidden_size": network.hidden_size,
        "ffn_hidden_size": network.intermediate_size,
        "num_attention_heads": network.num_attention_heads,
        "num_query_groups": network.num_key_value_heads,
        "kv_channels": network.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": network.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": network.has_qkv_bias,
        "qk_layernorm": network.has_qk_norm,
        # Off whatever the Hugging Face config says: see the module's docstring.
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if network.experts is not None:
        found |= {
            "num_moe_experts": network.num_experts,
            "moe_ffn_hidden_size": network.intermediate_size,
            "moe_router_topk": network.num_experts_per_tok,
            # Softmax over the chosen experts alone is softmax over all of them, made to sum to 1 over the chosen.
            "moe_router_pre_softmax": not network.norm_topk_prob,
        }
    return found


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
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        # Routers read it when they are built. The sum of a loss over tokens is divided by their global number at the end.
        "calculate_per_token_loss": True,
    }


def _computation(network: NetworkShape, config: Config) -> dict[str, Any]:
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
    if network.experts is not None:
        settings |= _expert_computation(settings["transformer_impl"])
    return settings


def _expert_computation(impl: str) -> dict[str, Any]:
    return {
        # No token is dropped, and ranks may hold different numbers of tokens.
        "moe_token_dispatcher_type": "alltoall",
        # Transformer Engine's experts of a layer are one module with one kernel; the others are computed one after the other.
        "moe_grouped_gemm": impl == "transformer_engine",
        "moe_router_dtype": "fp32",
        # PPO's loss alone. To keep experts busy evenly, override both; the auxiliary loss is then added for all positions, prompts and
        # padding among them, and weighs more the fewer of them are trained on.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


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


def _check_expert_overrides(overrides: dict[str, Any]) -> None:
    dispatcher = overrides.get("moe_token_dispatcher_type", "alltoall")
    if dispatcher == "allgather":
        raise ValueError(
            "transformer_overrides: moe_token_dispatcher_type = allgather wants the same number of tokens on every rank, but rows differ "
            "in length; take alltoall or flex"
        )
    balancing = overrides.get("moe_router_load_balancing_type", "none")
    if balancing not in LOAD_BALANCING:
        raise ValueError(
            f"transformer_overrides: moe_router_load_balancing_type = {balancing!r} would route differently in training than in scoring, "
            f"or is unknown; take one of {', '.join(LOAD_BALANCING)}"
        )


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
