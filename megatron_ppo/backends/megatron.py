"""``MegatronBackend``: the training mesh's roles on megatron-core, with tensor, pipeline, context and data parallelism.

Stands below ``training_engine.py``, which asks it for log-probs, values, scores and optimizer steps, and above the roles, whose forward
passes it runs through megatron-core's schedules. One network a role; the actor and a separate critic have an optimizer, the reference
and the reward model are frozen and hold weights of their own.

    config.model.critic   networks
    shared                actor "lm+value"
    separate              actor "lm", critic "value"
    none                  actor "lm"
    + reference "lm" where a KL is asked for, + reward model "score" where there is a path

Left out: rewards, advantages, the loop, files of a checkpoint (``megatron_checkpoint.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_ppo import device
from megatron_ppo.backends import megatron_checkpoint
from megatron_ppo.backends.base import (
    LossFunction,
    LossMetrics,
    PendingSave,
    PlannedNetwork,
    RoleName,
    StepResult,
    TrainingBackend,
    planned_networks,
)
from megatron_ppo.backends.hf_files import check_same_network, export_network
from megatron_ppo.backends.megatron_optimizer import MegatronOptimizer
from megatron_ppo.backends.megatron_schedule import collect_outputs, reduce_metrics, run_schedule
from megatron_ppo.backends.megatron_setup import configure_schedule, initialize_megatron
from megatron_ppo.config import Config
from megatron_ppo.families import Head, NetworkShape, network_shape
from megatron_ppo.resharding.hf_checkpoint import load_hf_weights
from megatron_ppo.resharding.layout import RankLayout
from megatron_ppo.resharding.megatron_layout import megatron_layout, training_layouts
from megatron_ppo.resharding.megatron_mesh import megatron_parallel
from megatron_ppo.types import Completion, MicroBatch, RoleOutput, Sampling

OUTPUTS: dict[Head, tuple[str, ...]] = {
    "lm": ("log_probs", "entropy"),
    "lm+value": ("log_probs", "entropy", "values"),
    "value": ("values",),
    "score": ("scores",),
}
"""What a network with this head gives on its last stage."""


@dataclass
class Network:
    """One role's network on this rank."""

    head: Head
    folder: Path
    """Hugging Face folder that the weights came from."""
    roles: list[Any]
    """``MegatronActorCritic``, one a virtual stage, in pipeline order."""
    chunks: list[Any]
    """The same, wrapped in DistributedDataParallel where the network is trained."""
    optimizer: MegatronOptimizer | None = None

    def train(self, mode: bool) -> None:
        """Set training or evaluation mode."""
        for chunk in self.chunks:
            chunk.train(mode)


