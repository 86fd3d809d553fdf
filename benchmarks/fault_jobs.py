"""One job of the fault drill: real launches of the tiny quickstart job, killed as planned, started again, and watched all the while.

    launch 1: attempt 0 -- kill --> all end --> (torchrun's restart) attempt 1 -- kill --> all end --> ... --> the job's end
    launch 2: where nobody restarts: under srun's variables, after the agent's death, without --max-restarts

Every attempt waits until what the one before left has been looked at. A job may be killed more than once, each kill is a ``Cell``; its
end (``differences`` to an undisturbed job) speaks for all of them. Verdicts are ``fault_judge.py``'s.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.fault_judge import Stop, checkpoint_faults, differences, newest_iteration, stop_faults
from benchmarks.fault_kill import BUSY, KILLED_ITERATION, MOMENTS
from tests.spawn import free_port
from tests.train_support import Processes, make_inputs, tiny_flags

LauncherName = Literal["torchrun", "srun"]
PROGRAM = Path(__file__).with_name("fault_kill.py")
NUM_RANKS, NUM_TRAINING = 4, 2
TRAIN_ITERS = KILLED_ITERATION + 3
"""Two more than is killed: a save in the background may end in the next iteration, where no rank has finished yet."""
REACH_S = 300.0
"""Limit for an attempt to come to its kill, or to the job's end."""
LINGER_S = 45.0
"""Past this, what is left of a killed attempt is counted as a survivor and killed. Longer than torchrun's own 30 s, to see that."""
_POLL_S = 0.05
VICTIMS: dict[str, int | None] = {"training 0": 0, "training 1": 1, "rollout 0": 2, "rollout 1": 3, "agent": None}
REWARD = f'''
"""A reward that runs in processes of its own, so that there are children to leave behind, and busy ones if wanted."""
import os, time

def few(sample):
    if os.path.exists(os.environ["{BUSY}"]):
        time.sleep(60.0)
    return 1.0 / (1 + sample.num_response_tokens)
'''


@dataclass(frozen=True)
class Variant:
    """A shape of the job. The repeats of the drill go through them."""

    name: str
    fields: dict[str, object] = field(hash=False)
    max_restarts: int = 2
    """torchrun's; 0: it ends with a code of its own, and the drill starts another."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether checkpoints are written in the background."""
        return bool(self.fields.get("async_save", False))


VARIANTS = (
    Variant("TP2, hf", {"tensor_model_parallel_size": 2, "rollout_backend": "hf"}),
    Variant("PP2, hf, async", {"pipeline_model_parallel_size": 2, "rollout_backend": "hf", "async_save": True}, max_restarts=0),
    Variant("TP2, vllm", {"tensor_model_parallel_size": 2, "rollout_backend": "vllm"}),
)


@dataclass(frozen=True)
class Cell:
    """One kill."""

    phase: str
    victim: str
    launcher: LauncherName
    repeat: int = 0

    @property
    def variant(self) -> Variant:
        """Of the job that is killed."""
        return VARIANTS[self.repeat % len(VARIANTS)]

    @property
    def moment(self) -> str:
        """Where in the phase; neighbouring victims and repeats have different ones."""
        moments = MOMENTS[self.phase]
        return moments[(self.repeat + list(VICTIMS).index(self.victim)) % len(moments)]


@dataclass
class Outcome:
    """What became of a cell."""

    cell: Cell
    seconds_to_stop: float | None = None
    phase_of_victim: str | None = None
    newest_checkpoint: int | None = None
    """Finished iterations of the newest checkpoint that the kill left; 0: none."""
    resumed_from: int | None = None
    """The first iteration of the attempt after the kill; None: there was no such attempt."""
    equal: bool = False
    faults: list[str] = field(default_factory=list)

    @property
    def resumed(self) -> bool:
        """Whether the next attempt went on from the newest checkpoint."""
        return self.resumed_from is not None and self.resumed_from == self.newest_checkpoint

    @property
    def good(self) -> bool:
        """No fault, resumed, equal."""
        return not self.faults and self.resumed and self.equal

    def as_json(self) -> dict[str, Any]:
        """For the file."""
        own = {name: value for name, value in asdict(self).items() if name != "cell"}
        where = {"moment": self.cell.moment, "variant": self.cell.variant.name}
        return {**asdict(self.cell), **where, **own, "resumed": self.resumed, "good": self.good}


