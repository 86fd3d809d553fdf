"""WeightSynchronizer: after each update, every weight goes from its training shard straight into its rollout shard.

Step 1 of the iteration. Both meshes run the same ``sync``: a training rank asks the engine for its weights and sends, a rollout rank gives
the workers the handle and they receive into the live parameters of the inference engine. The plan (who sends what to whom) is
built by every rank from the configuration alone, and its digest is compared through the launch's store before the first byte.
"""

from __future__ import annotations

import json
import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megatron_ppo import device
from megatron_ppo.backends.base import rollout_head
from megatron_ppo.config import Config
from megatron_ppo.data_bus import DataBus, DataHandle
from megatron_ppo.device import has_transformer_engine
from megatron_ppo.families import GenericNetwork, Head, canonical_tensors, network_shape
from megatron_ppo.generic_network import describe_network
from megatron_ppo.resharding.checksum import compare_checksums, destination_checksums, non_finite, source_checksums
from megatron_ppo.resharding.executor import MakeGroup, ReshardExecutor, TransferStats
from megatron_ppo.resharding.fsdp_layout import fsdp_layouts
from megatron_ppo.resharding.hf_weight_loader import HFWeightLoader, Load, WeightTransfer, compare_full
from megatron_ppo.resharding.layout import RankLayout
from megatron_ppo.resharding.megatron_layout import training_layouts
from megatron_ppo.resharding.megatron_mesh import megatron_parallel
from megatron_ppo.resharding.plan import ReshardPlan, build_plan
from megatron_ppo.resharding.vllm_layout import hf_layout, vllm_layout
from megatron_ppo.world import World

logger = logging.getLogger(__name__)


class WeightSource(Protocol):
    """The training engine, or a reference to the one on the other mesh."""

    version: int
    """Number of finished updates."""

    def get_weights(self) -> DataHandle:
        """A handle of the current weights; does not block."""


class WeightDestination(Protocol):
    """The rollout workers, or a reference to those on the other mesh."""

    version: int | None
    """Version of the weights that are loaded; None: no whole set of weights that was proved where it had to be, so nothing is sampled."""

    def set_weights(self, handle: DataHandle) -> TransferStats:
        """Take over the weights of the handle; the engine is unusable until that has succeeded."""

    def live_weights(self) -> dict[str, Tensor]:
        """The engine's live parameters by local name."""


@dataclass(frozen=True)
class SyncStats:
    """What one sync moved on this rank."""

    version: int
    bytes_sent: int
    bytes_received: int
    seconds: float


class WeightSynchronizer:
    """Runs syncs; every rank of the launch has one."""

    def __init__(self, world: World, bus: DataBus, executor: WeightTransfer, *, verify_always: bool) -> None:
        self._world = world
        self._bus = bus
        self._executor = executor
        self._verify_always = verify_always
        self._first_version: int | None = None

    def sync(self, source: WeightSource, destinations: WeightDestination) -> SyncStats:
        """Bring every rollout worker to the source's weights. Blocking and complete: returns when this rank's part is done.

        The first sync of a launch, and every one with ``verify_always``, is proved: each rollout rank compares the checksum of every
        parameter, read from its live weights, with the checksum that the sender took of its own.

        Raises:
            RuntimeError: a checksum differs; the message names what differs, and where. The worker has no version then, as after any
                error of a sync.
        """
        started = time.monotonic()
        handle, version = source.get_weights(), source.version
        proves = self._first_version in (None, version) or self._verify_always
        if isinstance(self._executor, HFWeightLoader):
            self._executor.keeps_checksums = proves
        sent: dict[str, Tensor] = {}
        received: dict[str, Tensor] = {}
        if self._world.is_training:
            weights = self._bus.get(handle)
            assert isinstance(weights, dict)
            sent = weights
            _refuse_non_finite(sent, version)
        if self._world.is_rollout:  # colocated ranks send and receive at once: the handle is their own
            stats = destinations.set_weights(handle)
            received = destinations.live_weights()
        else:
            stats = self._executor.send(sent)
        if self._world.is_training:  # read by all: a sync starts when the one before has ended everywhere
            self._world.store.delete_key(_checksum_key(version - 1, self._world.global_rank))
        if self._first_version is None:
            self._first_version = version
        if proves:
            try:
                self._prove(version, sent, received)
            except BaseException:
                destinations.version = None  # all bytes came, and not all are right
                raise
        return SyncStats(version, stats.bytes_sent, stats.bytes_received, time.monotonic() - started)

    def _prove(self, version: int, sent: dict[str, Tensor], received: dict[str, Tensor]) -> None:
        """Compare checksums through the launch's store: a few numbers a block."""
        if isinstance(self._executor, HFWeightLoader):
            self._prove_full(version, self._executor)
            return
        rank, store, plan = self._world.global_rank, self._world.store, self._executor.plan
        if self._world.is_training:
            sums = source_checksums(plan, rank, sent, self._executor.transfer_dtype)
            store.set(_checksum_key(version, rank), json.dumps(sums))
        if not self._world.is_rollout:
            return
        sources = {group.source for group in plan.groups_of(rank) if rank in group.destinations}
        theirs = {source: json.loads(store.get(_checksum_key(version, source))) for source in sorted(sources)}
        differences = compare_checksums(plan, theirs, {rank: destination_checksums(plan, rank, received)})
        if differences:
            shown = "\n  ".join(differences[:20])
            raise RuntimeError(
                f"{len(differences)} blocks of weights v{version} on {self._world.describe(rank)} are not those that were sent "
                f"(of {sum(len(group.transfers) for group in plan.groups_of(rank))}):\n  {shown}"
            )


    def _prove_full(self, version: int, loader: HFWeightLoader) -> None:
        """Every full tensor arrived as the first training rank sent it; the engine's backend has seen that no parameter was left out."""
        rank, store = self._world.global_rank, self._world.store
        if rank == loader.source:
            store.set(_checksum_key(version, rank), json.dumps(loader.checksums))
        if self._world.is_rollout:
            differences = compare_full(json.loads(store.get(_checksum_key(version, loader.source))), loader.checksums)
            if differences:
                shown = "\n  ".join(differences[:20])
                raise RuntimeError(
                    f"{len(differences)} tensors of weights v{version} on {self._world.describe(rank)} are not those that were sent:"
                    f"\n  {shown}"
                )


