"""Whole launches for tests: a tiny job's inputs, torchrun as a subprocess, and the processes that belong to it. Test support only.

Each launch carries a mark of its own in the environment, which every process that it starts inherits, however deep and in whatever session.
So what is still alive can be found, and what is ended at the close of a test is this launch's alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from scripts.quickstart_assets import make_tiny

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ("-m", "megatron_ppo", "train")
WARNING = re.compile(r"warn|deprecat", re.IGNORECASE)
_MARK = "MEGATRON_PPO_TEST_LAUNCH"
_POLL_S = 0.05
_BUSY_LOAD = 4.0


def make_inputs(folder: Path) -> Path:
    """The quickstart's model (vocabulary of 13, 4 heads, 2 layers), tokenizer and prompts, written to ``folder``."""
    with torch.random.fork_rng(devices=[]):
        make_tiny(folder, seed=1)
    return folder


def tiny_flags(inputs: Path, run_dir: Path, **fields: object) -> list[str]:
    """Flags of a job of 8 prompts x 4 responses of at most 8 tokens; ``fields`` are set above that by their names in the configuration."""
    settings: dict[str, object] = {
        "model_path": inputs / "model",
        "prompt_data": inputs / "prompts.jsonl",
        "run_dir": run_dir,
        "reward": "token_accuracy",
        "train_iters": 2,
        "prompts_per_iteration": 8,
        "samples_per_prompt": 4,
        "global_batch_size": 16,
        "micro_batch_size": 8,
        "max_prompt_length": 8,
        "max_response_length": 8,
        "vllm_overrides": {"kv_cache_memory_bytes": "268435456"},
        "lr": 1e-3,
        "critic_lr": 1e-3,
    } | fields
    flags: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        flags += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", *_words(value)]
    return flags


def _words(value: object) -> list[str]:
    """Of a list, tuple or mapping, each of its parts."""
    if isinstance(value, dict):
        value = [part for pair in value.items() for part in pair]
    return [str(part) for part in value] if isinstance(value, list | tuple) else [str(value)]


class Processes:
    """One launch's processes. A context manager: at its end nothing of the launch is left alive."""

    def __init__(self, log_folder: Path, environment: Mapping[str, str] | None = None) -> None:
        log_folder.mkdir(parents=True, exist_ok=True)
        self._folder = log_folder
        self._mark = uuid.uuid4().hex
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "SLURM"))},
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # as the project's launchers set it
            _MARK: self._mark,
            **(environment or {}),
        }
        self.started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while alive := self.alive():
            for pid in alive:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(_POLL_S)
        for process in self.started:
            process.wait()

    def start(self, arguments: Sequence[str], **environment: str) -> subprocess.Popen[bytes]:
        """Start ``python ARGUMENTS`` in a session of its own; its output goes to files that ``output`` reads."""
        return self.start_command([sys.executable, *arguments], **environment)

    def start_command(self, command: Sequence[str], **environment: str) -> subprocess.Popen[bytes]:
        """``start`` of any program."""
        name = f"process{len(self.started)}"
        with (self._folder / f"{name}.out").open("wb") as out, (self._folder / f"{name}.err").open("wb") as err:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**self._environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def torchrun(self, num_ranks: int, program: Sequence[str], *, max_restarts: int = 0) -> subprocess.Popen[bytes]:
        """One torchrun on this machine, on ports that it finds free itself. ``program`` is what follows ``python``."""
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), "--max-restarts", str(max_restarts)]
        return self.start([*launcher, "--no-python", sys.executable, *program])

    def output(self, number: int = 0) -> str:
        """What a started process and its children have written so far: standard output, then standard error."""
        return self.stdout(number) + self.stderr(number)

    def stdout(self, number: int = 0) -> str:
        """Standard output of the process that was started as ``number``."""
        return (self._folder / f"process{number}.out").read_text(encoding="utf-8", errors="replace")

    def stderr(self, number: int = 0) -> str:
        """Standard error of the process that was started as ``number``."""
        return (self._folder / f"process{number}.err").read_text(encoding="utf-8", errors="replace")

    def alive(self, attempt: int | None = None) -> list[int]:
        """Process ids that run (zombies do not); ``attempt``: only ranks, and their children, of torchrun's restart count."""
        return [
            pid
            for pid, environment in self._environments().items()
            if attempt is None or environment.get("TORCHELASTIC_RESTART_COUNT") == str(attempt)
        ]

    def rank(self, global_rank: int) -> int:
        """Process id of a rank, by the RANK that torchrun started it with. ``AssertionError`` where there is not exactly one."""
        found = [
            pid
            for pid, environment in self._environments().items()
            if environment.get("RANK") == str(global_rank) and environment.get(_MARK) and self._parent(pid) == self.started[0].pid
        ]
        assert len(found) == 1, f"processes of rank {global_rank}: {found}; output:\n{self.output()}"
        return found[0]

    def wait(self, timeout_s: float, number: int = 0) -> int:
        """Exit code of a started process. ``AssertionError`` with its output where it takes longer."""
        try:
            return self.started[number].wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s; output:\n{self.output(number)}") from None

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float) -> float:
        """Poll until ``condition`` holds; ``time.monotonic()`` of that moment."""
        until = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > until:
                raise AssertionError(f"not within {timeout_s} s: {what}; alive: {self.alive()}; output:\n{self.output()}")
            time.sleep(_POLL_S)
        return time.monotonic()

    def _environments(self) -> dict[int, dict[str, str]]:
        """Environment at the start of each living process of this launch, by process id."""
        found: dict[int, dict[str, str]] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                data = (entry / "environ").read_bytes()
            except OSError:  # another user's, or gone in the meantime
                continue
            environment = dict(part.split("=", 1) for part in data.decode(errors="replace").split("\0") if "=" in part)
            if environment.get(_MARK) == self._mark:
                found[int(entry.name)] = environment
        return found

    def _parent(self, pid: int) -> int:
        try:
            return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return 0


