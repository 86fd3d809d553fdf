"""What a rollout rank computes of its own rows after sampling: values, reference log-probs, reward-model scores (``compute_on = rollout``).

Step 2 of an iteration, in place of a part of step 3. Values come from the actor that sampled, whose value head arrived with the last sync;
reference and reward model are this rank's own frozen copies, whole, in ``params_dtype`` as on the training mesh, read from their folders at
every start. Numbers are those of the training mesh up to rounding. Left out: log-probs that are trained on, which the trainer computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megatron_ppo import device
from megatron_ppo.config import Config
from megatron_ppo.packing import make_micro_batch, plan_micro_batches, scatter_back, scatter_scores
from megatron_ppo.roles.actor_critic import ActorCritic
from megatron_ppo.roles.reference import ReferenceRole
from megatron_ppo.roles.reward import RewardRole
from megatron_ppo.types import MicroBatch, TrajectoryBatch


class HFEvaluation:
    """The frozen networks that ``config`` asks for, and passes over a batch."""

    def __init__(self, config: Config) -> None:
        """``ValueError`` for a folder that holds no such network."""
        model, training = config.model, config.training
        options = {"dtype": getattr(torch, model.params_dtype), "trust_remote_code": model.trust_remote_code}
        self._reference: ReferenceRole | None = None
        self._reward: RewardRole | None = None
        if config.uses_reference:
            self._reference = ReferenceRole(ActorCritic.from_folder(model.model_path, **options)).to(device.device())
        if model.reward_model_path is not None:
            self._reward = RewardRole.from_folder(model.reward_model_path, **options).to(device.device())
        self._temperature = config.rollout.temperature
        self._limits = (training.micro_batch_size, training.max_tokens_per_micro_batch)

    @torch.no_grad()
    def evaluate(self, actor: ActorCritic, batch: TrajectoryBatch) -> TrajectoryBatch:
        """``batch`` with what these networks, and a value head of ``actor``, make of it; None where there is no such network."""
        rows = torch.arange(batch.num_rows)
        (plan,) = plan_micro_batches(batch.lengths, [rows], *self._limits)
        passes = [make_micro_batch(batch, own, device=device.device()) for own in plan]

        def per_token(compute: Callable[[MicroBatch], Tensor]) -> Tensor:
            return scatter_back([compute(one) for one in passes], passes, batch.num_rows, batch.tokens.shape[1])

        values = ref_log_probs = model_scores = None
        if actor.score is not None:
            values = per_token(actor.compute_values)
        if self._reference is not None:
            ref_log_probs = per_token(self._reference_log_probs)
        if self._reward is not None:
            model_scores = scatter_scores([self._reward.compute_scores(one) for one in passes], passes, batch.num_rows)
        return replace(batch, values=values, ref_log_probs=ref_log_probs, model_scores=model_scores)

    def _reference_log_probs(self, batch: MicroBatch) -> Tensor:
        assert self._reference is not None
        output = self._reference.forward(batch, temperature=self._temperature)
        assert not isinstance(output, Tensor) and output.log_probs is not None
        return output.log_probs