def _checksum_key(version: int, rank: int) -> str:
    return f"checksums/{rank}/v{version}"


def _refuse_non_finite(weights: dict[str, Tensor], version: int) -> None:
    """``FloatingPointError`` on the rank that holds them: such weights are neither sampled from nor saved."""
    broken = non_finite(weights)
    if broken:
        raise FloatingPointError(f"weights of v{version} are not finite and are not sent: {', '.join(broken)}; go back to a checkpoint")


def make_transfer(config: Config, world: World, make_group: MakeGroup, load: Load | None) -> WeightTransfer:
    """How weights travel in a run: shard to shard where both sides' layouts are known, else as full tensors through the engine's loader.

    ``load``: the engine's loader on rollout ranks. The choice is the same on every rank; the first one logs the second kind.
    """
    if not sends_full_tensors(config):
        plan, dtype = refit_plan(config, world.world_size), transfer_dtype(config)
        return ReshardExecutor(plan, world.global_rank, make_group, bucket_bytes=config.parallel.bucket_bytes, transfer_dtype=dtype)
    network = describe_network(Path(config.model.model_path))
    assert isinstance(network, GenericNetwork)
    loader = HFWeightLoader(
        canonical_tensors(network),
        actor_layouts(config, config.training_size(world.world_size)),
        rank=world.global_rank,
        training_ranks=world.training_ranks,
        rollout_ranks=world.rollout_ranks,
        make_group=make_group,
        transfer_dtype=transfer_dtype(config),
        device=device.device(),
        load=load,
    )
    if world.global_rank == 0:
        logger.warning(
            "weights of this %s model go to vLLM's own loader as full tensors (%s): every rollout rank takes in %.3g GB a sync, whatever "
            "its share, one tensor after another. A table for the family makes it exact: docs/fsdp.md, Other models",
            *(network.family, network.reason, loader.full_bytes / 1e9),
        )
    return loader


def sends_full_tensors(config: Config) -> bool:
    """Whether the engine is vLLM, and no table knows how the model lies in it."""
    if config.rollout.rollout_backend != "vllm":
        return False
    return isinstance(describe_network(Path(config.model.model_path)), GenericNetwork)


def refit_plan(config: Config, world_size: int) -> ReshardPlan:
    """Who sends which part of which weight to whom, from the configuration alone: every rank builds the same plan."""
    sources = actor_layouts(config, config.training_size(world_size))
    layouts, first = rollout_layouts(config), world_size - config.rollout_size(world_size)
    destinations = {rank: layouts[(rank - first) % len(layouts)] for rank in range(first, world_size)}
    return build_plan(sources, destinations, bytes_per_element=transfer_dtype(config).itemsize)


def actor_layouts(config: Config, num_training: int) -> dict[int, RankLayout]:
    """How the actor lies on each rank of a training mesh of ``num_training`` ranks."""
    folder = Path(config.model.model_path)
    head: Head = "lm+value" if config.model.critic == "shared" else "lm"
    if config.parallel.backend == "fsdp":
        network = describe_network(folder)
        return fsdp_layouts(network, world_size=num_training, shard_size=config.fsdp_shards(num_training), head=head)
    names = uses_transformer_engine(config)
    return training_layouts(network_shape(folder), megatron_parallel(config), num_training, head=head, transformer_engine_names=names)


def rollout_layouts(config: Config) -> list[RankLayout]:
    """How the actor lies on each rank of one rollout replica."""
    folder, p = Path(config.model.model_path), config.parallel
    if config.rollout.rollout_backend == "hf":
        return [hf_layout(describe_network(folder), rollout_head(config))]
    network = describe_network(folder)
    if isinstance(network, GenericNetwork):
        num_bytes = sum(math.prod(tensor.shape) for tensor in canonical_tensors(network)) * transfer_dtype(config).itemsize
        raise ValueError(
            f"there is no plan shard by shard from {folder} to vLLM: {network.reason}. A run gives vLLM's own loader the full tensors, "
            f"{num_bytes / 1e9:.3g} GB to each rollout rank a sync. Use rollout_backend = hf, or add a table for the family (docs/fsdp.md)"
        )
    tp, whole_experts = p.rollout_tensor_parallel_size, config.rollout_expert_parallel
    return [vllm_layout(network, tensor_parallel_size=tp, tp_rank=rank, expert_parallel=whole_experts) for rank in range(tp)]


def transfer_dtype(config: Config) -> torch.dtype:
    """The dtype of the weights on the wire: the rollout engine's."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.rollout.rollout_dtype]


def uses_transformer_engine(config: Config) -> bool:
    """Whether the trainer's parameters have the names of the Transformer Engine spec."""
    wanted = config.transformer_impl
    return has_transformer_engine() if wanted == "auto" else wanted == "transformer_engine"
