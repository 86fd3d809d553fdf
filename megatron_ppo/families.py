"""Which tensors a Hugging Face checkpoint of each model family holds: names, shapes, and what the network looks like.

Everything that moves weights (megatron and vLLM layouts, loading, export, planning) starts from ``NetworkShape`` and the list of
canonical tensors built here from ``config.json`` alone. A family is one entry of ``FAMILIES``, or one that a user adds (``register``, or
an entry point of the group ``megatron_ppo.families``). Quantised checkpoints and variants with other tensors are refused by name. What no
table knows is a ``GenericNetwork``, which ``generic_network.py`` reads off transformers' own model. No tensor is read here:
``hf_checkpoint.py`` does that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from megatron_ppo.canonical import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    SCORE_HEAD,
    WRAPPER_SEGMENTS,
    CanonicalTensor,
    GenericNetwork,
    Head,
    canonical_name,
    canonical_names,
    check_tensors,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = [
    "EMBEDDING",
    "ENTRY_POINTS",
    "EXPERT_KEYS",
    "FAMILIES",
    "FINAL_NORM",
    "LM_HEAD",
    "SCORE_HEAD",
    "WRAPPER_SEGMENTS",
    "CanonicalTensor",
    "ExpertSpec",
    "FamilySpec",
    "GenericNetwork",
    "Head",
    "Network",
    "NetworkShape",
    "OutsideTablesError",
    "as_mapping",
    "canonical_name",
    "canonical_names",
    "canonical_tensors",
    "check_tensors",
    "family_spec",
    "is_built_in",
    "layer_tensors",
    "mixture_faults",
    "network_shape",
    "read_json",
    "register",
]  # fmt: skip

@dataclass(frozen=True)
class ExpertSpec:
    """How a family whose layers all hold a mixture of experts names and sizes it."""

    block: str
    """Name of the block within a layer."""
    gate: str
    up: str
    down: str
    """Names of an expert's three matrices; gate is the one that goes through the activation."""
    width_key: str
    """Config key of an expert's width."""
    needs_expert_per_rank: bool
    """vLLM refuses more ranks than experts, even where every rank holds a slice of each."""
    always_renormalised: bool
    """Weights of the chosen experts are made to sum to 1, whatever the config says; otherwise ``norm_topk_prob`` decides."""


@dataclass(frozen=True)
class FamilySpec:
    """How one ``model_type`` differs from the common decoder layer."""

    classifier: str
    """transformers' class that holds a ``score`` head."""
    experts: ExpertSpec | None = None
    """None: a dense family."""
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    default_head_dim: int | None = None
    """Head size that transformers assumes where config.json has no ``head_dim`` key. None: hidden_size / num_attention_heads."""
    sliding_window_switch: str | None = None
    """Config key that must be true for ``sliding_window`` to have effect."""
    default_sliding_window: int | None = None
    """Window that transformers assumes where config.json has no ``sliding_window`` key."""
    default_rms_norm_eps: float = 1e-6
    default_rope_theta: float = 10000.0
    """What transformers assumes where config.json does not say."""


FAMILIES: dict[str, FamilySpec] = {
    "llama": FamilySpec("LlamaForSequenceClassification"),
    "mistral": FamilySpec("MistralForSequenceClassification", default_sliding_window=4096),
    "qwen2": FamilySpec("Qwen2ForSequenceClassification", has_qkv_bias=True, sliding_window_switch="use_sliding_window"),
    "qwen3": FamilySpec(
        "Qwen3ForSequenceClassification", has_qk_norm=True, default_head_dim=128, sliding_window_switch="use_sliding_window"
    ),
    "mixtral": FamilySpec(
        "MixtralForSequenceClassification",
        experts=ExpertSpec(
            "block_sparse_moe", "w1", "w3", "w2", width_key="intermediate_size", needs_expert_per_rank=False, always_renormalised=True
        ),
        default_rms_norm_eps=1e-5,
        default_rope_theta=1e6,
    ),
    "qwen3_moe": FamilySpec(
        "Qwen3MoeForSequenceClassification",
        experts=ExpertSpec(
            "mlp",
            "gate_proj",
            "up_proj",
            "down_proj",
            width_key="moe_intermediate_size",
            needs_expert_per_rank=True,
            always_renormalised=False,
        ),
        has_qk_norm=True,
        sliding_window_switch="use_sliding_window",
    ),
}

ENTRY_POINTS = "megatron_ppo.families"
"""Entry points of this group add families to every process that can import their package: the name is the ``model_type``."""

