"""Canonical tensors: the Hugging Face name and unsharded shape of each weight of a checkpoint, whoever describes them.

At the bottom of everything that moves weights. ``families.py`` describes models by tables, ``generic_network.py`` those that no table
knows, as a ``GenericNetwork``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Head = Literal["lm", "value", "lm+value", "score"]
"""What stands on the trunk. lm: a policy. value: a separate critic. lm+value: a policy with a value head. score: a reward model."""

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
SCORE_HEAD = "score.weight"
"""[1, hidden_size]: transformers' name for the head of a one-label sequence classifier; value heads use it too."""

WRAPPER_SEGMENTS = frozenset({"module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})
"""Name segments that DDP, FSDP1, torch.compile and activation checkpointing put into parameter names."""


@dataclass(frozen=True)
class CanonicalTensor:
    """Hugging Face name and unsharded shape of a weight."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A canonical tensor, and where transformers' model has it."""

    name: str
    """As checkpoints name it, which need not be transformers' name of the parameter."""
    shape: tuple[int, ...]
    parameter: str
    start: tuple[int, ...]
    """Index of its first element in the parameter, one number a dim of it; a parameter that stacks tensors has more dims than they."""


@dataclass(frozen=True)
class GenericNetwork:
    """A causal LM that no table knows, as transformers builds it: enough to load, train, save and export it, not to cut it for vLLM."""

    family: str
    num_layers: int
    hidden_size: int
    """Of what goes into the output head."""
    vocab_size: int
    max_position_embeddings: int | None
    """None: nothing in the config limits the length."""
    head_dim: int | None
    """None: the config does not say."""
    trunk: str
    """First part of the names of all parameters below the heads, ``model`` in most families."""
    tied: bool
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    """(transformers' name, shape) of each parameter of the causal LM; tied ones under their first name."""
    stored: tuple[StoredTensor, ...]
    """The same, as checkpoints hold them, in the order of the parameters."""
    aliases: tuple[tuple[str, str], ...]
    """(second name, first name) in checkpoints, of tied tensors."""
    ignored: tuple[str, ...]
    """Patterns of names that old checkpoints hold and the model has no use for."""
    classifier: str | None
    """transformers' class of the trunk under a ``score`` head; None: it has none."""
    settings: str
    """JSON of what in the config may change the computation."""
    reason: str
    """Why the tables do not know it."""

    @property
    def experts(self) -> None:
        """Not told apart from other weights."""
        return None

    @property
    def num_experts(self) -> int:
        """As ``experts``."""
        return 0

    def tensors(self, head: Head) -> list[CanonicalTensor]:
        """All tensors of the checkpoint."""
        kept = (one for one in self.stored if head in ("lm", "lm+value") or one.parameter.startswith(f"{self.trunk}."))
        score = [CanonicalTensor(SCORE_HEAD, (1, self.hidden_size))] if head != "lm" else []
        return [CanonicalTensor(one.name, one.shape) for one in kept] + score


def check_tensors(
    expected: Iterable[CanonicalTensor], found: Mapping[str, tuple[int, ...]], what: str, ignored: Iterable[str] = ()
) -> None:
    """``ValueError`` listing every tensor that is missing, that no expected tensor consumes, or whose shape differs.

    ``found``: canonical name -> shape; ``what`` says in the message where it was found; ``ignored``: names left out knowingly.
    Rotary ``inv_freq`` buffers of old checkpoints are left out: they follow from the config.
    """
    wanted = {tensor.name: tensor.shape for tensor in expected}
    skipped = set(ignored)
    have = {name for name in found if not name.endswith("rotary_emb.inv_freq") and name not in skipped}
    faults = [f"missing: {name} {shape}" for name, shape in wanted.items() if name not in found and name not in skipped]
    faults += [f"not consumed: {name} {tuple(found[name])}" for name in sorted(have - wanted.keys())]
    faults += [
        f"shape of {name}: {tuple(found[name])}, but the config says {shape}"
        for name, shape in wanted.items()
        if name in have and tuple(found[name]) != shape
    ]
    if faults:
        listed = "\n  - ".join(faults[:40] + ([f"... and {len(faults) - 40} more"] if len(faults) > 40 else []))
        raise ValueError(
            f"{what} does not hold the tensors that its config describes:\n  - {listed}\n"
            "Check that config.json belongs to these weights."
        )


def canonical_name(name: str) -> str:
    """The name without the segments that wrappers put into it."""
    return ".".join(segment for segment in name.split(".") if segment not in WRAPPER_SEGMENTS)


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Given name -> canonical name; ``ValueError`` where two given names would become one."""
    origin: dict[str, str] = {}
    result: dict[str, str] = {}
    for name in names:
        plain = canonical_name(name)
        if plain in origin:
            raise ValueError(f"{origin[plain]} and {name} are both {plain} without wrapper prefixes; one would overwrite the other")
        origin[plain] = name
        result[name] = plain
    return result
