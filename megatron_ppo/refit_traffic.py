"""What one weight sync moves, counted from a plan: by rank, by pair of ranks, by kind of tensor. Pure data; no rank is started.

Stands between the plan (``weight_synchronizer.refit_plan``) and those who show it (``refit_report.py`` in words, ``refit_picture.py`` as a
picture). Left out: seconds.

    plan.groups  --+-->  RankRow      place, node, bytes sent and received, groups, messages of each rank
                   +-->  matrix       [training ranks, rollout ranks] bytes
                   +-->  kinds        attention, MLP or experts, embedding and head, norms
    shapes       ----->  shard        what a rollout rank must get, counted without the plan's blocks: received / shard is the claim
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_ppo.backends.base import rollout_head
from megatron_ppo.config import Config
from megatron_ppo.families import EMBEDDING, LM_HEAD, SCORE_HEAD, CanonicalTensor, Network, canonical_tensors
from megatron_ppo.generic_network import describe_network
from megatron_ppo.resharding.megatron_mesh import MegatronParallel, megatron_parallel, rank_coordinates
from megatron_ppo.resharding.plan import ReshardPlan

KINDS = ("attention", "mlp", "embedding_and_head", "norms")
"""Kinds of tensors; a mixture's router and experts are ``mlp``."""


@dataclass(frozen=True)
class RankRow:
    """One rank's part in one sync."""

    rank: int
    """Global rank."""
    is_training: bool
    place: Mapping[str, int]
    """Coordinates in its mesh: tp, pp, dp (cp too where sequences are split, ep and expert_tp for a mixture), or replica and tp."""
    node: int
    """Number of its node, where nodes hold ``ranks_per_node`` consecutive ranks."""
    bytes_sent: int
    """A broadcast counts once, however many replicas listen."""
    bytes_received: int
    shard_bytes: int
    """Bytes of the engine's parameters on this rank, vocabulary padding excluded; 0 on training ranks."""
    num_groups: int
    """Process groups (NCCL communicators) that it is a member of."""
    num_messages: int
    """Broadcasts over those groups."""
    num_buckets: int
    """Buckets that it packs or unpacks."""
    num_transfers: int
    """Boxes of tensors in them."""


@dataclass(frozen=True)
class KindRow:
    """One kind of tensor."""

    model_bytes: int
    """One copy of the tensors."""
    bytes_sent: int
    bytes_received: int


