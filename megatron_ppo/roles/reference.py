"""The reference policy: a frozen actor of any kind (step 3 of an iteration: log-probs for the KL penalty).

It never learns, and it shares no tensor with a network that does. Left out: the KL itself (``ppo.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from megatron_ppo.roles.base import ActorRole
from megatron_ppo.types import Completion, MicroBatch, RoleOutput, Sampling


class ReferenceRole(nn.Module, ActorRole):
    """Any ``ActorRole`` that is an ``nn.Module``, frozen: eval mode for good, no parameter asks for a gradient.

    The role given is taken over, not copied (a megatron-core model is built for it once); to freeze the present state of an
    actor that goes on learning, use ``copy_of``.
    """

    def __init__(self, role: ActorRole) -> None:
        super().__init__()
        if not isinstance(role, nn.Module):
            raise TypeError(f"only a network can be frozen, but {type(role).__name__} is not an nn.Module")
        self.role = role
        self.requires_grad_(False)
        self.eval()

    @classmethod
    def copy_of(cls, actor: ActorRole) -> ReferenceRole:
        """A frozen copy of an actor as it is now, in memory of its own; the actor itself stays as it is."""
        return cls(copy.deepcopy(actor))

    def train(self, mode: bool = True) -> ReferenceRole:
        """Stays in eval mode whatever ``mode`` is: a wrapper that switches all its modules cannot switch dropout on here."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, batch: MicroBatch, *, temperature: float = 1.0, with_entropy: bool = False) -> RoleOutput | Tensor:
        """As the wrapped role's, without gradients."""
        return self._actor.forward(batch, temperature=temperature, with_entropy=with_entropy)

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        """As the wrapped role's."""
        return self._actor.generate(prompts, sampling, seeds)

    @property
    def _actor(self) -> ActorRole:
        return cast(ActorRole, self.role)
