"""Rewards of a user's own, for the tests of the reward pool. Imported by worker processes only."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from decimal import Decimal
from fractions import Fraction

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
