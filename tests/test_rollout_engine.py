"""RolloutWorker: what it asks of an engine, what it makes of the answers, and when it refuses to sample.

Engines are the real Hugging Face backend, or one that is told what to answer, where a test needs a response that no model gives on
demand. Weights come from a delivery of the folder's own; real transfers are proved in ``test_refit_vllm.py``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from spawn import free_port
from torch import Tensor
from toy_models import make_toy
from toy_tokenizers import EOS, HE, LLO, make_bpe_tokenizer
from transformers import AutoModelForCausalLM

from megatron_ppo.backends.base import EngineMemory, InferenceBackend
from megatron_ppo.backends.hf import HFBackend
from megatron_ppo.config import Config
from megatron_ppo.data_bus import DataBus, DataHandle
from megatron_ppo.experience import make_experience
from megatron_ppo.prompts import request_seed
from megatron_ppo.resharding.executor import TransferStats
from megatron_ppo.reward_pool import RewardPool
from megatron_ppo.rollout_engine import (
    PromptBatch,
    RemoteRollout,
    RemoteTraining,
    RolloutWorker,
    make_trajectories,
    trajectories_key,
    version_of,
)
from megatron_ppo.tokenizer import load_tokenizer
from megatron_ppo.types import Completion, Prompt, Sampling, TrajectoryBatch
from megatron_ppo.world import World

PROMPTS = tuple(Prompt(prompt_id=10 + i, token_ids=tuple(range(5, 8 + i)), text=f"prompt {i}") for i in range(4))


class Told(InferenceBackend):
    """Answers as told: ``answer(prompt, seed)``; truncated where the last id is no stop. Remembers its calls, and their order."""

    def __init__(self, answer: Callable[[tuple[int, ...], int], list[int]] = lambda prompt, seed: [prompt[-1], EOS]) -> None:
        self.answer = answer
        self.parameters = {"weight": torch.zeros(3, 2)}
        self.calls: list[tuple[list[list[int]], Sampling, list[int]]] = []
        self.log: list[str] = []

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        self.calls.append(([list(prompt) for prompt in prompts], sampling, list(seeds)))
        answers = [self.answer(tuple(prompt), seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        log_probs = [[-0.5 - 0.25 * i for i in range(len(ids))] for ids in answers]
        stops = sampling.stop_token_ids
        return [Completion(ids, given, truncated=stops.isdisjoint(ids[-1:])) for ids, given in zip(answers, log_probs, strict=True)]

    def weights(self) -> dict[str, Tensor]:
        return self.parameters

    def shard_bytes(self) -> int:
        return 24

    def load_hf_weights(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        raise NotImplementedError

    def after_weight_update(self) -> None:
        self.log.append("after update")

    def sleep(self) -> None:
        self.log.append("asleep")

    def wake_up(self, what: EngineMemory) -> None:
        self.log.append(f"awake: {what}")

    def close(self) -> None:
        self.log.append("closed")


class Delivery:
    """Stands for the executor: fills live parameters from a state dict, and may break on the way or miscount."""

    def __init__(self, state: dict[str, Tensor] | None = None, *, miscount: int = 0) -> None:
        self.state = {"weight": torch.ones(3, 2)} if state is None else state
        self.miscount = miscount
        self.breaks = False

    def receive(self, parameters: dict[str, Tensor]) -> TransferStats:
        received = 0
        for name, tensor in parameters.items():
            if self.breaks and received:
                raise RuntimeError("the other end is gone")
            tensor.copy_(self.state[name])
            received += tensor.nbytes
        return TransferStats(0, received + self.miscount, 1, 0.0)

    def expected_bytes(self, shard_bytes: int) -> int:
        return shard_bytes


@pytest.fixture(scope="module", autouse=True)
def mesh_of_one() -> Iterator[None]:
    """The rollout mesh's default group, of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the data bus reads of the launcher's environment."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bpe_tokenizer(tmp_path_factory.mktemp("tokenizers") / "bpe")


@pytest.fixture
def config(folder: Path, tokenizer_folder: Path) -> Config:
    fields = {"samples_per_prompt": 3, "max_prompt_length": 16, "max_response_length": 6, "rollout_backend": "hf"}
    return Config().replace(model_path=str(folder), tokenizer_path=str(tokenizer_folder), **fields)


