"""What every inference backend must be sure of: sound requests, parameters that lie as the plan thinks, complete weights.

Used by ``vllm.py`` and ``hf.py`` at start, after each weight update and before sampling. Nothing here knows an engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_ppo.resharding.layout import RankLayout
from megatron_ppo.types import Sampling


def check_requests(prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int], max_model_len: int) -> None:
    """``ValueError`` for requests that an engine would cut short, answer emptily or seed from nowhere."""
    if len(prompts) != len(seeds):
        raise ValueError(f"{len(prompts)} prompts came with {len(seeds)} seeds: each prompt needs its own")
    if sampling.max_response_length < 1:
        raise ValueError(f"max_response_length must be at least 1, but is {sampling.max_response_length}")
    if not sampling.greedy and not sampling.temperature > 0:
        raise ValueError(f"temperature must be above 0, but is {sampling.temperature}; for greedy decoding say greedy=True")
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {index} has no tokens: there is nothing to predict the first token from")
        if len(prompt) + sampling.max_response_length > max_model_len:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; with max_response_length {sampling.max_response_length} that is more than "
                f"max_prompt_length + max_response_length = {max_model_len}: shorten the prompt or the response, or raise one of them"
            )
    if any(seed < 0 for seed in seeds):
        raise ValueError(f"seeds must be 0 or more, but the smallest is {min(seeds)}")


def check_layout(parameters: Mapping[str, Tensor], layout: RankLayout, dtype: torch.dtype) -> None:
    """The live parameters must be those that weights are planned for: same names, local shapes and dtype, dense in memory.

    ``RuntimeError`` that lists every other one: writing into it blindly would give silent garbage.
    """
    faults = [f"{name}: planned, but the engine has no such parameter" for name in layout.shapes if name not in parameters]
    for name, tensor in parameters.items():
        if name not in layout.shapes:
            faults.append(f"{name} {list(tensor.shape)}: no weight is planned for it")
        elif tuple(tensor.shape) != layout.shapes[name]:
            faults.append(f"{name}: shape {list(tensor.shape)}, planned {list(layout.shapes[name])}")
        elif tensor.dtype != dtype:
            faults.append(f"{name}: dtype {tensor.dtype}, planned {dtype} (a quantised or repacked weight?)")
        elif not tensor.is_contiguous():
            faults.append(f"{name}: strides {tensor.stride()} are not those of a dense tensor")
    if faults:
        raise RuntimeError(
            f"{len(faults)} parameter(s) of the inference engine do not lie as weights are planned to arrive (another version of it, or a "
            "layout that is not supported):\n  - " + "\n  - ".join(faults[:20])
        )


def check_dense(parameters: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """``check_layout`` where no layout is known: floating point of the engine's dtype or fp32, dense in memory. ``RuntimeError``."""
    faults = [
        f"{name}: {tensor.dtype} {list(tensor.shape)}, strides {tensor.stride()}"
        for name, tensor in parameters.items()
        if tensor.dtype not in (dtype, torch.float32) or tensor.numel() == 0
    ]
    if faults:
        raise RuntimeError(
            f"{len(faults)} parameter(s) of the inference engine are quantised, repacked or empty, and cannot take weights again:\n  - "
            + "\n  - ".join(faults[:20])
        )


def forget_weights(parameters: Mapping[str, Tensor], layout: RankLayout | None) -> None:
    """NaN into every element that weights are planned for, zero into the rest (vocabulary padding).

    So no weight that an update leaves out can pass for a value. Without a layout NaN is everywhere: the engine's own loader fills padding.
    """
    if layout is None:
        for tensor in parameters.values():
            tensor.fill_(float("nan"))
        return
    for tensor in parameters.values():
        tensor.zero_()
    for block in layout.blocks:
        index = tuple(slice(start, stop) for start, stop in block.local)
        parameters[block.parameter][index] = float("nan")


def check_complete(parameters: Mapping[str, Tensor]) -> None:
    """``RuntimeError`` with the names of parameters in which an element is still (or again) NaN."""
    left = [name for name, tensor in parameters.items() if bool(torch.isnan(tensor).any())]
    if left:
        raise RuntimeError(f"{len(left)} parameter(s) were not fully written by the weight update, or got NaN: {left[:8]}")
