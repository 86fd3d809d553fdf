"""What optimizer steps are alike in whatever backend takes them: the learning rate, counted in finished steps, and what a step reports."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_ppo.config import OptimizerConfig


def learning_rate(num_steps: int, peak: float, optimizer: OptimizerConfig, num_optimizer_steps: int) -> float:
    """Learning rate of the step that follows ``num_steps`` finished optimizer steps.

    Linear warm-up without a step at 0: step number ``lr_warmup_steps`` and the one after it run at ``peak``. Then linear or cosine decay
    (arXiv:1608.03983 without restarts), which reaches ``min_lr`` when ``num_optimizer_steps`` are finished and stays there.
    """
    warmup = optimizer.lr_warmup_steps
    if num_steps < warmup:
        return peak * (num_steps + 1) / warmup
    if optimizer.lr_decay_style == "constant":
        return peak
    done = min(1.0, (num_steps - warmup) / max(1, num_optimizer_steps - warmup))
    share = 1.0 - done if optimizer.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return optimizer.min_lr + (peak - optimizer.min_lr) * share


@dataclass(frozen=True)
class StepOutcome:
    """What one call of an optimizer's ``step`` did, equal on all ranks."""

    grad_norm: float
    """Global norm before clipping."""
    lr: float
    """Learning rate of this step."""
    skipped: bool
    """True where no rank changed a weight."""