@dataclass(frozen=True)
class RefitTraffic:
    """One sync of one configuration."""

    network: Network
    parallel: MegatronParallel
    fsdp_shard_size: int | None
    """Training ranks that share one copy of the model under FSDP; None: the backend is megatron."""
    bytes_per_element: int
    replica_size: int
    """Ranks of one rollout replica."""
    whole_experts: bool
    """Each rank of a replica holds whole experts (expert parallelism of the rollout engine)."""
    ranks_per_node: int
    rows: tuple[RankRow, ...]
    """Training ranks by number, then rollout ranks. A colocated rank has a row on each side."""
    matrix: NDArray[np.int64]
    """[training ranks, rollout ranks]: bytes that the receiver gets from the sender."""
    kinds: Mapping[str, KindRow]
    """Each of ``KINDS``."""
    num_groups: int

    @property
    def training(self) -> tuple[RankRow, ...]:
        """Rows of the training ranks."""
        return tuple(row for row in self.rows if row.is_training)

    @property
    def rollout(self) -> tuple[RankRow, ...]:
        """Rows of the rollout ranks."""
        return tuple(row for row in self.rows if not row.is_training)

    @property
    def training_mesh(self) -> str:
        """``TP 8 x PP 16 x CP 1 x DP 8``, and how the experts lie, where there are some. FSDP: copies x shards."""
        p, num_ranks = self.parallel, len(self.training)
        if self.fsdp_shard_size is not None:
            return f"FSDP, {num_ranks // self.fsdp_shard_size} x {self.fsdp_shard_size} shards"
        dense = (p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.context_parallel_size)
        text = f"TP {dense[0]} x PP {dense[1]} x CP {dense[2]} x DP {num_ranks // math.prod(dense)}"
        if not self.network.num_experts:
            return text
        experts = (p.expert_tensor_size, p.expert_model_parallel_size, p.pipeline_model_parallel_size)
        return f"{text}; experts: TP {experts[0]} x EP {experts[1]} x PP {experts[2]} x DP {num_ranks // math.prod(experts)}"

    @property
    def rollout_mesh(self) -> str:
        """``16 replicas x TP 8``."""
        count = len(self.rollout) // self.replica_size
        return f"{count} replica{'s' if count > 1 else ''} x TP {self.replica_size}{', whole experts' if self.whole_experts else ''}"

    @property
    def num_parameters(self) -> int:
        """Elements of the policy's checkpoint."""
        return sum(math.prod(tensor.shape) for tensor in canonical_tensors(self.network))

    @property
    def model_bytes(self) -> int:
        """One copy of the policy in the dtype on the wire."""
        return self.num_parameters * self.bytes_per_element

    @property
    def bytes_sent(self) -> int:
        """Over all training ranks."""
        return sum(row.bytes_sent for row in self.rows)

    @property
    def bytes_received(self) -> int:
        """Over all rollout ranks."""
        return sum(row.bytes_received for row in self.rows)

    @property
    def shard_bytes(self) -> int:
        """What all rollout ranks together hold."""
        return sum(row.shard_bytes for row in self.rows)

    @property
    def received_over_shard(self) -> tuple[float, float]:
        """Least and largest of received / shard bytes over the rollout ranks."""
        ratios = [row.bytes_received / row.shard_bytes for row in self.rollout]
        return min(ratios), max(ratios)

    @property
    def full_broadcast_factor(self) -> float:
        """How many times the bytes the rollout ranks would receive, were each sent the whole model."""
        return self.model_bytes * len(self.rollout) / self.bytes_received

    @property
    def busiest_sender(self) -> RankRow:
        """The first of the training ranks that send most."""
        return max(self.training, key=lambda row: row.bytes_sent)

    @property
    def busiest_receiver(self) -> RankRow:
        """The first of the rollout ranks that receive most."""
        return max(self.rollout, key=lambda row: row.bytes_received)

    @property
    def num_idle(self) -> int:
        """Training ranks that send nothing: copies of what others send."""
        return sum(row.bytes_sent == 0 for row in self.training)


def largest_unit(num_bytes: int) -> tuple[str, int]:
    """(name, bytes) of the largest binary unit that ``num_bytes`` reaches."""
    units = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
    return next((name, unit) for name, unit in units if num_bytes >= unit or unit == 1)


def size_text(num_bytes: int) -> str:
    """``5.91 GiB``."""
    name, unit = largest_unit(num_bytes)
    return f"{num_bytes} B" if unit == 1 else f"{num_bytes / unit:.2f} {name}"