_ADDED: dict[str, FamilySpec] = {}


def register(model_type: str, spec: FamilySpec) -> None:
    """Add a family to this process, whose weights then go to vLLM shard by shard. An entry point does so in all processes of a launch.

    Its tensors must be those of ``canonical_tensors``; what its layers compute may differ, so that megatron-core does not train it.
    ``ValueError`` for a built-in family.
    """
    if model_type in FAMILIES:
        raise ValueError(f"family {model_type} is built in and cannot be registered")
    _ADDED[model_type] = spec


def family_spec(model_type: str) -> FamilySpec | None:
    """The table's entry; None for a family that is neither built in nor added. ``ValueError`` for an entry point that gives none."""
    if model_type not in FAMILIES and model_type not in _ADDED:
        for point in entry_points(group=ENTRY_POINTS, name=model_type):
            spec = point.load()
            if not isinstance(spec, FamilySpec):
                raise ValueError(f"entry point {model_type} = {point.value} ({ENTRY_POINTS}) is a {type(spec).__name__}, not a FamilySpec")
            register(model_type, spec)
    return FAMILIES.get(model_type) or _ADDED.get(model_type)


def is_built_in(model_type: str) -> bool:
    """Whether the computation of its layers is known too, and not only their tensors: megatron-core trains these alone."""
    return model_type in FAMILIES


ATTENTION_TENSORS: tuple[tuple[str, tuple[str, ...], str | None], ...] = (
    ("input_layernorm.weight", ("hidden_size",), None),
    ("self_attn.q_proj.weight", ("query_size", "hidden_size"), None),
    ("self_attn.k_proj.weight", ("kv_size", "hidden_size"), None),
    ("self_attn.v_proj.weight", ("kv_size", "hidden_size"), None),
    ("self_attn.q_proj.bias", ("query_size",), "has_qkv_bias"),
    ("self_attn.k_proj.bias", ("kv_size",), "has_qkv_bias"),
    ("self_attn.v_proj.bias", ("kv_size",), "has_qkv_bias"),
    ("self_attn.q_norm.weight", ("head_dim",), "has_qk_norm"),
    ("self_attn.k_norm.weight", ("head_dim",), "has_qk_norm"),
    ("self_attn.o_proj.weight", ("hidden_size", "query_size"), None),
    ("post_attention_layernorm.weight", ("hidden_size",), None),
)
"""(name within the layer, shape as attributes of ``NetworkShape``, attribute that must be true for the tensor to exist)."""


@dataclass(frozen=True)
class NetworkShape:
    """A decoder: all that layouts, loaders and planners need to know of ``config.json``."""

    family: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    """Width of the dense MLP, or of one expert."""
    vocab_size: int
    """Rows of the embedding in the checkpoint; may exceed the tokenizer's ids. The checkpoint's number is the right one."""
    tied: bool
    """The language-model head is the embedding; the checkpoint holds no ``lm_head.weight``."""
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    num_experts: int = 0
    """Experts of each layer; 0: a dense MLP."""
    num_experts_per_tok: int = 0
    """Experts that a token goes through."""
    norm_topk_prob: bool = False
    """The weights of a token's experts are made to sum to 1."""
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rope_scaling: tuple[tuple[str, float | int | str], ...] = ()
    """Sorted (key, value) pairs of the rope block without theta, ``rope_type`` among them unless it is the default; empty: plain RoPE."""
    sliding_window: int | None = None
    """Tokens that attention looks back, where the model limits it: sequences up to this long are not affected."""

    @property
    def query_size(self) -> int:
        """Rows of ``q_proj``: heads * head_dim, which need not be ``hidden_size``."""
        return self.num_attention_heads * self.head_dim

    @property
    def experts(self) -> ExpertSpec | None:
        """Names of the mixture of experts; None: dense."""
        return _known_spec(self.family).experts

    @property
    def classifier(self) -> str:
        """transformers' class of the trunk under a ``score`` head."""
        return _known_spec(self.family).classifier

    @property
    def kv_size(self) -> int:
        """Rows of ``k_proj`` and of ``v_proj``."""
        return self.num_key_value_heads * self.head_dim


Network = NetworkShape | GenericNetwork


class OutsideTablesError(ValueError):
    """A model that no table describes; transformers may know it."""


