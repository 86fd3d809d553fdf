"""The two seams between engines and frameworks: ``TrainingBackend`` (how roles are distributed and trained) and
``InferenceBackend`` (how one replica generates).

A backend knows nothing of rewards, advantages or the loop. Engines (``training_engine.py``, ``rollout_engine.py``) know nothing of
frameworks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torch import Tensor

from megatron_ppo.backends.staged_save import PendingSave
from megatron_ppo.config import Config
from megatron_ppo.families import Head
from megatron_ppo.types import Completion, MicroBatch, RoleOutput, Sampling, TrajectoryBatch

__all__ = [
    "EngineMemory",
    "InferenceBackend",
    "LossFunction",
    "LossMetrics",
    "PendingSave",
    "PlannedNetwork",
    "RoleName",
    "StepResult",
    "TrainingBackend",
    "planned_networks",
    "rollout_head",
]

RoleName = Literal["actor", "critic", "reference", "reward"]
EngineMemory = Literal["weights", "cache"]
"""What a sleeping inference engine gets back: room for its parameters, and for its key/value cache."""


@dataclass(frozen=True)
class PlannedNetwork:
    """A network that a configuration asks for, whatever backend builds it."""

    folder: Path
    """In Hugging Face format."""
    head: Head
    peak_lr: float | None = None
    """None: frozen."""
    weights: Path | None = None
    """Folder whose weights it starts from, in place of ``folder``'s."""


def planned_networks(config: Config) -> dict[RoleName, PlannedNetwork]:
    """Role -> network of a training mesh: the actor, and critic, reference and reward model where ``config`` asks for them there."""
    model, optimizer, actor = config.model, config.optimizer, Path(config.model.model_path)
    start = None if config.checkpoint.load_hf is None else Path(config.checkpoint.load_hf)
    head: Head = "lm+value" if model.critic == "shared" else "lm"
    planned: dict[RoleName, PlannedNetwork] = {"actor": PlannedNetwork(actor, head, optimizer.lr, start)}
    if model.critic == "separate":
        planned["critic"] = PlannedNetwork(Path(model.critic_path or actor), "value", optimizer.critic_lr)
    if config.rollout.compute_on == "rollout":  # the rollout ranks have copies of the frozen networks
        return planned
    if config.uses_reference:
        planned["reference"] = PlannedNetwork(actor, "lm")
    if model.reward_model_path is not None:
        planned["reward"] = PlannedNetwork(Path(model.reward_model_path), "score")
    return planned


def rollout_head(config: Config) -> Head:
    """What stands on the actor's trunk in a rollout engine: a value head travels with it only where the rollout ranks compute values."""
    return "lm+value" if config.model.critic == "shared" and config.rollout.compute_on == "rollout" else "lm"


LossMetrics = Mapping[str, Tensor]
"""Name -> [2] float tensor (sum, count): reduced by adding over micro-batches and ranks, then dividing."""

LossFunction = Callable[[RoleOutput, MicroBatch], tuple[Tensor, Tensor, LossMetrics]]
"""``loss_fn(output, micro_batch) -> (loss_sum, num_tokens, metrics)``: Megatron's contract of ``calculate_per_token_loss``.

The gradient of a step is the gradient of (sum of ``loss_sum``) / (sum of ``num_tokens``), both over all micro-batches and all
data-parallel ranks, so that the result does not depend on how a mini-batch was split. ``num_tokens`` is an integer tensor ([]); for
sequence-wise aggregation it counts sequences.
"""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step reports, equal on all ranks of the training mesh."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """The loss function's metrics, averaged over the global mini-batch. A count of 0 leaves the name out."""
    grad_norm: float = 0.0
    """Global gradient norm before clipping."""
    lr: float = 0.0
    """Learning rate of this step."""
    skipped: bool = False
    """True where the gradient was not finite or no token was valid, and no rank changed a weight."""


