"""Process groups, seeds and schedule settings of megatron-core, before any model is built.

Stands at the start of a training rank: ``world.py`` has made the training mesh's default process group, this module cuts it into
tensor-, context-, data-, expert- and pipeline-parallel groups, in Megatron's default order (``resharding/megatron_mesh.py``).

Left out: building networks (``megatron.py``), and equations between sizes that need no megatron (``config_checks.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_ppo import device
from megatron_ppo.config import Config, ParallelConfig
from megatron_ppo.resharding.megatron_mesh import RankCoordinates, data_parallel_size, megatron_parallel, rank_coordinates

_made: list[torch.distributed.ProcessGroup] = []
"""Groups of megatron-core that live in this process."""


def initialize_megatron(config: Config, seed: int) -> RankCoordinates:
    """Make megatron-core's process groups over the default group and seed its random states. Collective over the training mesh.

    Returns this rank's coordinates. ``ValueError`` for settings that megatron-core would run wrongly or not at all;
    ``RuntimeError`` where there is no default group yet, or where megatron-core already has groups.
    """
    device.prepare_megatron()
    from megatron.core import parallel_state, tensor_parallel

    if not torch.distributed.is_initialized():
        raise RuntimeError("the training mesh has no default process group yet; make it (world.py) before the Megatron backend")
    if parallel_state.model_parallel_is_initialized():
        raise RuntimeError("megatron-core already has process groups in this process; call destroy_megatron() first")
    parallel, world_size = config.parallel, torch.distributed.get_world_size()
    check_settings(config, world_size)
    sizes = megatron_parallel(config)
    before = set(torch.distributed.distributed_c10d._world.pg_map)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=sizes.expert_model_parallel_size,
        expert_tensor_parallel_size=sizes.expert_tensor_size,
        distributed_timeout_minutes=parallel.distributed_timeout_minutes,
        # One backend is enough: the twins over gloo serve checkpoint formats that are not used here.
        create_gloo_process_groups=False,
    )
    _made.extend(group for group in torch.distributed.distributed_c10d._world.pg_map if group not in before)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    found = RankCoordinates(
        dp=parallel_state.get_data_parallel_rank(),
        pp=parallel_state.get_pipeline_model_parallel_rank(),
        tp=parallel_state.get_tensor_model_parallel_rank(),
        cp=parallel_state.get_context_parallel_rank(),
        ep=parallel_state.get_expert_model_parallel_rank(),
        expert_tp=parallel_state.get_expert_tensor_parallel_rank(),
    )
    expected = rank_coordinates(torch.distributed.get_rank(), world_size, sizes)
    assert found == expected, f"megatron-core placed this rank at {found}, the arithmetic of megatron_mesh.py at {expected}"
    return found


def destroy_megatron() -> None:
    """End megatron-core's process groups, so that others can be made in this process. The default group stays.

    Not collective, but nothing may be under way on them. megatron-core itself only forgets them, with some 50 threads of gloo each time.
    """
    device.prepare_megatron()
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    while _made:
        torch.distributed.destroy_process_group(_made.pop())


def check_settings(config: Config, world_size: int) -> None:
    """``ValueError`` for combinations of settings that megatron-core 0.16.1 refuses late or runs wrongly."""
    _check_overrides(config.model.transformer_overrides)
    parallel = config.parallel
    stages, chunks = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    data_parallel_size(world_size, megatron_parallel(config))
    if chunks is not None and (chunks < 2 or stages < 2):
        raise ValueError(
            f"virtual_pipeline_model_parallel_size {chunks} with pipeline_model_parallel_size {stages}: the interleaved schedule needs "
            "at least 2 of both. Leave virtual_pipeline_model_parallel_size away for the plain 1F1B schedule"
        )
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        raise ValueError("sequence_parallel splits work between tensor-parallel ranks, but tensor_model_parallel_size is 1: turn it off")
    if config.optimizer.optimizer == "sgd" and parallel.use_distributed_optimizer:
        raise ValueError(
            "megatron-core's distributed optimizer shards Adam only, and sgd has no state to shard: "
            "set use_distributed_optimizer to false with optimizer sgd"
        )


def _check_overrides(overrides: Mapping[str, str]) -> None:
    taken = sorted(set(overrides) & SCHEDULE_FIELDS)
    if taken:
        raise ValueError(
            f"transformer_overrides sets {', '.join(taken)}, which the pipeline schedule decides: other values mix up messages between "
            "stages or change the loss without a word in megatron-core 0.16.1. Remove them"
        )


SCHEDULE_FIELDS = frozenset(
    {
        "calculate_per_token_loss",
        "pipeline_dtype",
        "variable_seq_lengths",
        "overlap_p2p_comm",
        "batch_p2p_comm",
        "deallocate_pipeline_outputs",
        "overlap_p2p_comm_warmup_flush",
        "microbatch_group_size_per_vp_stage",
    }
)
"""Fields of megatron-core's TransformerConfig that ``configure_schedule`` or the role sets, or whose default they rely on."""


def configure_schedule(transformer: Any, parallel: ParallelConfig) -> None:
    """Set the fields of a megatron-core ``TransformerConfig`` that its pipeline schedules and gradient reduction read."""
    transformer.pipeline_dtype = transformer.params_dtype
    interleaved = parallel.virtual_pipeline_model_parallel_size is not None
    # 1F1B asks each neighbour for the shape of a micro-batch first. Interleaved, forward and backward messages between two ranks travel
    # at once and the shape messages of one could be read as the other's: there all micro-batches get one shape instead.
    transformer.variable_seq_lengths = not interleaved and parallel.pipeline_model_parallel_size > 1
    # With any other setting the interleaved schedule of 0.16.1 mixes up messages of two ranks, or sends memory it has given back.
    transformer.overlap_p2p_comm = interleaved
    transformer.batch_p2p_comm = not interleaved
    transformer.deallocate_pipeline_outputs = False
