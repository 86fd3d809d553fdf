"""TrainingEngine: the authoritative weights, and everything that is computed with them.

Steps 3 and 5 of the iteration, on the training mesh. It cuts batches into each data-parallel replica's micro-batches, lets the backend
run them, and puts the results together again, so that what it returns is the whole batch on every rank: experience.py and ppo.py know
no topology.
Which framework trains is the backend's matter; when what is asked is the controller's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ppo.backends.base import LossFunction, PendingSave, RoleName, StepResult, TrainingBackend
from megatron_ppo.checkpoint import TrainerState
from megatron_ppo.config import AlgorithmConfig, Config
from megatron_ppo.data_bus import DataBus, DataHandle
from megatron_ppo.losses import make_actor_loss, make_critic_loss
from megatron_ppo.packing import make_micro_batch, partition_rows, plan_micro_batches, scatter_back, scatter_scores, split_mini_batches
from megatron_ppo.prompts import request_seed
from megatron_ppo.types import Experience, MicroBatch, TrajectoryBatch
from megatron_ppo.world import World


class TrainingEngine:
    """One training rank's end of the engine; all methods but ``get_weights`` are collective over the training mesh."""

    def __init__(self, config: Config, world: World, bus: DataBus, backend: TrainingBackend, device: torch.device) -> None:
        self.version = 0
        """Number of finished updates."""
        self._config = config
        self._world = world
        self._bus = bus
        self._backend = backend
        self._device = device
        self._published: DataHandle | None = None
        self.num_optimizer_steps: dict[str, int] = {"actor": 0, "critic": 0}
        """Role -> optimizer steps taken."""
        self.consecutive_skipped: dict[str, int] = {"actor": 0, "critic": 0}
        """Role -> optimizer steps in a row that its last ones skipped because a loss or gradient was not finite."""

    def get_weights(self) -> DataHandle:
        """A handle of this rank's live actor parameters at the present version. Does not block; copies shards in host memory alone."""
        self.release_weights()
        self._published = self._bus.put(self._backend.weights(), key=f"weights/{self.version}")
        return self._published

    def release_weights(self) -> None:
        """After a sync: what was published is taken back. With ``cpu_offload = always`` it is a copy on the accelerator."""
        if self._published is not None:
            self._bus.delete(self._published)
            self._published = None

    def make_room(self) -> None:
        """Before an engine on the same ranks samples: what ``cpu_offload`` says goes out of its way."""
        if self._config.parallel.cpu_offload == "sampling":
            self._backend.offload()

    def take_room(self) -> None:
        """After ``make_room``, before training goes on."""
        if self._config.parallel.cpu_offload == "sampling":
            self._backend.reload()

    def fetch(self, handles: Sequence[DataHandle]) -> TrajectoryBatch:
        """All replicas' trajectories, whole, on every training rank: each handle is pulled by one rank, which hands it on.

        Where the owner trains too it is that rank, and nothing is pulled.
        """
        parts = []
        for index, handle in enumerate(handles):
            puller = handle.owner if self._world.is_colocated else index % self._world.mesh_size
            batch = self._bus.get(handle) if self._world.rank == puller else None
            assert batch is None or isinstance(batch, TrajectoryBatch)
            data = self._broadcast_bytes(batch.to_bytes() if batch is not None else None, puller)
            parts.append(TrajectoryBatch.from_bytes(data))
        return TrajectoryBatch.concatenate(parts)

    def compute_log_probs(self, batch: TrajectoryBatch) -> Tensor:
        """[B, T] float32 log-probs of the tokens under the actor, at the sampling temperature; 0 outside the responses."""
        return self._token_results("actor", batch, "log_probs")

    def compute_ref_log_probs(self, batch: TrajectoryBatch) -> Tensor | None:
        """[B, T] float32 log-probs under the frozen reference; None without one."""
        return self._token_results("reference", batch, "log_probs") if self._config.uses_reference else None

    def compute_values(self, batch: TrajectoryBatch) -> Tensor | None:
        """[B, T] float32 values of the states before each token; None without a critic."""
        critic = self._config.model.critic
        if critic == "none":
            return None
        return self._token_results("critic" if critic == "separate" else "actor", batch, "values")

    def compute_scores(self, batch: TrajectoryBatch) -> Tensor | None:
        """[B] float32 scores of the whole responses by the reward model; None without one."""
        if self._config.model.reward_model_path is None:
            return None
        micro_batches = self._micro_batches(batch, torch.arange(batch.num_rows), multiple_of=1)
        scores = scatter_scores(self._backend.score(micro_batches), micro_batches, batch.num_rows)
        return self._backend.data_parallel_sum(scores)

    def update_policy(self, batch_handle: DataHandle, algorithm_config: AlgorithmConfig) -> dict[str, float]:
        """One whole update: all epochs, mini-batches and micro-batches, for critic and actor, by the given algorithm.

        Returns the mean of each statistic over the optimizer steps. Steps without a valid token, or whose gradient is not finite, change
        nothing and are counted in ``skipped_steps``.

        Raises:
            FloatingPointError: more than ``max_skipped_steps`` steps of a role in a row were not finite; on all ranks.
        """
        experience = self._bus.get(batch_handle)
        assert isinstance(experience, Experience)
        critic = self._config.model.critic
        actor_loss = make_actor_loss(algorithm_config, critic_shared=critic == "shared")
        critic_loss = make_critic_loss(algorithm_config)
        results: dict[str, list[StepResult]] = {"actor": [], "critic": []}
        for epoch in range(self._config.training.ppo_epochs):
            seed = request_seed(self._config.training.seed, self.version, epoch, 0)
            for rows in split_mini_batches(
                experience.trajectories.num_rows, self._config.training.global_batch_size, seed
            ):
                micro_batches = self._micro_batches(experience, rows, multiple_of=self._backend.micro_batch_multiple)
                if critic == "separate":
                    results["critic"].append(self._step("critic", micro_batches, critic_loss))
                results["actor"].append(self._step("actor", micro_batches, actor_loss))
        self.version += 1
        return _mean_of_steps(results)

    def non_finite(self) -> list[str]:
        """Weights of any training rank that hold a NaN or an infinity, with their rank; the same list on all."""
        own = [f"{name} of rank {self._world.rank}" for name in self._backend.non_finite()]
        everyone: list[list[str]] = [[]] * self._world.mesh_size
        dist.all_gather_object(everyone, own)
        return [name for names in everyone for name in names]

    def save_checkpoint(self, path: Path, *, asynchronous: bool = False) -> PendingSave:
        """Write weights, optimizer and random states of this rank into the existing folder ``path``.

        ``asynchronous``: return when everything is copied; the result tells when it is on the disk.
        """
        return self._backend.save_checkpoint(path, asynchronous=asynchronous)

    def load_checkpoint(self, path: Path, state: TrainerState | None = None) -> None:
        """Take over what ``save_checkpoint`` wrote, on any mesh. ``state``: that of the checkpoint; None: it holds weights alone."""
        if state is None:
            self._backend.load_weights(path)
            return
        self._backend.load_checkpoint(path)
        self.version = state.version
        self.num_optimizer_steps = dict(state.num_optimizer_steps)
        self.consecutive_skipped = dict(state.consecutive_skipped)

    def export_hf(self, folder: Path) -> None:
        """Write the actor in Hugging Face format."""
        self._backend.export_hf(folder)

    def _step(self, role: str, micro_batches: list[MicroBatch], loss_fn: LossFunction) -> StepResult:
        assert role in ("actor", "critic")
        temperature = self._config.rollout.temperature
        result = self._backend.train_step(role, micro_batches, loss_fn, temperature=temperature)  # type: ignore[arg-type]
        self.num_optimizer_steps[role] += not result.skipped
        if not math.isfinite(result.grad_norm):
            self.consecutive_skipped[role] += 1
            limit = self._config.training.max_skipped_steps
            if self.consecutive_skipped[role] > limit:
                raise FloatingPointError(
                    f"{self.consecutive_skipped[role]} optimizer steps of the {role} in a row were skipped because a loss or gradient was "
                    f"not finite (max_skipped_steps = {limit}); weights are those of before: look at the last records, lower lr, or resume "
                    "from an older checkpoint"
                )
        elif not result.skipped:
            self.consecutive_skipped[role] = 0
        return result

    def _token_results(self, role: RoleName, batch: TrajectoryBatch, field: str) -> Tensor:
        micro_batches = self._micro_batches(batch, torch.arange(batch.num_rows), multiple_of=1)
        outputs = self._backend.forward(role, micro_batches, temperature=self._config.rollout.temperature)
        tensors = [getattr(output, field) for output in outputs]
        own = scatter_back(tensors, micro_batches, batch.num_rows, batch.tokens.shape[1])
        return self._backend.data_parallel_sum(own)

    def _micro_batches(self, source: Experience | TrajectoryBatch, rows: Tensor, *, multiple_of: int) -> list[MicroBatch]:
        """This replica's passes over ``rows`` ([n] int64), as many as every other replica has."""
        batch = source.trajectories if isinstance(source, Experience) else source
        shares = [rows[positions] for positions in partition_rows(batch.lengths[rows], self._backend.dp_size)]
        plan = plan_micro_batches(
            batch.lengths,
            shares,
            self._config.training.micro_batch_size,
            self._config.training.max_tokens_per_micro_batch,
            length_multiple=self._backend.length_multiple,
            multiple_of=multiple_of,
        )
        return [
            make_micro_batch(source, own, self._backend.length_multiple, self._device) for own in plan[self._backend.dp_rank]
        ]

    def _broadcast_bytes(self, data: bytes | None, source: int) -> bytes:
        """The bytes of mesh rank ``source``, on every training rank."""
        size = torch.tensor([len(data) if data is not None else 0], dtype=torch.int64, device=self._device)
        dist.broadcast(size, src=source)
        if data is not None:
            payload = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        else:
            payload = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        dist.broadcast(payload, src=source)
        return data if data is not None else payload.cpu().numpy().tobytes()


def _mean_of_steps(results: dict[str, list[StepResult]]) -> dict[str, float]:
    """Statistics of all steps; the critic's gradient norm and rate carry its name, losses have names of their own.

    What no step has (a count of 0, a gradient norm where all were skipped) is left out.
    """
    metrics: dict[str, float] = {}
    for role, steps in results.items():
        prefix = "" if role == "actor" else "critic/"
        names = sorted({name for step in steps for name in step.metrics})
        for name in names:
            values = [step.metrics[name] for step in steps if name in step.metrics]
            metrics[name] = sum(values) / len(values)
        if steps:
            norms = [step.grad_norm for step in steps if not step.skipped]
            if norms:
                metrics[f"{prefix}grad_norm"] = sum(norms) / len(norms)
            metrics[f"{prefix}lr"] = steps[-1].lr
            metrics[f"{prefix}skipped_steps"] = float(sum(step.skipped for step in steps))
    return metrics