def network_shape(source: PretrainedConfig | Mapping[str, object] | Path | str) -> NetworkShape:
    """Read a Hugging Face config: an object of transformers, a parsed config.json, or a folder that holds one.

    ``ValueError`` for an unknown or unsupported architecture (``OutsideTablesError``), naming it, and for numbers that do not fit together.
    """
    config = as_mapping(source)
    family = _supported_family(config)
    spec = _known_spec(family)
    heads = _integer(config, "num_attention_heads")
    theta, scaling = _rope(config, spec)
    kv_heads = config.get("num_key_value_heads")
    if kv_heads is None and family != "llama":  # transformers' other defaults are one released model's numbers, no rule
        raise ValueError(f"config.json of family {family} lacks num_key_value_heads; write the model's number into it")
    network = NetworkShape(
        family=family,
        num_layers=_integer(config, "num_hidden_layers"),
        hidden_size=_integer(config, "hidden_size"),
        num_attention_heads=heads,
        num_key_value_heads=heads if kv_heads is None else _integer(config, "num_key_value_heads"),
        head_dim=_head_dim(config, spec),
        intermediate_size=_integer(config, "intermediate_size" if spec.experts is None else spec.experts.width_key),
        vocab_size=_integer(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        has_qkv_bias=spec.has_qkv_bias,
        has_qk_norm=spec.has_qk_norm,
        rms_norm_eps=float(str(config.get("rms_norm_eps", spec.default_rms_norm_eps))),
        max_position_embeddings=_integer(config, "max_position_embeddings"),
        rope_theta=theta,
        rope_scaling=scaling,
        sliding_window=_sliding_window(config, spec),
        **_experts(config, spec),
    )
    if network.num_attention_heads % network.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {network.num_key_value_heads}; check config.json"
        )
    return network


def mixture_faults(network: NetworkShape, tensor_model_parallel_size: int, sequence_parallel: bool) -> Iterator[str]:
    """What megatron-core 0.16.1 does not compute, or not rightly, for a mixture of experts, in words."""
    if network.num_experts_per_tok == 1 and network.norm_topk_prob:
        yield (
            f"a {network.family} model with num_experts_per_tok = 1 whose weights are made to sum to 1 weighs its expert by 1 whatever the "
            "router says: the router could not learn, and megatron-core does not compute it"
        )
    if network.experts is not None and tensor_model_parallel_size > 1 and not sequence_parallel:
        # Without it every tensor-parallel rank would send all tokens to the experts; megatron-core refuses that in training.
        yield (
            f"a mixture of experts ({network.family}) with tensor_model_parallel_size = {tensor_model_parallel_size} needs "
            "sequence_parallel: set it to true"
        )


def canonical_tensors(network: Network, head: Head = "lm") -> list[CanonicalTensor]:
    """All tensors of the checkpoint in the order of the forward pass. A tied network has no ``lm_head.weight`` under any head."""
    if isinstance(network, GenericNetwork):
        return network.tensors(head)
    tensors = [CanonicalTensor(EMBEDDING, (network.vocab_size, network.hidden_size))]
    of_a_layer = layer_tensors(network)
    for layer in range(network.num_layers):
        tensors += [CanonicalTensor(f"model.layers.{layer}.{name}", shape) for name, shape in of_a_layer]
    tensors.append(CanonicalTensor(FINAL_NORM, (network.hidden_size,)))
    if head in ("lm", "lm+value") and not network.tied:
        tensors.append(CanonicalTensor(LM_HEAD, (network.vocab_size, network.hidden_size)))
    if head != "lm":
        tensors.append(CanonicalTensor(SCORE_HEAD, (1, network.hidden_size)))
    return tensors


def layer_tensors(network: NetworkShape) -> list[tuple[str, tuple[int, ...]]]:
    """(name within the layer, shape) of one decoder layer; all layers are alike."""
    found: list[tuple[str, tuple[int, ...]]] = [
        (name, tuple(getattr(network, size) for size in shape))
        for name, shape, condition in ATTENTION_TENSORS
        if condition is None or getattr(network, condition)
    ]
    hidden, width, experts = network.hidden_size, network.intermediate_size, network.experts
    if experts is None:
        return [*found, *_swiglu("mlp.", "gate_proj", "up_proj", "down_proj", hidden, width)]
    found.append((f"{experts.block}.gate.weight", (network.num_experts, hidden)))
    for number in range(network.num_experts):
        found += _swiglu(f"{experts.block}.experts.{number}.", experts.gate, experts.up, experts.down, hidden, width)
    return found


