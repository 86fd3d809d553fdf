"""How megatron-core cuts its ranks and its layers: sizes of the training mesh, coordinates of a rank, layers of a stage. Pure arithmetic.

Read by the layouts (``megatron_layout.py``), by the backend that makes the process groups, and by whoever plans without either. Source:
megatron-core 0.16.1, ``parallel_state.py`` (RankGenerator) and ``transformer/transformer_block.py`` (get_num_layers_to_build).

    world of 8, TP 2, PP 2:   rank        0 1 2 3   4 5 6 7        and with EP 2, expert TP 1:   ep   0 1 0 1   0 1 0 1
                              pp          0 0 0 0   1 1 1 1
                              dp          0 0 1 1   0 0 1 1
                              tp          0 1 0 1   0 1 0 1

    layers of 8, PP 2, 2 chunks a stage:   stage 0 holds 0 1 and 4 5, stage 1 holds 2 3 and 6 7
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from megatron_ppo.config import Config


@dataclass(frozen=True)
class MegatronParallel:
    """The sizes of the training mesh that decide where a weight lies; Megatron's names."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    """Chunks a stage holds; None: one, and names without the ``model{v}.`` prefix."""
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    """Ranks that share each expert's matrices; None: as many as share the dense ones."""
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    """The embedding counts as a layer, so that the first stage holds one decoder layer less (none, where a stage has one)."""
    account_for_loss_in_pipeline_split: bool = False
    """The same for the last stage and the head."""
    make_vocab_size_divisible_by: int = 128

    @property
    def num_chunks(self) -> int:
        """Chunks of a stage, 1 without the interleaved schedule."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def expert_tensor_size(self) -> int:
        """Ranks that share each expert's matrices."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size


SPLIT_OVERRIDES = {
    "expert_tensor_parallel_size": int,
    "num_layers_in_first_pipeline_stage": int,
    "num_layers_in_last_pipeline_stage": int,
    "account_for_embedding_in_pipeline_split": bool,
    "account_for_loss_in_pipeline_split": bool,
}
"""Fields of megatron-core's TransformerConfig that decide where a weight lies and are set through ``transformer_overrides``."""


def megatron_parallel(config: Config) -> MegatronParallel:
    """The sizes of a run; ``ValueError`` for an override that is no number or no true/false."""
    parallel = config.parallel
    return MegatronParallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        make_vocab_size_divisible_by=config.model.make_vocab_size_divisible_by,
        **_split_overrides(config.model.transformer_overrides),
    )


