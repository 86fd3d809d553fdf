"""What ends a launch, and how soon: kill -9 of a vLLM rank in the middle of a rollout, exceptions on one rank.

A fault is planted by a script that torchrun runs in place of the program: on one rank of the first attempt it changes one function, and
then runs the program. Everything else is the real thing, in real processes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch_config import two_by_two
from torch import Tensor
from train_support import Processes, make_inputs, promised, read_lines, tiny_flags

from megatron_ppo.backends.base import EngineMemory, InferenceBackend
from megatron_ppo.data_bus import DataBus, DataHandle
from megatron_ppo.resharding.executor import TransferStats
from megatron_ppo.rollout_engine import PromptBatch, RolloutWorker
from megatron_ppo.types import Completion, Prompt, Sampling, TrajectoryBatch
from megatron_ppo.world import World

LAUNCH_TIMEOUT_S = 400.0
"""Until the fault is reached; the machine may be busy."""
END_S = 10.0
"""The promise: so soon after a rank was lost every process of the launch has ended."""

PLANTED = '''
"""Runs the program with a fault on one rank of the first attempt."""
import os, signal, sys, time

KIND, VICTIM, KILLED_AT = sys.argv[1:4]

def killed(*_, **__):
    # Time for a heartbeat to say in which phase this rank is: real weights take seconds.
    time.sleep(2.5)
    with open(KILLED_AT, "w") as file:
        file.write(repr(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)

def raises(text):
    def call(*_, **__):
        raise ValueError(text)
    return call

def on_call(number, function, replacement):
    calls = 0
    def call(*arguments, **options):
        nonlocal calls
        calls += 1
        return (replacement if calls == number else function)(*arguments, **options)
    return call

def plant():
    if KIND == "generate":
        from megatron_ppo.backends.vllm import VLLMBackend
        # Of iteration 1: replica 1 answers once an iteration.
        VLLMBackend.generate = on_call(2, VLLMBackend.generate, killed)
    elif KIND == "metrics":
        from megatron_ppo.metrics import MetricsWriter
        MetricsWriter.log = on_call(2, MetricsWriter.log, raises("planted: the disk is full"))
        import wandb
        wandb.init = raises("planted: no route")
    elif KIND == "data":
        from megatron_ppo import run
        run._load_data = raises("planted: the prompts are gone")
    elif KIND == "reward":
        from megatron_ppo import run
        run.RewardPool = raises("planted: the reward does not start")

if os.environ["RANK"] == VICTIM and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    plant()
from megatron_ppo.__main__ import main
sys.exit(main(["train", *sys.argv[4:]]))
'''

REWARD = '''
"""A reward that runs in processes of its own, so that there are children to leave behind."""

def few(sample):
    return 1.0 / (1 + sample.num_response_tokens)
'''


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, tokenizer and prompts."""
    folder = make_inputs(tmp_path_factory.mktemp("inputs"))
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    return folder


def planted(inputs: Path, folder: Path, kind: str, victim: int, **fields: object) -> list[str]:
    """What follows ``python`` for a job of two training ranks (TP 2) and a rollout rank with that fault."""
    script = folder / "planted.py"
    script.write_text(PLANTED, encoding="utf-8")
    shape = {"tensor_model_parallel_size": 2, "rollout_world_size": 1, "bucket_bytes": 65536, "reward": f"{inputs / 'reward.py'}:few"}
    return [str(script), kind, str(victim), str(folder / "killed_at"), *tiny_flags(inputs, folder / "run", **{**shape, **fields})]


def torchrun_killed_a_rank(output: str) -> bool:
    """Whether torchrun had to end a rank with SIGKILL, 30 s after it had asked it to end. These are its words (torch 2.13)."""
    return "forcefully exiting via" in output


