"""Runs ``python -m megatron_ppo train`` on one rank, with kill -9 planted at a chosen moment of a chosen phase.

The launcher of a job of the fault drill starts it in place of the program itself:

    torchrun ... python benchmarks/fault_kill.py PLAN.json FLAGS      or the same under srun's variables

The plan names one kill an attempt: phase, moment, victim. On one rank, the one that strikes, a function that is called in the midst of
that phase is changed: it waits until all have had the time to say where they are, writes down when, and sends SIGKILL, to its own process
where it is the victim itself. Everything else is the real program. Nothing here judges: ``fault_jobs.py`` looks at what happens,
``fault_judge.py`` at what it means.

Files in the plan's folder, by attempt (n) and rank (r): ``started_n`` (written by the drill: the attempt may begin), ``pid_n_r``,
``phase_n_r`` (where a rank was, since when), ``began_n`` (the version of the attempt's first sync), ``killed_n.json``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import itertools
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PHASES = {
    "sync": "weight sync v{}",
    "rollout": "rollout of iteration {}",
    "score": "score of iteration {}",
    "update": "update of iteration {}",
    "save": "save of iteration {}",
}
"""Phases of the drill, in the loop's order -> how the program calls them."""
MOMENTS = {
    "sync": ("first bucket", "last bucket"),
    "rollout": ("second token", "rewards"),
    "score": ("second pass", "critic"),
    "update": ("second pass", "first optimizer step", "last optimizer step"),
    "save": ("first file", "before its name", "before latest"),
}
"""Where in a phase the kill falls; the repeats go through them."""
KILLED_ITERATION = 2
"""Every kill falls into this one (iterations count from 0); of checkpoints, into the one of so many finished iterations."""
SETTLE_S = 0.8
"""From the strike's moment to the signal: every rank that will have to wait does, and has told in which phase."""
SETTLE_RANK_0_S = 2.5
"""The same where rank 0 is killed, which takes the launch's store with it: the others hear of its phase once a second."""
STAY_S = 5.0
GO_TIMEOUT_S = 300.0
BUSY = "FAULT_DRILL_BUSY"
"""Environment variable: a file; while it exists, the job's reward is at work on a response for a minute."""


