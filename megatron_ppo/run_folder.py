"""The folder of a run: who may write what where. One live run at a time, and what an earlier run left is set aside, not overwritten."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from megatron_ppo.config import Config
from megatron_ppo.config_io import write_config

PREEMPTED = "PREEMPTED"
"""Marks a run that was stopped by a signal, for the launcher that asked for it."""

RECORDS = ("config.yaml", "metrics.jsonl", "samples.jsonl", "learning_curve.png", "tensorboard", "wandb", "hf", PREEMPTED)
"""All that a run writes."""


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

    def begin(self) -> None:
        """Called once, when everything is built: set aside what an earlier run left, and write the resolved configuration."""
        set_aside(self.path)
        write_config(self._config, self.path / "config.yaml")

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self._lock)


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
