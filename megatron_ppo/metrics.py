"""Metrics of the run: console, metrics.jsonl, samples.jsonl, Weights & Biases, TensorBoard.

Step 6 of the iteration. Written by global rank 0 only, after all reductions: the numbers that reach this file are the whole launch's.
The local files are the record; what happens to W&B or TensorBoard never stops a run.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape

from megatron_ppo.config import Config

PHASES = ("sync", "rollout", "score", "update")
"""The phases of an iteration whose seconds are logged as ``time/{phase}_s``."""

_MEAN: Callable[[Sequence[float]], float] = lambda values: sum(values) / len(values)  # noqa: E731
REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "reward/timeouts": sum,
    "reward/errors": sum,
    "refit/received_bytes": sum,
    "refit/shard_bytes": sum,
    "time/rollout_s": max,
    "time/reward_s": max,
}
"""How the observations of several replicas become one number; the mean where a name is not listed."""


def summarise(observations: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """One number a name from all replicas' observations (``REDUCTIONS``). A name nobody observed is left out."""
    return {name: float(REDUCTIONS.get(name, _MEAN)(values)) for name, values in observations.items() if len(values) > 0}


def finite_or_none(value: object) -> object:
    """JSON has no NaN or Infinity: such numbers are written as null, everywhere in nested lists and mappings."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: finite_or_none(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_none(inner) for inner in value]
    return value


class Sink(Protocol):
    """Somewhere outside the run folder's own records that scalars go."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars of one iteration."""

    def close(self) -> None:
        """Flush and end."""


class RecordFile:
    """A JSONL file that records are appended to. Where the disk is full, records wait in memory, and training goes on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._waiting = b""

    def append(self, record: Mapping[str, object]) -> None:
        """Write a record, after those that wait."""
        line = json.dumps(finite_or_none(record), allow_nan=False, ensure_ascii=False) + "\n"
        had_to_wait = bool(self._waiting)
        self._waiting += line.encode()
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if not had_to_wait:
                warn(f"{self._path} cannot be written, its records wait in memory: {error}")

    def sync(self) -> None:
        """Wait until everything that could be written is on the disk."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            warn(f"{self._path} cannot be brought to the disk: {error}")

    def close(self) -> None:
        """Close the file. What still waits is lost, which is said."""
        if self._waiting:
            warn(f"{self._path} lacks its last {len(self._waiting)} bytes, which could not be written")
        self._file.close()


