"""Optimizer step of the Megatron backend: clipping, the decision to skip, and the learning rate, counted in optimizer steps.

Stands at the end of ``train_step``, after megatron-core's ``finalize_model_grads`` has summed the gradients over all ranks and divided
them by the global number of tokens. The optimizer itself is megatron-core's (fp32, or bf16 with fp32 master weights; plain or distributed).
What a checkpoint has to keep of it are its ``owned_states``. Left out: gradients (``megatron_schedule.py``) and files
(``megatron_checkpoint.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_ppo.backends.optimizer_step import StepOutcome, learning_rate
from megatron_ppo.config import Config

MASTER = "master"
"""Name under which a parameter's fp32 copy is saved; a parameter that is fp32 itself has none."""


@dataclass(frozen=True)
class OwnedState:
    """What this rank's optimizer keeps of one parameter."""

    parameter: nn.Parameter
    start: int
    """First element of the flattened parameter that this rank's optimizer steps."""
    stop: int
    """The element after the last: with the plain optimizer all of them are this rank's."""
    tensors: Mapping[str, Tensor]
    """``master``, ``exp_avg``, ``exp_avg_sq`` -> live fp32 tensor [stop - start]. Writing into it changes what the next step does."""


class MegatronOptimizer:
    """megatron-core's optimizer over one role's chunks, with its learning-rate schedule."""

    def __init__(self, chunks: Sequence[Any], config: Config, *, peak_lr: float, num_optimizer_steps: int) -> None:
        """``chunks`` are wrapped in megatron-core's DistributedDataParallel. Collective over the training mesh."""
        from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
        from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides

        settings = config.optimizer
        dtype = getattr(torch, config.model.params_dtype)
        megatron_config = MegatronOptimizerConfig(
            optimizer=settings.optimizer,
            lr=peak_lr,
            min_lr=0.0,  # the schedule of this module sets every rate; megatron-core's own scheduler is not used
            weight_decay=settings.weight_decay,
            adam_beta1=settings.adam_betas[0],
            adam_beta2=settings.adam_betas[1],
            adam_eps=settings.adam_eps,
            sgd_momentum=0.0,
            clip_grad=settings.clip_grad,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=config.parallel.use_distributed_optimizer,
        )
        self.optimizer = get_megatron_optimizer(
            megatron_config,
            list(chunks),
            # Megatron's rule: no weight decay on biases and on parameters of one dim (norms).
            config_overrides=get_standard_config_overrides(megatron_config),
            use_gloo_process_groups=False,
        )
        self.num_steps = 0
        """Finished optimizer steps; skipped ones do not count."""
        self._settings = settings
        self._sharded = megatron_config.use_distributed_optimizer
        self._moments = ("exp_avg", "exp_avg_sq") if settings.optimizer == "adam" else ()  # plain sgd keeps none
        self._peak_lr = peak_lr
        self._num_optimizer_steps = num_optimizer_steps
        for group in self.optimizer.param_groups:
            group["weight_decay"] = settings.weight_decay * group["wd_mult"]

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return learning_rate(self.num_steps, self._peak_lr, self._settings, self._num_optimizer_steps)

    def zero_grad(self) -> None:
        """Forget the gradients of the last step (the buffers of the chunks are zeroed by their owner)."""
        self.optimizer.zero_grad()

    def step(self, num_tokens: int) -> StepOutcome:
        """One step from gradients that are summed over ranks and divided by ``num_tokens`` (global). Collective.

        Skips, on all ranks alike, where ``num_tokens`` is 0 or the global norm is not finite: both are reduced over all ranks.
        """
        lr = self.lr
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        if num_tokens == 0 or not math.isfinite(grad_norm):
            return StepOutcome(grad_norm=grad_norm, lr=lr, skipped=True)
        if self._settings.clip_grad > 0:
            self._clip(grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step_with_ready_grads()
        self.num_steps += 1
        return StepOutcome(grad_norm=grad_norm, lr=lr, skipped=False)

    def move_state(self, where: torch.device) -> None:
        """Take moments and fp32 masters to a device. A parameter that is fp32 is its own master and stays where it is."""
        for part in self._parts():
            for parameter, _, _, main in _owned_parameters(part):
                if parameter.dtype != torch.float32:
                    main.data = main.data.to(where)
                state = part.optimizer.state.get(main, {})  # none before the first step
                for name in state.keys() & set(self._moments):
                    state[name] = state[name].to(where)

    # -- what a checkpoint keeps --------------------------------------------------------------------------------------

    @property
    def is_sharded(self) -> bool:
        """Whether each data-parallel rank steps a part of every parameter (megatron-core's distributed optimizer)."""
        return self._sharded

    def owned_states(self) -> Iterator[OwnedState]:
        """One entry a parameter of which this rank steps at least one element. Not collective.

        Moments that the first step would make are made here, as zeros, so that a checkpoint has the same tensors before it and after.
        """
        for part in self._parts():
            for parameter, start, stop, main in _owned_parameters(part):
                assert main.numel() == stop - start, f"{main.numel()} elements of {stop - start} in a master of {tuple(parameter.shape)}"
                tensors = {} if parameter.dtype == torch.float32 else {MASTER: main.detach().view(-1)}
                for name in self._moments:
                    state = part.optimizer.state[main]
                    if name not in state:
                        state[name] = torch.zeros_like(main, dtype=torch.float32)
                        _set_num_steps(part.optimizer, main, 0)
                    tensors[name] = state[name].view(-1)
                yield OwnedState(parameter, start, stop, tensors)

    def restore_num_steps(self, num_steps: int) -> None:
        """Go on as after ``num_steps`` finished steps: the learning rate's place, and Adam's bias correction of every parameter.

        Nothing else of a parameter group is taken from a checkpoint: its settings are this run's configuration.
        """
        self.num_steps = num_steps
        if self._moments:
            for part in self._parts():
                for _, _, _, main in _owned_parameters(part):
                    _set_num_steps(part.optimizer, main, num_steps)

    def reload_masters(self) -> None:
        """Take the fp32 masters anew from the parameters, after these were loaded."""
        self.optimizer.reload_model_params()

    def _parts(self) -> list[Any]:
        """megatron-core's optimizers of dense and of expert parameters; a rank without the one kind has an empty stub."""
        return [part for part in self.optimizer.chained_optimizers if not getattr(part, "is_stub_optimizer", False)]

    def _clip(self, grad_norm: float) -> None:
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

        for part in self.optimizer.chained_optimizers:
            parameters = part.get_parameters()
            if parameters:
                clip_grad_by_total_norm_fp32(parameters, max_norm=self._settings.clip_grad, total_norm=grad_norm)


def _owned_parameters(part: Any) -> Iterator[tuple[nn.Parameter, int, int, Tensor]]:
    """(parameter, first and last + 1 flat element that this rank steps, the fp32 tensor that is stepped) of one optimizer."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    if isinstance(part, DistributedOptimizer):
        for parameter, (group, place) in part.model_param_group_index_map.items():
            owned = part._get_model_param_range_map(parameter)["param"]
            yield parameter, owned.start, owned.end, part.optimizer.param_groups[group]["params"][place]
        return
    if isinstance(part, Float16OptimizerWithFloat16Params):
        for models, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            for parameter, main in zip(models, mains, strict=True):
                yield parameter, 0, parameter.numel(), main
        whole = [parameter for group in part.fp32_from_fp32_groups for parameter in group]
    else:
        whole = [parameter for group in part.optimizer.param_groups for parameter in group["params"]]
    for parameter in whole:
        yield parameter, 0, parameter.numel(), parameter


def _set_num_steps(optimizer: torch.optim.Optimizer, main: Tensor, num_steps: int) -> None:
    """torch's Adam counts in a tensor of each parameter (never one shared by several), the fused ones in the group."""
    if isinstance(optimizer, torch.optim.Adam):
        optimizer.state[main]["step"] = torch.tensor(float(num_steps), dtype=torch.float32)
        return
    for group in optimizer.param_groups:
        if "step" in group or num_steps > 0:
            group["step"] = num_steps
