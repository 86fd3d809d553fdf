"""How many parameters each rank holds, counted on the real model classes, without memory for them and without other ranks.

Below ``planner.py``. For Megatron a child process joins a fake process group of the full size of the training mesh (torch's own, whose
collectives do nothing), lets megatron-core cut it, and builds the role of one rank of a pipeline stage with its matrices on the "meta"
device: whatever the class allocates is what is counted, paddings and replicated heads included. Stages between the first and the last are
equal, so three ranks are enough; tensor-, context- and data-parallel ranks of a stage hold the same number. For FSDP the Hugging Face model
is built on "meta" and its rows are shared out by ``fsdp_layout.shard_rows``.

Left out: bytes (``plan_memory.py``), and which values the parameters have.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_ppo.backends.base import PlannedNetwork, RoleName, planned_networks
from megatron_ppo.config import Config
from megatron_ppo.families import Head, NetworkShape, network_shape
from megatron_ppo.resharding.fsdp_layout import shard_rows
from megatron_ppo.resharding.megatron_mesh import megatron_parallel, stage_layers

LARGE = 2**22
"""Elements from which on a tensor must not have memory in a planning process."""


@dataclass(frozen=True)
class HeldParameters:
    """What one rank holds of one network."""

    num_dense: int
    """Elements outside of experts: sharded by the optimizer over data x context parallel ranks."""
    num_expert: int
    """Elements of experts: sharded by the optimizer over the ranks that hold the same experts."""
    num_tensors: int
    largest_unit: int = 0
    """FSDP: elements of the largest layer, whole, as it is gathered for a pass."""
    root_unit: int = 0
    """FSDP: elements of embedding, final norm and heads, whole, gathered during all of a pass."""

    @property
    def total(self) -> int:
        """All elements."""
        return self.num_dense + self.num_expert


@dataclass(frozen=True)
class Stage:
    """Ranks of the training mesh that hold equally much."""

    stages: tuple[int, ...]
    """Pipeline stages; FSDP: (0,)."""
    rank: int
    """The rank that was built: tensor, context and data coordinates 0."""
    num_layers: tuple[int, ...]
    """Layers of the actor in each of its chunks."""
    is_first: bool
    is_last: bool
    networks: Mapping[RoleName, HeldParameters]


def build_stages(configs: Sequence[Config], num_training: Sequence[int], *, processes: int = 2) -> list[list[Stage]]:
    """For each configuration, with its number of training ranks, what the ranks of each distinct stage hold, in order of the stages.

    ``ValueError`` where a network cannot be built so; configurations must have passed ``validate``. Starts child processes.
    """
    pairs = zip(map(_local, configs), num_training, strict=True)
    jobs = [(index, job) for index, (config, size) in enumerate(pairs) for job in _jobs(config, size)]
    # A process of their own: they make process groups, hide GPUs and install stand-ins, none of which the caller may want.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=max(1, min(processes, len(jobs))), mp_context=context, initializer=_prepare_process) as pool:
        answers = list(pool.map(_build, [job for _, job in jobs]))
    found: list[list[Stage]] = [[] for _ in configs]
    for (index, job), (networks, fault) in zip(jobs, answers, strict=True):
        if fault:
            raise ValueError(f"{job.config.model.model_path} cannot be built on rank {job.rank} of {job.num_training}: {fault}")
        found[index].append(Stage(job.stages, job.rank, job.num_layers, job.is_first, job.is_last, networks))
    return found


def chunk_sizes(config: Config, network: NetworkShape, stage: int) -> tuple[int, ...]:
    """Layers of a network in each chunk of a pipeline stage."""
    if config.parallel.backend == "fsdp":
        return (network.num_layers,)
    return tuple(len(chunk) for chunk in stage_layers(network.num_layers, megatron_parallel(config))[stage])


def _local(config: Config) -> Config:
    """The same with layers that need no GPU, whose parameters are as many as Transformer Engine's."""
    overrides = config.model.transformer_overrides
    return config.replace(transformer_overrides={name: text for name, text in overrides.items() if name != "transformer_impl"})


@dataclass(frozen=True)
class _Job:
    config: Config
    num_training: int
    rank: int
    stages: tuple[int, ...]
    num_layers: tuple[int, ...]
    is_first: bool
    is_last: bool


def _jobs(config: Config, num_training: int) -> list[_Job]:
    network = network_shape(Path(config.model.model_path))
    if config.parallel.backend == "fsdp":
        return [_Job(config, num_training, 0, (0,), chunk_sizes(config, network, 0), is_first=True, is_last=True)]
    count = config.parallel.pipeline_model_parallel_size
    per_stage = num_training // count
    jobs: list[_Job] = []
    for stages in ([0], list(range(1, count - 1)), [count - 1]):
        if not stages or (stages == [0] and count == 1 and jobs):
            continue
        sizes = chunk_sizes(config, network, stages[0])
        first, last = stages[0] == 0, stages[-1] == count - 1
        jobs.append(_Job(config, num_training, stages[0] * per_stage, tuple(stages), sizes, is_first=first, is_last=last))
    return jobs


