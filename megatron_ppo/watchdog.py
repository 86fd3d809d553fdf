"""Knows who is alive and in which phase, and ends every rank soon after one is lost. Two threads on each rank, for the whole run.

A rank that waits in C++ for a peer that was killed notices nothing (gloo may wait out its whole timeout) and runs no Python signal
handler, so nobody would learn which rank was lost. Hence, beside the main thread:

    heart   every second, over a store connection of its own: writes this rank's beat (counter, phase), reads the launch's verdict;
            rank 0 also reads all beats, the others rank 0's. It alone judges and ends the process.
    ears    waits for signals (``signal.set_wakeup_fd`` works while the main thread is in C++), for the death of ranks on the same
            node (pidfd, at once), of the launcher, and for a store that no longer answers.

The first verdict written to the store is the one that all ranks print:
``rank 3 (rollout rank 1) lost in phase weight sync v3; this is rank 0 in phase weight sync v3; ending``, then ``os._exit(1)``.

What happens after a request to stop or save is the loop's business: here it only becomes ``preempt_requested`` or ``save_requested``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import FrameType, TracebackType
from typing import NoReturn

import torch.distributed as dist

from megatron_ppo.heartbeat import START_UP, START_UP_PATIENCE, UNSEEN_LIMIT_S, Beat, Mates, Pulse, Verdict, can_watch_processes
from megatron_ppo.world import World

_ALERT_POLL_S = 0.2
_EARS_POLL_S = 0.25
_HOST_LINGERS_S = 3.0
"""How long rank 0 keeps the store up after a verdict, so that the others can read it."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_NOT_A_SIGNAL = b"\0"
_RAISED_IN = "_megatron_ppo_phase"  # attribute of an exception: the innermost phase it came out of


class InputError(ValueError):
    """Bad input, already in words: shown without a traceback."""


