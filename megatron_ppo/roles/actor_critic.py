"""Actor and critic over a Hugging Face causal language model (steps 2, 3 and 5 of an iteration, wherever megatron-core is not used).

The same interfaces as ``MegatronActorCritic``. One process holds the whole network; distributing it is a backend's matter (FSDP). Left out:
losses, optimizers, and the choice which role runs when. Rows of a ``MicroBatch`` are right-padded, so causal attention needs no mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from megatron_ppo.families import LM_HEAD, canonical_tensors
from megatron_ppo.generic_network import describe_network
from megatron_ppo.roles import hf_generate
from megatron_ppo.roles.base import ActorRole, CriticRole
from megatron_ppo.roles.hf_heads import hidden_and_logits, hidden_size
from megatron_ppo.roles.logits import log_probs_and_entropy
from megatron_ppo.types import Completion, MicroBatch, RoleOutput, Sampling

_SCORE_WEIGHT = "score.weight"


class ActorCritic(nn.Module, ActorRole, CriticRole):
    """A policy, and with ``critic="shared"`` also a value head on its trunk.

    The head is ``score``, a bias-free Linear(hidden, 1), as in Hugging Face's sequence classifiers.
    """

    def __init__(self, model: PreTrainedModel, *, critic: Literal["shared", "none"] = "none", score_weight: Tensor | None = None) -> None:
        """``score_weight`` [1, H] starts the value head (default: zeros, so that all first values are 0)."""
        super().__init__()
        if score_weight is not None and critic == "none":
            raise ValueError('a score head was given, but critic="none" has no use for it: say critic="shared"')
        self.model = model
        self.score = value_head(model, score_weight) if critic == "shared" else None

    @classmethod
    def from_folder(
        cls,
        folder: Path | str,
        *,
        dtype: torch.dtype,
        critic: Literal["shared", "none"] = "none",
        trust_remote_code: bool = False,
    ) -> ActorCritic:
        """From a folder in Hugging Face format; a shared critic starts from ``score.weight`` where the checkpoint has one."""
        model = load_causal_lm(folder, dtype=dtype, trust_remote_code=trust_remote_code)
        weight = read_weight(folder, _SCORE_WEIGHT) if critic == "shared" else None
        return cls(model, critic=critic, score_weight=weight)

    def forward(self, batch: MicroBatch, *, temperature: float = 1.0, with_entropy: bool = False) -> RoleOutput:
        """Log-probs [b, T] fp32 of ``batch.labels`` under logits / ``temperature``; entropy if asked; values with a shared critic."""
        hidden, logits = hidden_and_logits(self.model, input_ids=batch.tokens, use_cache=False)
        log_probs, entropy = log_probs_and_entropy(
            logits, batch.labels, temperature=temperature, vocab_size=logits.shape[-1], with_entropy=with_entropy
        )
        return RoleOutput(log_probs=log_probs, entropy=entropy, values=None if self.score is None else apply_value_head(self.score, hidden))

    def compute_values(self, batch: MicroBatch) -> Tensor:
        """Values [b, T] fp32. ``RuntimeError`` without a critic."""
        if self.score is None:
            raise RuntimeError('this ActorCritic has no value head: build it with critic="shared", or use a Critic')
        return apply_value_head(self.score, _hidden_states(self.model, batch.tokens))

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int], *, max_num_seqs: int = hf_generate.MAX_NUM_SEQS
    ) -> list[Completion]:
        """One response to each prompt, as ``hf_generate.generate`` says: with a key-value cache, and each by its own seed."""
        was_training = self.training
        self.eval()
        try:
            return hf_generate.generate(self.model, prompts, sampling, seeds, max_num_seqs=max_num_seqs)
        finally:
            self.train(was_training)


class Critic(nn.Module, CriticRole):
    """A separate state-value function: a trunk of its own under a value head."""

    def __init__(self, model: PreTrainedModel, *, score_weight: Tensor | None = None) -> None:
        """``model`` is a causal LM whose output head is left unused; ``score_weight`` [1, H] starts the value head (default: zeros)."""
        super().__init__()
        self.trunk = model.base_model
        self.score = value_head(model, score_weight)

    @classmethod
    def from_folder(cls, folder: Path | str, *, dtype: torch.dtype, trust_remote_code: bool = False) -> Critic:
        """From a policy's or a reward model's folder; the head starts from ``score.weight`` where the checkpoint has one."""
        model = load_causal_lm(folder, dtype=dtype, trust_remote_code=trust_remote_code)
        return cls(model, score_weight=read_weight(folder, _SCORE_WEIGHT))

    def forward(self, batch: MicroBatch) -> RoleOutput:
        """Values alone."""
        return RoleOutput(values=self.compute_values(batch))

    def compute_values(self, batch: MicroBatch) -> Tensor:
        """Values [b, T] fp32."""
        return apply_value_head(self.score, self.trunk(input_ids=batch.tokens, use_cache=False).last_hidden_state)


def value_head(model: PreTrainedModel, score_weight: Tensor | None) -> nn.Linear:
    """Linear(hidden, 1) without bias, in the model's dtype and place; zeros, or the given [1, H]. ``ValueError`` for another shape."""
    embedding, size = model.get_input_embeddings().weight, hidden_size(model)
    head = nn.Linear(size, 1, bias=False, dtype=embedding.dtype, device=embedding.device)
    if score_weight is not None and score_weight.shape != head.weight.shape:
        raise ValueError(
            f"{_SCORE_WEIGHT} has shape {list(score_weight.shape)}, but a value head over {size} hidden units has "
            f"{list(head.weight.shape)}: the checkpoint is of another size, or has more than one label"
        )
    with torch.no_grad():
        head.weight.zero_() if score_weight is None else head.weight.copy_(score_weight)
    return head


