"""``FSDPBackend``: the training mesh's roles on PyTorch's FSDP2 and Hugging Face models, for all that megatron-core is not wanted for.

Stands below ``training_engine.py`` in the place of ``MegatronBackend``, with the same networks (see there), the same contract of losses
and the same results. Every training rank is a data-parallel replica: it computes its own micro-batches, with parameters that are gathered
layer by layer from the ranks that hold them (``fsdp_setup.py``). So all ranks must make the same passes, and they do: every replica passes
as many micro-batches as every other.

    train_step, each micro-batch:  forward -> loss_sum -> backward -> reduce-scatter     gradients are kept as fp32 shards, never whole
    after the last one:            all-reduce over ``replicate`` -> divide by the global number of tokens -> clip -> step

Left out: rewards, advantages, the loop, files of a checkpoint (``fsdp_checkpoint.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_ppo import device
from megatron_ppo.backends import fsdp_checkpoint
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
from megatron_ppo.backends.fsdp_optimizer import FSDPOptimizer, local_shard
from megatron_ppo.backends.fsdp_setup import Root, build_network, make_mesh, named_parameters
from megatron_ppo.backends.hf_files import check_same_network, export_network
from megatron_ppo.backends.loss_metrics import mean_metrics
from megatron_ppo.config import Config
from megatron_ppo.families import Head
from megatron_ppo.generic_network import describe_network
from megatron_ppo.resharding.fsdp_layout import fsdp_layout, fsdp_layouts
from megatron_ppo.resharding.hf_checkpoint import load_hf_weights
from megatron_ppo.resharding.layout import RankLayout
from megatron_ppo.roles.base import ActorRole, new_value_head
from megatron_ppo.roles.hf_heads import hidden_and_logits
from megatron_ppo.roles.sampling import draw
from megatron_ppo.types import Completion, MicroBatch, RoleOutput, Sampling

logger = logging.getLogger(__name__)


@dataclass
class Network:
    """One role's network on this rank."""

    head: Head
    folder: Path
    """Hugging Face folder that the network is of."""
    root: Root
    parameters: dict[str, nn.Parameter]
    """Transformers' name -> sharded parameter."""
    optimizer: FSDPOptimizer | None = None

    def shards(self) -> dict[str, Tensor]:
        """Transformers' name -> this rank's live rows; on the device that FSDP keeps them on."""
        return {name: local_shard(parameter) for name, parameter in self.parameters.items()}


