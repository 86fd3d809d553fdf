"""A whole job without a launcher: ranks are forked from the server of ``spawn.py``, which has imported what they import. Test support only.

Half the processor time of ``train_support.run_job``. Where the launcher, start-up or a library's warnings are the point, use that one.
"""

from __future__ import annotations

from pathlib import Path

from spawn import run_program
from train_support import Job, tiny_flags


def forked_job(inputs: Path, run_dir: Path, num_ranks: int, **fields: object) -> Job:
    """One launch of ``tiny_flags`` to its end, which must be a good one; nothing of it outlives it."""
    flags = tiny_flags(inputs, run_dir, **fields)
    return Job(run_dir, run_program(num_ranks, ["train", *flags], run_dir.parent / f"log {run_dir.name}"), flags)