def assert_all_name_the_lost_rank(output: str, victim: str, phase: str, survivors: list[int]) -> None:
    """Each survivor has printed who was lost, in which phase, and where it was itself."""
    for rank in survivors:
        assert re.search(rf"^{re.escape(victim)} lost in phase {phase}; this is rank {rank} in phase .*; ending", output, re.M), output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_b92_a_killed_vllm_rank_ends_the_launch(inputs: Path, tmp_path: Path) -> None:
    """B92: in a rollout; all processes end within 10 s, by themselves, the other replica's too, and name rank and phase.

    With another engine, in every phase, with restarts: ``test_fault_drill.py``.
    """
    killed_at = tmp_path / "killed_at"
    two_replicas = {"tensor_model_parallel_size": 1, "rollout_world_size": 2}
    with Processes(tmp_path / "log") as processes:
        processes.torchrun(3, planted(inputs, tmp_path, "generate", 2, **two_replicas))
        processes.wait_until(killed_at.exists, "the planted kill", LAUNCH_TIMEOUT_S)
        ended = processes.wait_until(lambda: not processes.alive(attempt=0), "the end of all ranks and their children", 60.0)
        assert ended - float(killed_at.read_text()) < promised(END_S), processes.output()
        assert processes.wait(LAUNCH_TIMEOUT_S) != 0
        output = processes.output()
        assert processes.alive() == []
    assert_all_name_the_lost_rank(output, "rank 2 (rollout rank 1)", "rollout of iteration 1", [0, 1])
    assert not torchrun_killed_a_rank(output), output
    # torchrun's report: the victim died of SIGKILL, the others ended by themselves or on torchrun's request
    codes = re.findall(r"exitcode  : (-?\d+) ", output)
    assert codes.count("-9") == 1 and set(codes) <= {"-9", "1", "-15"}, output
    assert [record["iteration"] for record in read_lines(tmp_path / "run" / "metrics.jsonl")] == [0]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "victim", "text", "phase"),
    [
        ("metrics", 0, "planted: the disk is full", "log of iteration 1"),
        ("data", 0, "planted: the prompts are gone", "start-up: data"),
        ("reward", 2, "planted: the reward does not start", "start-up: reward"),
    ],
)
def test_b93_an_exception_on_one_rank_ends_all_and_is_what_all_print(
    inputs: Path, tmp_path: Path, kind: str, victim: int, text: str, phase: str
) -> None:
    """B93: no rank waits for a peer that has failed, and what every rank prints is the first error, not its echo.

    The record on disk is not optional, W&B is: in the first of these launches it fails on rank 0 before, and training goes on.
    """
    with Processes(tmp_path / "log", {"WANDB_MODE": "offline"}) as processes:
        # The engine of the other backend is built sooner; which one it is makes no difference here.
        processes.torchrun(3, planted(inputs, tmp_path, kind, victim, rollout_backend="hf", loggers=["wandb"]))
        started = processes.wait_until(lambda: text in processes.output(), "the planted error", LAUNCH_TIMEOUT_S)
        ended = processes.wait_until(lambda: not processes.alive(), "the end of all processes", 60.0)
        assert ended - started < promised(END_S)
        assert processes.wait(1.0) == 1
        output = processes.output()
    is_input = kind == "reward"  # what the user gave: its words alone
    assert output.count("    raise ValueError(text)\n") == (0 if is_input else 1), "the traceback is shown once"
    failed = re.escape(f"failed in phase {phase}: {'' if is_input else 'ValueError: '}{text}")
    for rank in range(3):
        rest = "" if rank == victim else f"; this is rank {rank} in phase .*"
        assert re.search(rf"^rank {victim} \(.*\) {failed}{rest}; ending", output, re.M), output
    assert not torchrun_killed_a_rank(output)
    if kind == "metrics":
        assert output.count("warning: wandb is off: ValueError: planted: no route\n") == 1, output
        assert [record["iteration"] for record in read_lines(tmp_path / "run" / "metrics.jsonl")] == [0]


# -- a worker whose sync broke ----------------------------------------------------------------------------------------


