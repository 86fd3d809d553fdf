"""A weight sync that breaks, stalls or loses a rank, between real processes: what is sampled afterwards, what is said, and how soon.

Two kinds of launch: a small model in a real engine, whose sync is cut in the middle and then done whole over new groups; and 100 MB of
weights, so that a rank can be stopped and killed while they travel. The loop around them is in ``test_fault_drill.py``.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense_layouts import Dense, engine_mesh, trainer_mesh
from launch_config import two_by_two
from safetensors.torch import load_file
from spawn import free_port, rank_environment, run_ranks, start_process
from torch import Tensor
from toy_models import make_toy
from toy_tokenizers import make_bpe_tokenizer
from train_support import promised

from megatron_ppo.bridge import Bridge
from megatron_ppo.config import Config
from megatron_ppo.data_bus import DataBus, DataHandle
from megatron_ppo.families import NetworkShape, network_shape
from megatron_ppo.resharding.executor import ReshardExecutor
from megatron_ppo.resharding.fsdp_layout import fsdp_layouts
from megatron_ppo.resharding.hf_checkpoint import load_hf_weights
from megatron_ppo.resharding.layout import RankLayout
from megatron_ppo.resharding.megatron_layout import training_layouts
from megatron_ppo.resharding.megatron_mesh import megatron_parallel
from megatron_ppo.resharding.plan import build_plan
from megatron_ppo.rollout_engine import PromptBatch, RemoteRollout, RemoteTraining, RolloutWorker
from megatron_ppo.tokenizer import load_tokenizer
from megatron_ppo.types import Prompt, TrajectoryBatch
from megatron_ppo.watchdog import Watchdog
from megatron_ppo.weight_synchronizer import WeightSynchronizer, refit_plan, transfer_dtype
from megatron_ppo.world import World, close_world, init_world

pytestmark = pytest.mark.timeout(600)

# -- a sync that is cut in the middle, and one that is whole ---------------------------------------------------------------

PROMPTS = tuple(Prompt(i, tuple(range(3 + i, 9 + 3 * i)), text="", answer=None, columns={}) for i in range(4))
BREAKS_AT = 5
"""Number of the broadcast, in the sync that is cut, before which one rollout rank loses its connection."""


class Group:
    """A weight group that notes each broadcast that has ended, and may lose its connection."""

    def __init__(self, bridge: Bridge, events: list[str], started: list[int]) -> None:
        self._bridge = bridge
        self._events = events
        self._started = started

    def broadcast(self, tensor: Tensor, source: int, async_op: bool = False) -> Any:
        self._started[0] -= 1
        if self._started[0] == 0:
            self._bridge.close()
            raise ConnectionError("planted: the connection is lost")
        work = self._bridge.broadcast(tensor, source, async_op)
        assert work is not None
        return Landing(work, self._events)


class Landing:
    """The end of a broadcast, noted."""

    def __init__(self, work: dist.Work, events: list[str]) -> None:
        self._work = work
        self._events = events

    def wait(self) -> None:
        self._work.wait()
        self._events.append("bucket")


class Ends:
    """One rank's executor, what happened in it, and its groups."""

    def __init__(self, config: Config, world: World, prefix: str) -> None:
        self.events: list[str] = []
        self.breaks_after = [0]
        """Broadcasts until the connection is lost; counts down, and below 0 never comes."""
        self.bridges: list[Bridge] = []
        self._world = world
        self._prefix = prefix
        self.executor = ReshardExecutor(
            refit_plan(config, world.world_size),
            world.global_rank,
            self._make,
            bucket_bytes=config.parallel.bucket_bytes,
            transfer_dtype=transfer_dtype(config),
        )

    def _make(self, name: str, ranks: Sequence[int]) -> Group:
        self.bridges.append(Bridge(f"{self._prefix}/{name}", ranks, self._world, "gloo", 60))
        return Group(self.bridges[-1], self.events, self.breaks_after)

    def close(self) -> None:
        for bridge in self.bridges:
            bridge.close()


class Source:
    """Stands for the training engine: hands out one of two sets of weights."""

    def __init__(self, bus: DataBus) -> None:
        self.version = 0
        self.parameters: Mapping[str, Tensor] = {}
        self._bus = bus

    def get_weights(self) -> DataHandle:
        return self._bus.put(self.parameters, f"weights/{self.version}/{time.monotonic_ns()}")


