"""The data of one iteration, from prompt to micro-batch.

Shape legend: B responses of a batch, b of a micro-batch, T padded length, H hidden size, V vocabulary.

Alignment, once and everywhere but in ``MicroBatch``: a sequence is ``prompt + response``, right-padded, and index t speaks of the
token ``tokens[:, t]`` given the tokens before it. So ``log_probs[:, t]`` is the log-probability of ``tokens[:, t]``, ``values[:, t]`` the
value of the state before that token is chosen, and index 0 is never valid. A ``MicroBatch`` is aligned with the network's outputs
instead (position s predicts token s + 1); ``packing.py`` is the one place that shifts between the two.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """One prompt, tokenised once: every engine sees these ids and no other."""

    prompt_id: int
    """Row of the prompt in its data file; unique in a run."""
    token_ids: tuple[int, ...]
    text: str
    """What was tokenised, after the chat template."""
    answer: str | None = None
    """Reference answer for the reward."""
    columns: Mapping[str, object] = field(default_factory=dict)
    """The other columns of the data file, for a reward function of the user's own."""


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. ``temperature`` > 0; greedy decoding is ``greedy=True``."""

    max_response_length: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    greedy: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    """Ids that end a response; the id itself belongs to the response."""


@dataclass(frozen=True)
class Completion:
    """One sampled response."""

    token_ids: list[int]
    """The sampled ids, end-of-sequence id included; may be empty."""
    log_probs: list[float]
    """Log-probability of each id at the sampling temperature, under the engine's weights."""
    truncated: bool
    """True where the response was cut off at a length limit, not ended by a stop id."""