class Drill:
    """Runs jobs in a folder of its own; holds the inputs and the undisturbed jobs, one a variant."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._inputs = make_inputs(folder / "inputs")
        (self._inputs / "reward.py").write_text(REWARD, encoding="utf-8")
        self._references: dict[str, Path] = {}
        self._num_jobs = 0

    def run(self, cells: Sequence[Cell]) -> list[Outcome]:
        """One job that is killed once for each of ``cells``, which share launcher and variant, in their order."""
        variant, launcher = cells[0].variant, cells[0].launcher
        assert all((cell.variant, cell.launcher) == (variant, launcher) for cell in cells)
        reference = self.reference(variant)
        job = self._job(variant, launcher, cells)
        job.run()
        unlike = differences(reference, job.run_dir, TRAIN_ITERS) if job.ended_well else []
        for outcome in job.outcomes:
            outcome.equal = job.ended_well and not unlike
            outcome.faults += [f"the job's end: {line}" for line in unlike]
        return job.outcomes

    def reference(self, variant: Variant) -> Path:
        """Run folder of a job of that variant that nobody touched. ``RuntimeError`` where it fails: then nothing can be judged."""
        if variant.name not in self._references:
            job = self._job(variant, "torchrun", [])
            job.run()
            if not job.ended_well:
                raise RuntimeError(f"the undisturbed job ({variant.name}) failed:\n{job.last_output}")
            self._references[variant.name] = job.run_dir
        return self._references[variant.name]

    def _job(self, variant: Variant, launcher: LauncherName, cells: Sequence[Cell]) -> Job:
        self._num_jobs += 1
        return Job(self._folder / f"job{self._num_jobs}", self._inputs, variant, launcher, cells)


class Job:
    """A run folder, and the launches and attempts that it takes."""

    def __init__(self, folder: Path, inputs: Path, variant: Variant, launcher: LauncherName, cells: Sequence[Cell]) -> None:
        self.run_dir = folder / "run"
        self.outcomes = [Outcome(cell) for cell in cells]
        self.ended_well = False
        self.last_output = ""
        self._folder, self._variant, self._launcher = folder, variant, launcher
        self._attempt = 0
        self._plan = folder / "plan.json"
        folder.mkdir(parents=True)
        kills = [
            {
                "phase": cell.phase,
                "moment": cell.moment,
                "victim": VICTIMS[cell.victim],
                "first_rollout_rank": NUM_TRAINING,
                "asynchronous": variant.is_asynchronous,
            }
            for cell in cells
        ]
        plan = {"folder": str(folder), "checkpoints": str(self.run_dir / "checkpoints"), "kills": kills}
        self._plan.write_text(json.dumps(plan), encoding="utf-8")
        shape: dict[str, object] = {
            "train_iters": TRAIN_ITERS,
            "save_interval": 1,
            "rollout_world_size": NUM_RANKS - NUM_TRAINING,
            "bucket_bytes": 65536,
            "reward": f"{inputs / 'reward.py'}:few",
            "kl_coef": 0.05,  # with a target it moves: one more state to be restored
            "kl_target": 0.01,
            "lr_decay_style": "linear",
            "weight_decay": 0.01,
        }
        self._program = [str(PROGRAM), str(self._plan), *tiny_flags(inputs, self.run_dir, **(shape | variant.fields))]

    def run(self) -> None:
        """All launches. What goes wrong is in ``outcomes``; ``ended_well`` says whether the job came to its end."""
        self._let_begin()
        number = 0
        while True:
            restarts = self._variant.max_restarts if self.outcomes else 0
            with _start(self._launcher, self._folder, self._program, restarts, number) as launch:
                goes_on = self._follow(launch)
                self.last_output = launch.output()
            number += 1
            if not goes_on:
                return

    def _follow(self, launch: Launch) -> bool:
        """One launch, to its end. Returns whether another one is to follow."""
        first = self._attempt
        while True:
            killed = self._folder / f"killed_{self._attempt}.json"
            ended = self._wait_for_kill_or_end(launch, killed)
            if not killed.exists():
                self._end(launch, ended=ended)
                return False
            outcome = self.outcomes[self._attempt]
            restarts = launch.restarts and outcome.cell.victim != "agent"
            self._observe(launch, outcome, killed, attempt=self._attempt - first if restarts else None)
            self._attempt += 1
            self._let_begin()
            if not restarts:
                return True

    def _wait_for_kill_or_end(self, launch: Launch, killed: Path) -> bool:
        """Whether the launch has ended; both are looked at again by the caller. False where time was up or there was a kill."""
        until = time.monotonic() + REACH_S
        while time.monotonic() < until:
            if launch.has_ended():
                return True
            if killed.exists():
                return False
            time.sleep(_POLL_S)
        return False

    def _observe(self, launch: Launch, outcome: Outcome, killed: Path, *, attempt: int | None) -> None:
        """From a kill to the last other process, and what the disk holds then. ``attempt``: of a launch that goes on after it."""
        record = json.loads(killed.read_text(encoding="utf-8"))
        until = record["time"] + LINGER_S
        seconds: float | None = None
        while time.monotonic() < until:
            if not launch.alive(attempt):
                seconds = time.monotonic() - record["time"]
                break
            time.sleep(_POLL_S)
        survivors = [] if seconds is not None else launch.kill(attempt)
        stop = Stop(
            victim=VICTIMS[outcome.cell.victim],
            victim_phases=record["phases"],
            num_ranks=NUM_RANKS,
            num_training=NUM_TRAINING,
            seconds=seconds,
            output=launch.new_output(),
            exit_codes=launch.exit_codes() if attempt is None and seconds is not None else {},
            survivors=survivors,
            checkpoint_faults=checkpoint_faults(self.run_dir),
        )
        outcome.seconds_to_stop, outcome.phase_of_victim = seconds, next(iter(record["phases"]), None)
        outcome.newest_checkpoint = newest_iteration(self.run_dir)
        outcome.faults += stop_faults(stop)

    def _end(self, launch: Launch, *, ended: bool) -> None:
        """The job came to its end, or never to the kill that was planned."""
        for outcome in self.outcomes[self._attempt :]:
            outcome.faults.append(f"attempt {self._attempt} never came to its kill:\n{_last_lines(launch.output())}")
        if not ended:
            self._ask_where_they_hang(launch)
            self._blame(f"after {REACH_S:.0f} s the job had not ended; alive: {launch.alive(None)}:\n{launch.output()}")
            return
        codes = launch.exit_codes()
        if any(codes.values()):
            self._blame(f"the job's end had exit codes {codes}:\n{_last_lines(launch.output())}")
            return
        self.ended_well = self._attempt == len(self.outcomes)
        for number, outcome in enumerate(self.outcomes[: self._attempt]):
            began = self._folder / f"began_{number + 1}"  # absent where nothing was left to do
            outcome.resumed_from = int(began.read_text(encoding="utf-8")) if began.exists() else TRAIN_ITERS

    def _ask_where_they_hang(self, launch: Launch) -> None:
        """Each rank's stacks go to its standard error (``fault_kill.py`` has seen to that)."""
        ranks = {int(file.read_text(encoding="utf-8")) for file in self._folder.glob(f"pid_{self._attempt}_*")}
        for pid in ranks.intersection(launch.alive(None)):
            os.kill(pid, signal.SIGUSR2)
        time.sleep(2.0)

    def _blame(self, fault: str) -> None:
        """All kills of the job, as nobody can tell which of them it was."""
        for outcome in self.outcomes:
            outcome.faults.append(fault)

    def _let_begin(self) -> None:
        (self._folder / f"started_{self._attempt}").touch()