class FSDPBackend(TrainingBackend):
    """Training backend on ``torch.distributed.fsdp.fully_shard``."""

    length_multiple = 1
    micro_batch_multiple = 1

    def __init__(self, config: Config, *, num_optimizer_steps: int) -> None:
        """Build all networks that ``config`` asks for and load their weights.

        Collective over the training mesh, whose default process group exists. ``num_optimizer_steps`` is the length of the
        learning-rate decay. ``ValueError`` for settings or folders that do not fit.
        """
        self._config = config
        self._num_optimizer_steps = num_optimizer_steps
        if config.parallel.cpu_offload == "always" and not device.has_cuda() and dist.get_rank() == 0:
            logger.warning("cpu_offload gains nothing here: without a GPU all weights are in host memory anyway")
        self._mesh = make_mesh(config)
        self.dp_rank, self.dp_size = dist.get_rank(), dist.get_world_size()
        self.shard_size = self._mesh.size(self._mesh.ndim - 1)
        """Ranks over which a network is sharded; the others hold copies."""
        self._networks = {role: self._build(plan) for role, plan in planned_networks(config).items()}

    # -- passes -------------------------------------------------------------------------------------------------------

    def forward(self, role: RoleName, micro_batches: Sequence[MicroBatch], *, temperature: float = 1.0) -> list[RoleOutput]:
        return [RoleOutput(**named) for named in self._evaluate(self._network(role), micro_batches, temperature)]

    def score(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        return [named["scores"] for named in self._evaluate(self._network("reward"), micro_batches, temperature=1.0)]

    def train_step(
        self, role: Literal["actor", "critic"], micro_batches: Sequence[MicroBatch], loss_fn: LossFunction, *, temperature: float = 1.0
    ) -> StepResult:
        network = self._network(role)
        if network.optimizer is None:
            raise ValueError(f"the {role} is frozen and cannot take an optimizer step; train_step takes actor or critic")
        if not micro_batches:
            raise ValueError("an optimizer step got no micro-batch: fill up with dummies, whose loss_mask is 0")
        network.optimizer.zero_grad()
        root: Any = network.root
        num_tokens = torch.zeros((), dtype=torch.int64, device=device.device())
        metrics: list[LossMetrics] = []
        for index, batch in enumerate(micro_batches):
            # Copies of a shard add up their gradients once a step. Within a copy every pass is summed up at once: gradients that wait
            # for the last pass would be whole, as large as the model in fp32 on every rank.
            root.set_requires_all_reduce(index == len(micro_batches) - 1)
            moved = batch.to(device.device())
            output = RoleOutput(**root(partial(_outputs, batch=moved, temperature=temperature)))
            loss, count, named = loss_fn(output, moved)
            if not loss.requires_grad:  # this rank alone would leave the backward pass out, and all others wait
                raise ValueError("loss_fn gave a loss that does not depend on its output; mask with torch.where(mask, term, 0.0).sum()")
            loss.backward()
            num_tokens += count
            metrics.append(named)
        dist.all_reduce(num_tokens)
        outcome = network.optimizer.step(int(num_tokens))
        return StepResult(metrics=mean_metrics(metrics), grad_norm=outcome.grad_norm, lr=outcome.lr, skipped=outcome.skipped)

    def data_parallel_sum(self, tensor: Tensor) -> Tensor:
        total = tensor.detach().clone().to(device.device())
        dist.all_reduce(total)
        return total.cpu()

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        """As the interface says; every rank is a replica with prompts of its own. Ranks that are done run along with the others."""
        root = self._network("actor").root
        requests = [_Request(list(prompt), torch.Generator().manual_seed(int(seed))) for prompt, seed in zip(prompts, seeds, strict=True)]
        while True:
            active = [request for request in requests if request.is_open(sampling)]
            if not self._anyone(bool(active)):
                break
            rows = [request.tokens for request in active] or [[0]]
            logits = root(partial(_next_token_logits, rows=rows))["logits"].cpu()
            for request, row in zip(active, logits, strict=bool(active)):
                request.add(*draw(row, sampling, request.generator))
        self._release(root)
        return [request.completion(sampling) for request in requests]

    # -- weights ------------------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        return self.named_parameters("actor")

    def named_parameters(self, role: RoleName) -> dict[str, Tensor]:
        """``weights()`` of any role."""
        # With CPU offload they are copied to the GPU, from where alone NCCL sends.
        return {name: shard.to(device.device()) for name, shard in self._network(role).shards().items()}

    def non_finite(self) -> list[str]:
        found = []
        for role, network in self._trained().items():
            shards = network.shards()
            # One answer for all of them: on a GPU each question would wait for the device.
            flags = torch.stack([tensor.isfinite().all() for tensor in shards.values()]).tolist()
            found += [f"{role}.{name}" for name, finite in zip(shards, flags, strict=True) if not finite]
        return found

    def offload(self) -> None:
        self._move_optimizers(torch.device("cpu"))
        if device.has_cuda():
            torch.cuda.empty_cache()

    def reload(self) -> None:
        self._move_optimizers(device.device())

    def _move_optimizers(self, where: torch.device) -> None:
        """Gradients do not outlive a step, so that the moments are all there is to move."""
        for network in self._trained().values():
            assert network.optimizer is not None
            network.optimizer.move_state(where)

    def save_checkpoint(self, folder: Path, *, asynchronous: bool = False) -> PendingSave:
        return fsdp_checkpoint.save(self._trained(), folder, self._sizes(), asynchronous=asynchronous)

    def load_checkpoint(self, folder: Path) -> None:
        fsdp_checkpoint.load(self._trained(), folder, self._sizes())

    def load_weights(self, folder: Path) -> None:
        fsdp_checkpoint.load_weights(self._trained(), folder, self._sizes())

    def layout(self, role: RoleName = "actor") -> RankLayout:
        """How this rank's parameters of ``role`` lie in the canonical model. Pure data, not collective."""
        network = self._network(role)
        return self._layout(network.folder, network.head)

    def export_hf(self, folder: Path, role: Literal["actor", "critic"] = "actor") -> None:
        """Write the role in Hugging Face format and ``params_dtype``, from rank 0. Collective over the training mesh.

        A shared network is written as a language model for the actor, and as a one-label classifier on the same trunk for the critic.
        """
        is_shared = role == "critic" and self._config.model.critic == "shared"
        network = self._network("actor" if is_shared else role)
        shape = describe_network(network.folder)
        layouts = fsdp_layouts(shape, world_size=self.dp_size, shard_size=self.shard_size, head=network.head)
        parameters = {name: shard.to(device.device()) for name, shard in network.shards().items()}
        dtype = getattr(torch, self._config.model.params_dtype)
        export_network(folder, network.folder, layouts, parameters, "lm" if role == "actor" else "value", cast=dtype)

    # -- networks -----------------------------------------------------------------------------------------------------

    def _network(self, role: RoleName) -> Network:
        if role not in self._networks:
            raise ValueError(f"this run has no {role}: the configuration asks for {', '.join(self._networks)}")
        return self._networks[role]

    def _trained(self) -> dict[str, Network]:
        """Role -> network, of those that have an optimizer: the others come from their folders at every start."""
        return {role: network for role, network in self._networks.items() if network.optimizer is not None}

    def _sizes(self) -> dict[str, int]:
        """Sizes of the training mesh, by the names of their axes."""
        return self._config.training_mesh_sizes(self.dp_size)

    def _layout(self, folder: Path, head: Head) -> RankLayout:
        rank = self.dp_rank % self.shard_size
        return fsdp_layout(describe_network(folder), shard_size=self.shard_size, shard_rank=rank, head=head)

    def _build(self, plan: PlannedNetwork) -> Network:
        """Build a network and load its weights; one that starts from another folder's must have their shape."""
        folder, head, peak_lr, weights = plan.folder, plan.head, plan.peak_lr, plan.weights
        shape = describe_network(folder)
        if weights is not None:
            check_same_network(shape, folder, describe_network(weights), weights)
        root = build_network(self._config, self._mesh, folder, head, frozen=peak_lr is None)
        parameters = named_parameters(root)
        network = Network(head, folder, root, parameters)
        shards = network.shards()
        for name in load_hf_weights(weights or folder, self._layout(folder, head), shards, head=head):  # a value head that no file holds
            shards[name].copy_(new_value_head(shards[name].shape[1], self._config.training.seed)[: shards[name].shape[0]])
        if peak_lr is not None:
            network.optimizer = FSDPOptimizer(
                parameters,
                self._config,
                peak_lr=peak_lr,
                num_optimizer_steps=self._num_optimizer_steps,
                num_replicas=self.dp_size // self.shard_size,
            )
        return network

    # -- passes without gradients -------------------------------------------------------------------------------------

    @torch.no_grad()
    def _evaluate(self, network: Network, micro_batches: Sequence[MicroBatch], temperature: float) -> list[dict[str, Tensor]]:
        compute: Callable[..., dict[str, Tensor]] = _scores if network.head == "score" else partial(_outputs, temperature=temperature)
        root: Any = network.root
        outputs = []
        for batch in micro_batches:
            named = root(partial(compute, batch=batch.to(device.device())))
            outputs.append({name: tensor.float().cpu() for name, tensor in named.items()})
        self._release(root)
        if network.optimizer is None and micro_batches:
            root.reset_iter_state()  # FSDP notes every forward pass until a backward one, which a frozen network never has
        return outputs

    def _release(self, root: Any) -> None:
        """FSDP keeps the root's parameters gathered after a forward pass, for the backward pass: here is none, and a later pass would
        find them out of date."""
        root.reshard()

    def _anyone(self, active: bool) -> bool:
        flag = torch.tensor([int(active)], device=device.device())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)


