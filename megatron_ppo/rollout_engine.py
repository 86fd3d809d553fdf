"""RolloutWorker: samples with one replica's inference engine and rewards what it sampled.

Steps 1 and 2 of the iteration, on the rollout mesh. All ranks of a replica call the same methods with the same arguments; its head
computes the rewards and puts the trajectories on the data bus; with ``compute_on = rollout`` also values, reference log-probs and the
reward model's scores of its own rows. Log-probs that are trained on are never computed here: the trainer does that with its own weights.
``RemoteRollout`` is how a training rank names the workers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ppo.backends.base import EngineMemory, InferenceBackend
from megatron_ppo.config import Config
from megatron_ppo.data_bus import DataBus, DataHandle
from megatron_ppo.device import device
from megatron_ppo.prompts import expand, request_seed, shard
from megatron_ppo.resharding.executor import TransferStats
from megatron_ppo.resharding.hf_weight_loader import WeightTransfer
from megatron_ppo.reward_pool import RewardPool
from megatron_ppo.rewards import RewardInput
from megatron_ppo.tokenizer import Tokenizer
from megatron_ppo.types import Completion, Prompt, Sampling, TrajectoryBatch
from megatron_ppo.world import World


@dataclass(frozen=True)
class PromptBatch:
    """The prompts of one iteration, all replicas' together; the same on every rank of the rollout mesh."""

    iteration: int
    prompts: tuple[Prompt, ...]