class Attempt:
    """This rank's part in one attempt of the job."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.folder = Path(plan["folder"])
        self.checkpoints = Path(plan["checkpoints"])
        self.number = len(list(self.folder.glob("killed_*.json")))
        self.rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "")))
        self.kill = plan["kills"][self.number] if self.number < len(plan["kills"]) else None
        self.launcher_pid = os.getppid()  # the strike may happen in a child that this rank forks
        self.phase = "start-up"
        self._passed_save = self._is_striking = False
        self._write(f"pid_{self.number}_{self.rank}", str(os.getpid()))

    def wait_for_go(self) -> None:
        """Until the drill has looked at what the attempt before left."""
        until = time.monotonic() + GO_TIMEOUT_S
        while not (self.folder / f"started_{self.number}").exists():
            if time.monotonic() > until:
                sys.exit(f"the drill did not let attempt {self.number} begin within {GO_TIMEOUT_S} s")
            time.sleep(0.02)

    def follow_phases(self) -> None:
        """From here on the phase of this rank stands in its file, as the watchdog tells it."""
        from megatron_ppo.watchdog import Watchdog

        real = Watchdog.phase

        @contextlib.contextmanager
        def phase(watchdog: Watchdog, name: str, patience: float | None = None) -> Iterator[None]:
            with real(watchdog, name, patience):
                self._entered(name)
                yield
            self._entered(watchdog.current_phase)

        Watchdog.phase = phase  # type: ignore[method-assign, assignment]

    def strikes_here(self) -> bool:
        """Whether this rank sends the signal: the victim itself where it passes that moment, else rank 0, or the first rollout rank."""
        if self.kill is None:
            return False
        victim, first_rollout = self.kill["victim"], self.kill["first_rollout_rank"]
        if self.kill["moment"] in ("before its name", "before latest"):  # what rank 0 alone does
            return self.rank == 0
        present = {"sync": range(99), "rollout": range(first_rollout, 99)}.get(self.kill["phase"], range(first_rollout))
        return self.rank == (victim if victim is not None and victim in present else present[0])

    def strike(self) -> None:
        """Send SIGKILL to the victim. Where that is another process, stay at this moment for as long as one is let. Once only."""
        assert self.kill is not None
        record = self.folder / f"killed_{self.number}.json"
        if record.exists():
            return
        victim = self.kill["victim"]
        self._is_striking = True
        time.sleep(SETTLE_RANK_0_S if victim == 0 else SETTLE_S)
        pid = self.launcher_pid if victim is None else int(self._read(f"pid_{self.number}_{victim}"))
        phases = [] if victim is None else self._phases_of(victim)
        self._write(record.name, json.dumps({"time": time.monotonic(), "pid": pid, "phases": phases}))
        os.kill(pid, signal.SIGKILL)
        time.sleep(STAY_S)  # otherwise this rank would have passed the moment before it hears of the loss
        self._is_striking = False

    def _phases_of(self, rank: int) -> list[str]:
        """Where a rank is; behind that, what it has left so lately that the others may not know yet."""
        lines = [line.split(" ", 1) for line in self._read(f"phase_{self.number}_{rank}").splitlines()]
        news_s = 2.0 if rank == 0 else 0.5  # they hear of rank 0 once a second, and look up the others when they are gone
        lately = [name for (_, name), (left, _) in itertools.pairwise(lines) if time.monotonic() - float(left) < news_s]
        return [lines[-1][1], *lately]

    def in_killed_phase(self) -> bool:
        """Whether this rank is where the kill belongs. A save in the background may go on in later phases."""
        assert self.kill is not None
        wanted = PHASES[self.kill["phase"]].format(KILLED_ITERATION)
        if self.kill["phase"] == "save" and self.kill["asynchronous"]:
            return self._passed_save
        return self.phase == wanted

    @property
    def has_saved_a_file(self) -> bool:
        """Whether some of a checkpoint that is being written stands in its files."""
        return any(path.is_file() and path.stat().st_size for path in self.checkpoints.glob(".iter_*.tmp/*/*"))

    def _entered(self, phase: str) -> None:
        self.phase = phase
        self._passed_save |= phase == PHASES["save"].format(KILLED_ITERATION)
        with (self.folder / f"phase_{self.number}_{self.rank}").open("a", encoding="utf-8") as file:
            file.write(f"{time.monotonic()} {phase}\n")
        while self._is_striking:  # in a thread, from a save in the background: the loop does not run on to its end meanwhile
            time.sleep(0.02)
        found = re.fullmatch(PHASES["sync"].format(r"(\d+)"), phase)
        if found and self.rank == 0 and not (self.folder / f"began_{self.number}").exists():
            self._write(f"began_{self.number}", found[1])

    def _write(self, name: str, text: str) -> None:
        new = self.folder / f".{name}.{self.rank}"
        new.write_text(text, encoding="utf-8")
        _real_replace(new, self.folder / name)

    def _read(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8")


_real_replace = os.replace


# -- moments: which function of the program is changed ----------------------------------------------------------------


def plant(attempt: Attempt) -> None:
    """Change the function that is called at the moment of this attempt's kill."""
    assert attempt.kill is not None
    phase, moment = attempt.kill["phase"], attempt.kill["moment"]
    if phase == "sync":
        _plant_in_sync(attempt, moment)
    elif phase == "rollout":
        _plant_in_rollout(attempt, moment)
    elif phase == "save":
        _plant_in_save(attempt, moment)
    else:
        _plant_in_training(attempt, moment)