@dataclass
class _Request:
    """A row of ``generate`` on its way."""

    tokens: list[int]
    generator: torch.Generator
    response: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def add(self, token: int, log_prob: float) -> None:
        """Take the next token."""
        self.tokens.append(token)
        self.response.append(token)
        self.log_probs.append(log_prob)

    def is_stopped(self, sampling: Sampling) -> bool:
        """Whether the last token is one that ends a response."""
        return bool(self.response) and self.response[-1] in sampling.stop_token_ids

    def is_open(self, sampling: Sampling) -> bool:
        """Whether another token is wanted."""
        return len(self.response) < sampling.max_response_length and not self.is_stopped(sampling)

    def completion(self, sampling: Sampling) -> Completion:
        """What became of it."""
        return Completion(self.response, self.log_probs, truncated=not self.is_stopped(sampling))


def _outputs(role: Any, *, batch: MicroBatch, temperature: float) -> dict[str, Tensor]:
    """Log-probs, entropy and values, whichever the role has."""
    options = {"temperature": temperature, "with_entropy": True} if isinstance(role, ActorRole) else {}  # a critic has no logits
    return {name: tensor for name, tensor in vars(role(batch, **options)).items() if tensor is not None}


def _scores(role: Any, *, batch: MicroBatch) -> dict[str, Tensor]:
    return {"scores": role(batch)}


def _next_token_logits(role: Any, *, rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """[n, V] after the last token of each row; rows are right-padded, which causal attention does not see."""
    lengths = torch.tensor([len(row) for row in rows], device=device.device())
    longest = max(len(row) for row in rows)
    tokens = torch.tensor([[*row, *([0] * (longest - len(row)))] for row in rows], device=device.device())
    numbers = torch.arange(len(rows), device=device.device())
    _, logits = hidden_and_logits(
        role.model, pick=lambda hidden: hidden[numbers, lengths - 1, None], input_ids=tokens, use_cache=False
    )
    return {"logits": logits[:, 0]}