# -- launchers --------------------------------------------------------------------------------------------------------


class Launch:
    """Processes of one launch."""

    def __init__(self, processes: Processes, *, has_agent: bool, restarts: bool) -> None:
        self.restarts = restarts
        """Whether a new attempt follows by itself where a rank was lost."""
        self._processes = processes
        self._has_agent = has_agent
        self._seen = ("", "")

    def alive(self, attempt: int | None) -> list[int]:
        """Process ids: of an attempt that torchrun starts, its ranks and their children; else all of the launch."""
        return self._processes.alive(attempt)

    def has_ended(self) -> bool:
        """Whether nothing of it is running any more."""
        return all(process.poll() is not None for process in self._processes.started) and not self.alive(None)

    def output(self) -> str:
        """Of all ranks so far."""
        return "".join(self._texts())

    def new_output(self) -> str:
        """Of all ranks since the last call."""
        texts, seen = self._texts(), self._seen
        self._seen = texts
        return "".join(text[len(before) :] for text, before in zip(texts, seen, strict=True))

    def exit_codes(self) -> dict[int, int]:
        """Rank -> code, -1 -> torchrun's. Waits for the last moments of a launcher whose ranks are gone."""
        first = -1 if self._has_agent else 0
        return {first + number: process.wait(LINGER_S) for number, process in enumerate(self._processes.started)}

    def kill(self, attempt: int | None) -> list[str]:
        """SIGKILL to what is left; the command lines."""
        lines = []
        for pid in self.alive(attempt):
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                lines.append(f"{pid} " + (Path("/proc") / str(pid) / "cmdline").read_text().replace("\0", " ")[:120])
                os.kill(pid, signal.SIGKILL)
        return lines

    def _texts(self) -> tuple[str, str]:
        numbers = range(len(self._processes.started))
        return "".join(map(self._processes.stdout, numbers)), "".join(map(self._processes.stderr, numbers))


