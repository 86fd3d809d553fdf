"""The server that ranks are forked from has imported what they need, and nothing that one of them must not see."""

from __future__ import annotations

import gc
import os
import sys

from spawn import run_ranks
from spawn_preload import MODULES


def look_around(rank: int, world_size: int) -> dict[str, object]:
    """What a rank finds before it has done anything."""
    return {
        "missing": [name for name in MODULES if name not in sys.modules],
        "foreign": sorted({name.split(".")[0] for name in sys.modules} & {"megatron", "vllm", "ray"}),
        "frozen": gc.get_freeze_count() > 100_000 and gc.isenabled(),
        "threads": len(os.listdir("/proc/self/task")), "threads of the server": len(os.listdir(f"/proc/{os.getppid()}/task")),
        "path": os.environ.get("PYTHONPATH"), "rank": os.environ["RANK"],
    }  # fmt: skip


def test_ranks_are_forked_from_a_server_of_one_thread_that_holds_no_engine() -> None:
    expected = {
        "missing": [],
        "foreign": [],
        "frozen": True,
        "threads": 1,
        "threads of the server": 1,
        "path": os.environ.get("PYTHONPATH"),
    }
    assert run_ranks(look_around, 2) == [expected | {"rank": str(rank)} for rank in range(2)]
