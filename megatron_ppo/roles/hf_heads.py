"""What stands on the trunk of any Hugging Face causal LM: its width, and the model's own way from hidden states to logits.

Left out: heads of our own (``actor_critic.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


def hidden_size(model: PreTrainedModel) -> int:
    """Width of what the heads read. It need not be that of the embedding."""
    return int(model.get_output_embeddings().weight.shape[1])


def hidden_and_logits(model: PreTrainedModel, *, pick: Callable[[Tensor], Tensor] | None = None, **inputs: Any) -> tuple[Tensor, Tensor]:
    """What the model's output head reads, [b, T, H], and the model's logits [b, T, V], in one pass of the model's own forward.

    So that all that a family does behind its head (caps, scales) is in the logits. ``pick`` takes what is wanted of the hidden states
    before the head multiplies them with the whole vocabulary: [b, T, H] -> [n, t, H]. ``inputs`` are the model's.
    """
    found: list[Tensor] = []

    def before(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        found.append(given[0] if pick is None else pick(given[0]))
        return (found[0], *given[1:])

    hook = model.get_output_embeddings().register_forward_pre_hook(before)
    try:
        logits = model(**inputs).logits
    finally:
        hook.remove()
    if len(found) != 1 or logits.shape[:-1] != found[0].shape[:-1]:
        raise RuntimeError(f"{type(model).__name__} does not make its logits by one call of its output head: not supported")
    return found[0], logits
