"""The reward model: a frozen Hugging Face sequence classifier with one label (step 3 of an iteration).

Its tokens are the policy's own ids, so both must have the same vocabulary. Left out: function rewards (``rewards.py``).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatron_ppo.roles.actor_critic import apply_value_head, load_causal_lm, read_weight, value_head
from megatron_ppo.roles.base import RewardModelRole
from megatron_ppo.types import MicroBatch

_SCORE_WEIGHT = "score.weight"


class RewardRole(nn.Module, RewardModelRole):
    """A trunk under a score head [1, H], frozen: eval mode for good, no gradients."""

    def __init__(self, model: PreTrainedModel, score_weight: Tensor) -> None:
        """``model`` is a causal LM with the scorer's trunk; its output head is left unused."""
        super().__init__()
        self.trunk = model.base_model
        self.score = value_head(model, score_weight)
        self.requires_grad_(False)
        self.eval()

    @classmethod
    def from_folder(cls, folder: Path | str, *, dtype: torch.dtype, trust_remote_code: bool = False) -> RewardRole:
        """From a folder in Hugging Face format.

        ``ValueError`` where the checkpoint has no ``score.weight``: a head made up on the spot would give random rewards (B25).
        """
        weight = read_weight(folder, _SCORE_WEIGHT)
        if weight is None:
            raise ValueError(
                f"no safetensors file in {str(folder)!r} has {_SCORE_WEIGHT}: "
                "the checkpoint is not a reward model with a scalar head (a policy, perhaps)"
            )
        return cls(load_causal_lm(folder, dtype=dtype, trust_remote_code=trust_remote_code), weight)

    def train(self, mode: bool = True) -> RewardRole:
        """Stays in eval mode whatever ``mode`` is."""
        return super().train(False)

    def forward(self, batch: MicroBatch) -> Tensor:
        """``compute_scores``."""
        return self.compute_scores(batch)

    @torch.no_grad()
    def compute_scores(self, batch: MicroBatch) -> Tensor:
        """Scores [b] fp32, read at the last real token by ``batch.lengths``; no padding id is looked for (B78)."""
        hidden = self.trunk(input_ids=batch.tokens, use_cache=False).last_hidden_state
        last = hidden[torch.arange(hidden.shape[0], device=hidden.device), batch.lengths - 1]
        return apply_value_head(self.score, last)