def break_and_mend(rank: int, world_size: int, config: Config, other: str) -> dict[str, Any]:
    """v0, v1, v0's weights again as v2, v1's as v3: cut in the middle, then whole. One training rank, two replicas."""
    torch.set_num_threads(1)
    world = init_world(config)
    bus = DataBus(world, timeout_s=200)
    end = Bridge("end", range(world_size), world)
    found = _send(config, world, bus, other, end) if world.is_training else _receive(config, world, bus, end)
    end.barrier()  # rank 0 hosts the launch's store
    close_world(world)
    return found


def _send(config: Config, world: World, bus: DataBus, other: str, end: Bridge) -> dict[str, Any]:
    layout = training_layouts(network_shape(config.model.model_path), megatron_parallel(config), 1)[0]
    sets = []
    for folder in (config.model.model_path, other):
        sets.append({name: torch.zeros(shape) for name, shape in layout.shapes.items()})
        load_hf_weights(folder, layout, sets[-1])
    source, rollout, first = Source(bus), RemoteRollout(world), Ends(config, world, "first")
    synchronizer = WeightSynchronizer(world, bus, first.executor, verify_always=True)
    for source.version, source.parameters in enumerate((sets[0], sets[1], sets[0])):
        synchronizer.sync(source, rollout)
        end.barrier()  # a sync starts when the one before has ended everywhere
    source.version, source.parameters = 3, sets[1]
    found = {"broken": _error(lambda: synchronizer.sync(source, rollout))}
    first.close()
    found["again"] = _error(lambda: synchronizer.sync(source, rollout))
    end.barrier()
    second = Ends(config, world, "second")
    WeightSynchronizer(world, bus, second.executor, verify_always=True).sync(source, rollout)
    end.barrier()
    second.close()
    return found


def _receive(config: Config, world: World, bus: DataBus, end: Bridge) -> dict[str, Any]:
    backend = _engine(config, world)
    first = Ends(config, world, "first")
    events = first.events
    _note(backend, events)
    worker = RolloutWorker(config, world, bus, backend, first.executor, load_tokenizer(config), frozenset(), rewards=None)
    training = RemoteTraining(world)
    synchronizer = WeightSynchronizer(world, bus, first.executor, verify_always=True)
    found: dict[str, Any] = {"events": [], "samples": [], "num_buckets": len(first.executor._buckets)}
    weights = []
    for _ in range(3):
        events.clear()
        synchronizer.sync(training, worker)
        found["samples"].append(_sample(worker, bus, iteration=7))
        found["events"].append(list(events))
        weights.append({name: tensor.clone() for name, tensor in backend.weights().items()})
        training.finished_update()
        end.barrier()
    events.clear()
    first.breaks_after[0] = BREAKS_AT if world.global_rank == 2 else 0
    found["broken"] = _error(lambda: synchronizer.sync(training, worker))
    first.close()
    found |= {"version": worker.version, "broken events": list(events)}
    live = {name: tensor.clone() for name, tensor in backend.weights().items()}
    differ = {name: weights[0][name] != weights[1][name] for name in live}
    found["parts"] = [sum(int((differ[name] & (live[name] == own[name])).sum()) for name in live) for own in weights[:2]]
    found["refusals"] = [
        _error(lambda: _sample(worker, bus, iteration=8)),
        _error(lambda: worker.collect_greedy(8, PROMPTS)),
        _error(lambda: synchronizer.sync(training, worker)),
        _error(lambda: _sample(worker, bus, iteration=9)),
    ]
    found["after refusals"] = list(events[len(found["broken events"]) :])
    end.barrier()
    second = Ends(config, world, "second")
    _note(backend, second.events)
    mended = RolloutWorker(config, world, bus, backend, second.executor, load_tokenizer(config), frozenset(), rewards=None)
    found["before"] = _error(lambda: _sample(mended, bus, iteration=10))
    WeightSynchronizer(world, bus, second.executor, verify_always=True).sync(training, mended)
    found["mended"] = mended.version, _sample(mended, bus, iteration=7)
    found["mended events"] = second.events
    found["stale"] = [name for name, tensor in backend.weights().items() if not torch.equal(tensor, weights[1][name])]
    end.barrier()
    second.close()
    mended.close()
    return found