class MegatronBackend(TrainingBackend):
    """Training backend on megatron-core 0.16."""

    def __init__(self, config: Config, *, num_optimizer_steps: int) -> None:
        """Build all networks that ``config`` asks for and load their weights.

        Collective over the training mesh, whose default process group exists. ``num_optimizer_steps`` is the length of the
        learning-rate decay. ``ValueError`` for settings or folders that do not fit.
        """
        self._config = config
        self.coordinates = initialize_megatron(config, config.training.seed)
        parallel = config.parallel
        self.dp_rank = self.coordinates.dp
        self.dp_size = torch.distributed.get_world_size() // config.model_parallel_size
        context, tensor = parallel.context_parallel_size, parallel.tensor_model_parallel_size
        # Zig-zag order cuts a row into 2 x CP chunks; sequence parallelism cuts what a rank holds once more.
        self.length_multiple = (2 * context if context > 1 else 1) * (tensor if parallel.sequence_parallel else 1)
        interleaved = parallel.virtual_pipeline_model_parallel_size is not None
        self.micro_batch_multiple = parallel.pipeline_model_parallel_size if interleaved else 1
        self._num_optimizer_steps = num_optimizer_steps
        self._networks = {role: self._build(plan) for role, plan in planned_networks(config).items()}

    # -- passes -------------------------------------------------------------------------------------------------------

    def forward(self, role: RoleName, micro_batches: Sequence[MicroBatch], *, temperature: float = 1.0) -> list[RoleOutput]:
        network = self._network(role)
        return [RoleOutput(**named) for named in self._evaluate(network, micro_batches, temperature)]

    def score(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        return [named["scores"] for named in self._evaluate(self._network("reward"), micro_batches, temperature=1.0)]

    def train_step(
        self, role: Literal["actor", "critic"], micro_batches: Sequence[MicroBatch], loss_fn: LossFunction, *, temperature: float = 1.0
    ) -> StepResult:
        network = self._network(role)
        if network.optimizer is None:
            raise ValueError(f"the {role} is frozen and cannot take an optimizer step; train_step takes actor or critic")
        self._check_micro_batches(micro_batches)
        network.train(True)
        for chunk in network.chunks:
            chunk.zero_grad_buffer()
        network.optimizer.zero_grad()
        counted = _TokenCount()
        for part in network.roles:
            part.config.finalize_model_grads_func = counted.finalize_model_grads
        first_of_context = self.coordinates.cp == 0

        def finish(output: RoleOutput, batch: MicroBatch) -> tuple[Tensor, Tensor, LossMetrics]:
            loss, num_tokens, metrics = loss_fn(output, batch)
            if not loss.requires_grad:  # the schedule would send no gradient to the stage before, which waits for one
                raise ValueError("loss_fn gave a loss that does not depend on its output; mask with torch.where(mask, term, 0.0).sum()")
            # Every rank of a context-parallel group sees the whole rows: one of them counts.
            return loss, num_tokens if first_of_context else torch.zeros_like(num_tokens), metrics

        metrics = run_schedule(network.chunks, micro_batches, _Pass(temperature), finish, forward_only=False)
        outcome = network.optimizer.step(counted.num_tokens)
        return StepResult(metrics=reduce_metrics(metrics), grad_norm=outcome.grad_norm, lr=outcome.lr, skipped=outcome.skipped)

    def data_parallel_sum(self, tensor: Tensor) -> Tensor:
        from megatron.core import parallel_state

        total = tensor.detach().clone().to(device.device())
        torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return total.cpu()

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        from megatron_ppo.roles.megatron_generate import generate

        network = self._network("actor")
        network.train(False)
        with torch.no_grad():
            return generate(network.roles, prompts, sampling, seeds)

    # -- weights ------------------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        return dict(named_parameters(self._network("actor").roles))

    def named_parameters(self, role: RoleName) -> dict[str, Tensor]:
        """``weights()`` of any role."""
        return dict(named_parameters(self._network(role).roles))

    def non_finite(self) -> list[str]:
        found = []
        for role, network in self._trained().items():
            parameters = dict(named_parameters(network.roles))
            # One answer for all of them: on a GPU each question would wait for the device.
            flags = torch.stack([tensor.isfinite().all() for tensor in parameters.values()]).tolist()
            found += [f"{role}.{name}" for name, finite in zip(parameters, flags, strict=True) if not finite]
        return found

    def offload(self) -> None:
        for network in self._trained().values():
            assert network.optimizer is not None
            network.optimizer.move_state(torch.device("cpu"))
            for chunk in network.chunks:
                chunk.offload_grad_buffers()

    def reload(self) -> None:
        for network in self._trained().values():
            assert network.optimizer is not None
            network.optimizer.move_state(device.device())
            for chunk in network.chunks:
                chunk.restore_grad_buffers()

    def save_checkpoint(self, folder: Path, *, asynchronous: bool = False) -> PendingSave:
        return megatron_checkpoint.save(self._trained(), folder, self._mesh(), asynchronous=asynchronous)

    def load_checkpoint(self, folder: Path) -> None:
        megatron_checkpoint.load(self._trained(), folder, self._mesh())

    def load_weights(self, folder: Path) -> None:
        megatron_checkpoint.load_weights(self._trained(), folder)

    def _trained(self) -> dict[str, Network]:
        """Role -> network, of those that have an optimizer: the others come from their folders at every start."""
        return {role: network for role, network in self._networks.items() if network.optimizer is not None}

    def _mesh(self) -> dict[str, int]:
        """Sizes of the training mesh, by the names of their axes."""
        return self._config.training_mesh_sizes(torch.distributed.get_world_size())

    def layout(self, role: RoleName = "actor") -> RankLayout:
        """How this rank's parameters of ``role`` lie in the canonical model. Pure data, not collective."""
        network = self._network(role)
        return self._layout(network_shape(network.folder), network.head)

    def export_hf(self, folder: Path, role: Literal["actor", "critic"] = "actor") -> None:
        """Write the role in Hugging Face format, from rank 0. Collective over the training mesh.

        A shared network is written as a language model for the actor, and as a one-label classifier on the same trunk for the critic.
        """
        network = self._network("actor" if role == "critic" and self._config.model.critic == "shared" else role)
        head: Head = "lm" if role == "actor" else "value"
        shape = network_shape(network.folder)
        sizes = megatron_parallel(self._config)
        layouts = training_layouts(
            shape, sizes, torch.distributed.get_world_size(), head=network.head, transformer_engine_names=self._fuses_norms
        )
        export_network(folder, network.folder, layouts, dict(named_parameters(network.roles)), head)

    # -- networks -----------------------------------------------------------------------------------------------------

    def _network(self, role: RoleName) -> Network:
        if role not in self._networks:
            raise ValueError(f"this run has no {role}: the configuration asks for {', '.join(self._networks)}")
        return self._networks[role]

    def _build(self, plan: PlannedNetwork) -> Network:
        """Build a network and load its weights; one that starts from another folder's must have their shape."""
        folder, head, peak_lr, weights = plan.folder, plan.head, plan.peak_lr, plan.weights
        shape = network_shape(folder)
        layout = self._layout(shape, head)  # first: it refuses sizes that do not fit, with their equation
        if weights is not None:
            check_same_network(shape, folder, network_shape(weights), weights)
        roles = list(self._build_roles(shape, head))
        load_hf_weights(weights or folder, layout, dict(named_parameters(roles)), head=head)
        if peak_lr is None:
            for part in roles:
                part.requires_grad_(False)
            return Network(head, folder, roles, chunks=list(roles))
        network = Network(head, folder, roles, chunks=self._wrap(roles))
        network.optimizer = MegatronOptimizer(network.chunks, self._config, peak_lr=peak_lr, num_optimizer_steps=self._num_optimizer_steps)
        return network

    def _build_roles(self, shape: NetworkShape, head: Head) -> Iterator[Any]:
        """The chunks of this rank, in pipeline order; one without virtual stages."""
        from megatron.core import parallel_state

        from megatron_ppo.roles.megatron_actor_critic import MegatronActorCritic

        virtual = self._config.parallel.virtual_pipeline_model_parallel_size
        for index in range(virtual or 1):
            stage = None if virtual is None else index
            part = MegatronActorCritic(
                shape,
                self._config,
                head=head,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                vp_stage=stage,
            )
            configure_schedule(part.config, self._config.parallel)
            yield part

    def _layout(self, shape: NetworkShape, head: Head) -> RankLayout:
        """How this rank's parameters lie."""
        sizes = megatron_parallel(self._config)
        return megatron_layout(shape, sizes, self.coordinates, head=head, transformer_engine_names=self._fuses_norms)

    @property
    def _fuses_norms(self) -> bool:
        """Transformer Engine's layer spec fuses norms into the linear layers after them."""
        from megatron_ppo.roles.megatron_config import transformer_impl

        return transformer_impl(self._config) == "transformer_engine"

    def _wrap(self, roles: Sequence[Any]) -> list[Any]:
        """Put the gradient buffers of megatron-core's DistributedDataParallel around each chunk."""
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        parallel = self._config.parallel
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=self._config.overlap_grad_reduce,
            use_distributed_optimizer=parallel.use_distributed_optimizer,
        )
        chunks = [
            # Megatron's rule: only the first chunk's gradients are reduced bucket by bucket.
            DistributedDataParallel(part.config, ddp_config, part, disable_bucketing=index > 0)
            for index, part in enumerate(roles)
        ]
        if self._config.overlap_grad_reduce:
            syncs = [chunk.no_sync for chunk in chunks]
            for part in roles:
                part.config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
        return chunks

    # -- passes without gradients -------------------------------------------------------------------------------------

    def _evaluate(self, network: Network, micro_batches: Sequence[MicroBatch], temperature: float) -> list[dict[str, Tensor]]:
        if not micro_batches:
            return []
        self._check_lengths(micro_batches)
        # The interleaved schedule wants a multiple of the stages: repeat the last micro-batch and forget what it gives.
        missing = -len(micro_batches) % self.micro_batch_multiple
        scheduled = [*micro_batches, *([micro_batches[-1]] * missing)]
        keep = _keep_scores if network.head == "score" else _keep_outputs
        network.train(False)
        with torch.no_grad():
            outputs = run_schedule(network.chunks, scheduled, _Pass(temperature), keep, forward_only=True)
        shapes = [
            {name: batch.tokens.shape[:1] if name == "scores" else batch.tokens.shape for name in OUTPUTS[network.head]}
            for batch in micro_batches
        ]
        return collect_outputs(outputs[: len(micro_batches)], shapes)

    def _check_micro_batches(self, micro_batches: Sequence[MicroBatch]) -> None:
        count, multiple = len(micro_batches), self.micro_batch_multiple
        if count == 0 or count % multiple:
            raise ValueError(
                f"an optimizer step got {count} micro-batches, but wants a multiple of {multiple} and at least one "
                "(pipeline stages of the interleaved schedule): fill up with dummies, whose loss_mask is 0"
            )
        self._check_lengths(micro_batches)

    def _check_lengths(self, micro_batches: Sequence[MicroBatch]) -> None:
        for index, batch in enumerate(micro_batches):
            if batch.tokens.shape[1] % self.length_multiple:
                raise ValueError(
                    f"micro-batch {index} is padded to {batch.tokens.shape[1]} tokens, which is not a multiple of {self.length_multiple} "
                    "(context x sequence parallelism): pad it to length_multiple"
                )