def world_of(rollout_rank: int = 0, *, num_ranks: int = 1, tensor_parallel: int = 1) -> World:
    """One training rank, then the rollout ranks."""
    store, size = dist.HashStore(), 1 + num_ranks
    training, rollout = range(1), range(1, size)
    return World(1 + rollout_rank, size, 0, "rollout", rollout_rank, num_ranks, training, rollout, tensor_parallel, store, "test")


def make_worker(
    config: Config,
    backend: InferenceBackend,
    *,
    world: World | None = None,
    delivery: Delivery | None = None,
    stops: frozenset[int] = frozenset({EOS}),
    rewards: RewardPool | None = None,
    sync: bool = True,
) -> tuple[RolloutWorker, DataBus]:
    world = world or world_of()
    if world.num_replicas > 1:
        config = config.replace(
            rollout_world_size=len(world.rollout_ranks), rollout_tensor_parallel_size=world.rollout_tensor_parallel_size
        )
    bus = DataBus(world, timeout_s=10)
    executor: Any = delivery or Delivery()
    worker = RolloutWorker(config, world, bus, backend, executor, load_tokenizer(config), stops, rewards)
    if sync:
        worker.set_weights(DataHandle(0, "weights/0"))
    return worker, bus


def collect(worker: RolloutWorker, bus: DataBus, prompts: Sequence[Prompt] = PROMPTS, iteration: int = 0) -> TrajectoryBatch:
    batch = bus.get(worker.collect(bus.put(PromptBatch(iteration, tuple(prompts)))))
    assert isinstance(batch, TrajectoryBatch)
    return batch


def response(batch: TrajectoryBatch, row: int) -> list[int]:
    return batch.tokens[row][batch.response_mask[row]].tolist()


# -- weights ----------------------------------------------------------------------------------------------------------


def test_nothing_is_sampled_before_a_sync(config: Config) -> None:
    backend = Told()
    worker, bus = make_worker(config, backend, sync=False)
    with pytest.raises(RuntimeError, match="no whole set of weights"):
        collect(worker, bus)
    with pytest.raises(RuntimeError, match="no whole set of weights"):
        worker.collect_greedy(0, PROMPTS)
    assert backend.calls == [] and worker.version is None


def test_a_sync_fills_live_parameters_then_drops_caches_and_sets_the_version(config: Config) -> None:
    backend = Told()
    worker, bus = make_worker(config, backend, sync=False)
    stats = worker.set_weights(DataHandle(0, "weights/7"))
    assert stats.bytes_received == 24 and backend.log == ["after update"]
    assert bool((worker.live_weights()["weight"] == 1).all()) and worker.live_weights()["weight"] is backend.parameters["weight"]
    batch = collect(worker, bus)
    assert worker.version == batch.version == 7
    assert batch.metrics["refit/received_bytes"] == batch.metrics["refit/shard_bytes"] == [24.0]


@pytest.mark.parametrize("miscount", [4, -4])
def test_bytes_that_are_not_those_of_the_shard_are_refused(config: Config, miscount: int) -> None:
    backend = Told()
    worker, bus = make_worker(config, backend, delivery=Delivery(miscount=miscount), sync=False)
    with pytest.raises(RuntimeError, match=f"received {24 + miscount} bytes of weights, but should get 24"):
        worker.set_weights(DataHandle(0, "weights/0"))
    with pytest.raises(RuntimeError, match="nothing may be sampled"):
        collect(worker, bus)
    assert backend.log == [] and backend.calls == []


def test_a_sync_that_broke_midway_forbids_sampling_even_with_older_weights(config: Config, folder: Path) -> None:
    delivery = Delivery(AutoModelForCausalLM.from_pretrained(folder).state_dict())
    worker, bus = make_worker(config, HFBackend(config, seed=1), delivery=delivery)
    collect(worker, bus)
    delivery.breaks = True
    with pytest.raises(RuntimeError, match="the other end is gone"):
        worker.set_weights(DataHandle(0, "weights/1"))
    with pytest.raises(RuntimeError, match="the last sync did not end well"):
        collect(worker, bus, iteration=1)
    delivery.breaks = False
    worker.set_weights(DataHandle(0, "weights/1"))
    assert collect(worker, bus, iteration=2).version == 1


@pytest.mark.parametrize("key", ["trajectories/3", "weights/", "weights/x", "weights/-1", "weights"])
def test_only_a_handle_of_weights_names_a_version(key: str) -> None:
    assert version_of(DataHandle(0, "weights/12")) == 12
    with pytest.raises(ValueError, match="does not name weights"):
        version_of(DataHandle(0, key))


