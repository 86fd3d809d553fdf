"""The folder of a run: who may write what where. One live run at a time, and what an earlier run left is set aside, not overwritten."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from megatron_ppo.config import Config
from megatron_ppo.config_io import write_config

PREEMPTED = "PREEMPTED"
"""Marks a run that was stopped by a signal, for the launcher that asked for it."""

SAVE_NOW = "SAVE_NOW"
"""A file of this name asks for a checkpoint at the next boundary, which removes it."""

RECORDS = (
    "config.yaml",
    "metrics.jsonl",
    "samples.jsonl",
    "learning_curve.png",
    "tensorboard",
    "wandb",
    "hf",
    "checkpoints",
    PREEMPTED,
)
"""All that a run writes, beside ``hf_iter_*``."""


class RunFolder:
    """Global rank 0's hold on the folder; ended by ``close`` or by the end of the process."""

    def __init__(self, config: Config) -> None:
        """Make the folder and take its lock.

        Raises:
            ValueError: another run that still lives has the folder, or it cannot be made.
        """
        self.path = Path(config.logging.run_dir)
        self._config = config
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise ValueError(f"run_dir = {self.path} cannot be used as the folder of a run: {error}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ValueError(f"run_dir = {self.path} belongs to a run that has not ended: choose another --run-dir") from None

    def begin(self, going_on_after: int | None) -> None:
        """Called once, when everything is built: write the resolved configuration.

        ``going_on_after``: the number of finished iterations after which the run of this folder goes on; records of later ones, which were
        not saved, are dropped, as they will be made again. None: what an earlier run left is set aside.
        """
        if going_on_after is None:
            set_aside(self.path)
        else:
            (self.path / PREEMPTED).unlink(missing_ok=True)
            for name in ("metrics.jsonl", "samples.jsonl"):
                drop_later_records(self.path / name, going_on_after)
        write_config(self._config, self.path / "config.yaml")

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self._lock)


def drop_later_records(file: Path, num_iterations: int) -> None:
    """Keep the records of a JSONL file whose ``iteration`` is below ``num_iterations``, and no line that was cut off by a crash."""
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []:
        if line.endswith("\n") and json.loads(line)["iteration"] < num_iterations:
            kept.append(line)
    new = file.with_suffix(".tmp")
    new.write_text("".join(kept), encoding="utf-8")
    os.replace(new, file)


def set_aside(folder: Path) -> None:
    """Give the records in ``folder`` a number, the same for all: ``metrics.1.jsonl``, ``hf.1``; the larger, the later the run."""
    left = [folder / name for name in RECORDS if (folder / name).exists()]
    number = 1
    while any(numbered(folder / name, number).exists() for name in RECORDS):
        number += 1
    for path in left:
        path.rename(numbered(path, number))


def numbered(path: Path, number: int) -> Path:
    """``metrics.jsonl`` -> ``metrics.1.jsonl``."""
    return path.with_name(f"{path.stem}.{number}{path.suffix}")