class Watchdog:
    """This rank's heart and ears. Use it as a context manager around the whole program, in the main thread:

    leaving without an exception is ``finish``, leaving with one is ``fail``.
    """

    def __init__(self, world: World, heartbeat_timeout_s: float, *, poll_s: float = 1.0, watch_processes: bool = True) -> None:
        """Start both threads and take over SIGTERM, SIGINT and SIGUSR1.

        Args:
            world: this rank's place.
            heartbeat_timeout_s: a rank that has been silent for this long is lost (ten times that during start-up).
            poll_s: time between beats.
            watch_processes: notice the death of ranks on this node without waiting for their beats to stop.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("the watchdog takes over signal handlers, so it must be made in the main thread")
        if heartbeat_timeout_s < 2 * poll_s:
            raise ValueError(f"heartbeat_timeout_s = {heartbeat_timeout_s} must be at least two beats of {poll_s} s")
        self.preempt_requested = False
        """A SIGTERM or SIGINT has arrived: save and end at the next boundary, together."""
        self.save_requested = False
        """A SIGUSR1 has arrived; whoever acts on it sets this back."""
        self._world = world
        self._timeout_s = heartbeat_timeout_s
        self._poll_s = poll_s
        self._store = world.connect(timeout_s=60.0)
        self._phase = (START_UP, START_UP_PATIENCE)
        self._stack = [self._phase]
        self._count = 0
        self._listens_to = range(1, world.world_size) if world.global_rank == 0 else range(1)
        self._seen: list[int] = []
        self._pulse = Pulse(self._listens_to, heartbeat_timeout_s, time.monotonic())
        self._failure: _Failure | None = None
        self._alert_until = 0.0
        self._interrupts = 0
        self._suspects: deque[int] = deque()
        self._last_contact = time.monotonic()
        self._wake, self._done, self._all_done = threading.Event(), threading.Event(), threading.Event()
        self._finishing = self._stopped = False
        self._ending = threading.Lock()
        self._parent = os.getppid()
        self._epoll = select.epoll()
        self._take_signals()
        watches = watch_processes and can_watch_processes()
        self._mates = Mates(self._store, world.global_rank, self._epoll) if watches else None
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in (self._heart, self._ears)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.finish()
        else:
            self.fail(error)

    # -- what the main thread calls -----------------------------------------------------------------------------------

    @property
    def current_phase(self) -> str:
        """Name of the innermost phase, or of the one that the last error left."""
        return self._phase[0]

    @contextlib.contextmanager
    def phase(self, name: str, patience: float | None = None) -> Iterator[None]:
        """Name what this rank does inside the block; all ranks know it within moments.

        ``patience`` multiplies the time limit of beats, for work that holds the interpreter lock for long. Default: 1, and 10 where
        the name begins with ``start-up``.
        """
        if patience is None:
            patience = START_UP_PATIENCE if name.startswith(START_UP) else 1.0
        here = (name, patience)
        self._stack.append(here)
        self._phase = here
        self._wake.set()
        raised_in: tuple[str, float] | None = None
        try:
            yield
        except BaseException as error:
            raised_in = vars(error).setdefault(_RAISED_IN, here)
            raise
        finally:
            self._stack.pop()
            # What an error left stays until another phase begins or ends, so that a failing rank is not seen elsewhere.
            self._phase = raised_in or self._stack[-1]
            self._wake.set()

    def fail(self, error: BaseException) -> NoReturn:
        """Tell the launch that this rank failed, and end this process with a non-zero code; all other ranks end too.

        An error of a collective usually only means that somebody else is gone, so it is held back until the others have had the time
        to say so: what all ranks print is the first cause.
        """
        phase = vars(error).get(_RAISED_IN, self._stack[-1])[0]
        text = str(error) if isinstance(error, InputError) else "".join(traceback.format_exception_only(error)).strip()
        held_back_until = time.monotonic() + (self._timeout_s + 2 * self._poll_s if _is_echo(error) else 0.0)
        verdict = Verdict("failed", self._world.global_rank, phase, text)
        shown = "" if isinstance(error, InputError) else "".join(traceback.format_exception(error))
        self._failure = _Failure(verdict, shown, held_back_until)
        self._wake.set()
        if self._stopped:
            self._end(self._failure.traceback)
        while True:  # the heart ends the process
            time.sleep(1.0)

    def finish(self) -> None:
        """Say that this rank is done, and give the signals back. Rank 0, which may host the store, returns when all are done.

        The last thing a rank does: nobody notices its end after this.
        """
        self._finishing = True
        self._wake.set()
        self._done.wait()
        if self._world.global_rank == 0:
            self._all_done.wait()
        self._stopped = True
        self._wake.set()
        os.write(self._pipe[1], _NOT_A_SIGNAL)
        for thread in self._threads:
            thread.join()
        self._give_signals_back()

    # -- signals ------------------------------------------------------------------------------------------------------

    def _take_signals(self) -> None:
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[0], False)
        os.set_blocking(self._pipe[1], False)
        self._epoll.register(self._pipe[0], select.EPOLLIN)
        # A handler must exist for the number to be written; what there is to do, the ears do.
        self._handlers = {number: signal.signal(number, _leave_it_to_the_ears) for number in _SIGNALS}
        self._wakeup_fd = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)

    def _give_signals_back(self) -> None:
        signal.set_wakeup_fd(self._wakeup_fd)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for descriptor in self._pipe:
            os.close(descriptor)
        if self._mates is not None:
            self._mates.close()
        self._epoll.close()

    def _hear(self, number: int) -> None:
        if number == signal.SIGUSR1:
            self.save_requested = True
        elif number in (signal.SIGTERM, signal.SIGINT):
            # Launchers also send this to the survivors of a crash: look closely whether a rank is missing.
            self.preempt_requested = True
            self._alert_until = time.monotonic() + self._timeout_s
            self._interrupts += number == signal.SIGINT
            if self._interrupts > 1 and self._failure is None:
                verdict = Verdict("failed", self._world.global_rank, self.current_phase, "interrupted twice (SIGINT)")
                self._failure = _Failure(verdict, "", 0.0)
            self._wake.set()

    # -- ears ---------------------------------------------------------------------------------------------------------

    def _ears(self) -> None:
        try:
            self._listen_around()
        except BaseException:
            self._end(f"the watchdog of rank {self._world.global_rank} is broken; ending\n{traceback.format_exc()}")

    def _listen_around(self) -> None:
        last = time.monotonic()
        while not self._stopped:
            for descriptor, _ in self._epoll.poll(_EARS_POLL_S):
                if descriptor == self._pipe[0]:
                    for number in os.read(descriptor, 256):
                        self._hear(number)
                elif self._mates is not None:
                    self._suspects.append(self._mates.ended(descriptor))
                    self._wake.set()
            now = time.monotonic()
            if now - last > 1.0:
                self._last_contact = now  # this process itself stood still: that says nothing about the store
            last = now
            if os.getppid() != self._parent and self._failure is None:
                what = f"its launcher (process {self._parent}) is gone"
                self._failure = _Failure(Verdict("failed", self._world.global_rank, self.current_phase, what), "", 0.0)
                self._wake.set()
            if now - self._last_contact > self._timeout_s and not self._done.is_set():
                self._end(self._store_is_gone("does not answer"))

    # -- heart --------------------------------------------------------------------------------------------------------

    def _heart(self) -> None:
        try:
            while not self._stopped:
                self._round()
                self._last_contact = time.monotonic()
                alert = self._failure is not None or self._suspects or time.monotonic() < self._alert_until
                self._wake.wait(_ALERT_POLL_S if alert else self._poll_s)
                self._wake.clear()
        except dist.DistError as error:
            if not self._done.is_set() or self._world.global_rank == 0:
                self._end(self._store_is_gone(str(error).split("\n", 1)[0]))
        except BaseException:
            self._end(f"the watchdog of rank {self._world.global_rank} is broken; ending\n{traceback.format_exc()}")

    def _round(self) -> None:
        """One beat: speak, listen, judge. Returns, or ends the process."""
        finishing = self._finishing
        phase, patience = self._phase
        self._count += 1
        beat = Beat(self._count, phase, patience, finishing)
        self._store.set(f"beat/{self._world.global_rank}", json.dumps(asdict(beat)))
        if finishing and self._failure is None:
            self._done.set()
            if self._world.global_rank != 0:
                return  # rank 0 and its store may go from now on
        if self._store.check(["verdict"]):
            self._end_by(Verdict(**json.loads(self._store.get("verdict"))))
        self._report_failure()
        self._listen()
        self._judge()

    def _report_failure(self) -> None:
        failure = self._failure
        if failure is not None and time.monotonic() >= failure.held_back_until:
            self._end_by(self._record(failure.verdict))

    def _listen(self) -> None:
        now = time.monotonic()
        self._seen += [rank for rank in self._listens_to if rank not in self._seen and self._store.check([f"beat/{rank}"])]
        for rank, text in zip(self._seen, self._store.multi_get([f"beat/{rank}" for rank in self._seen]), strict=True):
            self._pulse.observe(rank, Beat(**json.loads(text)), now)
        if self._mates is not None:
            self._suspects += self._mates.meet()
        if self._done.is_set() and self._pulse.all_done:
            self._all_done.set()

    def _judge(self) -> None:
        while self._suspects:
            rank = self._suspects.popleft()
            beat = Beat(**json.loads(self._store.get(f"beat/{rank}")))
            if not beat.done:
                self._end_by(self._record(Verdict("lost", rank, beat.phase)))
        now = time.monotonic()
        # Once a signal's alert is over, a rank that never came up is what the launcher's signal was about.
        alert_is_over = 0.0 < self._alert_until < now
        late = self._pulse.overdue(now, unseen_limit_s=0.0 if alert_is_over else UNSEEN_LIMIT_S)
        if late is not None:
            self._end_by(self._record(Verdict("lost", late, self._pulse.phase(late))))

    def _record(self, verdict: Verdict) -> Verdict:
        """Write the verdict, unless there is one already; the one that stands."""
        return Verdict(**json.loads(self._store.compare_set("verdict", "", json.dumps(asdict(verdict)))))

    # -- the end ------------------------------------------------------------------------------------------------------

    def _end_by(self, verdict: Verdict) -> NoReturn:
        self._print_once(self._tell(verdict))
        with contextlib.suppress(dist.DistError):  # the store may have gone with rank 0; the text is out already
            num_ended = self._store.add("ended", 1)
            if self._world.global_rank == 0 and self._world.rank0_hosts_store:
                expected = self._world.world_size - (verdict.kind == "lost")
                until = time.monotonic() + _HOST_LINGERS_S
                while num_ended < expected and time.monotonic() < until:
                    time.sleep(0.02)
                    num_ended = self._store.add("ended", 0)
        _exit()

    def _end(self, text: str) -> NoReturn:
        self._print_once(text)
        _exit()

    def _print_once(self, text: str) -> None:
        if not self._ending.acquire(blocking=False):
            time.sleep(_HOST_LINGERS_S + 1.0)  # the other thread is ending the process, unless the store holds it up
            os._exit(1)
        # Not sys.stderr: the main thread may hold its lock.
        os.write(2, f"{text}\n".encode())

    def _tell(self, verdict: Verdict) -> str:
        me = self._world.global_rank
        if self._failure is not None and verdict == self._failure.verdict:
            return f"{self._failure.traceback}{self._world.describe(me)} failed in phase {verdict.phase}: {verdict.error}; ending"
        if verdict.rank == me:
            return f"{self._world.describe(me)} was not heard of for too long in phase {verdict.phase}, so the launch ends; ending"
        how = f"{verdict.kind} in phase {verdict.phase}" + (f": {verdict.error.splitlines()[0].rstrip(':')}" if verdict.error else "")
        return f"{self._world.describe(verdict.rank)} {how}; {self._own_part(verdict.error)}"

    def _own_part(self, first_error: str = "") -> str:
        me, own = self._world.global_rank, None if self._failure is None else self._failure.verdict
        then = f"\n(rank {me} itself then met: {own.error})" if own is not None and own.error != first_error else ""
        return f"this is rank {me} in phase {self.current_phase if own is None else own.phase}; ending{then}"

    def _store_is_gone(self, how: str) -> str:
        me = self._world.global_rank
        if self._world.rank0_hosts_store and me != 0:
            return self._tell(Verdict("lost", 0, self._pulse.phase(0)))
        host, port = self._world.store_address
        whose = "rank 0's own" if self._world.rank0_hosts_store else "the launcher's"
        return f"{whose} store at {host}:{port} is gone ({how}); {self._own_part()}"


@dataclass(frozen=True)
class _Failure:
    """What went wrong on this rank itself, and until when somebody else's verdict goes first."""

    verdict: Verdict
    traceback: str
    held_back_until: float


def _is_echo(error: BaseException) -> bool:
    """Whether the error is how a collective reports that a peer has gone."""
    words = r"gloo|nccl|connection (closed|reset|refused)|broken pipe"
    return isinstance(error, dist.DistError | ConnectionError) or (
        isinstance(error, RuntimeError) and re.search(words, str(error), re.IGNORECASE) is not None
    )


def _exit() -> NoReturn:
    """End without running anything of the main thread's, which may be stuck. Buffered output is flushed if that is possible at once."""
    flush = threading.Thread(target=_flush, daemon=True)
    flush.start()
    flush.join(timeout=0.3)
    os._exit(1)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _leave_it_to_the_ears(number: int, frame: FrameType | None) -> None:
    """Python handler of the signals; it may run much later than the ears have heard."""


def _forget_in_child() -> None:
    """A forked child shares the pipe: its signals must not reach the parent's ears, and must end the child as usual."""
    if any(signal.getsignal(number) is _leave_it_to_the_ears for number in _SIGNALS):
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget_in_child)