@dataclass(frozen=True)
class Job:
    """A finished launch."""

    folder: Path
    output: str
    flags: Sequence[str] = ()
    """Of the program, without its name."""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Records of metrics.jsonl."""
        return read_lines(self.folder / "metrics.jsonl")

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Records of samples.jsonl."""
        return read_lines(self.folder / "samples.jsonl")


def run_job(inputs: Path, run_dir: Path, num_ranks: int, *, timeout_s: float = 500.0, **fields: object) -> Job:
    """One torchrun of ``tiny_flags`` to its end, which must be a good one; nothing of it outlives it."""
    flags = tiny_flags(inputs, run_dir, **fields)
    with Processes(run_dir.parent / f"log_{len(list(run_dir.parent.iterdir()))}", {"WANDB_MODE": "offline"}) as processes:
        processes.torchrun(num_ranks, [*PROGRAM, *flags])
        code = processes.wait(timeout_s)
        assert code == 0, processes.output()
        assert processes.alive() == []
        return Job(run_dir, processes.output(), flags)


def stopped_after(run_dir: Path, iteration: int, copy: Path) -> Path:
    """``copy``: the run's folder as it was when so many iterations were finished and saved, so that a launch there goes on from them.

    Later checkpoints and records are not in it: what is found there afterwards is that launch's own.
    """
    shutil.copytree(run_dir, copy)
    newest = f"iter_{iteration:07d}"
    assert (copy / "checkpoints" / newest / "COMPLETE").exists()
    for folder in (copy / "checkpoints").glob("iter_*"):
        if folder.name > newest:
            shutil.rmtree(folder)
    (copy / "checkpoints" / "latest").write_text(f"{newest}\n", encoding="utf-8")
    for name in ("metrics.jsonl", "samples.jsonl"):
        write_lines(copy / name, [row for row in read_lines(copy / name) if row["iteration"] < iteration])
    return copy


def forget_last_greedy(run_dir: Path, last: int) -> None:
    """Drop the greedy answers of an iteration that was the last of its launch, but is not ``last``, the run's: the one that a
    run in one go has not."""
    rows = read_lines(run_dir / "samples.jsonl")
    write_lines(run_dir / "samples.jsonl", [row for row in rows if not row["greedy"] or row["iteration"] in (0, last)])


def promised(seconds: float) -> float:
    """A time limit that the product promises on a machine of its own.

    Twice that where other tests run beside this one, and twice again where more processes want to run than two cores can.
    """
    return seconds * (2 if "PYTEST_XDIST_WORKER" in os.environ else 1) * (2 if os.getloadavg()[0] > _BUSY_LOAD else 1)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


def write_lines(file: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """The opposite of ``read_lines``."""
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def warnings_in(text: str) -> list[str]:
    """Lines of terminal output that look like a warning."""
    return [line for line in text.splitlines() if WARNING.search(line)]