@dataclass(frozen=True)
class TrajectoryBatch:
    """What a rollout returns. All tensors live on the CPU; rows are prompt-major (all samples of a prompt stand together)."""

    tokens: Tensor
    """[B, T] int64, prompt + response, right-padded (any id; padding is told by the lengths, never by an id)."""
    prompt_lengths: Tensor
    """[B] int64."""
    response_lengths: Tensor
    """[B] int64, end-of-sequence token included; 0 is legal."""
    rollout_log_probs: Tensor
    """[B, T] float32 at the sampling temperature, 0 outside the response."""
    scores: Tensor
    """[B] float32, the function reward of the whole response."""
    truncated: Tensor
    """[B] bool, True where the response hit a length limit."""
    prompt_ids: Tensor
    """[B] int64, ``Prompt.prompt_id``; responses of one id are a group."""
    sample_indices: Tensor
    """[B] int64, 0..samples_per_prompt-1 within the group."""
    version: int
    """The weights that sampled: number of finished updates."""
    metrics: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Statistics that the rollout adds (times, reward timeouts): name -> observations."""
    values: Tensor | None = None
    """[B, T] float32 values of the states before each token, 0 outside the response. This and the next two are None but where the rollout
    ranks compute them (``compute_on = rollout``) and the run has such a network."""
    ref_log_probs: Tensor | None = None
    """[B, T] float32 log-probs by the frozen reference at the sampling temperature, 0 outside the response; or None."""
    model_scores: Tensor | None = None
    """[B] float32 scores of the whole responses by the reward model; or None."""

    @property
    def num_rows(self) -> int:
        """B."""
        return self.tokens.shape[0]

    @property
    def lengths(self) -> Tensor:
        """[B] int64, prompt plus response."""
        return self.prompt_lengths + self.response_lengths

    @property
    def response_mask(self) -> Tensor:
        """[B, T] bool, 1 = a token of the response (trained on)."""
        return response_mask(self.prompt_lengths, self.response_lengths, self.tokens.shape[1])

    def select(self, rows: Tensor) -> TrajectoryBatch:
        """The given rows ([n] int64), in that order."""
        return replace(self, **{name: getattr(self, name)[rows] for name in _tensor_names(self)})

    def to_bytes(self) -> bytes:
        """Serialise without pickle (safetensors with a JSON header)."""
        header = {"version": self.version, "metrics": {k: list(v) for k, v in self.metrics.items()}}
        tensors = {name: getattr(self, name).contiguous() for name in _tensor_names(self)}
        return save_safetensors(tensors | {"_header": _text_tensor(json.dumps(header))})

    @staticmethod
    def from_bytes(data: bytes) -> TrajectoryBatch:
        """Inverse of ``to_bytes``."""
        tensors = load_safetensors(data)
        header = json.loads(bytes(tensors.pop("_header").tolist()))
        return TrajectoryBatch(**tensors, version=header["version"], metrics=header["metrics"])

    @staticmethod
    def concatenate(batches: Sequence[TrajectoryBatch]) -> TrajectoryBatch:
        """Join along the rows, padding with 0 to the longest T. All must be of one version and have the same tensors (``ValueError``)."""
        versions = {batch.version for batch in batches}
        if len(versions) != 1:
            raise ValueError(f"a batch must come from one set of weights, but these are of versions {sorted(versions)}")
        if len({tuple(_tensor_names(batch)) for batch in batches}) != 1:
            raise ValueError(f"some parts of a batch have tensors that others lack: {[_tensor_names(batch) for batch in batches]}")
        length = max(batch.tokens.shape[1] for batch in batches)
        joined = {
            name: torch.cat([_pad_to(getattr(batch, name), length) for batch in batches]) for name in _tensor_names(batches[0])
        }
        metrics: dict[str, list[float]] = {}
        for batch in batches:
            for name, observations in batch.metrics.items():
                metrics.setdefault(name, []).extend(observations)
        return TrajectoryBatch(**joined, version=batches[0].version, metrics=metrics)


@dataclass(frozen=True)
class Experience:
    """What a loss can learn from: trajectories plus what the training mesh computed of them. CPU tensors."""

    trajectories: TrajectoryBatch
    old_log_probs: Tensor
    """[B, T] float32, by the trainer's weights before the update, at the sampling temperature."""
    advantages: Tensor
    """[B, T] float32, 0 outside the response."""
    returns: Tensor | None
    """[B, T] float32, targets of the critic; None without a critic."""
    values: Tensor | None
    """[B, T] float32, the critic's before the update; None without a critic."""
    ref_log_probs: Tensor | None
    """[B, T] float32, by the reference; None without one."""


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward/backward pass, aligned with the network's outputs: position s predicts ``labels[:, s]``.

    Tensors are on the training device. A dummy micro-batch (to keep ranks in step) has ``loss_mask`` all 0.
    """

    tokens: Tensor
    """[b, T] int64, input ids."""
    labels: Tensor
    """[b, T] int64, ``tokens`` moved left by one; the last column is 0."""
    loss_mask: Tensor
    """[b, T] bool, 1 = ``labels`` holds a response token (trained on)."""
    rows: Tensor
    """[b] int64, row of each sequence in the batch it was cut from."""
    lengths: Tensor
    """[b] int64, real tokens of each row."""
    old_log_probs: Tensor | None = None
    """[b, T] float32."""
    rollout_log_probs: Tensor | None = None
    """[b, T] float32."""
    ref_log_probs: Tensor | None = None
    """[b, T] float32."""
    advantages: Tensor | None = None
    """[b, T] float32."""
    returns: Tensor | None = None
    """[b, T] float32."""
    values: Tensor | None = None
    """[b, T] float32, old values."""

    def to(self, where: torch.device) -> MicroBatch:
        """The same rows with their tensors on ``where``."""
        return replace(self, **{name: getattr(self, name).to(where) for name in _tensor_names(self)})


@dataclass(frozen=True)
class RoleOutput:
    """What a role's forward pass gives, aligned like ``MicroBatch`` (position s speaks of ``labels[:, s]``). All float32."""

    log_probs: Tensor | None = None
    """[b, T] log-probability of ``labels`` at the sampling temperature."""
    entropy: Tensor | None = None
    """[b, T] entropy in nats of the distribution at the sampling temperature."""
    values: Tensor | None = None
    """[b, T] value of the state before ``labels[:, s]`` is chosen."""


def response_mask(prompt_lengths: Tensor, response_lengths: Tensor, length: int) -> Tensor:
    """[B, length] bool: 1 where ``prompt_length <= t < prompt_length + response_length``."""
    positions = torch.arange(length, device=prompt_lengths.device)[None, :]
    start = prompt_lengths[:, None]
    return (positions >= start) & (positions < start + response_lengths[:, None])


def _tensor_names(batch: TrajectoryBatch | MicroBatch) -> list[str]:
    return [f.name for f in fields(batch) if isinstance(getattr(batch, f.name), Tensor)]


def _pad_to(tensor: Tensor, length: int) -> Tensor:
    if tensor.dim() == 1 or tensor.shape[1] == length:
        return tensor
    return torch.nn.functional.pad(tensor, (0, length - tensor.shape[1]))


def _text_tensor(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)
