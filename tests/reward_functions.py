"""Rewards of a user's own, for the tests of the reward pool. Imported by worker processes only."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from decimal import Decimal
from fractions import Fraction
from multiprocessing.synchronize import Event

from megatron_ppo.rewards import RewardInput

RESULTS = {
    "nan": float("nan"),
    "inf": float("inf"),
    "none": None,
    "text": "1.0",
    "complex": 1j,
    "true": True,
    "fraction": Fraction(1, 4),
    "decimal": Decimal("0.75"),
    "big": 10**400,
}


def misbehave(sample: RewardInput) -> object:
    """Does what the response says; the length of the response otherwise."""
    if sample.response == "loop":
        while True:
            pass
    if sample.response == "child":
        subprocess.Popen(["sleep", "1234.5"])
        time.sleep(1000)
    if sample.response == "raise":
        raise KeyError("the text of the error")
    if sample.response == "exit":
        os._exit(3)
    if sample.response in RESULTS:
        return RESULTS[sample.response]
    return len(sample.response)


def environment(sample: RewardInput) -> float:
    """1 where neither torch nor the launcher's variables reach the worker, and the sample arrived whole."""
    light = not {"torch", "vllm", "transformers"} & set(sys.modules)
    whole = (sample.prompt, sample.answer, sample.columns["n"], sample.num_response_tokens, sample.truncated) == ("p", "a", 5, 7, True)
    return float(light and whole and "RANK" not in os.environ)


def process_id(sample: RewardInput) -> float:
    """The worker's process id, after a while in which the other workers get their share."""
    time.sleep(0.05)
    return float(os.getpid())


def signalled(sample: RewardInput) -> float:
    """1 where the scheduler's signals do not end the worker, but end what it forked or started."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    forking = multiprocessing.get_context("fork")
    ready = forking.Event()
    forked = forking.Process(target=_stay, args=(ready,))
    started = subprocess.Popen(["sleep", "1000"])
    forked.start()
    ready.wait()
    forked.terminate()
    started.terminate()
    forked.join()
    return float(forked.exitcode == started.wait() == -signal.SIGTERM)


def _stay(ready: Event) -> None:
    ready.set()
    time.sleep(1000)
