"""What a role answers: WHAT is computed, statelessly. How it is distributed is a backend's matter.

A role owns a network and knows nothing of optimizers, data parallelism, schedules, rewards or losses. ``ActorCritic`` (Hugging Face) and
``MegatronActorCritic`` (megatron-core) have these interfaces; nothing above ``roles/`` can tell them apart.
Under pipeline parallelism a stage that is not the last returns hidden states, which its backend's schedule passes on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_ppo.types import Completion, MicroBatch, RoleOutput, Sampling


class ActorRole(ABC):
    """A policy: log-probabilities of given responses, and responses."""

    @abstractmethod
    def forward(self, batch: MicroBatch, *, temperature: float = 1.0, with_entropy: bool = False) -> RoleOutput | Tensor:
        """Log-probs (and entropy) of ``batch.labels``, fp32, [b, T], of logits / ``temperature``.

        Under pipeline parallelism every stage but the last returns its hidden states instead.
        """

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        """One response to each prompt; ``seeds`` gives each its own generator. Same result on every rank of the model."""


class CriticRole(ABC):
    """A state-value function."""

    @abstractmethod
    def compute_values(self, batch: MicroBatch) -> Tensor:
        """Values [b, T] fp32 of the states before ``batch.labels`` are chosen (hidden states, on a stage that is not the last)."""


class RewardModelRole(ABC):
    """A frozen scorer with a scalar head."""

    @abstractmethod
    def compute_scores(self, batch: MicroBatch) -> Tensor:
        """Scores [b] fp32, read at the last real token of each row (``batch.lengths - 1``), wherever padding stands."""


def new_value_head(hidden_size: int, seed: int) -> Tensor:
    """[1, H] fp32 weight of a value head that no checkpoint holds: normal, of deviation 1 / (H + 1), the same on every rank and backend.

    So small, because hidden states have entries of size 1 and the first values should be near 0: the noise of a head of deviation
    1 / sqrt(H + 1) (arXiv:2009.01325, for reward models) would be all that the first advantages hold.
    """
    return torch.randn(1, hidden_size, generator=torch.Generator().manual_seed(seed)) / (hidden_size + 1)