class CachingEngine(InferenceBackend):
    """Answers with its only weight, and answers a prompt that it has seen from a cache, as a prefix cache would."""

    def __init__(self, events: list[str]) -> None:
        self.weight = torch.zeros(2)
        self.events = events
        self._cache: dict[tuple[int, ...], int] = {}

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        """One token, which is the weight."""
        self.events.append("generate")
        answers = [self._cache.setdefault(tuple(prompt), int(self.weight[0])) for prompt in prompts]
        return [Completion(token_ids=[answer], log_probs=[0.0], truncated=False) for answer in answers]

    def weights(self) -> dict[str, Tensor]:
        """The live parameter."""
        return {"weight": self.weight}

    def shard_bytes(self) -> int:
        """Of two fp32 numbers."""
        return 8

    def sleep(self) -> None:
        """It has a mesh of its own."""
        raise AssertionError

    def wake_up(self, what: EngineMemory) -> None:
        """As ``sleep``."""
        raise AssertionError

    def after_weight_update(self) -> None:
        """Forget the answers."""
        self.events.append("reset")
        self._cache.clear()

    def load_hf_weights(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Not called."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to free."""


@dataclass
class ScriptedTransfer:
    """Stands for the executor: writes ``values`` one by one into the live weight, or breaks after the first."""

    events: list[str]
    value: float = 0.0
    breaks: bool = False
    bytes_received: int = 8

    def expected_bytes(self, shard_bytes: int) -> int:
        """The shard, once."""
        return shard_bytes

    def receive(self, parameters: Mapping[str, Tensor]) -> TransferStats:
        """One sync."""
        for index in range(2):
            if self.breaks and index == 1:
                raise RuntimeError("connection closed by peer")
            parameters["weight"][index] = self.value
            self.events.append("tensor")
        return TransferStats(0, self.bytes_received, 2, 0.0)


@dataclass
class Rollout:
    """A worker on one rank, with what it is made of."""

    worker: RolloutWorker
    transfer: ScriptedTransfer
    engine: CachingEngine
    bus: DataBus
    events: list[str] = field(default_factory=list)

    def sync(self, version: int) -> None:
        """Receive the weights of a version."""
        self.worker.set_weights(DataHandle(0, f"weights/{version}"))

    def collect(self, iteration: int) -> int:
        """Sample one response to one prompt; its token."""
        prompt = Prompt(prompt_id=0, token_ids=(5, 6), text="", answer=None, columns={})
        handle = self.bus.put(PromptBatch(iteration, (prompt,)), key=f"prompts/{iteration}")
        batch = self.bus.get(self.worker.collect(handle))
        assert isinstance(batch, TrajectoryBatch)
        assert batch.version == self.worker.version
        return int(batch.tokens[0, 2])


@pytest.fixture
def rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rollout]:
    """The real worker and bus on one rank, between a scripted transfer and an engine with a cache."""
    config = two_by_two(str(tmp_path)).replace(
        reward=None, rollout_world_size=1, samples_per_prompt=1, max_prompt_length=4, max_response_length=4
    )
    world = World(
        global_rank=0,
        world_size=1,
        local_rank=0,
        mesh="rollout",
        rank=0,
        mesh_size=1,
        training_ranks=range(0),
        rollout_ranks=range(1),
        rollout_tensor_parallel_size=1,
        store=dist.HashStore(),
        run_id="test",
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # tells the bus which network it serves
    monkeypatch.setenv("MASTER_PORT", "1")
    events: list[str] = []
    transfer, engine, bus = ScriptedTransfer(events), CachingEngine(events), DataBus(world, timeout_s=10.0)
    worker = RolloutWorker(config, world, bus, engine, transfer, None, frozenset(), None)  # type: ignore[arg-type]
    yield Rollout(worker, transfer, engine, bus, events)
    dist.destroy_process_group()


def test_b27_the_cache_goes_once_a_sync_after_the_last_tensor_and_before_the_next_sample(rollout: Rollout) -> None:
    """B27: the same prompt is answered by the new weights."""
    for version in range(3):
        rollout.transfer.value = float(version + 7)
        rollout.events.clear()
        rollout.sync(version)
        assert rollout.collect(version) == version + 7
        assert rollout.events == ["tensor", "tensor", "reset", "generate"]


def test_nothing_is_sampled_before_the_first_sync(rollout: Rollout) -> None:
    """A worker without weights refuses."""
    with pytest.raises(RuntimeError, match="holds no whole set of weights"):
        rollout.collect(0)
    assert rollout.events == []


def test_a_sync_that_broke_leaves_the_worker_unusable(rollout: Rollout) -> None:
    """Half of v1 has been written over v0: neither may be sampled from. A later sync that ends well mends it."""
    rollout.sync(0)
    rollout.transfer.breaks = True
    with pytest.raises(RuntimeError, match="connection closed"):
        rollout.sync(1)
    assert rollout.worker.version is None
    with pytest.raises(RuntimeError, match="last sync did not end well"):
        rollout.collect(1)
    assert "generate" not in rollout.events
    rollout.transfer.breaks, rollout.transfer.value = False, 3.0
    rollout.sync(2)
    assert rollout.worker.version == 2
    assert rollout.collect(2) == 3


@pytest.mark.parametrize("received", [0, 4])
def test_b28_a_sync_that_brought_too_little_is_an_error(rollout: Rollout, received: int) -> None:
    """B28: no tensor at all, or not all of them: the numbers are said, and the worker stays unusable."""
    rollout.transfer.bytes_received = received
    with pytest.raises(RuntimeError, match=f"received {received} bytes of weights, but should get 8"):
        rollout.sync(0)
    assert rollout.worker.version is None
    with pytest.raises(RuntimeError, match="holds no whole set of weights"):
        rollout.collect(0)