def _engine(config: Config, world: World) -> Any:
    if config.rollout.rollout_backend == "hf":
        from megatron_ppo.backends.hf import HFBackend

        return HFBackend(config, seed=world.replica)
    from megatron_ppo.backends.vllm import VLLMBackend

    return VLLMBackend(config, seed=world.replica)


def _note(backend: Any, events: list[str]) -> None:
    """Let the engine's own methods say when they were called."""
    for name, event in (("after_weight_update", "reset"), ("generate", "generate")):
        method = getattr(type(backend), name)

        def noted(*arguments: Any, method: Any = method, event: str = event) -> Any:
            events.append(event)
            return method(backend, *arguments)

        setattr(backend, name, noted)


def _sample(worker: RolloutWorker, bus: DataBus, iteration: int) -> tuple[list[list[int]], list[list[float]], int]:
    """Tokens and log-probs of this replica's share of the prompts, and the version that the batch bears."""
    batch = bus.get(worker.collect(bus.put(PromptBatch(iteration, PROMPTS))))
    assert isinstance(batch, TrajectoryBatch)
    return batch.tokens.tolist(), batch.rollout_log_probs.tolist(), batch.version


def _error(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, ConnectionError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("backend", ["hf", pytest.param("vllm", marks=pytest.mark.slow)])
def test_b27_a_sync_cut_in_the_middle_leaves_no_engine_to_sample_from_until_a_whole_one(tmp_path: Path, backend: str) -> None:
    """One of two replicas loses its connection while weights travel: no end can use its groups or its engine any more.

    Over new groups the same engines take a whole sync, and then answer as they did to the same weights before, token by token and
    log-prob by log-prob. B27: in every whole sync the cache goes once, after the last bucket and before the next sample.
    """
    sizes: dict[str, Any] = {"hidden_size": 128, "vocab_size": 201} if backend == "vllm" else {"vocab_size": 201}
    models = [make_toy(tmp_path / name, "qwen2", seed=seed, **sizes) for seed, name in enumerate(("one", "other"))]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    config = Config().replace(
        model_path=str(models[0]),
        tokenizer_path=str(make_bpe_tokenizer(tmp_path / "tokenizer")),
        prompt_data=str(tmp_path / "prompts.jsonl"),
        reward="length",
        critic="none",
        advantage_estimator="grpo",
        rollout_backend=backend,
        rollout_world_size=2,
        global_batch_size=8,
        micro_batch_size=4,
        prompts_per_iteration=4,
        samples_per_prompt=2,
        max_prompt_length=32,
        max_response_length=10,
        vllm_overrides={"kv_cache_memory_bytes": "53687091"},
        bucket_bytes=8192,
    )
    trainer, *replicas = run_ranks(break_and_mend, 3, config, str(models[1]), timeout_s=500)
    assert trainer["broken"] and "failed midway" in trainer["again"]
    for number, replica in enumerate(replicas):
        whole = ["bucket"] * replica["num_buckets"] + ["reset", "generate"]
        assert replica["num_buckets"] > 3 * BREAKS_AT
        assert replica["events"] == [whole] * 3 and replica["mended events"] == whole
        one, other, again = replica["samples"]
        assert one[:2] == again[:2] and one[0] != other[0], "the two sets of weights must answer differently"
        assert [version for *_, version in replica["samples"]] == [0, 1, 2]

        assert ("planted" in replica["broken"]) == (number == 1) and replica["broken"]
        assert replica["version"] is None
        assert all(count > 0 for count in replica["parts"]), "the engine must hold parts of both sets, or this proves little"
        assert set(replica["broken events"]) == {"bucket"}
        text = "the rollout engine holds no whole set of weights: the last sync did not end well; nothing may be sampled"
        sampled, greedy, synced, sampled_again = replica["refusals"]
        assert text in sampled and text in greedy and text in sampled_again and "failed midway" in synced
        assert text in replica["before"], "a new worker over the same engine has no weights either"
        assert replica["after refusals"] == []

        version, samples = replica["mended"]
        assert version == 3 and samples == (*other[:2], 3)
        assert replica["stale"] == []
    assert load_file(models[0] / "model.safetensors").keys() == load_file(models[1] / "model.safetensors").keys()


# -- ranks that stop, and ranks that die, while weights travel -------------------------------------------------------------

BIG = Dense(num_layers=2, hidden=512, heads=8, kv_heads=8, head_dim=64, ffn=2048, vocab=16384)
"""100 MB in fp32, which each of two replicas gets from two training ranks."""
BIG_ON_FSDP = NetworkShape("llama", 2, 512, 8, 8, 64, 2048, 16384, tied=False)
BACKENDS = ("fsdp", "megatron")
"""Version v comes from tensor-parallel ranks where v is odd, and from FSDP's shards where it is even."""
HEARTBEAT_TIMEOUT_S = 6.0
"""The configuration's default."""


def sync_for_ever(folder: Path) -> None:
    """One rank of four: syncs, in each of which every weight has another value, and on a rollout rank looks at them all."""
    world = init_world(two_by_two(str(folder)))
    rank = world.global_rank
    torch.set_num_threads(1)
    with Watchdog(world, HEARTBEAT_TIMEOUT_S) as watchdog:
        destinations = engine_mesh(BIG, 1, 2, 2)
        meshes = {"fsdp": fsdp_layouts(BIG_ON_FSDP, world_size=2, shard_size=2), "megatron": trainer_mesh(BIG, 2, 1)}
        executors = {name: _executor(world, name, sources, destinations) for name, sources in meshes.items()}
        shapes = {name: sources[rank].shapes if world.is_training else destinations[rank].shapes for name, sources in meshes.items()}
        held = {name: {key: torch.zeros(shape) for key, shape in own.items()} for name, own in shapes.items()}
        for version in range(1, 10_000):
            name = BACKENDS[version % 2]
            executor, parameters = executors[name], held[name]
            if world.is_training:
                for tensor in parameters.values():
                    tensor.fill_(version)
            with watchdog.phase(f"weight sync v{version}"):
                print(f"begins v{version}", flush=True)
                stats = executor.send(parameters) if world.is_training else executor.receive(parameters)
                print(f"ended v{version}", flush=True)
            with watchdog.phase(f"rollout of v{version}"):
                if world.is_rollout:
                    assert stats.bytes_received == sum(4 * tensor.numel() for tensor in parameters.values())
                    wrong = [name for name, tensor in parameters.items() if not bool((tensor == version).all())]
                    assert not wrong, wrong


def _executor(world: World, name: str, sources: Mapping[int, RankLayout], destinations: Mapping[int, RankLayout]) -> ReshardExecutor:
    plan = build_plan(sources, destinations, bytes_per_element=4)

    def make_group(group: str, ranks: Sequence[int]) -> Bridge:
        return Bridge(f"{name}/{group}", ranks, world)

    return ReshardExecutor(plan, world.global_rank, make_group, bucket_bytes=1 << 20, transfer_dtype=torch.float32)


class Launch:
    """Four ranks of ``sync_for_ever``, each with a log of its own. At its end none is left."""

    def __init__(self, folder: Path) -> None:
        two_by_two(str(folder))
        port = free_port()
        self._logs = [folder / f"rank{rank}.log" for rank in range(4)]
        self.ranks = [start_process(sync_for_ever, (folder,), rank_environment(rank, 4, port), self._logs[rank]) for rank in range(4)]

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.join()

    def output(self, rank: int | None = None) -> str:
        """What one rank, or all, have written."""
        logs = self._logs if rank is None else [self._logs[rank]]
        return "".join(log.read_text() for log in logs if log.exists())

    def ended(self, rank: int) -> int:
        """The last version that the rank has whole."""
        return int(([0, *re.findall(r"^ended v(\d+)$", self.output(rank), re.MULTILINE)])[-1])

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Poll; ``AssertionError`` with all output where the time is over."""
        until = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < until, f"waited in vain for {what}\n{self.output()}"
            time.sleep(0.02)

    def signal(self, rank: int, number: int) -> None:
        """To one rank alone."""
        pid = self.ranks[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def stop_in_a_sync(self, rank: int, backend: str | None = None) -> int:
        """Stop a rank between the begin and the end of a sync, of that backend where one is named; the version on its way."""
        for _ in range(200):
            self.signal(rank, signal.SIGSTOP)
            time.sleep(0.05)
            begun = re.findall(r"^(begins|ended) v(\d+)$", self.output(rank), re.MULTILINE)
            if begun and begun[-1][0] == "begins" and backend in (None, BACKENDS[int(begun[-1][1]) % 2]):
                return int(begun[-1][1])
            self.signal(rank, signal.SIGCONT)
            time.sleep(0.03)
        raise AssertionError(f"rank {rank} was never met in a sync\n{self.output()}")


def come_up(launch: Launch) -> None:
    launch.wait_for(lambda: all(launch.ended(rank) >= 1 for rank in range(4)), "the first sync", 120)


def assert_all_name(launch: Launch, victim: int, name: str, version: int) -> None:
    """Every survivor has ended by itself, with code 1, and said once who was lost in which sync."""
    for rank in set(range(4)) - {victim}:
        assert launch.ranks[rank].exitcode == 1, launch.output()
        line = rf"^rank {victim} \({name}\) lost in phase (.*); this is rank {rank} in phase (.*); ending$"
        found = re.findall(line, launch.output(rank), re.MULTILINE)
        assert len(found) == 1, launch.output()
        if victim == 0:  # its store is gone with it: the others know its phase as of their last beat, and their own
            assert rank == 1 or found[0][1] in (f"weight sync v{version}", f"weight sync v{version + 1}"), found
            assert re.fullmatch(r"start-up.*|weight sync v\d+|rollout of .*", found[0][0]), found
        else:
            # On a busy machine it may have been stopped between its step into the sync and the beat that says so.
            assert found[0][0] in (f"weight sync v{version}", f"rollout of v{version - 1}"), found
        assert re.fullmatch(r"(weight sync|rollout of) v\d+", found[0][1]), found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "name"), [(1, "training rank 1"), (0, "training rank 0"), (3, "rollout rank 1")], ids=["sender", "store's host", "receiver"]
)
def test_b92_a_rank_killed_in_a_sync_ends_all_with_its_rank_and_the_version(tmp_path: Path, victim: int, name: str) -> None:
    """B92: stopped first, so that it surely dies while weights travel; within 10 s of kill -9 nobody is left waiting."""
    with Launch(tmp_path) as launch:
        come_up(launch)
        version = launch.stop_in_a_sync(victim)
        time.sleep(0.5)
        before = [launch.ended(rank) for rank in range(4)]
        time.sleep(0.5)
        assert [launch.ended(rank) for rank in range(4)] == before, "all others must hang on the one that stands still"
        launch.signal(victim, signal.SIGKILL)
        started = time.monotonic()
        survivors = [launch.ranks[rank] for rank in range(4) if rank != victim]
        launch.wait_for(lambda: all(rank.exitcode is not None for rank in survivors), "the end of all ranks", 30)
        assert time.monotonic() - started < promised(10.0), launch.output()
        assert_all_name(launch, victim, name, version)


@pytest.mark.slow
def test_a_slow_receiver_does_not_break_a_sync_and_one_that_stays_away_is_named(tmp_path: Path) -> None:
    """Stopped for half the time limit of beats it catches up, and every weight of every version arrives; stopped for good it is lost.

    From FSDP's shards as from Megatron's; a slow sender, too.
    """
    with Launch(tmp_path) as launch:
        come_up(launch)
        for rank, backend in ((2, "fsdp"), (1, "fsdp"), (2, "megatron")):
            version = launch.stop_in_a_sync(rank, backend)
            time.sleep(HEARTBEAT_TIMEOUT_S / 2)
            assert launch.ended(rank) < version and all(process.exitcode is None for process in launch.ranks), launch.output()
            launch.signal(rank, signal.SIGCONT)
            launch.wait_for(lambda v=version: all(launch.ended(r) >= v + 2 for r in range(4)), "two more syncs", 60)
            assert "ending" not in launch.output() and "Error" not in launch.output(), launch.output()
        version = launch.stop_in_a_sync(3)
        started = time.monotonic()
        launch.wait_for(lambda: all(launch.ranks[rank].exitcode is not None for rank in range(3)), "the end of all ranks", 40)
        assert time.monotonic() - started < promised(HEARTBEAT_TIMEOUT_S + 4.0), launch.output()
        assert_all_name(launch, 3, "rollout rank 1", version)