def refit_traffic(plan: ReshardPlan, config: Config, *, ranks_per_node: int) -> RefitTraffic:
    """Count ``plan``, which is that of ``config``: sources are the training ranks from 0 on, destinations the next ones, or the same.

    What a colocated rank copies within itself counts as sent and received, as in the executor.

    ``ValueError`` where a bucket cannot hold one element.
    """
    network, parallel = describe_network(Path(config.model.model_path)), megatron_parallel(config)
    replica_size = config.parallel.rollout_tensor_parallel_size
    num_training, num_rollout = len(plan.source_shapes), len(plan.destination_shapes)
    first = 0 if config.is_colocated else num_training
    assert sorted(plan.source_shapes) == list(range(num_training))
    assert sorted(plan.destination_shapes) == list(range(first, first + num_rollout))
    matrix = np.zeros((num_training, num_rollout), dtype=np.int64)
    for group in plan.groups:
        for rank in group.destinations:
            matrix[group.source, rank - first] += group.num_elements * plan.bytes_per_element
    shard_size = config.fsdp_shards(num_training) if config.parallel.backend == "fsdp" else None
    rows = []
    summary = plan.summary(config.parallel.bucket_bytes)
    sides = [(rank, True) for rank in range(num_training)] + [(rank, False) for rank in range(first, first + num_rollout)]
    for rank, is_training in sides:
        traffic = summary[rank]
        if not is_training:
            place = _rollout_place(rank - first, replica_size)
        elif shard_size is not None:
            place = {"copy": rank // shard_size, "shard": rank % shard_size}
        else:
            place = _training_place(rank, num_training, network, parallel)
        shard = 0 if is_training else _shard_elements(plan.destination_shapes[rank], network.vocab_size, place["tp"])
        rows.append(
            RankRow(
                rank=rank,
                is_training=is_training,
                place=place,
                node=rank // ranks_per_node,
                bytes_sent=traffic.bytes_sent if is_training else 0,
                bytes_received=0 if is_training else traffic.bytes_received,
                shard_bytes=shard * plan.bytes_per_element,
                num_groups=traffic.num_groups,
                num_messages=traffic.num_messages,
                num_buckets=traffic.num_buckets,
                num_transfers=traffic.num_transfers,
            )
        )
    return RefitTraffic(
        network=network,
        parallel=parallel,
        fsdp_shard_size=shard_size,
        bytes_per_element=plan.bytes_per_element,
        replica_size=replica_size,
        whole_experts=config.rollout_expert_parallel,
        ranks_per_node=ranks_per_node,
        rows=tuple(rows),
        matrix=matrix,
        kinds=_kinds(plan, canonical_tensors(network, rollout_head(config))),
        num_groups=len(plan.groups),
    )


def tensor_kind(name: str) -> str:
    """Which of ``KINDS`` a canonical tensor is."""
    if name in (EMBEDDING, LM_HEAD, SCORE_HEAD):
        return "embedding_and_head"
    if name.endswith("norm.weight"):
        return "norms"
    return "attention" if ".self_attn." in name else "mlp"


def _training_place(rank: int, world_size: int, network: Network, parallel: MegatronParallel) -> dict[str, int]:
    at = rank_coordinates(rank, world_size, parallel)
    context = {"cp": at.cp} if parallel.context_parallel_size > 1 else {}
    experts = {"ep": at.ep, "expert_tp": at.expert_tp} if network.experts else {}
    return {"tp": at.tp, **context, "pp": at.pp, "dp": at.dp, **experts}


def _rollout_place(rank: int, replica_size: int) -> dict[str, int]:
    return {"replica": rank // replica_size, "tp": rank % replica_size}


def _shard_elements(shapes: Mapping[str, tuple[int, ...]], vocab_size: int, tp_rank: int) -> int:
    """Elements of a rollout rank's parameters; rows of the vocabulary beyond its end are padding."""
    total = 0
    for name, shape in shapes.items():
        if name in (EMBEDDING, LM_HEAD):
            rows = min(max(vocab_size - tp_rank * shape[0], 0), shape[0])
            total += rows * shape[1]
        else:
            total += math.prod(shape)
    return total


def _kinds(plan: ReshardPlan, tensors: Sequence[CanonicalTensor]) -> dict[str, KindRow]:
    kind_of = {tensor.name: tensor_kind(tensor.name) for tensor in tensors}
    model, sent, received = (dict.fromkeys(KINDS, 0) for _ in range(3))
    for tensor in tensors:
        model[kind_of[tensor.name]] += math.prod(tensor.shape) * plan.bytes_per_element
    for group in plan.groups:
        for transfer in group.transfers:
            kind, size = kind_of[transfer.name], transfer.num_elements * plan.bytes_per_element
            sent[kind] += size
            received[kind] += size * len(group.destinations)
    return {kind: KindRow(model[kind], sent[kind], received[kind]) for kind in KINDS}
