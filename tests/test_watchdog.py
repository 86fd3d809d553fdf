"""Lost ranks, failing ranks and signals, on real processes: what is printed, how fast all end, and with which code.

Run as a script this file is one rank of a launch: ``python test_watchdog.py SCENARIO FOLDER``.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch_config import two_by_two
from spawn import free_port, rank_environment, start_process
from train_support import promised

from megatron_ppo.bridge import Bridge
from megatron_ppo.heartbeat import Beat, Pulse
from megatron_ppo.watchdog import Watchdog, _is_echo
from megatron_ppo.world import World, init_world

PHASE = "weight sync v3"
NUM_BYTES = 2**27
REPOSITORY = Path(__file__).resolve().parent.parent


# -- who is overdue: no processes -------------------------------------------------------------------------------------


def test_only_a_counter_that_stands_still_is_overdue() -> None:
    pulse = Pulse(range(3), 6.0, now=0.0)
    for now in range(20):
        for rank in (0, 1, 2):
            stuck = rank == 1 and now > 4
            pulse.observe(rank, Beat(4 if stuck else now, f"phase {now}", 1.0), float(now))
        assert pulse.overdue(float(now)) == (1 if now > 10 else None)


def test_patience_and_done_and_unseen_ranks_are_not_overdue() -> None:
    pulse = Pulse(range(3), 6.0, now=0.0)
    pulse.observe(0, Beat(1, "build models", patience=10.0), 0.0)
    pulse.observe(1, Beat(1, "end", 1.0, done=True), 0.0)
    assert pulse.overdue(59.0) is None
    assert pulse.overdue(61.0) == 0
    assert pulse.overdue(7.0, unseen_limit_s=0.0) == 2
    assert "no beat yet" in pulse.phase(2)
    assert not pulse.all_done


def test_errors_of_collectives_wait_for_a_better_explanation() -> None:
    """The texts are gloo's and the store's as seen; an error of one's own is never held back."""
    assert _is_echo(RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:8355: Connection reset by peer"))
    assert _is_echo(dist.DistNetworkError("failed to recv, got 0 bytes"))
    assert _is_echo(ConnectionResetError("anything"))
    assert not _is_echo(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not _is_echo(OSError("disk full"))


def test_the_phase_of_an_error_is_the_innermost(tmp_path: Path) -> None:
    """Also where the error is only reported after the phases have been left; and phases nest."""
    process = start_process(play, ("nested", tmp_path), rank_environment(0, 1, free_port()), tmp_path / "log")
    process.join(30)
    assert process.exitcode == 1
    assert "rank 0 (training rank 0) failed in phase inner: KeyError: 'x'; ending" in (tmp_path / "log").read_text()
    assert "phases: start-up outer handled inner outer" in (tmp_path / "log").read_text()


# -- launches ---------------------------------------------------------------------------------------------------------


class Launch:
    """Four ranks started without a launcher's agent, each with its own stderr."""

    def __init__(self, scenario: str, folder: Path, **environment: str) -> None:
        port = free_port()
        self.folder = folder
        two_by_two(str(folder))
        self.ranks = [
            start_process(play, (scenario, folder), rank_environment(rank, 4, port) | environment, folder / f"rank{rank}.log")
            for rank in range(4)
        ]

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.join()

    def wait_until_ready(self, ranks: range = range(4)) -> None:
        wait_for(lambda: all((self.folder / f"ready{rank}").exists() for rank in ranks), "the ranks to come up", self.output)

    def codes(self, timeout_s: float) -> list[int | None]:
        until = time.monotonic() + timeout_s
        wait_for(lambda: all(rank.exitcode is not None for rank in self.ranks), "the ranks to end", self.output, until)
        return [rank.exitcode for rank in self.ranks]

    def signal(self, rank: int, number: int) -> None:
        pid = self.ranks[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def output(self, rank: int | None = None) -> str:
        return "".join((self.folder / f"rank{each}.log").read_text() for each in ([rank] if rank is not None else range(4)))


def wait_for(condition: Callable[[], bool], what: str, output: Callable[[], str], until: float | None = None) -> None:
    until = until or time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, f"waited in vain for {what}\n{output()}"
        time.sleep(0.02)


def script_environment() -> dict[str, str]:
    paths = f"{REPOSITORY}{os.pathsep}{Path(__file__).parent}"
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("victim", "name", "by_process"), [(3, "rollout rank 1", "1"), (0, "training rank 0", "1"), (3, "rollout rank 1", "0")]
)
def test_b92_a_rank_killed_in_a_broadcast_ends_all(tmp_path: Path, victim: int, name: str, by_process: str) -> None:
    """B92: kill -9 in the middle of a large gloo broadcast; by process death, by loss of rank 0's store, and by heartbeats alone."""
    with Launch("broadcast", tmp_path, BY_PROCESS=by_process) as launch:
        launch.wait_until_ready()
        time.sleep(1.2)
        launch.signal(victim, signal.SIGKILL)
        start = time.monotonic()
        codes = launch.codes(timeout_s=20)
        assert time.monotonic() - start < promised(10.0)
        assert codes == [-9 if rank == victim else 1 for rank in range(4)], launch.output()
        for rank in set(range(4)) - {victim}:
            line = f"rank {victim} ({name}) lost in phase {PHASE}; this is rank {rank} in phase {PHASE}; ending"
            assert launch.output(rank).count(line) == 1, launch.output()
            assert launch.output(rank).count("ending") == 1, launch.output()


def test_b93_an_exception_on_rank_0_is_what_all_print(tmp_path: Path) -> None:
    """B93: rank 0 raises in its save; the others, blocked at a barrier, end too and name rank 0's error."""
    with Launch("exception", tmp_path) as launch:
        launch.wait_until_ready()
        assert launch.codes(timeout_s=10) == [1, 1, 1, 1], launch.output()
        assert "Traceback" in launch.output(0)
        assert "rank 0 (training rank 0) failed in phase save: OSError: disk full; ending" in launch.output(0)
        for rank in (1, 2, 3):
            cause = f"rank 0 (training rank 0) failed in phase save: OSError: disk full; this is rank {rank} in phase rollout; ending"
            assert cause in launch.output(rank), launch.output()


def test_signals_are_heard_in_c_code_and_a_clean_end_is_clean(tmp_path: Path) -> None:
    """B90 (noticing): SIGTERM and SIGUSR1 to one rank that waits in C++; a late rank at the end is waited for; all exit 0."""
    with Launch("signals", tmp_path) as launch:
        launch.wait_until_ready(range(3))
        launch.signal(1, signal.SIGTERM)
        launch.signal(2, signal.SIGUSR1)
        wait_for(lambda: (tmp_path / "heard1").exists() and (tmp_path / "heard2").exists(), "the signals", launch.output)
        (tmp_path / "go").touch()
        assert launch.codes(timeout_s=30) == [0, 0, 0, 0], launch.output()
        flags = [re.search(r"preempt (\w+) save (\w+)", launch.output(rank)) for rank in range(4)]
        assert [match and match.groups() for match in flags] == [
            ("False", "False"),
            ("True", "False"),
            ("False", "True"),
            ("False", "False"),
        ]
        assert "ending" not in launch.output()


@pytest.mark.slow
@pytest.mark.parametrize("share_store", ["0", "1"])
def test_torchrun_restarts_into_fresh_groups(tmp_path: Path, share_store: str) -> None:
    """The first attempt loses a rank to kill -9, the second sets up every group again and ends well, whoever hosts the store."""
    two_by_two(str(tmp_path))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--max-restarts", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "again"]
    environment = script_environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0" if share_store == "1" else "1"}
    run = subprocess.run(
        [*command, __file__, "restart", str(tmp_path)], env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert run.returncode == 0, run.stderr
    assert f"rank 2 (rollout rank 0) lost in phase {PHASE}; this is rank 0 in phase {PHASE}; ending" in run.stderr
    assert "SIGKILL" not in run.stderr.replace("exitcode: -9", "")
    assert sorted(path.name for path in tmp_path.glob("attempt1_*")) == [f"attempt1_rank{rank}" for rank in range(4)]
    assert [path.read_text() for path in tmp_path.glob("attempt1_*")] == [f"store by agent: {share_store == '1'}"] * 4


def test_a_rank_ends_when_its_launcher_does(tmp_path: Path) -> None:
    """An agent that was killed leaves no rank behind."""
    command = f"{sys.executable} {__file__} orphan {tmp_path} & wait"
    environment = script_environment() | rank_environment(0, 1, free_port())
    with open(tmp_path / "log", "w") as log, subprocess.Popen(["sh", "-c", command], env=environment, stderr=log) as shell:
        wait_for((tmp_path / "ready0").exists, "the rank", (tmp_path / "log").read_text)
        rank = os.pidfd_open(int((tmp_path / "ready0").read_text()))
        shell.kill()
    try:
        wait_for(lambda: "is gone; ending" in (tmp_path / "log").read_text(), "the rank to end", (tmp_path / "log").read_text)
        wait_for(lambda: not alive(rank), "the process to end", (tmp_path / "log").read_text)
    finally:
        os.close(rank)


def alive(descriptor: int) -> bool:
    try:
        signal.pidfd_send_signal(descriptor, 0)
    except ProcessLookupError:
        return False
    return True


# -- the ranks --------------------------------------------------------------------------------------------------------


def ready(folder: Path, rank: int) -> None:
    (folder / f"ready{rank}.new").write_text(str(os.getpid()))
    os.replace(folder / f"ready{rank}.new", folder / f"ready{rank}")


def rank_broadcast(folder: Path) -> None:
    world = init_world(two_by_two(str(folder)))
    watch = os.environ["BY_PROCESS"] == "1"
    with Watchdog(world, 6.0 if watch else 3.0, poll_s=1.0 if watch else 0.5, watch_processes=watch) as watchdog:
        bridge = Bridge("weights", range(4), world)
        data = torch.zeros(NUM_BYTES, dtype=torch.uint8)
        with watchdog.phase(PHASE):
            bridge.barrier()
            ready(folder, world.global_rank)
            while True:
                bridge.broadcast(data, 0)


def rank_exception(folder: Path) -> None:
    world = init_world(two_by_two(str(folder)))
    with Watchdog(world, 6.0) as watchdog:
        bridge = Bridge("control", range(4), world)
        with watchdog.phase("save" if world.global_rank == 0 else "rollout"):
            bridge.barrier()
            ready(folder, world.global_rank)
            if world.global_rank == 0:
                raise OSError("disk full")
            bridge.barrier()


def rank_signals(folder: Path) -> None:
    world = init_world(two_by_two(str(folder)))
    rank = world.global_rank
    with Watchdog(world, 2.0, poll_s=0.25) as watchdog:
        bridge = Bridge("control", range(4), world)
        bridge.barrier()
        ended_by = check_fork(watchdog) if rank == 0 else signal.SIGTERM
        assert ended_by == signal.SIGTERM, ended_by
        if rank == 3:
            wait_for((folder / "go").exists, "the test", lambda: "")
        else:
            tell_when_heard(folder, rank, watchdog)
            ready(folder, rank)
        bridge.barrier()
        time.sleep(3.0 if rank == 2 else 0.0)
        print(f"preempt {watchdog.preempt_requested} save {watchdog.save_requested}", flush=True)


def tell_when_heard(folder: Path, rank: int, watchdog: Watchdog) -> None:
    """From another thread: the main thread stays in C++ meanwhile."""

    def tell() -> None:
        while not (watchdog.preempt_requested or watchdog.save_requested or (folder / "go").exists()):
            time.sleep(0.02)
        (folder / f"heard{rank}").touch()

    threading.Thread(target=tell, daemon=True).start()


def check_fork(watchdog: Watchdog) -> int:
    """SIGTERM to a forked child ends the child and is not heard here; returns the signal that ended it."""
    child = os.fork()
    if child == 0:
        time.sleep(60)
    time.sleep(0.1)
    os.kill(child, signal.SIGTERM)
    status = os.waitpid(child, 0)[1]
    time.sleep(0.5)
    assert not watchdog.preempt_requested
    return os.WTERMSIG(status)


def rank_restart(folder: Path) -> None:
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    world = init_world(two_by_two(str(folder)))
    with Watchdog(world, 6.0) as watchdog:
        bridge = Bridge("weights", range(4), world)
        with watchdog.phase(PHASE):
            bridge.barrier()
            time.sleep(0.5)
            if attempt == "0" and world.global_rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            bridge.broadcast(torch.zeros(NUM_BYTES // 8, dtype=torch.uint8), 0)
        assert bridge.all_gather_objects(world.global_rank) == [0, 1, 2, 3]
        (folder / f"attempt{attempt}_rank{world.global_rank}").write_text(f"store by agent: {not world.rank0_hosts_store}")


def world_of_one() -> World:
    port = int(os.environ["MASTER_PORT"])
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    store = dist.PrefixStore("x", server)
    return World(0, 1, 0, "training", 0, 1, range(1), range(1, 1), 1, store, "x", "0", ("127.0.0.1", port), "x")


def rank_orphan(folder: Path) -> None:
    with Watchdog(world_of_one(), 6.0):
        ready(folder, 0)
        time.sleep(60)


def rank_nested(folder: Path) -> None:
    with Watchdog(world_of_one(), 6.0) as watchdog:
        seen = [watchdog.current_phase]
        with watchdog.phase("outer"):
            seen.append(watchdog.current_phase)
            with contextlib.suppress(ValueError), watchdog.phase("handled"):
                raise ValueError
            seen.append(watchdog.current_phase)
            with watchdog.phase("inner"):
                seen.append(watchdog.current_phase)
            seen.append(watchdog.current_phase)
            print("phases:", *seen, flush=True)
            with watchdog.phase("inner"):
                raise KeyError("x")


def play(scenario: str, folder: Path) -> None:
    """One rank of the scenario of that name."""
    globals()[f"rank_{scenario}"](folder)


if __name__ == "__main__":
    play(sys.argv[1], Path(sys.argv[2]))
