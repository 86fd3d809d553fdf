"""Optimizer step of the FSDP backend: global norm, clipping, the decision to skip, and the learning rate, counted in optimizer steps.

Stands at the end of ``train_step``, after FSDP has summed the gradients over all ranks. It steps local shards: AdamW and SGD work element
by element, so that no rank needs another's part, and ranks of the axis ``replicate`` do the same work on the same numbers. Shards are fp32:
they are the master weights of bf16 training. Rules are those of ``megatron_optimizer.py``: norm before clipping, no weight decay on biases
and on parameters of one dim, a step skipped by all ranks or by none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_ppo import device
from megatron_ppo.backends.optimizer_step import StepOutcome, learning_rate
from megatron_ppo.config import Config

_CLIP_EPSILON = 1e-6
"""Added to the norm before the division, as megatron-core and torch do."""


class FSDPOptimizer:
    """torch's AdamW or SGD over one network's local shards, with the learning-rate schedule."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: Config, *, peak_lr: float, num_optimizer_steps: int, num_replicas: int
    ) -> None:
        """``parameters``: name -> sharded parameter, whose ``grad`` is a DTensor too. ``num_replicas``: ranks that hold each element."""
        settings = config.optimizer
        self.num_steps = 0
        """Finished optimizer steps; skipped ones do not count."""
        self._parameters = parameters
        self._shards = {name: local_shard(parameter) for name, parameter in parameters.items()}
        self._settings = settings
        self._peak_lr = peak_lr
        self._num_optimizer_steps = num_optimizer_steps
        self._num_replicas = num_replicas
        self._moments = ("exp_avg", "exp_avg_sq") if settings.optimizer == "adam" else ()
        decayed = [shard for name, shard in self._shards.items() if _is_decayed(name, shard)]
        others = [shard for name, shard in self._shards.items() if not _is_decayed(name, shard)]
        groups = [
            {"params": shards, "weight_decay": decay} for shards, decay in ((decayed, settings.weight_decay), (others, 0.0)) if shards
        ]
        if settings.optimizer == "adam":
            self._optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=peak_lr, betas=settings.adam_betas, eps=settings.adam_eps)
        else:
            self._optimizer = torch.optim.SGD(groups, lr=peak_lr)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return learning_rate(self.num_steps, self._peak_lr, self._settings, self._num_optimizer_steps)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for name, parameter in self._parameters.items():
            parameter.grad = self._shards[name].grad = None

    def step(self, num_tokens: int) -> StepOutcome:
        """One step from gradients that are summed over ranks; they are divided by ``num_tokens`` (global) here. Collective.

        Skips, on all ranks alike, where ``num_tokens`` is 0 or the global norm is not finite. Gradients are used up.
        """
        lr = self.lr
        gradients = self._take_gradients()
        grad_norm = self._global_norm(gradients) / max(1, num_tokens)
        if num_tokens == 0 or not math.isfinite(grad_norm):
            self.zero_grad()
            return StepOutcome(grad_norm=grad_norm, lr=lr, skipped=True)
        clip = self._settings.clip_grad
        share = min(1.0, clip / (grad_norm + _CLIP_EPSILON)) if clip > 0 else 1.0
        torch._foreach_mul_(gradients, share / num_tokens)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.num_steps += 1
        self.zero_grad()
        return StepOutcome(grad_norm=grad_norm, lr=lr, skipped=False)

    def move_state(self, where: torch.device) -> None:
        """Take the moments to a device. Shards are parameters and stay where they are."""
        for state in self._optimizer.state.values():
            for kind in state.keys() & set(self._moments):
                state[kind] = state[kind].to(where)

    # -- what a checkpoint keeps --------------------------------------------------------------------------------------

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """``exp_avg``, ``exp_avg_sq`` -> parameter name -> live shard. Those that the first step would make are made here, as zeros."""
        found: dict[str, dict[str, Tensor]] = {kind: {} for kind in self._moments}
        for name, shard in self._shards.items():
            state = self._optimizer.state[shard]
            for kind in self._moments:
                if kind not in state:
                    state[kind] = torch.zeros_like(shard)
                    state["step"] = torch.tensor(0.0)
                found[kind][name] = state[kind]
        return found

    def restore_num_steps(self, num_steps: int) -> None:
        """Go on as after ``num_steps`` finished steps: the learning rate's place, and Adam's bias correction of every parameter."""
        self.num_steps = num_steps
        if self._moments:
            self.moments()
            for shard in self._shards.values():
                self._optimizer.state[shard]["step"] = torch.tensor(float(num_steps))

    def _take_gradients(self) -> list[Tensor]:
        """Hand the shards the gradients of the parameters; what the loss did not depend on has 0."""
        for name, parameter in self._parameters.items():
            shard = self._shards[name]
            shard.grad = torch.zeros_like(shard) if parameter.grad is None else local_shard(parameter.grad)
        return [shard.grad for shard in self._shards.values() if shard.grad is not None]

    def _global_norm(self, gradients: list[Tensor]) -> float:
        """Over the elements of the whole model, each counted once. Reduced over all ranks, so that all decide alike."""
        norms = torch.stack(torch._foreach_norm(gradients)).double()
        total = norms.square().sum().to(device.device())
        dist.all_reduce(total)
        return math.sqrt(float(total) / self._num_replicas)


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, sharing its memory, outside of autograd."""
    return tensor.detach().to_local()  # type: ignore[attr-defined]


def _is_decayed(name: str, shard: Tensor) -> bool:
    """Megatron's rule."""
    return shard.dim() > 1 and not name.endswith(".bias")
