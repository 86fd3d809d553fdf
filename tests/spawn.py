"""Runs a function on several processes that look like the ranks of one torchrun launch. Test support only.

Each rank is a process of its own with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and OMP_NUM_THREADS=1 in
its environment, which is this process's otherwise. No process group and no store is made here: that is the function's business.
Ranks are forked from a server that has imported what nearly all ranks import (``spawn_preload.py``) and done nothing with it: 2 to 5 s of
processor time saved a rank.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import queue as queues
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parent
_DEAD_RANK_GRACE_S = 1.0
"""How long a result may still be on its way after its process has ended."""
_LEAVE_GRACE_S = 5.0
"""How long ranks may take to leave once all have returned; after a failure the rest is killed at once."""


class RankFailed(AssertionError):
    """One rank raised or died; the text holds its traceback."""


def free_port() -> int:
    """A TCP port that was free a moment ago, below those that the kernel gives to gloo's listeners and to outgoing connections."""
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("none of 100 ports from 20000 to 32000 is free")


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun would set for ``rank`` of a launch on one node."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def start_process(function: Callable[..., Any], args: tuple[Any, ...], environment: dict[str, str], log: Path | None = None) -> BaseProcess:
    """Start ``function(*args)`` in a process of its own; ``log`` takes its standard output and error. The caller ends and joins it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["spawn_preload"])
    process = context.Process(target=_process_main, args=(function, args, {**os.environ, **environment}, log))
    # Read by the server when it starts: the first variable by its libraries, the second to find what it shall import.
    with _environment({"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, (_TESTS, _TESTS.parent)))}):
        process.start()
    return process


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120) -> list[Any]:
    """Run ``function(rank, world_size, *args)`` on ``world_size`` processes and return their values in rank order.

    ``function`` must be importable (module level) and its arguments and value picklable. The first rank that fails is re-raised
    here as ``RankFailed`` with its traceback; a rank that dies without a word is reported with its exit code. When the time is
    over ``TimeoutError`` names the ranks that are missing. No process outlives the call.
    """
    results = multiprocessing.get_context("forkserver").Queue()
    port = free_port()
    processes: list[BaseProcess] = []
    returned = False
    try:
        for rank in range(world_size):
            call = (results, function, rank, world_size, args)
            processes.append(start_process(_rank_main, call, rank_environment(rank, world_size, port)))
        values = _collect(results, processes, time.monotonic() + timeout_s, timeout_s)
        returned = True
        return values
    finally:
        _end(processes, leave=returned)


def run_program(num_ranks: int, arguments: Sequence[object], log_folder: Path, timeout_s: float = 500.0, **environment: str) -> str:
    """``python -m megatron_ppo ARGUMENTS`` on every rank of a launch, to its good end: what the ranks have written, in rank order.

    For jobs of which neither the launcher nor what the first import of a library says is the point: what ranks import is imported already.
    ``environment`` is set above a rank's own. ``AssertionError`` with the output where a rank fails or the time is over; none outlives it.
    """
    log_folder.mkdir(parents=True)
    logs = [log_folder / f"rank{rank}.log" for rank in range(num_ranks)]
    port, processes = free_port(), []
    # As the project's launchers set the first.
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(_TESTS.parent), **environment}
    until = time.monotonic() + timeout_s
    try:
        for rank, log in enumerate(logs):
            variables = rank_environment(rank, num_ranks, port) | own
            processes.append(start_process(_program_main, (list(map(str, arguments)),), variables, log))
        while any(process.exitcode is None for process in processes) and time.monotonic() < until:
            time.sleep(0.05)
        output = "".join(log.read_text(encoding="utf-8", errors="replace") for log in logs if log.exists())
        assert [process.exitcode for process in processes] == [0] * num_ranks, output
        return output
    finally:
        _end(processes, leave=False)


def _program_main(arguments: list[str]) -> None:
    from megatron_ppo.__main__ import main

    sys.exit(main(arguments))


def _process_main(function: Callable[..., Any], args: tuple[Any, ...], environment: dict[str, str], log: Path | None) -> None:
    os.environ.clear()
    os.environ.update(environment)
    if log is not None:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
    function(*args)


def _rank_main(results: Any, function: Callable[..., Any], rank: int, world_size: int, args: tuple[Any, ...]) -> None:
    try:
        # Pickled here, not in the queue's feeder thread, whose errors would be lost.
        results.put((rank, True, pickle.dumps(function(rank, world_size, *args))))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))


def _collect(results: Any, processes: Sequence[BaseProcess], deadline: float, timeout_s: float) -> list[Any]:
    values: dict[int, Any] = {}
    failure: str | None = None
    died_at: dict[int, float] = {}
    while len(values) < len(processes):
        with contextlib.suppress(queues.Empty):
            rank, succeeded, payload = results.get(timeout=0.1)
            if not succeeded:
                raise RankFailed(f"rank {rank} of {len(processes)} failed:\n{payload}")
            values[rank] = pickle.loads(payload)
            continue
        now = time.monotonic()
        for rank, process in enumerate(processes):
            if rank not in values and process.exitcode is not None and now - died_at.setdefault(rank, now) > _DEAD_RANK_GRACE_S:
                failure = failure or f"rank {rank} of {len(processes)} ended with code {process.exitcode} and returned nothing"
        if failure is not None:
            raise RankFailed(failure)
        if now > deadline:
            missing = [rank for rank in range(len(processes)) if rank not in values]
            raise TimeoutError(f"ranks {missing} of {len(processes)} had not returned after {timeout_s} s")
    return [values[rank] for rank in range(len(processes))]


def _end(processes: Sequence[BaseProcess], *, leave: bool) -> None:
    """Kill what still runs (these processes are ours alone); ``leave``: all have returned, give them a moment to go."""
    until = time.monotonic() + (_LEAVE_GRACE_S if leave else 0)
    for process in processes:
        if process.pid is not None:
            process.join(max(0.0, until - time.monotonic()))
            if process.exitcode is None:
                os.kill(process.pid, signal.SIGKILL)
                process.join()


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
