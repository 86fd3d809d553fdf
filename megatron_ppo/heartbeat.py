"""What the ranks of a launch say of themselves in its store, and what can be told from it: the words and the memory of ``watchdog.py``,
which speaks, listens and judges.
"""

from __future__ import annotations

import json
import os
import select
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch.distributed as dist

START_UP = "start-up"
"""The phase before the first one is named."""
START_UP_PATIENCE = 10.0
"""Importing and building models may hold the interpreter lock, and with it the heart, for seconds."""
UNSEEN_LIMIT_S = 600.0
"""How long a rank may take to its first beat; before it, its launcher is who watches it."""


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself."""

    count: int
    """Grows with every beat. Times of other machines are never compared."""
    phase: str = START_UP
    patience: float = START_UP_PATIENCE
    """Factor on the time limit in this phase."""
    done: bool = False


@dataclass(frozen=True)
class Verdict:
    """Why the launch ends."""

    kind: Literal["lost", "failed"]
    rank: int
    """The global rank that is to blame."""
    phase: str
    error: str = ""
    """Class and message of the exception, for ``failed``."""


class Pulse:
    """Tells which ranks have not beaten for too long, by this process's clock. No input or output of its own."""

    def __init__(self, ranks: range, timeout_s: float, now: float) -> None:
        self._timeout_s = timeout_s
        self._beats: dict[int, Beat] = {}
        self._since = dict.fromkeys(ranks, now)

    @property
    def all_done(self) -> bool:
        """Whether every rank has said that it is done."""
        return len(self._beats) == len(self._since) and all(beat.done for beat in self._beats.values())

    def observe(self, rank: int, beat: Beat, now: float) -> None:
        """Take note of a beat; only a counter that has moved is progress."""
        known = self._beats.get(rank)
        self._beats[rank] = beat
        if known is None or beat.count != known.count:
            self._since[rank] = now

    def phase(self, rank: int) -> str:
        """The phase the rank was in when last heard of."""
        return self._beats[rank].phase if rank in self._beats else f"{START_UP} (no beat yet)"

    def overdue(self, now: float, *, unseen_limit_s: float = UNSEEN_LIMIT_S) -> int | None:
        """The rank that has been silent past its limit for the longest time, or None."""
        late: dict[int, float] = {}
        for rank, since in self._since.items():
            beat = self._beats.get(rank)
            limit = unseen_limit_s if beat is None else self._timeout_s * beat.patience
            if (beat is None or not beat.done) and now - since > limit:
                late[rank] = now - since
        return max(late, key=lambda rank: late[rank]) if late else None


class Mates:
    """The ranks on this rank's node: a pidfd, which an epoll sees, tells of a process's end at once."""

    def __init__(self, store: dist.Store, rank: int, epoll: select.epoll) -> None:
        """Sign in on this node. Others may suspect this rank from now on, so its first beat is written before."""
        self._store = store
        self._rank = rank
        self._epoll = epoll
        self._key = f"processes/{_node_key()}"
        self._ranks: dict[int, int] = {}
        self._num_met = 0
        store.set(f"beat/{rank}", json.dumps(asdict(Beat(0))))
        store.append(self._key, f"{rank}:{os.getpid()};")  # type: ignore[attr-defined]

    def meet(self) -> list[int]:
        """Watch every rank that has signed in since the last call; those of them that are gone already."""
        gone = []
        entries = self._store.get(self._key).decode().rstrip(";").split(";")
        for entry in entries[self._num_met :]:
            rank, pid = (int(part) for part in entry.split(":"))
            if rank == self._rank:
                continue
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                gone.append(rank)
            else:
                self._ranks[descriptor] = rank
                self._epoll.register(descriptor, select.EPOLLIN)
        self._num_met = len(entries)
        return gone

    def ended(self, descriptor: int) -> int:
        """The rank whose process has ended, as the epoll said by its descriptor; it will not say so again."""
        self._epoll.unregister(descriptor)
        return self._ranks[descriptor]

    def close(self) -> None:
        """Forget all."""
        for descriptor in self._ranks:
            os.close(descriptor)


def can_watch_processes() -> bool:
    """Whether this kernel (5.3 on) and container let a process have a pidfd; elsewhere beats alone tell who is alive."""
    if not hasattr(os, "pidfd_open"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # no such call, or not allowed
        return False
    return True


def _node_key() -> str:
    """Equal for processes that can see each other's process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}:{os.readlink('/proc/self/ns/pid')}"