def _plant_in_sync(attempt: Attempt, moment: str) -> None:
    from megatron_ppo.resharding import executor

    if moment == "first bucket":
        _on_call(attempt, executor, "_finish", 1, after=True)
    else:
        _on_call(attempt, executor.ReshardExecutor, "_run", 1, after=True)


def _plant_in_rollout(attempt: Attempt, moment: str) -> None:
    from megatron_ppo import reward_pool
    from megatron_ppo.backends.hf import HFBackend
    from megatron_ppo.backends.vllm import VLLMBackend

    if moment == "rewards":

        def is_busy_from_now(_: object) -> bool:
            Path(os.environ[BUSY]).touch()
            return True

        _on_call(attempt, reward_pool.RewardPool, "_hand_out", 1, after=True, where=is_busy_from_now)
        return

    def through_hf(backend: Any) -> tuple[Any, str]:
        return backend._live_actor.model, "forward"

    def through_vllm(backend: Any) -> tuple[Any, str]:
        return backend._engine.llm_engine, "step"

    for backend, inside in ((HFBackend, through_hf), (VLLMBackend, through_vllm)):
        _on_first_generate(attempt, backend, inside)


def _on_first_generate(attempt: Attempt, backend: Any, inside: Callable[[Any], tuple[Any, str]]) -> None:
    """The function that makes one token is known only when there is an engine."""
    real = backend.generate
    planted = False

    @functools.wraps(real)
    def generate(self: Any, *arguments: Any) -> Any:
        nonlocal planted
        if not planted:
            _on_call(attempt, *inside(self), 2, after=True)
            planted = True
        return real(self, *arguments)

    backend.generate = generate


def _plant_in_training(attempt: Attempt, moment: str) -> None:
    from megatron_ppo.backends import megatron
    from megatron_ppo.backends.megatron_optimizer import MegatronOptimizer

    if moment == "second pass":
        _on_call(attempt, megatron._Pass, "__call__", 2)
    elif moment == "critic":
        _on_call(attempt, megatron.MegatronBackend, "forward", 1, where=lambda arguments: arguments[1] == "critic")
    else:  # two mini-batches, and in each a step of the critic, then one of the actor
        _on_call(attempt, MegatronOptimizer, "step", 1 if moment == "first optimizer step" else 4, after=True)


def _plant_in_save(attempt: Attempt, moment: str) -> None:
    if moment == "first file":
        _on_call(attempt, os, "fsync", 1, after=True, where=lambda _: attempt.has_saved_a_file)
    elif moment == "before its name":
        for name in ("rename", "replace"):
            _on_call(attempt, os, name, 1, where=lambda paths: Path(paths[1]).name.startswith("iter_"))
    else:
        for name in ("rename", "replace"):
            _on_call(attempt, os, name, 1, where=lambda paths: Path(paths[1]).name == "latest")


def _on_call(
    attempt: Attempt,
    owner: Any,
    name: str,
    number: int,
    *,
    after: bool = False,
    where: Callable[[tuple[Any, ...]], bool] = lambda _: True,
) -> None:
    """Strike before, or after, the ``number``-th call within the phase (of those ``where`` the positional arguments say so)."""
    real = getattr(owner, name)
    calls = 0

    @functools.wraps(real)
    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        if not attempt.in_killed_phase() or not where(arguments):
            return real(*arguments, **options)
        calls += 1
        if calls != number:
            return real(*arguments, **options)
        if not after:
            attempt.strike()
            return real(*arguments, **options)
        result = real(*arguments, **options)
        attempt.strike()
        return result

    setattr(owner, name, call)


def main() -> int:
    """PLAN.json, then the flags of ``train``."""
    faulthandler.register(signal.SIGUSR2)  # the drill asks a job that hangs where it does
    attempt = Attempt(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    from megatron_ppo.__main__ import main as program

    attempt.wait_for_go()
    Path(os.environ[BUSY]).unlink(missing_ok=True)
    attempt.follow_phases()
    if attempt.strikes_here():
        plant(attempt)
    return program(["train", *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
