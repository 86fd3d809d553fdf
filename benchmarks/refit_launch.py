"""Starts the ranks of the refit benchmark and gives them orders, one at a time.

    parent --- pipe ---> rank 0, 1, ... : ``run("exact")``     <--- value or traceback ---

Each rank is a process of its own with one thread. Between two orders it sleeps on its pipe, so that several launches can be alive and
take turns: that is how methods which need different process groups are measured interleaved.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from megatron_ppo.world import World

BuildWorker = Callable[..., Any]
"""(rank, number of ranks, *arguments) -> the object whose methods the parent calls; at module level."""
_TIMEOUT = timedelta(minutes=10)
_ORDER_TIMEOUT_S = 900.0


class Ranks:
    """A launch: ``ask`` calls one method on every rank. Use as a context manager; no process outlives it."""

    def __init__(self, build: BuildWorker, num_ranks: int, *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed"])
        port = _free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }
            process = context.Process(target=_serve, args=(theirs, environment, build, rank, num_ranks, arguments), daemon=True)
            before = os.environ.get("OMP_NUM_THREADS")
            os.environ["OMP_NUM_THREADS"] = "1"  # read by the fork server's libraries when they are loaded
            process.start()
            del os.environ["OMP_NUM_THREADS"]
            if before is not None:
                os.environ["OMP_NUM_THREADS"] = before
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        try:
            self._answers(range(num_ranks))  # each says when it is ready
        except BaseException:
            self._kill()
            raise

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Results of ``worker.method(*arguments)`` in rank order. ``RuntimeError`` with the traceback of the first rank that fails."""
        for pipe in self._pipes:
            pipe.send((method, arguments))
        return self._answers(range(len(self._pipes)))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            self._kill()
            return
        for ranks in (range(1, len(self._pipes)), range(1)):  # rank 0 hosts the store
            for rank in ranks:
                self._pipes[rank].send(None)
            for rank in ranks:
                self._processes[rank].join(timeout=20)
        self._kill()

    def _answers(self, ranks: Iterable[int]) -> list[Any]:
        values: dict[int, Any] = {}
        waiting = {self._pipes[rank]: rank for rank in ranks}
        deadline = time.monotonic() + _ORDER_TIMEOUT_S
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RuntimeError(f"ranks {sorted(waiting.values())} have not answered for {_ORDER_TIMEOUT_S:.0f} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    succeeded, value = pipe.recv()
                except EOFError:
                    raise RuntimeError(f"rank {rank} has ended without an answer") from None
                if not succeeded:
                    raise RuntimeError(f"rank {rank} failed:\n{value}")
                values[rank] = value
        return [values[rank] for rank in sorted(values)]

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
            process.join()


def join_world(rank: int, num_ranks: int, num_training: int, rollout_tp: int) -> World:
    """A rank's place in both meshes, with a default process group of its own mesh, as ``world.init_world`` makes it.

    By hand, because a ``Config`` wants a model folder and prompts, and nothing here reads either.
    """
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = dist.TCPStore(*address, is_master=rank == 0, wait_for_workers=False, timeout=_TIMEOUT)
    trains = rank < num_training
    world = World(
        global_rank=rank,
        world_size=num_ranks,
        local_rank=rank,
        mesh="training" if trains else "rollout",
        rank=rank if trains else rank - num_training,
        mesh_size=num_training if trains else num_ranks - num_training,
        training_ranks=range(num_training),
        rollout_ranks=range(num_training, num_ranks),
        rollout_tensor_parallel_size=rollout_tp,
        store=store,
        run_id="refit",
    )
    mesh_store = dist.PrefixStore(world.mesh, store)
    dist.init_process_group("gloo", store=mesh_store, rank=world.rank, world_size=world.mesh_size, timeout=_TIMEOUT)
    return world


def _serve(
    pipe: Connection, environment: dict[str, str], build: BuildWorker, rank: int, num_ranks: int, arguments: tuple[Any, ...]
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        worker = build(rank, num_ranks, *arguments)
        pipe.send((True, None))
        while (order := pipe.recv()) is not None:
            method, values = order
            pipe.send((True, getattr(worker, method)(*values)))
    except EOFError:  # the parent is gone
        os._exit(1)
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
    os._exit(0)  # groups end with their process: leaving them one by one would need an order


def _free_port() -> int:
    for port in random.SystemRandom().sample(range(20000, 32000), 100):  # below those of gloo's own connections
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("none of 100 ports from 20000 to 32000 is free")