# -- requests ---------------------------------------------------------------------------------------------------------


def test_b43_rows_are_prompt_major_with_group_ids(config: Config) -> None:
    worker, bus = make_worker(config, Told())
    batch = collect(worker, bus)
    assert batch.prompt_ids.tolist() == [10] * 3 + [11] * 3 + [12] * 3 + [13] * 3
    assert batch.sample_indices.tolist() == [0, 1, 2] * 4
    for row in range(12):
        prompt = PROMPTS[row // 3].token_ids
        assert batch.tokens[row, : len(prompt)].tolist() == list(prompt) and int(batch.prompt_lengths[row]) == len(prompt)
        assert response(batch, row) == [prompt[-1], EOS]


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_b43_replicas_joined_give_what_one_replica_gives(config: Config, folder: Path, num_replicas: int) -> None:
    """A real engine: shards of any size, seeds that belong to the requests, rewards that stay with their rows."""
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    stops = frozenset(range(0, 130, 10))
    backend = HFBackend(config, seed=1)

    def rollout(world: World) -> TrajectoryBatch:
        with RewardPool("length", num_workers=1, timeout_s=5) as rewards:
            return collect(*make_worker(config, backend, world=world, delivery=Delivery(state), stops=stops, rewards=rewards))

    whole = rollout(world_of())
    parts = [rollout(world_of(rank, num_ranks=num_replicas)) for rank in range(num_replicas)]
    joined = TrajectoryBatch.concatenate(parts)
    for name in ("prompt_lengths", "response_lengths", "truncated", "prompt_ids", "sample_indices", "scores"):
        assert torch.equal(getattr(joined, name), getattr(whole, name)), name
    width = min(joined.tokens.shape[1], whole.tokens.shape[1])
    assert torch.equal(joined.tokens[:, :width], whole.tokens[:, :width])
    torch.testing.assert_close(joined.rollout_log_probs[:, :width], whole.rollout_log_probs[:, :width], atol=1e-5, rtol=0)
    assert len(whole.response_lengths.unique()) > 1, "responses of one length would not show rows that changed places"
    assert len({tuple(response(whole, row)) for row in range(12)}) > 6


def test_b42_peers_of_a_replica_are_asked_the_same_and_replicas_different_things(config: Config) -> None:
    backends = [Told() for _ in range(4)]
    for rank, backend in enumerate(backends):
        world = world_of(rank, num_ranks=4, tensor_parallel=2)
        worker, bus = make_worker(config, backend, world=world)
        handle = worker.collect(bus.put(PromptBatch(3, PROMPTS)))
        assert handle == DataHandle(1 + rank // 2 * 2, trajectories_key(3))
        if rank % 2:
            with pytest.raises(TimeoutError):  # only heads put, and this head's bus is another process's
                bus.get(handle, timeout_s=0.05)
    calls = [backend.calls[0] for backend in backends]
    assert calls[0] == calls[1] and calls[2] == calls[3]
    assert calls[0][0] == [list(p.token_ids) for p in PROMPTS[:2] for _ in range(3)]
    seeds = calls[0][2] + calls[2][2]
    assert len(set(seeds)) == 12 and all(isinstance(seed, int) and 0 <= seed < 2**31 for seed in seeds)
    assert seeds == [request_seed(config.training.seed, 3, prompt.prompt_id, sample) for prompt in PROMPTS for sample in range(3)]


def test_b42_engine_seeds_differ_between_replicas_only(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a run builds engines: always a whole number, the same for the ranks of a replica."""
    from megatron_ppo.backends import hf
    from megatron_ppo.run import Run

    monkeypatch.setattr(hf, "HFBackend", lambda config, *, seed: seed)
    runs: list[Any] = [SimpleNamespace(_config=config, _world=world_of(rank, num_ranks=4, tensor_parallel=2)) for rank in range(4)]
    assert [Run._inference_backend(run) for run in runs] == [1, 1, 2, 2]


def test_b42_the_same_run_twice_gives_the_same_rollouts_and_another_iteration_others(config: Config, folder: Path) -> None:
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    backend = HFBackend(config, seed=1)
    worker, bus = make_worker(config, backend, delivery=Delivery(state))
    first, second = collect(worker, bus, iteration=0), collect(worker, bus, iteration=1)
    again = collect(*make_worker(config, backend, delivery=Delivery(state)), iteration=0)
    assert torch.equal(first.tokens, again.tokens) and torch.equal(first.rollout_log_probs, again.rollout_log_probs)
    assert not torch.equal(first.tokens, second.tokens)


def test_sampling_is_the_configurations(config: Config) -> None:
    backend = Told()
    worker, bus = make_worker(config.replace(temperature=0.6, top_p=0.9, top_k=40), backend, stops=frozenset({1, 9}))
    collect(worker, bus)
    assert backend.calls[0][1] == Sampling(6, temperature=0.6, top_p=0.9, top_k=40, stop_token_ids=frozenset({1, 9}))
    worker.collect_greedy(0, PROMPTS[:2])
    prompts, sampling, _ = backend.calls[1]
    assert len(prompts) == 2 and sampling.greedy and sampling.stop_token_ids == {1, 9} and sampling.max_response_length == 6


# -- answers ----------------------------------------------------------------------------------------------------------


def test_b36_ids_of_the_engine_are_trained_on_although_their_text_has_others(config: Config) -> None:
    """he + llo decodes to hello, which is one id; a special token inside the response stays too."""
    worker, bus = make_worker(
        config, Told(lambda prompt, seed: [HE, LLO]), rewards=RewardPool("exact_match", num_workers=1, timeout_s=5)
    )
    batch = collect(worker, bus, [dataclasses.replace(PROMPTS[0], answer="hello"), dataclasses.replace(PROMPTS[1], answer="he")])
    assert all(response(batch, row) == [HE, LLO] for row in range(6))
    for row in range(6):
        assert batch.rollout_log_probs[row][batch.response_mask[row]].tolist() == [-0.5, -0.75]
    assert batch.scores.tolist() == [1.0] * 3 + [0.0] * 3
    inside, bus = make_worker(config, Told(lambda prompt, seed: [HE, 0, LLO, EOS]))
    assert response(collect(inside, bus), 0) == [HE, 0, LLO, EOS]


def test_b34_b35_masks_come_from_lengths_never_from_ids(config: Config) -> None:
    """The padding id may be the stop id, and either may stand in a prompt."""
    answers = {3: [5, 6, 2], 4: [5, 1], 5: [5, 6, 7, 8, 9], 6: [2, 2, 2, 2]}
    prompts = tuple(Prompt(i, (2, *[1] * (n - 2), 0), "") for i, n in enumerate(answers))
    backend = Told(lambda prompt, seed: answers[len(prompt)])
    batch = collect(*make_worker(config.replace(samples_per_prompt=1), backend, stops=frozenset({1, 2})), prompts)
    assert batch.tokens.shape == (4, 10)
    for row, (length, ids) in enumerate(answers.items()):
        mask = batch.response_mask[row]
        assert mask.tolist() == [False] * length + [True] * len(ids) + [False] * (10 - length - len(ids))
        assert batch.tokens[row][mask].tolist() == ids
        assert batch.tokens[row, :length].tolist() == list(prompts[row].token_ids)
    assert bool((batch.rollout_log_probs[~batch.response_mask] == 0).all())
    assert batch.truncated.tolist() == [False, False, True, False], "only the response without either stop id is cut off"


def test_b34_responses_of_a_real_engine_end_at_the_first_stop_id(config: Config, folder: Path) -> None:
    stops = frozenset(range(0, 130, 5))
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    batch = collect(*make_worker(config, HFBackend(config, seed=1), delivery=Delivery(state), stops=stops))
    for row in range(batch.num_rows):
        *inside, last = response(batch, row)
        assert not stops.intersection(inside)
        assert (last not in stops) == bool(batch.truncated[row])
        assert len(inside) + 1 == 6 or not batch.truncated[row]
    assert 0 < int(batch.truncated.sum()) < batch.num_rows


@pytest.mark.parametrize("empty", [{10}, {10, 11, 12, 13}], ids=["one", "all"])
def test_b40_responses_without_a_token(config: Config, empty: set[int]) -> None:
    prompt_of = {prompt.token_ids: prompt.prompt_id for prompt in PROMPTS}
    backend = Told(lambda prompt, seed: [] if prompt_of[prompt] in empty else [9, EOS])
    worker, bus = make_worker(config, backend, rewards=RewardPool("length", num_workers=1, timeout_s=5))
    batch = collect(worker, bus)
    rows = torch.tensor([int(i) in empty for i in batch.prompt_ids])
    assert batch.response_lengths.tolist() == [0 if is_empty else 2 for is_empty in rows.tolist()]
    assert not bool(batch.response_mask[rows].any()) and bool(torch.isfinite(batch.scores).all())
    assert bool((batch.rollout_log_probs[rows] == 0).all())
    again = TrajectoryBatch.from_bytes(batch.to_bytes())
    assert torch.equal(again.tokens, batch.tokens) and torch.equal(again.response_lengths, batch.response_lengths)
    zeros = torch.zeros_like(batch.rollout_log_probs)
    experience, metrics = make_experience(batch, batch.rollout_log_probs, zeros, None, None, config.algorithm, 0.0)
    assert all(math.isfinite(value) for value in metrics.values())
    assert bool(torch.isfinite(experience.advantages).all()) and bool((experience.advantages[rows] == 0).all())


def test_a_row_needs_its_completion() -> None:
    with pytest.raises(ValueError, match="zip"):
        make_trajectories([(PROMPTS[0], 0), (PROMPTS[0], 1)], [Completion([1], [-1.0], False)], [0.0, 0.0], version=0, metrics={})


# -- rewards ----------------------------------------------------------------------------------------------------------


def test_b80_timeouts_and_errors_of_the_reward_are_counted(config: Config) -> None:
    texts = {PROMPTS[0].token_ids: "loop", PROMPTS[1].token_ids: "raise", PROMPTS[2].token_ids: "nan", PROMPTS[3].token_ids: "abc"}
    tokenizer = load_tokenizer(config)
    backend = Told(lambda prompt, seed: tokenizer.encode(texts[prompt], add_bos=False))
    with RewardPool("reward_functions:misbehave", num_workers=1, timeout_s=0.5) as rewards:
        worker, bus = make_worker(config.replace(samples_per_prompt=1), backend, rewards=rewards)
        batch = collect(worker, bus)
        assert batch.metrics["reward/timeouts"] == [1.0] and batch.metrics["reward/errors"] == [2.0]
        assert batch.scores.tolist() == [0.0, 0.0, 0.0, 3.0]
        assert batch.metrics["time/reward_s"][0] >= 0.5 and batch.metrics["time/rollout_s"] >= batch.metrics["time/reward_s"]


def test_without_a_function_reward_scores_are_zero(config: Config) -> None:
    batch = collect(*make_worker(config, Told()))
    assert batch.scores.tolist() == [0.0] * 12 and "reward/timeouts" not in batch.metrics


# -- handles ----------------------------------------------------------------------------------------------------------


def test_data_of_the_iteration_before_is_forgotten(config: Config) -> None:
    worker, bus = make_worker(config, Told())
    request = bus.put(PromptBatch(0, PROMPTS))
    first = worker.collect(request)
    worker.collect_greedy(0, PROMPTS[:1])
    greedy = DataHandle(1, "greedy/0")
    answers = bus.get(greedy)
    assert isinstance(answers, TrajectoryBatch) and answers.num_rows == 1 and bus.get(first) is not None
    worker.set_weights(DataHandle(0, "weights/1"))
    second = worker.collect(bus.put(PromptBatch(1, PROMPTS)))
    for old in (request, first, greedy):
        with pytest.raises(KeyError):
            bus.get(old)
    assert isinstance(bus.get(second), TrajectoryBatch)


def test_a_training_rank_names_the_workers_without_a_message() -> None:
    store = dist.HashStore()
    world = World(0, 6, 0, "training", 0, 2, range(2), range(2, 6), 2, store, "test")
    remote = RemoteRollout(world)
    assert remote.collect(5) == [DataHandle(2, "trajectories/5"), DataHandle(4, "trajectories/5")]
    assert remote.collect_greedy(5) == DataHandle(2, "greedy/5")
    with pytest.raises(RuntimeError, match="rank 0 trains"):
        remote.set_weights(DataHandle(0, "weights/0"))
    with pytest.raises(RuntimeError, match="rank 0 trains"):
        remote.live_weights()


def test_a_rollout_rank_counts_the_versions_itself() -> None:
    remote = RemoteTraining(world_of())
    assert version_of(remote.get_weights()) == 0
    remote.finished_update()
    assert remote.get_weights() == DataHandle(0, "weights/1") and remote.version == 1


def test_close_ends_the_rewards_and_the_engine(config: Config) -> None:
    backend, rewards = Told(), RewardPool("length", num_workers=1, timeout_s=5)
    worker, _ = make_worker(config, backend, rewards=rewards)
    worker.close()
    assert backend.log[-1] == "closed"
    with pytest.raises(RuntimeError, match="closed"):
        rewards.score([])
