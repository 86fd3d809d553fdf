"""The folder of a run: who may write what where. Nothing that an earlier run left in it is overwritten."""

from __future__ import annotations

from pathlib import Path

from megatron_ppo.config import Config
from megatron_ppo.config_io import write_config

PREEMPTED = "PREEMPTED"
"""Marks a run that was stopped by a signal, for the launcher that asked for it."""


def open_run_folder(config: Config) -> Path:
    """Make the folder, write the resolved configuration, and take away the mark of an earlier stop."""
    folder = Path(config.logging.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PREEMPTED).unlink(missing_ok=True)
    write_config(config, set_aside(folder / "config.yaml"))
    return folder


def set_aside(path: Path) -> Path:
    """Rename what stands at ``path`` (a file or a folder) to a numbered name beside it, and return ``path``, free now.

    ``metrics.jsonl`` becomes ``metrics.1.jsonl``, then ``metrics.2.jsonl``; the larger the number, the later the run.
    """
    if path.exists():
        number = 1
        while (other := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
            number += 1
        path.rename(other)
    return path
