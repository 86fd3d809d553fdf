"""What the ranks of the training engine's tests do: a backend and an engine a case, its updates, and everything that came of them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron_parity_support import gather_canonical
from toy_batches import make_trajectories

from megatron_ppo.backends.base import StepResult
from megatron_ppo.config import Config
from megatron_ppo.data_bus import DataBus, DataHandle
from megatron_ppo.experience import make_experience
from megatron_ppo.training_engine import TrainingEngine
from megatron_ppo.types import Experience, TrajectoryBatch
from megatron_ppo.world import World

PROMPT_LENGTHS = (3, 4, 2, 5, 3, 6, 2, 4)
RESPONSE_LENGTHS = (9, 5, 12, 1, 10, 10, 0, 7)
Results = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One engine, the rows it learns from, and how the update is called."""

    fields: Mapping[str, object]
    """Flat configuration fields."""
    algorithm: Mapping[str, object] | None = None
    """Fields of the ``algorithm_config`` handed to the call where it is not the configuration's own."""
    rows: tuple[int, ...] = tuple(range(8))
    length: int | None = None
    """Columns of the batch; default: as long as its longest row."""
    pad_token: int = 0
    num_updates: int = 1
    poison: Literal["none", "advantage", "weight"] = "none"
    """NaN in one valid advantage, or in the last parameter of the last rank."""


def run_cases(rank: int, world_size: int, cases: Mapping[str, Case]) -> Results:
    """What each case gave, as this rank saw it; ``fetch`` too where there are several ranks."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("training", store), rank=rank, world_size=world_size)
    world = World(rank, world_size, rank, "training", rank, world_size, range(world_size), range(world_size, world_size), 1, store, "test")
    results = {name: run_case(world, case) for name, case in cases.items()}
    if world_size > 1:
        results["fetch"] = fetch(world)
    dist.barrier()
    dist.destroy_process_group()
    return results


def run_case(world: World, case: Case) -> dict[str, Any]:
    from megatron_ppo.backends.fsdp import FSDPBackend
    from megatron_ppo.backends.megatron import MegatronBackend
    from megatron_ppo.backends.megatron_setup import destroy_megatron

    config = Config().replace(**dict(case.fields))
    backend_class: Any = {"megatron": MegatronBackend, "fsdp": FSDPBackend}[config.parallel.backend]

    class Recording(backend_class):
        """Remembers what every optimizer step reported, and how many passes it took."""

        def train_step(self, role: Any, micro_batches: Any, loss_fn: Any, *, temperature: float = 1.0) -> StepResult:
            result: StepResult = super().train_step(role, micro_batches, loss_fn, temperature=temperature)
            steps.append((role, result, len(micro_batches)))
            return result

    steps: list[tuple[str, StepResult, int]] = []
    torch.manual_seed(11)
    try:
        backend = Recording(config, num_optimizer_steps=config.num_optimizer_steps)
        bus = DataBus(world, timeout_s=60)
        engine = TrainingEngine(config, world, bus, backend, torch.device("cpu"))
        return {"steps": steps} | observe(world, config, case, backend, engine, bus)
    except ValueError as error:
        return {"refused": str(error)}
    finally:
        if config.parallel.backend == "megatron":
            destroy_megatron()


def observe(world: World, config: Config, case: Case, backend: Any, engine: TrainingEngine, bus: DataBus) -> dict[str, Any]:
    batch = make_batch(case)
    algorithm = config.algorithm if case.algorithm is None else dataclasses.replace(config.algorithm, **dict(case.algorithm))  # type: ignore[arg-type]
    if case.poison == "weight" and world.rank == world.mesh_size - 1:
        list(backend.weights().values())[-1].fill_(float("nan"))  # near the logits: rows of an embedding may not be asked for
    found: dict[str, Any] = {
        "log_probs": engine.compute_log_probs(batch),
        "ref": engine.compute_ref_log_probs(batch),
        "values": engine.compute_values(batch),
        "scores": engine.compute_scores(batch),
        "metrics": [],
    }
    try:
        experience, found["experience"] = make_experience(
            batch, found["log_probs"], found["values"], found["ref"], found["scores"], algorithm, algorithm.kl_coef
        )
    except FloatingPointError as error:
        return found | {"not finite": str(error)}
    found |= {"advantages": experience.advantages, "returns": experience.returns}
    frozen = {name: tensor.clone() for name, tensor in backend.named_parameters("reference").items()} if config.uses_reference else {}
    found["start"] = {role: gather_canonical(backend, role) for role in trained(config)}
    update(engine, bus, spoilt(experience) if case.poison == "advantage" else experience, algorithm, case.num_updates, found)
    found["version"] = engine.version
    found["weights"] = {role: gather_canonical(backend, role) for role in trained(config)}
    if case.num_updates > 1:
        found |= {"log_probs after": engine.compute_log_probs(batch), "values after": engine.compute_values(batch)}
    if config.uses_reference:
        reference = backend.named_parameters("reference")
        found["reference kept"] = all(torch.equal(frozen[name], tensor) for name, tensor in reference.items())
        found["ref after"] = engine.compute_ref_log_probs(batch)
        own = {tensor.untyped_storage().data_ptr() for tensor in backend.weights().values()}
        found["reference shares"] = [name for name, tensor in reference.items() if tensor.untyped_storage().data_ptr() in own]
    return found


def update(
    engine: TrainingEngine, bus: DataBus, experience: Experience, algorithm: Any, num_updates: int, found: dict[str, Any]
) -> None:
    for _ in range(num_updates):
        handle = bus.put(experience)
        found["metrics"].append(engine.update_policy(handle, algorithm))
        bus.delete(handle)


def spoilt(experience: Experience) -> Experience:
    """One valid advantage of row 0 alone is NaN: only the replica that holds it sees one."""
    advantages = experience.advantages.clone()
    advantages[0, int(experience.trajectories.prompt_lengths[0])] = float("nan")
    return dataclasses.replace(experience, advantages=advantages)


def trained(config: Config) -> list[str]:
    return ["actor", "critic"] if config.model.critic == "separate" else ["actor"]


def make_batch(case: Case) -> TrajectoryBatch:
    batch = make_trajectories(PROMPT_LENGTHS, RESPONSE_LENGTHS, length=case.length, pad_token=case.pad_token, group_size=4)
    if case.rows == tuple(range(8)):
        return batch
    if len(case.rows) > 8:  # a bigger batch of the same rows
        batch = TrajectoryBatch.concatenate([batch] * (len(case.rows) // 8))
    return batch.select(torch.tensor(case.rows))


def fetch(world: World) -> dict[str, Any]:
    """Three replicas' trajectories of unlike width, each put by a rank that does not pull it."""
    bus = DataBus(world, timeout_s=60)
    engine = TrainingEngine(Config(), world, bus, backend=None, device=torch.device("cpu"))  # type: ignore[arg-type]
    handles = []
    for index in range(3):
        owner = (index + 1) % world.mesh_size
        handles.append(DataHandle(owner, f"trajectories/{index}"))
        if world.rank == owner:
            part = make_trajectories((2, 3), (1 + 4 * index, 2), seed=index)
            bus.put(dataclasses.replace(part, metrics={"time": [float(index)]}), handles[-1].key)
    found = {"batch": engine.fetch(handles)}
    dist.barrier()  # the owners serve until all have pulled
    return found
