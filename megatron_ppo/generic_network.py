"""Describes a causal LM that no table knows, from transformers' own model, built without memory ("meta").

``describe_network`` is what everything calls that can do with such a model: configuration checks, FSDP, loading, export, rollouts. It asks
the tables of ``families.py`` first, and gives a ``GenericNetwork`` where they have nothing. Checkpoints may name and cut tensors otherwise
than transformers' model does (experts are stored one by one, and stacked in memory): transformers' own conversion is tried out on a few
numbers to see where each stored tensor lies in its parameter.

Refused, in words: models that are not causal or hold weights in buffers, that are quantised, whose class stands in their own folder, and
those whose stored tensors transformers computes with, where it only has to place them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_ppo.canonical import GenericNetwork, StoredTensor
from megatron_ppo.families import Network, OutsideTablesError, as_mapping, network_shape

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
_HARMLESS = frozenset(
    "architectures auto_map dtype torch_dtype transformers_version _name_or_path use_cache id2label label2id num_labels problem_type "
    "bos_token_id eos_token_id pad_token_id sep_token_id output_attentions output_hidden_states return_dict chunk_size_feed_forward "
    "max_position_embeddings n_positions tie_word_embeddings".split()
)
"""Keys of a config that may differ between two folders of one network."""
_PROBE = 2
"""Rows of each stored tensor in the trial of transformers' conversion: with one, dims would vanish in it."""


def describe_network(source: PretrainedConfig | Mapping[str, object] | Path | str) -> Network:
    """What the tables say of a config (an object, a parsed config.json, a folder), or transformers' own model where they say nothing.

    ``ValueError`` where neither can be, with both reasons.
    """
    config = as_mapping(source)
    try:
        return network_shape(config)
    except OutsideTablesError as outside:
        return _describe(json.dumps(config, sort_keys=True, default=str), str(outside))


def empty_causal_lm(config: Mapping[str, object]) -> PreTrainedModel:
    """transformers' model of a config, on the device "meta". ``ValueError`` where transformers has none that this project can use."""
    from transformers import AutoModelForCausalLM

    settings = _settings(config)
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # transformers' remarks on a model that is never run
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(settings)
    except Exception as error:  # a config that its own class cannot work with may raise anything
        raise ValueError(f"transformers cannot build the {config.get('model_type')} model of this config.json: {error}") from error
    finally:
        logging.disable(level)


def _settings(config: Mapping[str, object]) -> PretrainedConfig:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

    kind = str(config.get("model_type"))
    if kind not in CONFIG_MAPPING or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"model_type {kind!r} is no causal language model that transformers knows")
    if config.get("quantization_config"):
        raise ValueError(f"this {kind} checkpoint is quantised; save it dequantised and without quantization_config first")
    settings = CONFIG_MAPPING[kind].from_dict(dict(config))
    if settings.is_encoder_decoder:
        raise ValueError(f"model_type {kind!r} is an encoder and a decoder; only decoders alone are supported")
    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(settings, "is_decoder", False):
        raise ValueError(f"model_type {kind!r} looks at both sides of a token (is_decoder is false): it is no policy that could sample")
    return settings


@lru_cache(maxsize=8)
def _describe(text: str, reason: str) -> GenericNetwork:
    config = json.loads(text)
    try:
        model = empty_causal_lm(config)
        _refuse_buffers(model)
        return _network(model, config, reason)
    except ValueError as error:
        raise ValueError(f"{reason}; and as a model of transformers: {error}") from error