# -- in the child process ---------------------------------------------------------------------------------------------


def _prepare_process() -> None:
    """Plan as if there were no GPU: a job's ranks are not this machine's."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)


def _build(job: _Job) -> tuple[dict[RoleName, HeldParameters], str]:
    """Role -> parameters, or the reason in words; with its traceback where it is our bug."""
    try:
        planned = planned_networks(job.config)
        build = _fsdp_parameters if job.config.parallel.backend == "fsdp" else _megatron_parameters
        return build(job, planned), ""
    except ValueError as error:
        return {}, str(error)
    except Exception:
        return {}, traceback.format_exc()


def _megatron_parameters(job: _Job, planned: Mapping[RoleName, PlannedNetwork]) -> dict[RoleName, HeldParameters]:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_ppo.backends.megatron_setup import destroy_megatron, initialize_megatron

    dist.init_process_group("fake", store=FakeStore(), rank=job.rank, world_size=job.num_training)
    try:
        initialize_megatron(job.config, job.config.training.seed)
        try:
            known: dict[tuple[Path, Head], HeldParameters] = {}
            for plan in planned.values():
                if (plan.folder, plan.head) not in known:
                    known[plan.folder, plan.head] = _count(_megatron_roles(job.config, plan))
            return {role: known[plan.folder, plan.head] for role, plan in planned.items()}
        finally:
            destroy_megatron()
    finally:
        dist.destroy_process_group()


def _megatron_roles(config: Config, plan: PlannedNetwork) -> list[Any]:
    """This rank's chunks of a network, as ``MegatronBackend`` builds them."""
    from megatron.core import parallel_state

    from megatron_ppo.roles.megatron_actor_critic import MegatronActorCritic

    shape, virtual = network_shape(plan.folder), config.parallel.virtual_pipeline_model_parallel_size
    roles = []
    with _WithoutMemory():
        for stage in range(virtual) if virtual else [None]:
            first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
            last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
            roles.append(MegatronActorCritic(shape, config, head=plan.head, pre_process=first, post_process=last, vp_stage=stage))
    return roles


class _WithoutMemory(TorchFunctionMode):
    """``torch.empty`` without a device, by which megatron-core makes weights that a CPU initialises, gives tensors without memory."""

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        options = kwargs or {}
        # By its name: ``device.prepare_megatron`` has put a stand-in in the place of ``torch.empty``, which calls the one that comes here.
        if getattr(function, "__name__", "") == "empty" and options.get("device") is None:
            options = options | {"device": "meta"}
        return function(*args, **options)


def _count(roles: Sequence[Any]) -> HeldParameters:
    parameters = {id(parameter): parameter for role in roles for parameter in role.parameters()}
    for parameter in parameters.values():
        assert parameter.is_meta or parameter.numel() < LARGE, f"a parameter of {parameter.numel()} elements was given memory"
    # megatron-core marks the parameters of experts: they are not reduced over all data-parallel ranks.
    experts = sum(p.numel() for p in parameters.values() if not getattr(p, "allreduce", True))
    total = sum(p.numel() for p in parameters.values())
    return HeldParameters(total - experts, experts, len(parameters))


def _fsdp_parameters(job: _Job, planned: Mapping[RoleName, PlannedNetwork]) -> dict[RoleName, HeldParameters]:
    from megatron_ppo.backends.fsdp_setup import decoder_layers, empty_role

    shards = job.config.fsdp_shards(job.num_training)
    found: dict[RoleName, HeldParameters] = {}
    for role, plan in planned.items():
        model, module = empty_role(job.config, plan.folder, plan.head, frozen=plan.peak_lr is None)
        layers = decoder_layers(model.base_model)
        parameters = dict(module.named_parameters())
        in_layers = {id(p) for layer in layers for p in layer.parameters()}
        rows = [shard_rows(p.shape[0], shards, 0) for p in parameters.values()]
        held = sum((last - first) * math.prod(p.shape[1:]) for (first, last), p in zip(rows, parameters.values(), strict=True))
        found[role] = HeldParameters(
            num_dense=held,
            num_expert=0,
            num_tensors=len(parameters),
            largest_unit=max(sum(p.numel() for p in layer.parameters()) for layer in layers),
            root_unit=sum(p.numel() for p in parameters.values() if id(p) not in in_layers),
        )
    return found