class TrainingBackend(ABC):
    """Wraps and holds the roles of the training mesh; runs their forward and backward passes and optimizer steps.

    All methods are collective over the training mesh unless they say otherwise. ``micro_batches`` are this data-parallel replica's
    own; every replica passes the same number of them.
    """

    dp_rank: int
    """This rank's data-parallel replica."""
    dp_size: int
    """Data-parallel replicas."""
    length_multiple: int
    """The padded length T of a micro-batch must be a multiple of this (context and sequence parallelism)."""
    micro_batch_multiple: int
    """The number of micro-batches in ``train_step`` must be a multiple of this (interleaved pipeline schedule)."""

    @abstractmethod
    def forward(self, role: RoleName, micro_batches: Sequence[MicroBatch], *, temperature: float = 1.0) -> list[RoleOutput]:
        """Forward passes without gradients, in eval mode; CPU results on every rank of the replica, one a micro-batch.

        actor and reference give log_probs and entropy (and, for a shared critic, the actor gives values); critic gives values.
        """

    @abstractmethod
    def score(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Reward-model scores, [b] fp32 on the CPU of every rank of the replica, one a micro-batch."""

    @abstractmethod
    def train_step(
        self, role: Literal["actor", "critic"], micro_batches: Sequence[MicroBatch], loss_fn: LossFunction, *, temperature: float = 1.0
    ) -> StepResult:
        """Forward and backward of all micro-batches, gradient reduction, clipping, one optimizer and schedule step."""

    @abstractmethod
    def data_parallel_sum(self, tensor: Tensor) -> Tensor:
        """The sum of a CPU tensor over the data-parallel replicas, on every rank; all ranks of a replica pass the same."""

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        """Slow generation with the actor, without a cache: the oracle for inference backends."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """This rank's live parameters of the actor: local name -> tensor, ready to be sent (parameter gathers finished). Not collective."""

    @abstractmethod
    def non_finite(self) -> list[str]:
        """Local names of this rank's trained weights that hold a NaN or an infinity, after their role. Not collective."""

    @abstractmethod
    def offload(self) -> None:
        """Make room on this device: the optimizer's state goes to host memory, gradients are freed, weights stay. Not collective."""

    @abstractmethod
    def reload(self) -> None:
        """Bring back what ``offload`` took away; before the next ``train_step`` or checkpoint. Not collective."""

    @abstractmethod
    def save_checkpoint(self, folder: Path, *, asynchronous: bool = False) -> PendingSave:
        """Write weights, optimizer and random states of all trained networks below the existing ``folder``.

        Without ``asynchronous`` all ranks' files are on the disk, fsynced, when this returns. With it, this returns when everything is
        copied: what training does from then on is not in the files. The result's methods are not collective. ``OSError`` (at once, on all
        ranks, or with ``asynchronous`` from ``PendingSave.wait``) where a rank cannot write.
        """

    @abstractmethod
    def load_checkpoint(self, folder: Path) -> None:
        """Take over what ``save_checkpoint`` wrote. Random states are taken over on the mesh that saved them; otherwise a notice is logged.

        ``ValueError``, on all ranks and before anything is changed, where the checkpoint is of another model, optimizer or precision, or
        cannot be read.
        """

    @abstractmethod
    def load_weights(self, folder: Path) -> None:
        """Take over the weights of a checkpoint alone, of every trained network that it holds; ``ValueError`` as ``load_checkpoint``."""

    @abstractmethod
    def export_hf(self, folder: Path, role: Literal["actor", "critic"] = "actor") -> None:
        """Write the role in Hugging Face format (safetensors, config, tokenizer files)."""


class InferenceBackend(ABC):
    """One replica's engine. All ranks of the replica call the same methods with the same arguments (SPMD); docs/inference_backends.md says
    in which order, and what a new backend is held to.

    A replica is ``rollout_tensor_parallel_size`` neighbouring ranks of the rollout mesh, whose default process group exists before the
    engine is built. ``weights``, ``shard_bytes``, ``sleep`` and ``wake_up`` are not collective.
    """

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        """One response to each prompt, in order; ``seeds[i]`` seeds the i-th. The same list on every rank of the replica.

        A response depends on its prompt, its seed and the weights, not on the other requests, their order or earlier calls. Log-probs are
        of the distribution that was drawn from: logits / temperature, cut by top_k, then top_p, and renormalised; greedy: of the logits
        themselves. Only an id of ``sampling.stop_token_ids`` ends a response before ``max_response_length``; it belongs to it. The global
        random state stays as it was. ``ValueError`` for requests that cannot be answered in full (``check_requests``), ``RuntimeError``
        before a whole set of weights came.
        """

    def evaluate(self, batch: TrajectoryBatch) -> TrajectoryBatch:
        """``batch`` with ``values``, ``ref_log_probs`` and ``model_scores``, each where the run has such a network.

        ``batch`` holds this replica's own rows, sampled with the weights that are loaded. Called after ``generate`` where
        ``compute_on = rollout``, which ``config_checks.py`` allows for backends that have this; the others keep this refusal.
        """
        raise RuntimeError(f"{type(self).__name__} samples alone: values, reference log-probs and scores are computed by the trainer")

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """This rank's live parameters: the engine's local name -> tensor. Writing into them in place changes what is sampled.

        Names, shapes and dtype (``rollout_dtype``) are those of the backend's layout function, dense in memory; always the same tensors.
        """

    @abstractmethod
    def shard_bytes(self) -> int:
        """Bytes of this rank's live parameters, rows that only pad the vocabulary left out: read from the engine, not from a layout.

        A sync must have received exactly as many.
        """

    @abstractmethod
    def load_hf_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """The slow reference path: the engine's own loader, given full Hugging Face tensors by name. ``RuntimeError`` where one lacks."""

    @abstractmethod
    def after_weight_update(self) -> None:
        """Forget everything derived from the old weights (prefix cache). Called once after the last tensor of a sync.

        The first call proves that no parameter was left out: ``RuntimeError`` with names.
        """

    @abstractmethod
    def sleep(self) -> None:
        """Give up the memory of cache and weights where the engine can; only ``wake_up`` may follow. A second call changes nothing."""

    @abstractmethod
    def wake_up(self, what: EngineMemory) -> None:
        """Take back the memory of weights or cache, whose content is lost. Parameters stay the tensors that ``weights()`` named."""

    @abstractmethod
    def close(self) -> None:
        """Free the engine, its processes and its groups; the mesh's default process group stays. A second call changes nothing."""