def _split_overrides(overrides: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in SPLIT_OVERRIDES.keys() & overrides.keys():
        text = str(overrides[name]).strip().lower()
        if text in ("none", "null"):
            continue
        if SPLIT_OVERRIDES[name] is bool and text in ("true", "false"):
            found[name] = text == "true"
        elif SPLIT_OVERRIDES[name] is int and text.isdecimal() and int(text) > 0:
            found[name] = int(text)
        else:
            kind = "true or false" if SPLIT_OVERRIDES[name] is bool else "a whole number above 0"
            raise ValueError(f"transformer_overrides: {name} = {overrides[name]!r} must be {kind}")
    return found


@dataclass(frozen=True)
class RankCoordinates:
    """Where one rank stands on each axis of the training mesh."""

    dp: int
    pp: int
    tp: int
    cp: int = 0
    ep: int = 0
    """Which share of the experts it holds."""
    expert_tp: int = 0
    """Which part of their matrices."""


def rank_coordinates(rank: int, world_size: int, parallel: MegatronParallel) -> RankCoordinates:
    """Coordinates of ``rank`` in a training mesh of ``world_size`` ranks, as pure arithmetic.

    Megatron's order, fastest first: tp, cp, dp, pp for dense weights; expert tp, ep, expert dp, pp for experts. ``ValueError`` where the
    ranks cannot be cut so.
    """
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    dp = data_parallel_size(world_size, parallel)
    within = rank % (tp * cp * dp)  # among the ranks of its stage
    expert_tp = parallel.expert_tensor_size
    return RankCoordinates(
        dp=within // (tp * cp),
        pp=rank // (tp * cp * dp),
        tp=within % tp,
        cp=within // tp % cp,
        ep=within // expert_tp % parallel.expert_model_parallel_size,
        expert_tp=within % expert_tp,
    )


def data_parallel_size(world_size: int, parallel: MegatronParallel) -> int:
    """Copies of the dense weights; ``ValueError`` with the equation where the ranks cannot be cut into copies of the model."""
    tp, cp, pp = parallel.tensor_model_parallel_size, parallel.context_parallel_size, parallel.pipeline_model_parallel_size
    ep, expert_tp = parallel.expert_model_parallel_size, parallel.expert_tensor_size
    if world_size % (tp * pp * cp):
        raise ValueError(
            f"{world_size} training ranks cannot be cut into copies of the model: tensor {tp} x pipeline {pp} x context {cp} = "
            f"{tp * pp * cp} ranks each. Change the number of training ranks to a multiple of {tp * pp * cp}"
        )
    if world_size % (expert_tp * ep * pp):
        raise ValueError(
            f"{world_size} training ranks cannot be cut into copies of the experts: expert tensor {expert_tp} x expert {ep} x pipeline "
            f"{pp} = {expert_tp * ep * pp} ranks each. Change a size, or the number of training ranks to a multiple of "
            f"{expert_tp * ep * pp}"
        )
    return world_size // (tp * pp * cp)


def smallest_world_size(config: Config) -> int:
    """Ranks of the smallest launch that the sizes admit: one copy of dense weights and of experts, and the rollout ranks.

    ``ValueError`` for overrides that cannot be read.
    """
    parallel = megatron_parallel(config)
    experts = parallel.expert_tensor_size * parallel.expert_model_parallel_size * parallel.pipeline_model_parallel_size
    shards = config.parallel.fsdp_shard_size or 1
    training = math.lcm(config.model_parallel_size, experts, shards)
    if config.is_colocated:
        return math.lcm(training, config.parallel.rollout_tensor_parallel_size)
    return training + config.parallel.rollout_world_size


def stage_layers(num_layers: int, parallel: MegatronParallel) -> list[list[range]]:
    """[stage][chunk] -> global numbers of its layers, in order (``get_num_layers_to_build`` of megatron-core).

    ``ValueError`` with the equation where the layers cannot be cut so.
    """
    pp, chunks = parallel.pipeline_model_parallel_size, parallel.num_chunks
    if parallel.virtual_pipeline_model_parallel_size is not None and pp == 1:
        raise ValueError(
            f"virtual_pipeline_model_parallel_size {chunks} needs pipeline_model_parallel_size > 1; leave it unset or raise the latter"
        )
    sizes = _stage_sizes(num_layers, parallel)
    counts = [[size // chunks] * chunks for size in sizes]
    for stage, size in enumerate(sizes):
        if size % chunks:
            raise ValueError(
                f"pipeline stage {stage} has {size} layers, which virtual_pipeline_model_parallel_size {chunks} does not divide; "
                f"choose sizes so that every stage divides ({num_layers} layers, pipeline_model_parallel_size {pp})"
            )
    counts[0][0] -= parallel.account_for_embedding_in_pipeline_split
    counts[-1][-1] -= parallel.account_for_loss_in_pipeline_split
    if min(counts[0][0], counts[-1][-1]) < 0:
        raise ValueError(f"{num_layers} layers leave less than none for the stage of the embedding or of the loss; use fewer stages")
    order = [(stage, chunk) for chunk in range(chunks) for stage in range(pp)]
    ends = list(accumulate(counts[stage][chunk] for stage, chunk in order))
    found = [[range(0)] * chunks for _ in range(pp)]
    for (stage, chunk), end in zip(order, ends, strict=True):
        found[stage][chunk] = range(end - counts[stage][chunk], end)
    return found


def _stage_sizes(num_layers: int, parallel: MegatronParallel) -> list[int]:
    """Layers of each stage; embedding and loss count as layers where the sizes say so."""
    pp = parallel.pipeline_model_parallel_size
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    embedding, loss = parallel.account_for_embedding_in_pipeline_split, parallel.account_for_loss_in_pipeline_split
    if first is None and last is None:
        total = num_layers + embedding + loss
        if total % pp:
            counted = "".join(f" + {name}" for name, counts in (("embedding", embedding), ("loss", loss)) if counts)
            good = [n for n in range(1, total + 1) if total % n == 0]
            raise ValueError(
                f"{num_layers} layers{counted} are not a multiple of pipeline_model_parallel_size = {pp}; it may be one of {good}, or give "
                "the first or last stage its own number by transformer_overrides num_layers_in_first_pipeline_stage, "
                "num_layers_in_last_pipeline_stage, account_for_embedding_in_pipeline_split or account_for_loss_in_pipeline_split"
            )
        return [total // pp] * pp
    if embedding or loss:
        raise ValueError("num_layers_in_first/last_pipeline_stage and account_for_embedding/loss_in_pipeline_split exclude each other")
    own = [number for number in (first, last) if number is not None]
    rest, stages = num_layers - sum(own), pp - len(own)
    if pp < 2 or min(own) < 1 or rest < stages or (rest % stages if stages else rest):
        raise ValueError(
            f"{num_layers} layers, of which num_layers_in_first_pipeline_stage = {first} and num_layers_in_last_pipeline_stage = {last}, "
            f"leave {rest} for the other {stages} of {pp} stages; they must divide evenly, at least one each"
        )
    if not stages and parallel.virtual_pipeline_model_parallel_size is not None:
        raise ValueError(
            "with two stages and virtual_pipeline_model_parallel_size, give one of num_layers_in_first_pipeline_stage and "
            "num_layers_in_last_pipeline_stage, not both (megatron-core 0.16.1 divides by the 0 stages between them)"
        )
    middle = [rest // stages] * stages if stages else []
    return [*([] if first is None else [first]), *middle, *([] if last is None else [last])]
