"""Received bytes over shard bytes, for every family and topology: each sync is really run, and every value is looked at.

The shard's bytes come from the sizes of the destination's parameters and ``vocab_size`` alone, not from the plan. Models are tiny, with 2
key/value heads and a vocabulary that both sides pad; parameters are NaN before the sync.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from refit_launch import Ranks, join_world
from refit_model import DTYPE, Mesh, empty_parameters, fill, shard_bytes, tiny, wrong_blocks

from megatron_ppo.bridge import Bridge
from megatron_ppo.families import FAMILIES
from megatron_ppo.resharding.executor import ReshardExecutor
from megatron_ppo.resharding.megatron_mesh import MegatronParallel
from megatron_ppo.resharding.plan import build_plan

_BUCKET_BYTES = 4096
"""Small, so that boxes are cut and several buckets follow each other."""
_TRAINING_RANKS = 4
_ROLLOUT_RANKS = 4

TRAINING: dict[str, tuple[MegatronParallel, int]] = {
    "TP2": (MegatronParallel(tensor_model_parallel_size=2), 2),
    "PP2": (MegatronParallel(pipeline_model_parallel_size=2), 2),
    "TP2xPP2": (MegatronParallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2), 4),
    "VPP2": (MegatronParallel(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2), 2),
    "EP2": (MegatronParallel(expert_model_parallel_size=2), 2),
    "uneven PP": (MegatronParallel(pipeline_model_parallel_size=2, num_layers_in_first_pipeline_stage=1), 2),
}
"""Name -> sizes, ranks."""
ROLLOUT: dict[str, tuple[int, int, bool]] = {"TP1 x 2": (1, 2, False), "TP2": (2, 2, False), "TP4": (4, 1, False), "TP2 + EP": (2, 1, True)}
"""Name -> tensor-parallel size, replicas, whether experts stay whole. With 2 key/value heads, TP4 holds each of them twice."""


@dataclass(frozen=True)
class Combination:
    """One sync."""

    family: str
    mesh: Mesh


def combinations(families: Sequence[str] = tuple(FAMILIES)) -> list[Combination]:
    """All that exist: expert parallelism needs experts."""
    found = []
    for family in families:
        has_experts = FAMILIES[family].experts is not None
        for training, (parallel, num_training) in TRAINING.items():
            for rollout, (tp, replicas, expert_parallel) in ROLLOUT.items():
                if has_experts or (parallel.expert_model_parallel_size == 1 and not expert_parallel):
                    mesh = Mesh(training, parallel, num_training, rollout, tp, replicas, expert_parallel)
                    found.append(Combination(family, mesh))
    return found


class CoverageRank:
    """One of 4 + 4 ranks; a combination takes as many of each kind as it needs."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._world = rank, join_world(rank, num_ranks, _TRAINING_RANKS, 1)

    def sync_all(self, wanted: Sequence[Combination]) -> list[tuple[int, int, list[str]] | None]:
        """(bytes received, bytes of the shard, blocks that are wrong) of each combination; None where this rank receives nothing."""
        return [self._sync(number, combination) for number, combination in enumerate(wanted)]

    def _sync(self, number: int, combination: Combination) -> tuple[int, int, list[str]] | None:
        mesh, network, rank = combination.mesh, tiny(combination.family), self._rank
        sources, destinations = mesh.source_layouts(network), mesh.destination_layouts(network, _TRAINING_RANKS)
        layout = {**sources, **destinations}.get(rank)
        if layout is None:
            return None
        plan = build_plan(sources, destinations, bytes_per_element=DTYPE.itemsize)
        bridges: list[Bridge] = []

        def make_group(name: str, ranks: Sequence[int]) -> Bridge:
            bridges.append(Bridge(f"{number}/{name}", ranks, self._world))
            return bridges[-1]

        executor = ReshardExecutor(plan, rank, make_group, bucket_bytes=_BUCKET_BYTES, transfer_dtype=DTYPE)
        parameters = empty_parameters(layout)
        result = None
        if rank in sources:
            fill(layout, network, parameters)
            executor.send(parameters)
        else:
            stats = executor.receive(parameters)
            expected = shard_bytes(layout, network, (rank - _TRAINING_RANKS) % mesh.rollout_tp)
            result = stats.bytes_received, expected, wrong_blocks(layout, network, parameters)
        for bridge in bridges:
            bridge.close()
        return result


def run_coverage(families: Sequence[str] = tuple(FAMILIES)) -> list[dict[str, Any]]:
    """Run every combination on one launch of 4 + 4 ranks. ``RuntimeError`` where a value did not arrive."""
    wanted = combinations(families)
    with Ranks(CoverageRank, _TRAINING_RANKS + _ROLLOUT_RANKS) as ranks:
        by_rank = ranks.ask("sync_all", wanted)
    rows = []
    for number, combination in enumerate(wanted):
        results = [results[number] for results in by_rank if results[number] is not None]
        wrong = [block for _, _, blocks in results for block in blocks]
        if wrong:
            raise RuntimeError(f"{combination.family}, {combination.mesh.name}: {len(wrong)} blocks did not arrive, first {wrong[0]}")
        rows.append(
            {
                "family": combination.family,
                "training": combination.mesh.training,
                "rollout": combination.mesh.rollout,
                "received_bytes": [received for received, _, _ in results],
                "shard_bytes": [expected for _, expected, _ in results],
                "received_over_shard": [received / expected for received, expected, _ in results],
            }
        )
    return rows
