"""Runs a reward function over the responses of an iteration, in worker processes with a hard time limit.

    rank process                                   worker process (python -m megatron_ppo.reward_pool)
    score(samples) --- one sample at a time --->   reward function
                   <--- JSON: score or error ---
    limit passed: kill the worker's process group, score 0.0, start another worker in the background

Where it stands: in a replica's head on the rollout mesh, after sampling. A worker imports ``rewards.py`` and the reward,
never torch or vLLM, and is started as a program of its own (not forked: the rank has threads and devices; not by
multiprocessing: that would import the rank's main module again). Workers run in their own session, so that killing one
takes along what its reward started (but for what left its process group), and die with the thread that made the pool
(PR_SET_PDEATHSIG): make the pool in the main thread.

A reward with ``Reward.cannot_hang`` (exact_match, token_accuracy, length, format) runs in the caller's process and starts
no worker.

Left out: what a reward computes (``rewards.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import logging
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from types import FrameType, TracebackType

from megatron_ppo.rewards import Reward, RewardInput, RewardTimeout, as_score, resolve_reward

logger = logging.getLogger(__name__)

DEFAULT_SCORE = 0.0
"""Score of a response whose reward timed out or failed."""

START_TIMEOUT_S = 120.0
"""A worker that has not imported its reward by then counts as failed."""

_MAX_FAILED_STARTS = 3
_PR_SET_PDEATHSIG = 1
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RewardResult:
    """Scores of a batch, in the order of the samples, and what went wrong."""

    scores: list[float]
    """Finite; ``DEFAULT_SCORE`` where the reward timed out or failed."""
    num_timeouts: int = 0
    num_errors: int = 0
    """Exceptions, results that are not finite numbers, and workers that died."""
    first_error: str | None = None
    """Text of the first error (traceback included), or None."""


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    deadline: float
    """When it is killed, by ``time.monotonic``; for an idle worker it has no meaning."""
    ready: bool = False
    """Whether it has imported the reward."""
    sample: int | None = None
    """Index of the sample that it works on."""


@dataclass
class _Batch:
    """State of one ``score`` call."""

    samples: Sequence[RewardInput]
    scores: list[float]
    waiting: deque[int]
    num_done: int = 0
    num_timeouts: int = 0
    errors: list[str] = field(default_factory=list)


class RewardPool:
    """``num_workers`` processes that compute one reward; use as a context manager, or call ``close``.

    ``spec`` is ``data.reward``: a built-in's name, ``module:function`` or ``path/to/file.py:function``. The constructor
    waits until the first worker has imported it; an import that fails is a ``ValueError`` with the worker's own text.
    ``timeout_s`` limits one response.
    """

    def __init__(self, spec: str, num_workers: int, timeout_s: float) -> None:
        if num_workers < 1:
            raise ValueError(f"data.reward_num_workers = {num_workers}, but a reward needs at least one process")
        if not timeout_s > 0:
            raise ValueError(f"data.reward_timeout_s = {timeout_s} must be above 0")
        self._spec = spec
        self._timeout_s = timeout_s
        self._workers: list[_Worker] = []
        self._closed = False
        self._logged = False
        self._failed_starts = 0
        self._local: Reward | None = _local_reward(spec)
        if self._local is None:
            self._workers = [self._start() for _ in range(num_workers)]
            try:
                self._await_first()
            except BaseException:
                self.close()
                raise

    def score(self, samples: Sequence[RewardInput]) -> RewardResult:
        """Scores of ``samples``, in order. Takes at most about (timeouts / workers) x ``timeout_s`` longer than the rewards
        themselves."""
        if self._closed:
            raise RuntimeError("the reward pool is closed")
        batch = _Batch(samples, [DEFAULT_SCORE] * len(samples), deque(range(len(samples))))
        if self._local is not None:
            for index, sample in enumerate(samples):
                _take_reply(batch, index, _evaluate(self._local, sample))
        else:
            try:
                while batch.num_done < len(samples):
                    self._hand_out(batch)
                    self._collect(batch)
            except BaseException:
                self.close()  # a worker may hold a sample of this batch: its reply must not meet the next one
                raise
        if batch.errors and not self._logged:
            self._logged = True
            logger.warning(
                "the reward %s failed on a response, which scores %s; later failures are only counted:\n%s",
                self._spec,
                DEFAULT_SCORE,
                batch.errors[0],
            )
        return RewardResult(batch.scores, batch.num_timeouts, len(batch.errors), batch.errors[0] if batch.errors else None)

    def close(self) -> None:
        """End all workers; harmless when repeated."""
        self._closed = True
        for worker in self._workers:
            _kill(worker)
        self._workers = []

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    # -- workers ---------------------------------------------------------------------------------------------------------------

    def _start(self) -> _Worker:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            environment = {k: v for k, v in os.environ.items() if k not in _LAUNCHER_VARIABLES}
            environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
            environment.setdefault("OMP_NUM_THREADS", "1")
            process = subprocess.Popen(
                [sys.executable, "-m", "megatron_ppo.reward_pool", self._spec, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            return _Worker(process, Connection(ours.detach()), time.monotonic() + START_TIMEOUT_S)

    def _await_first(self) -> None:
        while not any(worker.ready for worker in self._workers):
            self._collect(None)

    def _hand_out(self, batch: _Batch) -> None:
        for worker in self._workers:
            if not batch.waiting:
                return
            if worker.ready and worker.sample is None:
                index = batch.waiting.popleft()
                worker.sample = index
                with contextlib.suppress(OSError):  # it died while idle: _collect sees that and counts the sample as failed
                    worker.connection.send_bytes(pickle.dumps(batch.samples[index]))
                worker.deadline = time.monotonic() + self._timeout_s

    def _collect(self, batch: _Batch | None) -> None:
        """Wait for the next reply or the next deadline; deal with what came and with what is late."""
        busy = [worker for worker in self._workers if not worker.ready or worker.sample is not None]
        assert busy, "waiting for no worker"
        earliest = min(worker.deadline for worker in busy)
        answered = wait([worker.connection for worker in busy], max(0.0, earliest - time.monotonic()))
        now = time.monotonic()
        for worker in busy:
            if worker.connection in answered:
                self._receive(worker, batch)
            elif now >= worker.deadline:
                self._time_out(worker, batch)

    def _receive(self, worker: _Worker, batch: _Batch | None) -> None:
        try:
            reply = json.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            code = worker.process.wait()
            if not worker.ready:
                self._failed_start(worker, f"its process ended with code {code} while it imported the reward")
                return
            reply = {"error": f"the reward process ended with code {code}"}
            self._replace(worker)
        if not worker.ready:
            if "error" in reply:
                raise ValueError(reply["error"])
            worker.ready = True
            self._failed_starts = 0
            return
        index, worker.sample = worker.sample, None
        assert batch is not None and index is not None, "a reply without a question"
        _take_reply(batch, index, reply)

    def _time_out(self, worker: _Worker, batch: _Batch | None) -> None:
        if not worker.ready:
            self._failed_start(worker, f"it took longer than {START_TIMEOUT_S} s to import the reward")
            return
        assert batch is not None and worker.sample is not None, "a deadline without a sample"
        batch.num_timeouts += 1
        batch.num_done += 1
        self._replace(worker)

    def _failed_start(self, worker: _Worker, cause: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= _MAX_FAILED_STARTS:
            raise RuntimeError(f"no reward process for {self._spec!r} could be started in {_MAX_FAILED_STARTS} tries: {cause}")
        self._replace(worker)

    def _replace(self, worker: _Worker) -> None:
        _kill(worker)
        self._workers[self._workers.index(worker)] = self._start()


def _local_reward(spec: str) -> Reward | None:
    """The reward, if it may run in this process. Code of the user's own is never imported here."""
    if ":" in spec:
        return None
    reward = resolve_reward(spec)
    return reward if reward.cannot_hang else None