class _TokenCount:
    """megatron-core's gradient reduction, remembering the number of tokens of the global mini-batch."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def finalize_model_grads(self, model: list[Any], num_tokens: Tensor | None, **options: Any) -> None:
        """Sum gradients over all ranks and divide them by the global ``num_tokens`` (not where it is 0)."""
        from megatron.core.distributed import finalize_model_grads

        assert num_tokens is not None, "calculate_per_token_loss must be on"
        finalize_model_grads(model, num_tokens, **options)
        self.num_tokens = int(num_tokens)  # summed over all replicas, in place


@dataclass(frozen=True)
class _Pass:
    """The forward pass of one chunk: hidden states, or on the last stage what the head gives."""

    temperature: float

    def __call__(self, chunk: Any, batch: MicroBatch) -> RoleOutput | Tensor:
        return chunk(batch, temperature=self.temperature, with_entropy=True)


def _keep_outputs(output: RoleOutput, batch: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    nothing = torch.zeros((), device=batch.tokens.device)
    return nothing, nothing.int(), {name: tensor for name, tensor in vars(output).items() if tensor is not None}


def _keep_scores(output: RoleOutput, batch: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """A score is the scalar head's value at the last real token of the row."""
    nothing, none, named = _keep_outputs(output, batch)
    return nothing, none, {"scores": named["values"].gather(1, batch.lengths[:, None] - 1).squeeze(1)}


def named_parameters(roles: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """(local name, live tensor); with virtual stages the names of the v-th chunk start with ``model{v}.``."""
    for index, part in enumerate(roles):
        prefix = f"model{index}." if len(roles) > 1 else ""
        for name, parameter in part.named_parameters():
            yield prefix + name, parameter.data