def _swiglu(prefix: str, gate: str, up: str, down: str, hidden: int, width: int) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (f"{prefix}{gate}.weight", (width, hidden)),
        (f"{prefix}{up}.weight", (width, hidden)),
        (f"{prefix}{down}.weight", (hidden, width)),
    ]


def as_mapping(source: PretrainedConfig | Mapping[str, object] | Path | str) -> Mapping[str, object]:
    """The config as plain data."""
    if isinstance(source, (str, Path)):
        return read_json(Path(source) / "config.json")
    if isinstance(source, Mapping):
        return source
    return source.to_dict()


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from a file; ``ValueError`` naming the file where it is missing, malformed or no object."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist; a folder in Hugging Face format is needed")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a JSON {type(content).__name__}, not an object")
    return content


def _supported_family(config: Mapping[str, object]) -> str:
    family = str(config.get("model_type"))
    spec = family_spec(family)
    if spec is None:
        raise OutsideTablesError(f"model_type {family!r} is not supported; supported: {', '.join(sorted(FAMILIES))}")
    experts = [key for key in EXPERT_KEYS if config.get(key)]
    if experts and spec.experts is None:
        raise ValueError(f"model_type {family!r} is a dense family, but its config.json has {experts[0]} = {config[experts[0]]!r}")
    if config.get("quantization_config"):
        raise ValueError(f"this {family} checkpoint is quantised; save it dequantised and without quantization_config first")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise OutsideTablesError(f"{key} = true is not supported for family {family}: its biases are in no layout")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise OutsideTablesError(f"hidden_act {activation!r} is not supported for family {family}; only silu (SwiGLU) is")
    return family


def _known_spec(family: str) -> FamilySpec:
    spec = family_spec(family)
    assert spec is not None, f"a network of family {family} exists without a table"
    return spec


EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Config keys under which families, and versions of transformers, write the number of experts."""


class _Experts(TypedDict, total=False):
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool


def _experts(config: Mapping[str, object], spec: FamilySpec) -> _Experts:
    if spec.experts is None:
        return {}
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ValueError(
            f"mlp_only_layers = {config.get('mlp_only_layers')!r} and decoder_sparse_step = {config.get('decoder_sparse_step')!r}: "
            "models with experts in some layers only are not supported"
        )
    key = next((key for key in EXPERT_KEYS if config.get(key) is not None), None)
    if key is None:
        raise ValueError(f"config.json of a mixture of experts needs their number, under one of {', '.join(EXPERT_KEYS)}")
    count, chosen = _integer(config, key), _integer(config, "num_experts_per_tok")
    if chosen > count:
        raise ValueError(f"num_experts_per_tok {chosen} exceeds {key} {count}; check config.json")
    renormalised = spec.experts.always_renormalised or bool(config.get("norm_topk_prob", False))
    return {"num_experts": count, "num_experts_per_tok": chosen, "norm_topk_prob": renormalised}


def _integer(config: Mapping[str, object], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json needs a positive integer {key}, and has {value!r}")
    return value


def _head_dim(config: Mapping[str, object], spec: FamilySpec) -> int:
    if config.get("head_dim") is not None:
        return _integer(config, "head_dim")
    if "head_dim" not in config and spec.default_head_dim is not None:
        return spec.default_head_dim
    hidden, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
    if hidden % heads:
        raise ValueError(f"config.json has no head_dim, and hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    return hidden // heads


def _rope(config: Mapping[str, object], spec: FamilySpec) -> tuple[float, tuple[tuple[str, float | int | str], ...]]:
    """(theta, scaling), from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before)."""
    block = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(block, Mapping):
        raise ValueError(f"the rope block of config.json is {block!r}, not an object")
    entries = dict(block)
    theta = entries.pop("rope_theta", config.get("rope_theta", spec.default_rope_theta))
    old_type = entries.pop("type", None)
    rope_type = entries.setdefault("rope_type", old_type or "default")
    if rope_type == "default":
        entries = {key: value for key, value in entries.items() if key == "partial_rotary_factor" and value != 1.0}
    return float(str(theta)), tuple(sorted(entries.items()))


def _sliding_window(config: Mapping[str, object], spec: FamilySpec) -> int | None:
    switch = spec.sliding_window_switch
    if "sliding_window" not in config and switch is None:
        return spec.default_sliding_window
    if config.get("sliding_window") is None or (switch is not None and not config.get(switch, False)):
        return None
    return _integer(config, "sliding_window")
