"""A launch over two hosts, a torchrun agent on each: a training rank on one, a rollout rank on the other, and a cable that is pulled.

The hosts are network namespaces (``network_namespaces.py``); program, launch script, torchrun and gloo are the real ones.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from network_namespaces import HOSTS, TwoHosts, why_not
from train_support import ROOT, Processes, make_inputs, read_lines, tiny_flags

LIMIT_S = 280.0
"""For what takes seconds on a quiet machine."""

REWARD = '''
"""After the first checkpoint the reward waits until it is released: so the launch stands in the rollout of the iteration after it."""
import pathlib, time

HERE = pathlib.Path(__file__).parent

def waits(sample):
    while (HERE / "run" / "checkpoints" / "latest").exists() and not (HERE / "released").exists():
        (HERE / "waiting").touch()
        time.sleep(0.05)
    return 1.0 / (1 + sample.num_response_tokens)
'''


def start_hosts(processes: Processes, hosts: TwoHosts, flags: list[str]) -> dict[str, int]:
    """The launch script on both hosts, a rank on each; host -> number of its process."""
    numbers: dict[str, int] = {}
    for host in HOSTS:
        environment = {
            "NNODES": "2",
            "NPROC_PER_NODE": "1",
            "RDZV_ENDPOINT": "hosta:29512",
            "MAX_RESTARTS": "0",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        numbers[host] = len(processes.started)
        processes.start_command(hosts.command(host, ["bash", str(ROOT / "scripts" / "train_torchrun.sh"), *flags]), **environment)
    return numbers


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(why_not() is not None, reason=f"no network namespaces here: {why_not()}")
def test_a_host_is_cut_off_and_the_job_goes_on_when_it_is_back(tmp_path: Path) -> None:
    """The ranks of both hosts end, each names what it has lost and where it was; started again, they go on from the checkpoint."""
    inputs = make_inputs(tmp_path / "inputs")
    (tmp_path / "reward.py").write_text(REWARD, encoding="utf-8")
    run = tmp_path / "run"
    flags = tiny_flags(
        inputs,
        run,
        train_iters=3,
        save_interval=1,
        rollout_backend="hf",
        critic="none",
        advantage_estimator="grpo",
        reward=f"{tmp_path / 'reward.py'}:waits",
        reward_timeout_s=3600,
    )
    with TwoHosts(tmp_path) as hosts, Processes(tmp_path / "log") as processes:
        numbers = start_hosts(processes, hosts, flags)
        processes.wait_until((tmp_path / "waiting").exists, "the rollout after the first checkpoint", LIMIT_S)
        hosts.pull_the_cable()
        # A collective would wait for half an hour: that all ranks end is the watchdog's doing.
        processes.wait_until(lambda: not processes.alive(attempt=0), "the end of all ranks on both hosts", LIMIT_S)
        # The agent of the host without the rendezvous's store waits for it inside torchrun, without a limit of its own.
        hosts.plug_it_in()
        codes = {host: processes.wait(LIMIT_S, number) for host, number in numbers.items()}
        output = {host: processes.output(number) for host, number in numbers.items()}
        assert all(codes.values()), output
        lost = r"^rank 1 \(rollout rank 0\) lost in phase rollout of iteration 1; this is rank 0 in phase .*; ending"
        assert re.search(lost, output["hosta"], re.M), output["hosta"]
        lost = r"^rank 0 \(training rank 0\) lost in phase .*; this is rank 1 in phase rollout of iteration 1; ending"
        assert re.search(lost, output["hostb"], re.M), output["hostb"]
        assert [record["iteration"] for record in read_lines(run / "metrics.jsonl")] == [0]

        (tmp_path / "released").touch()
        numbers = start_hosts(processes, hosts, flags)
        for number in numbers.values():
            assert processes.wait(LIMIT_S, number) == 0, processes.output(number)
        assert [record["iteration"] for record in read_lines(run / "metrics.jsonl")] == [0, 1, 2]
        assert "ended after 3 of 3 iterations" in processes.output(numbers["hosta"])