def _evaluate(reward: Reward, sample: RewardInput) -> dict[str, float | str]:
    """{"score": ...}, {"error": ...} or {"timeout": ...}; never raises for what the reward does."""
    try:
        return {"score": as_score(reward.function(sample))}
    except RewardTimeout as error:
        return {"timeout": str(error)}
    except Exception:
        return {"error": traceback.format_exc(limit=-8)}


def _take_reply(batch: _Batch, index: int, reply: dict[str, float | str]) -> None:
    batch.num_done += 1
    if "error" in reply:
        batch.errors.append(str(reply["error"]))
    elif "timeout" in reply:
        batch.num_timeouts += 1
    else:
        batch.scores[index] = float(reply["score"])


def _kill(worker: _Worker) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.process.pid, signal.SIGKILL)  # its session is its own, see start_new_session
    worker.process.wait()
    worker.connection.close()


# -- inside the worker -------------------------------------------------------------------------------------------------------


def _outlive_signals() -> None:
    """Slurm sends a signal to every process of a step. The ranks finish the iteration and save, so what is being scored must not be lost.

    A handler, not SIG_IGN, which programs that the reward starts would inherit; processes that it forks end as they would without.
    """
    own = os.getpid()

    def take_note(number: int, _: FrameType | None) -> None:
        if os.getpid() != own:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, take_note)


def _worker_main(spec: str, file_descriptor: int, parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # the parent died before the line above
    _outlive_signals()
    connection = Connection(file_descriptor)
    try:
        reward = resolve_reward(spec)
        for module in reward.imports:
            importlib.import_module(module)
    except (ValueError, ImportError, SystemExit) as error:
        text = f"reward {spec!r} exits while it is imported: {error}" if isinstance(error, SystemExit) else str(error)
        connection.send_bytes(json.dumps({"error": text}).encode())
        return
    if reward.memory_limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (reward.memory_limit_bytes, reward.memory_limit_bytes))
    connection.send_bytes(b"{}")
    own = os.getpid()
    while True:
        try:
            sample = pickle.loads(connection.recv_bytes())  # from our own parent, through an inherited socket
        except EOFError:
            return
        reply = _evaluate(reward, sample)
        if os.getpid() != own:
            os._exit(0)  # a child that the reward forked came back here: its answer would be taken for another sample's
        connection.send_bytes(json.dumps(reply).encode())


if __name__ == "__main__":
    _worker_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
