"""The folder of a run: who may write what where. One live run at a time, and what an earlier run left is set aside, not overwritten."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from megatron_ppo.config import Config
from megatron_ppo.config_io import write_config

logger = logging.getLogger(__name__)

PREEMPTED = "PREEMPTED"
"""Marks a run that was stopped by a signal, for the launcher that asked for it; gone as soon as the run is started again."""

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in a run's folder."""

SAVE_NOW = "SAVE_NOW"
"""A file of this name asks for a checkpoint at the next boundary, which removes it."""

RECORDS = ("config.yaml", "metrics.jsonl", "samples.jsonl", "learning_curve.png", "tensorboard", "wandb", "hf", CHECKPOINTS)
"""All that a run writes, beside ``hf_iter_*``."""

_LAUNCH = ".launch"


@dataclass(frozen=True)
class LaunchRecord:
    """Which launch began to write into the folder, and what it was told to go on from: tells a restart from a new order."""

    run_id: str
    """The launcher's, the same over its restarts; ``local`` where it gives none."""
    resume: str
    """The configuration's ``resume``."""


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
        try:
            (self.path / PREEMPTED).unlink(missing_ok=True)  # a launch that fails from here on was not preempted
        except OSError as error:
            raise ValueError(f"{self.path / PREEMPTED} cannot be removed: {error}; make the folder writable") from None

    def begin(self, launch: LaunchRecord, going_on_after: int | None) -> None:
        """Called once, when everything is built: write the resolved configuration.

        ``going_on_after``: the number of finished iterations after which the run of this folder goes on; records of later ones, which were
        not saved, are dropped, as they will be made again. None: what an earlier run left is set aside.
        """
        if going_on_after is None:
            moved = set_aside(self.path)
            if moved:
                print(f"records of an earlier run in this folder are set aside: {', '.join(moved)}", flush=True)
        else:
            for name in ("metrics.jsonl", "samples.jsonl"):
                drop_later_records(self.path / name, going_on_after)
        write_config(self._config, self.path / "config.yaml")
        (self.path / _LAUNCH).write_text(json.dumps(dataclasses.asdict(launch)), encoding="utf-8")

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self._lock)


def read_launch(folder: Path) -> LaunchRecord | None:
    """The launch that last began to write into a run folder; None where none has, or its record cannot be read."""
    try:
        return LaunchRecord(**json.loads((folder / _LAUNCH).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def drop_later_records(file: Path, num_iterations: int) -> None:
    """Keep the records of a JSONL file whose ``iteration`` is below ``num_iterations``; lines that a crash has spoilt go, counted."""
    kept, spoilt = [], 0
    for line in file.read_bytes().split(b"\n")[:-1] if file.exists() else []:  # the last part is empty, or a line that was cut off
        try:
            is_kept = json.loads(line)["iteration"] < num_iterations
        except (ValueError, KeyError, TypeError):
            spoilt += 1
            continue
        if is_kept:
            kept.append(line + b"\n")
    if spoilt:
        logger.warning("%s: %d unreadable lines, spoilt by a crash, were dropped", file, spoilt)
    new = file.with_suffix(".tmp")
    with new.open("wb") as target:
        target.write(b"".join(kept))
        target.flush()
        os.fsync(target.fileno())
    os.replace(new, file)


def replace_folder(partial: Path, target: Path) -> None:
    """Give a finished folder its name, in place of an older one of that name."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def set_aside(folder: Path) -> list[str]:
    """Give the records in ``folder`` a number, the same for all: ``metrics.1.jsonl``, ``hf.1``; the larger, the later the run. Their new
    names."""
    exports = [path.name for path in folder.glob("hf_iter_*") if "." not in path.name]
    left = [folder / name for name in (*RECORDS, *exports) if (folder / name).exists()]
    number = 1
    while any(numbered(folder / name, number).exists() for name in (*RECORDS, *exports)):
        number += 1
    for path in left:
        path.rename(numbered(path, number))
    return [numbered(path, number).name for path in left]


def numbered(path: Path, number: int) -> Path:
    """``metrics.jsonl`` -> ``metrics.1.jsonl``."""
    return path.with_name(f"{path.stem}.{number}{path.suffix}")
