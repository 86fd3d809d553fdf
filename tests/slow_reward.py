"""A reward for a job that has to outlast a signal: slow in the first start of a Slurm job, fast in the next. Test support only."""

from __future__ import annotations

import os
import time

from megatron_ppo.rewards import RewardInput


def patient(sample: RewardInput) -> float:
    """The length of the response; in a job's first start it takes a while to see it."""
    if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        time.sleep(float(os.environ["PATIENT_REWARD_S"]))
    return float(sample.num_response_tokens)