class MetricsWriter:
    """The run's records. ``log`` is called once an iteration, with strictly increasing iterations."""

    def __init__(self, config: Config, *, first_iteration: int = 0, wandb_run_id: str | None = None) -> None:
        """Records are appended to those in the folder.

        ``first_iteration``: what dashboards hold from it on is of a launch that was cut off. ``wandb_run_id``: the run of Weights & Biases
        that goes on.
        """
        self._config = config
        self._folder = Path(config.logging.run_dir)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._metrics_file = RecordFile(self._folder / "metrics.jsonl")
        self._samples_file = RecordFile(self._folder / "samples.jsonl")
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._sinks = _open_sinks(config, self._folder, first_iteration, wandb_run_id)
        self._wandb_run_id = next((sink.run_id for sink in self._sinks if isinstance(sink, WandbSink)), wandb_run_id)
        self._last_iteration = -1
        self._num_records = 0
        self._seconds: list[float] = []

    def log(self, iteration: int, scalars: Mapping[str, float]) -> None:
        """Record one iteration everywhere.

        Raises:
            ValueError: the iteration is not after the last one: a step would be recorded twice or out of order.
        """
        if iteration <= self._last_iteration:
            raise ValueError(f"metrics of iteration {iteration} come after those of iteration {self._last_iteration}")
        self._last_iteration = iteration
        self._num_records += 1
        self._metrics_file.append({"iteration": iteration, **scalars})
        self._console.print(self._line(iteration, scalars))
        for sink in list(self._sinks):
            try:
                sink.log(iteration, scalars)
            except Exception as error:  # the record on disk is complete; a broken dashboard must not end the run
                self._sinks.remove(sink)
                warn(f"{type(sink).__name__} failed and is off from iteration {iteration} on: {error}")

    def log_samples(self, samples: Sequence[Mapping[str, object]]) -> None:
        """Append prompts with responses and rewards to samples.jsonl."""
        for sample in samples:
            self._samples_file.append(sample)

    @property
    def num_records(self) -> int:
        """Iterations that this launch recorded."""
        return self._num_records

    @property
    def wandb_run_id(self) -> str | None:
        """Id of the run of Weights & Biases, also while it cannot be reached; None without one."""
        return self._wandb_run_id

    def sync(self) -> None:
        """Wait until all records are on the disk."""
        for file in (self._metrics_file, self._samples_file):
            file.sync()

    def close(self) -> None:
        """Flush everything."""
        self._metrics_file.close()
        self._samples_file.close()
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:  # as in log
                warn(f"{type(sink).__name__} could not be closed: {error}")

    def _failed_rewards(self, scalars: Mapping[str, float]) -> str:
        """Responses without a reward of their own, where there are any."""
        counts = {name: int(scalars.get(f"reward/{name}", 0)) for name in ("errors", "timeouts")}
        return "".join(f"[bold red]{count} reward {name}[/]  " for name, count in counts.items() if count)

    def _line(self, iteration: int, scalars: Mapping[str, float]) -> str:
        """One line on the console: what is learned, how fast, where the time goes, how long it takes still."""
        total = self._config.training.train_iters
        seconds = scalars.get("time/iteration_s", math.nan)
        self._seconds = [*self._seconds[-19:], seconds]
        left = sorted(self._seconds)[len(self._seconds) // 2] * (total - iteration - 1)
        split = " ".join(f"{phase} {scalars.get(f'time/{phase}_s', math.nan):.2f}" for phase in PHASES)
        width = len(str(total))
        return (
            f"[bold]iteration {iteration + 1:>{width}}/{total}[/]  reward [bold green]{scalars.get('reward/mean', math.nan):.3f}[/]  "
            + (f"kl {scalars.get('kl/mean', math.nan):.4f}  " if self._config.uses_reference else "")
            + f"entropy {scalars.get('entropy/mean', math.nan):.2f}  "
            + self._failed_rewards(scalars)
            + f"{seconds:.2f} s "
            + escape(f"[{split}]") + f"  {scalars.get('tokens_per_s', math.nan):.0f} tokens/s  "
            f"[dim]{_clock(left)} left[/]"
        )


def _clock(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def warn(text: str) -> None:
    """A warning that a person can act on."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


class WandbSink:
    """One Weights & Biases run."""

    def __init__(self, config: Config, folder: Path, first_iteration: int, run_id: str | None) -> None:
        import wandb  # an optional extra

        online = wandb.setup().settings.mode not in ("offline", "dryrun", "disabled")
        # On a terminal wandb would ask for the key, and the launch would wait for the answer.
        if online and not os.environ.get("WANDB_API_KEY") and wandb.api.api_key is None:
            raise RuntimeError("W&B needs a key: run `wandb login`, or set WANDB_API_KEY, or set WANDB_MODE=offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "megatron_ppo"),
            name=folder.name,
            dir=str(folder),
            config=dataclasses.asdict(config),
            id=run_id,
            resume="allow" if run_id is not None else None,
            settings=wandb.Settings(console="off", silent=True),
        )

        # Its own step only grows, so that iterations that are done again after a crash would be dropped.
        self._run.define_metric("*", step_metric="iteration")
        self.run_id = str(self._run.id)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Scalars of one iteration."""
        self._run.log({**scalars, "iteration": step})

    def close(self) -> None:
        """End the run."""
        self._run.finish()


class TensorboardSink:
    """TensorBoard events in ``RUN_DIR/tensorboard``."""

    def __init__(self, config: Config, folder: Path, first_iteration: int, run_id: str | None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # needs the optional extra

        self._writer: Any = SummaryWriter(log_dir=str(folder / "tensorboard"), purge_step=first_iteration)
        self._writer.add_text("config", f"```\n{dataclasses.asdict(config)}\n```")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Scalars of one iteration."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush."""
        self._writer.close()


def _open_sinks(config: Config, folder: Path, first_iteration: int, wandb_run_id: str | None) -> list[Sink]:
    known: dict[str, Callable[[Config, Path, int, str | None], Sink]] = {"wandb": WandbSink, "tensorboard": TensorboardSink}
    sinks: list[Sink] = []
    for name in config.logging.loggers:
        try:
            sinks.append(known[name](config, folder, first_iteration, wandb_run_id))
        except Exception as error:  # missing package, no key, no network: said once, and training goes on
            warn(f"{name} is off: {type(error).__name__}: {error}")
    return sinks


class Stopwatch:
    """Seconds of the phases of one iteration on this rank."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started = time.monotonic()

    def lap(self, phase: str) -> None:
        """Book the time since the last lap (or the start) on ``phase``."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._started
        self._started = now

    @property
    def total(self) -> float:
        """Seconds of all laps."""
        return sum(self.seconds.values())