class RolloutWorker:
    """One rollout rank's end of its replica."""

    def __init__(
        self,
        config: Config,
        world: World,
        bus: DataBus,
        backend: InferenceBackend,
        executor: WeightTransfer,
        tokenizer: Tokenizer,
        stop_token_ids: frozenset[int],
        rewards: RewardPool | None,
    ) -> None:
        """``rewards`` is the function reward; None on ranks that are not their replica's head, or where a reward model alone scores."""
        self.version: int | None = None
        """Version of the weights that are loaded; None while a sync is under way or after one broke: nothing may be sampled then."""
        self._config = config
        self._world = world
        self._bus = bus
        self._backend = backend
        self._executor = executor
        self._tokenizer = tokenizer
        self._sampling = Sampling(
            max_response_length=config.rollout.max_response_length,
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            top_k=config.rollout.top_k,
            stop_token_ids=stop_token_ids,
        )
        self._rewards = rewards
        self._has_rewarded = False
        self._previous: list[DataHandle] = []
        self._refit: dict[str, list[float]] = {}

    def set_weights(self, handle: DataHandle) -> TransferStats:
        """Receive the weights that ``handle`` names into the engine's live parameters. Collective over the rollout mesh.

        Where this rank trains too, the handle is of its own weights, which it sends in the same exchange.

        Raises:
            RuntimeError: the bytes that arrived are not those that this rank should get. The engine is unusable from the start of a sync
                until one has ended well.
        """
        self.version = None
        if self._world.is_colocated:
            own = self._bus.get(handle)
            assert isinstance(own, dict)
            stats = self._executor.exchange(own, self._backend.weights())
        else:
            stats = self._executor.receive(self._backend.weights())
        self._refit = self._count_bytes(stats.bytes_received)
        self._backend.after_weight_update()
        self.version = version_of(handle)
        return stats

    def wake_up(self, what: EngineMemory) -> None:
        """Take back the memory that ``sleep`` gave up: ``weights`` before a sync, ``cache`` before sampling. Their content is lost."""
        self._backend.wake_up(what)

    def sleep(self) -> None:
        """Give up the engine's memory for as long as this rank trains; a sync must bring the weights again."""
        self.version = None
        self._backend.sleep()

    def live_weights(self) -> dict[str, Tensor]:
        """This rank's live parameters by the engine's local name."""
        return self._backend.weights()

    def collect(self, prompts_handle: DataHandle) -> DataHandle:
        """Sample and reward this replica's share of the prompts. Returns the handle of its trajectories, which the replica's head owns.

        Raises:
            RuntimeError: no whole set of weights is loaded.
        """
        request = self._bus.get(prompts_handle)
        assert isinstance(request, PromptBatch)
        self._forget_previous()
        self._previous.append(prompts_handle)
        prompts = shard(request.prompts, self._world.num_replicas, self._world.replica)
        requests = expand(prompts, self._config.rollout.samples_per_prompt)
        seeds = [
            request_seed(self._config.training.seed, request.iteration, prompt.prompt_id, sample) for prompt, sample in requests
        ]
        started = time.monotonic()
        completions = self._sample([prompt for prompt, _ in requests], seeds, self._sampling)
        handle = DataHandle(self._world.replica_heads[self._world.replica], trajectories_key(request.iteration))
        if not self._world.is_head:
            return handle
        sampled = time.monotonic()
        scores, metrics = self._reward([prompt for prompt, _ in requests], completions)
        metrics["time/reward_s"] = [time.monotonic() - sampled]
        batch = make_trajectories(requests, completions, scores, version=self._version(), metrics={})
        if self._config.rollout.compute_on == "rollout":  # a replica is one rank then
            rewarded = time.monotonic()
            batch = self._backend.evaluate(batch)
            metrics["time/evaluate_s"] = [time.monotonic() - rewarded]
        metrics["time/rollout_s"] = [time.monotonic() - started]
        self._previous.append(self._bus.put(replace(batch, metrics=metrics | self._refit), handle.key))
        return handle

    def collect_greedy(self, iteration: int, prompts: Sequence[Prompt]) -> None:
        """Greedy answers of the first replica to a few prompts, put on the bus for the log. Called on every rank of that replica."""
        greedy = Sampling(self._sampling.max_response_length, greedy=True, stop_token_ids=self._sampling.stop_token_ids)
        completions = self._sample(prompts, [0] * len(prompts), greedy)
        if self._world.is_head:
            scores, _ = self._reward(prompts, completions)
            requests = [(prompt, 0) for prompt in prompts]
            batch = make_trajectories(requests, completions, scores, version=self._version(), metrics={})
            self._previous.append(self._bus.put(batch, greedy_key(iteration)))

    def close(self) -> None:
        """End the reward processes and free the engine."""
        if self._rewards is not None:
            self._rewards.close()
        self._backend.close()

    def _count_bytes(self, received: int) -> dict[str, list[float]]:
        """Two independent readings over the whole rollout mesh, reported once, by its first rank: bytes counted as they arrived, and
        bytes of the engine's live parameters without vocabulary padding."""
        shard = self._backend.shard_bytes()
        expected = self._executor.expected_bytes(shard)
        if received != expected:
            raise RuntimeError(f"rollout rank {self._world.rank} received {received} bytes of weights, but should get {expected}")
        totals = torch.tensor([received, shard], dtype=torch.int64, device=device())
        dist.all_reduce(totals)
        if self._world.rank != 0:
            return {}
        return {"refit/received_bytes": [float(totals[0])], "refit/shard_bytes": [float(totals[1])]}

    def _version(self) -> int:
        if self.version is None:
            raise RuntimeError("the rollout engine holds no whole set of weights: the last sync did not end well; nothing may be sampled")
        return self.version

    def _sample(self, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: Sampling) -> list[Completion]:
        self._version()
        return self._backend.generate([prompt.token_ids for prompt in prompts], sampling, seeds)

    def _reward(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> tuple[list[float], dict[str, list[float]]]:
        """Function reward of each response, 0 where there is no function (the reward model alone scores then)."""
        if self._rewards is None:
            return [0.0] * len(completions), {}
        inputs = [
            RewardInput(
                prompt=prompt.text,
                response=self._tokenizer.decode(completion.token_ids),
                answer=prompt.answer,
                columns=prompt.columns,
                num_response_tokens=len(completion.token_ids),
                truncated=completion.truncated,
            )
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        result = self._rewards.score(inputs)
        if not self._has_rewarded and inputs and result.num_errors == len(inputs):
            raise ValueError(
                f"the reward {self._config.data.reward} failed on all {len(inputs)} first responses; the first error:\n{result.first_error}"
            )
        self._has_rewarded = self._has_rewarded or bool(inputs)
        return result.scores, {"reward/timeouts": [float(result.num_timeouts)], "reward/errors": [float(result.num_errors)]}

    def _forget_previous(self) -> None:
        """Drop what the last iteration left on the bus: a new ``collect`` follows a sync, and that the trainer's update."""
        for handle in self._previous:
            self._bus.delete(handle)
        self._previous = []


class RemoteRollout:
    """The rollout workers as a training rank names them: handles without a message."""

    def __init__(self, world: World) -> None:
        self.version: int | None = None
        """Not known here: each worker keeps its own."""
        self._world = world

    def set_weights(self, handle: DataHandle) -> TransferStats:
        """A training rank never receives weights."""
        raise RuntimeError(f"rank {self._world.global_rank} trains; weights {handle.key} are received on the rollout mesh")

    def live_weights(self) -> dict[str, Tensor]:
        """As ``set_weights``."""
        raise RuntimeError(f"rank {self._world.global_rank} trains and has no weights of a rollout engine")

    def collect(self, iteration: int) -> list[DataHandle]:
        """Handles of all replicas' trajectories of the iteration, in replica order: prompt-major when joined."""
        return [DataHandle(head, trajectories_key(iteration)) for head in self._world.replica_heads]

    def collect_greedy(self, iteration: int) -> DataHandle:
        """Handle of the first replica's greedy answers."""
        return DataHandle(self._world.replica_heads[0], greedy_key(iteration))


class RemoteTraining:
    """The training engine as a rollout rank names it. Keeps count of the versions: one finished update an iteration."""

    def __init__(self, world: World, version: int = 0) -> None:
        """``version``: the one that the run begins with."""
        self.version = version
        self._world = world

    def get_weights(self) -> DataHandle:
        """The handle of the present version's weights, whose bytes the synchronizer moves shard by shard."""
        return DataHandle(self._world.training_ranks[0], f"weights/{self.version}")

    def finished_update(self) -> None:
        """The training mesh goes on to the next version."""
        self.version += 1


def trajectories_key(iteration: int) -> str:
    """Name of an iteration's trajectories on the bus of each replica's head."""
    return f"trajectories/{iteration}"


def greedy_key(iteration: int) -> str:
    """Name of an iteration's greedy answers on the bus of the first replica's head."""
    return f"greedy/{iteration}"


def version_of(handle: DataHandle) -> int:
    """The version that a handle of weights names."""
    kind, _, version = handle.key.partition("/")
    if kind != "weights" or not version.isdigit():
        raise ValueError(f"{handle.key!r} does not name weights: expected weights/VERSION")
    return int(version)


def make_trajectories(
    requests: Sequence[tuple[Prompt, int]],
    completions: Sequence[Completion],
    scores: Sequence[float],
    *,
    version: int,
    metrics: dict[str, list[float]],
) -> TrajectoryBatch:
    """Completions as one right-padded batch, row by row in the order of the requests."""
    lengths = [len(prompt.token_ids) for prompt, _ in requests]
    responses = [len(completion.token_ids) for completion in completions]
    length = max(p + r for p, r in zip(lengths, responses, strict=True))
    tokens = torch.zeros(len(requests), length, dtype=torch.int64)
    log_probs = torch.zeros(len(requests), length)
    for row, ((prompt, _), completion) in enumerate(zip(requests, completions, strict=True)):
        start, stop = lengths[row], lengths[row] + responses[row]
        tokens[row, :start] = torch.tensor(prompt.token_ids)
        tokens[row, start:stop] = torch.tensor(completion.token_ids, dtype=torch.int64)
        log_probs[row, start:stop] = torch.tensor(completion.log_probs)
    return TrajectoryBatch(
        tokens=tokens,
        prompt_lengths=torch.tensor(lengths),
        response_lengths=torch.tensor(responses),
        rollout_log_probs=log_probs,
        scores=torch.tensor(scores, dtype=torch.float32),
        truncated=torch.tensor([completion.truncated for completion in completions]),
        prompt_ids=torch.tensor([prompt.prompt_id for prompt, _ in requests]),
        sample_indices=torch.tensor([sample for _, sample in requests]),
        version=version,
        metrics=metrics,
    )