def load_causal_lm(folder: Path | str, *, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """A causal LM from a local folder, in eval mode. ``ValueError`` where the folder is none, or lacks a weight of the trunk.

    A reward model's folder serves too: its output head is then untied and unused.
    """
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"{str(folder)!r} has no config.json: a folder in Hugging Face format is needed")
    try:
        with _quiet():
            model, report = AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=dtype, trust_remote_code=trust_remote_code, local_files_only=True, output_loading_info=True
            )
    except RuntimeError as error:  # transformers stacks experts, and cannot where one is missing or has another shape
        fault = _absent_weights(folder)
        if not fault:
            raise
        raise ValueError(f"{str(folder)!r} cannot be loaded: {fault}. Copy the checkpoint again, or check its config.json") from error
    missing = sorted(name for name in report["missing_keys"] if not name.startswith("lm_head."))
    if missing:
        raise ValueError(f"the checkpoint in {str(folder)!r} lacks {len(missing)} weight(s) of the model, among them {missing[:5]}")
    return model.eval()


def _absent_weights(folder: Path | str) -> str:
    """What config.json describes and no file holds, in words; empty where nothing is absent."""
    found = {LM_HEAD}
    for path in Path(folder).glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= set(file.keys())
    absent = [tensor.name for tensor in canonical_tensors(describe_network(folder)) if tensor.name not in found]
    return f"its files lack {len(absent)} weight(s) of the model, among them {absent[:5]}" if absent else ""


def read_weight(folder: Path | str, name: str) -> Tensor | None:
    """One tensor of the safetensors files in ``folder``, or None where no file has it."""
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118  not a dict
                return file.get_tensor(name)
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bar and its report of weights that are missing or left over: the caller looks at those itself."""
    level, with_bar = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if with_bar:
            transformers_logging.enable_progress_bar()


def _hidden_states(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """[b, T, H] after the last norm."""
    return model.base_model(input_ids=tokens, use_cache=False).last_hidden_state


def apply_value_head(head: nn.Linear, hidden: Tensor) -> Tensor:
    """[b, T], computed in fp32: bf16 has steps of 0.4 % at best."""
    return nn.functional.linear(hidden.float(), head.weight.float()).squeeze(-1)