def _network(model: PreTrainedModel, config: Mapping[str, object], reason: str) -> GenericNetwork:
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    settings, kind = model.config.get_text_config(), str(config["model_type"])
    output = model.get_output_embeddings()
    if output is None or model.base_model is model:
        raise ValueError(f"{type(model).__name__} has no trunk and output head that could be told apart")
    parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    stored = tuple(_stored_tensors(model, parameters))
    names = {one.parameter: one.name for one in stored}
    both = [(name, first[id(parameter)]) for name, parameter in model.named_parameters(remove_duplicate=False)]
    heads, hidden = getattr(settings, "num_attention_heads", None), getattr(settings, "hidden_size", None)
    head_dim = getattr(settings, "head_dim", None) or (hidden // heads if heads and hidden else None)
    return GenericNetwork(
        family=kind,
        num_layers=int(getattr(settings, "num_hidden_layers", 0)),
        hidden_size=int(output.weight.shape[1]),
        vocab_size=int(output.weight.shape[0]),
        max_position_embeddings=next((int(value) for key in _LENGTHS if (value := getattr(settings, key, None))), None),
        head_dim=head_dim,
        trunk=model.base_model_prefix,
        tied=output.weight is model.get_input_embeddings().weight,
        parameters=tuple(parameters.items()),
        stored=stored,
        aliases=tuple((name, names[one]) for name, one in both if name != one),
        ignored=tuple(sorted(model._keys_to_ignore_on_load_unexpected or ())),
        classifier=MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(kind),
        settings=json.dumps({key: value for key, value in config.items() if key not in _HARMLESS}, sort_keys=True),
        reason=reason,
    )


def _refuse_buffers(model: PreTrainedModel) -> None:
    """What is in a checkpoint is a parameter: buffers are neither sharded nor trained nor sent."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    kept = [name for name in model.state_dict() if name not in parameters]
    if kept:
        raise ValueError(f"{type(model).__name__} holds weights in {len(kept)} buffers ({', '.join(kept[:3])}), which are not supported")


def _stored_tensors(model: PreTrainedModel, parameters: Mapping[str, tuple[int, ...]]) -> Iterator[StoredTensor]:
    """Where each tensor of a checkpoint lies in the model's parameters."""
    for name, shape in parameters.items():
        found = _revert(model, name, torch.empty(shape, device="meta"))
        if len(found) == 1 and tuple(next(iter(found.values())).shape) == shape:
            yield StoredTensor(next(iter(found)), shape, name, (0,) * len(shape))
        else:
            yield from _pieces(model, name, shape, {key: tuple(tensor.shape) for key, tensor in found.items()})


def _pieces(
    model: PreTrainedModel, name: str, shape: tuple[int, ...], found: Mapping[str, tuple[int, ...]]
) -> Iterator[StoredTensor]:
    """The stored tensors of one parameter: a small one of the same structure is cut by transformers, and its numbers tell their places."""
    wanted = next(iter(found.values()))
    lead = len(shape) - len(wanted)
    fault = f"transformers makes {name} {shape} of {', '.join(list(found)[:3])} by more than placing them: not supported"
    counts = [size // part for size, part in zip(shape[lead:], wanted, strict=True)] if lead >= 0 else []
    if lead < 0 or any(other != wanted for other in found.values()) or wanted != tuple(
        size // count for size, count in zip(shape[lead:], counts, strict=True)
    ):
        raise ValueError(fault)
    small = (*shape[:lead], *(count * _PROBE for count in counts))
    numbers = torch.arange(torch.Size(small).numel()).reshape(small)
    for key, tensor in _revert(model, name, numbers).items():
        corner = [int(index) for index in torch.unravel_index(tensor.min(), small)]
        box = tuple(slice(start, start + (1 if dim < lead else _PROBE)) for dim, start in enumerate(corner))
        if key not in found or not torch.equal(numbers[box].reshape(tensor.shape), tensor):
            raise ValueError(fault)
        start = [at if dim < lead else at // _PROBE * wanted[dim - lead] for dim, at in enumerate(corner)]
        yield StoredTensor(key, wanted, name, tuple(start))


def _revert(model: PreTrainedModel, name: str, tensor: Tensor) -> dict[str, Any]:
    """What of a checkpoint ``tensor``, the parameter ``name``, is made of."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, {name: tensor}))
