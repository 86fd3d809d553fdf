"""Generation with the Hugging Face model itself: an inference backend for machines without vLLM, and an oracle for vLLM.

Steps 1 and 2 of an iteration, like ``vllm.py``, with the same meaning of every sampling field, the same log-probabilities and the same
checks; seeded draws differ, because vLLM draws by another method. Parameters are whole, under their Hugging Face names (a layer's experts
stacked, as ``hf_layout`` says): a replica is one rank. How requests are batched is ``roles/hf_generate.py``'s matter. Left out: tensor
parallelism, and all of ``vllm_overrides`` but ``max_num_seqs``, the most requests that are sampled at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from megatron_ppo import device
from megatron_ppo.backends.base import EngineMemory, InferenceBackend, rollout_head
from megatron_ppo.backends.hf_evaluation import HFEvaluation
from megatron_ppo.backends.inference_checks import check_complete, check_layout, check_requests, forget_weights
from megatron_ppo.config import Config
from megatron_ppo.families import SCORE_HEAD
from megatron_ppo.generic_network import describe_network
from megatron_ppo.resharding.layout import box_shape, view
from megatron_ppo.resharding.vllm_layout import hf_layout
from megatron_ppo.roles.actor_critic import ActorCritic
from megatron_ppo.roles.hf_generate import MAX_NUM_SEQS, check_generates
from megatron_ppo.types import Completion, Sampling, TrajectoryBatch


class HFBackend(InferenceBackend):
    """A replica of one rank. ``seed`` is taken for the interface's sake: every request carries its own.

    With ``load_weights=False`` every parameter is NaN until a sync has written it, and ``generate`` refuses to sample before
    ``after_weight_update`` has seen that none was left out.
    """

    def __init__(self, config: Config, *, seed: int, load_weights: bool = False) -> None:
        size = config.parallel.rollout_tensor_parallel_size
        if size != 1:
            raise ValueError(
                f"rollout_backend = hf holds the whole model on one rank, but rollout_tensor_parallel_size is {size}: "
                "set it to 1, or use rollout_backend = vllm"
            )
        del seed
        if config.rollout_expert_parallel:
            raise ValueError(
                "enable_expert_parallel shares experts among ranks, but a replica of rollout_backend = hf is one rank; leave it out"
            )
        self._max_model_len = config.max_model_len
        self._max_num_seqs = _max_num_seqs(config)
        self._has_weights = load_weights
        dtype = getattr(torch, config.rollout.rollout_dtype)
        trusted = config.model.trust_remote_code
        head = rollout_head(config)
        critic: Literal["shared", "none"] = "shared" if head == "lm+value" else "none"
        self._actor: ActorCritic | None = ActorCritic.from_folder(
            config.model.model_path, dtype=dtype, critic=critic, trust_remote_code=trusted
        )
        self._actor.to(device.device()).requires_grad_(False).eval()
        self._evaluation = HFEvaluation(config) if config.rollout.compute_on == "rollout" else None
        check_generates(self._actor.model)
        self._layout = hf_layout(describe_network(config.model.model_path), head)
        check_layout(self.weights(), self._layout, dtype)
        if not load_weights:
            forget_weights(self.weights(), self._layout)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        """As ``VLLMBackend.generate``: same meanings, same errors."""
        if not self._has_weights:
            raise RuntimeError("the engine has no weights yet: sync them, or build it with load_weights=True")
        check_requests(prompts, sampling, seeds, self._max_model_len)
        return self._live_actor.generate(prompts, sampling, seeds, max_num_seqs=self._max_num_seqs)

    def evaluate(self, batch: TrajectoryBatch) -> TrajectoryBatch:
        """As the interface says. ``RuntimeError`` where the configuration leaves it to the training mesh."""
        if self._evaluation is None:
            return super().evaluate(batch)
        return self._evaluation.evaluate(self._live_actor, batch)

    def weights(self) -> dict[str, Tensor]:
        """Live parameters by transformers' name, experts stacked; a tied head appears once, as the embedding; a value head is ``score``.

        The frozen networks of ``compute_on = rollout`` are not among them: nothing is ever sent to them.
        """
        actor = self._live_actor
        named = {name: parameter.data for name, parameter in actor.model.named_parameters()}
        return named if actor.score is None else named | {SCORE_HEAD: actor.score.weight.data}

    def shard_bytes(self) -> int:
        """Bytes of the whole model; there is no padding here."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.weights().values())

    def load_hf_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy all tensors of a Hugging Face checkpoint by name; a tied head that is listed too is left out.

        Experts come one by one, as checkpoints hold them, and are stacked here. ``ValueError`` for an unknown name or another shape,
        ``RuntimeError`` with names where a tensor was missing.
        """
        own = self.weights()
        forget_weights(own, self._layout)
        aliases = {name for name, _ in self._live_actor.model.named_parameters(remove_duplicate=False)} - own.keys()
        places = {block.name: block for block in self._layout.blocks}
        for name, tensor in weights:
            place = places.get(name)
            if place is None:
                if name in aliases:
                    continue
                raise ValueError(f"the model has no weight called {name!r}")
            if tuple(tensor.shape) != box_shape(place.canonical):
                wanted = list(box_shape(place.canonical))
                raise ValueError(f"{name} has shape {wanted} in the model, but {list(tensor.shape)} was given")
            view(own[place.parameter], place.local).copy_(tensor)
        check_complete(own)

    def after_weight_update(self) -> None:
        """There is no cache between calls. The first call proves that no parameter was left without weights (``RuntimeError``)."""
        if not self._has_weights:
            check_complete(self.weights())
            self._has_weights = True

    def sleep(self) -> None:
        """No cache outlives a call, and the weights stay where they are: they are whole, and small where this backend is used."""

    def wake_up(self, what: EngineMemory) -> None:
        """Nothing was given up."""

    def close(self) -> None:
        """Free the models."""
        self._actor = self._evaluation = None

    @property
    def _live_actor(self) -> ActorCritic:
        if self._actor is None:
            raise RuntimeError("the backend is closed")
        return self._actor


def _max_num_seqs(config: Config) -> int:
    text = config.rollout.vllm_overrides.get("max_num_seqs", str(MAX_NUM_SEQS))
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"vllm_overrides: max_num_seqs = {text!r} must be a whole number of at least 1")
    return int(text)