@contextlib.contextmanager
def _start(launcher: LauncherName, folder: Path, program: list[str], max_restarts: int, number: int) -> Iterator[Launch]:
    """The ``number``-th launch of the job in ``folder``."""
    start: dict[str, Callable[[Processes], None]] = {
        "torchrun": lambda processes: _torchrun(processes, program, max_restarts),
        "srun": lambda processes: _like_srun(processes, program, number),
    }
    with Processes(folder / f"launch{number}", {BUSY: str(folder / "busy")}) as processes:
        start[launcher](processes)
        yield Launch(processes, has_agent=launcher == "torchrun", restarts=launcher == "torchrun" and max_restarts > 0)


def _torchrun(processes: Processes, program: list[str], max_restarts: int) -> None:
    processes.torchrun(NUM_RANKS, program, max_restarts=max_restarts)


def _like_srun(processes: Processes, program: list[str], number: int) -> None:
    """The ranks themselves, with the variables that srun sets; the ``number``-th requeue of the job."""
    port = free_port()
    for rank in range(NUM_RANKS):
        processes.start(
            program,
            SLURM_JOB_ID="4711",
            SLURM_STEP_ID="0",
            SLURM_PROCID=str(rank),
            SLURM_LOCALID=str(rank),
            SLURM_NTASKS=str(NUM_RANKS),
            SLURM_NODEID="0",
            SLURM_RESTART_COUNT=str(number),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )


def _last_lines(text: str, num_lines: int = 15) -> str:
    return "\n".join(text.splitlines()[-num_lines:])
