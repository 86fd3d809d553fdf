"""The job under a real Slurm on this machine, started by scripts/train_slurm.sh. Two nodes, one rank on each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_support import Cluster, Job, missing_programs
from train_support import ROOT, make_inputs, read_lines, tiny_flags

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing_programs()), reason=f"Slurm is not installed: there is no {', '.join(missing_programs())}"),
]
SCRIPT = "scripts/train_slurm.sh"
ONE_TASK_A_NODE = ("--partition", "both", "--nodes", "2", "--ntasks-per-node", "1")
ITERATIONS = 40


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


def flags(folder: Path, **fields: object) -> list[str]:
    """A small job without vLLM and critic, of which every launch is quick."""
    job = {"rollout_backend": "hf", "critic": "none", "advantage_estimator": "grpo", "prompts_per_iteration": 4, "global_batch_size": 16}
    return tiny_flags(make_inputs(folder / "inputs"), folder / "run", **(job | fields))


def test_a_job_is_stopped_before_its_time_limit_and_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    """Both ways of starting ranks: srun's signal reaches every process of the ranks, or a torchrun agent a node, which hands it on.

    The first job trains when its time limit is lowered, and gets SIGTERM from Slurm, which looks twice a minute; the second one gets it
    from scancel. No address or port is exported anywhere. In the end each has every iteration once, and both have the same numbers,
    though they were cut at different places.
    """
    jobs: dict[str, Job] = {}
    for launcher in ("srun", "torchrun"):
        reward = f"{ROOT / 'tests' / 'slow_reward.py'}:patient"
        arguments = flags(tmp_path / launcher, train_iters=ITERATIONS, reward=reward, reward_timeout_s=100.0)
        variables = {"LAUNCHER": launcher, "NPROC_PER_NODE": "1", "PATIENT_REWARD_S": "0.2"}
        jobs[launcher] = cluster.submit("--time", "20", "--signal", "TERM@60", *ONE_TASK_A_NODE, SCRIPT, *arguments, **variables)
    for launcher, job in jobs.items():
        records = tmp_path / launcher / "run" / "metrics.jsonl"
        job.wait_until(lambda file=records: file.exists() and len(read_lines(file)) > 1, "the job trains", 200)
        if launcher == "srun":
            job.set_time_limit(job.run_time_minutes() + 1)
        else:
            job.signal("TERM")
    jobs["srun"].wait_until(lambda: jobs["srun"].field("Restarts") == "1", "Slurm has signalled, and the job is queued again", 120)
    jobs["srun"].set_time_limit(20)
    rewards = []
    for launcher, job in jobs.items():
        job.wait(240)
        said = job.output()
        assert job.field("Restarts") == "1", said
        assert said.count("queueing job") == 1, said
        assert not (tmp_path / launcher / "run" / "PREEMPTED").exists()
        records = read_lines(tmp_path / launcher / "run" / "metrics.jsonl")
        assert [record["iteration"] for record in records] == list(range(ITERATIONS)), said
        rewards.append([record["reward/mean"] for record in records])
    assert rewards[0] == rewards[1]


def test_training_and_rollout_are_components_of_one_job(cluster: Cluster, tmp_path: Path) -> None:
    """The training component's node comes second by name: ranks, and the address where they meet, follow the components.

    Every rank has the cores that its component asked for.
    """
    arguments = flags(tmp_path, train_iters=1)
    sizes = ("--ntasks", "1", "--cpus-per-task", "2")
    python = tmp_path / "python"
    says = '[ -z "$SLURM_PROCID" ] || echo "rank $SLURM_PROCID has $SLURM_CPUS_PER_TASK cores"'
    python.write_text(f'#!/bin/sh\n{says}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    job = cluster.submit("--partition", "two", *sizes, ":", "--partition", "one", *sizes, SCRIPT, *arguments, PYTHON=str(python))
    job.wait(120)
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 1, job.output()
    assert {f"rank {rank} has 2 cores" for rank in (0, 1)} <= set(job.output().splitlines()), job.output()


def test_plain_srun_starts_the_ranks_without_any_script(cluster: Cluster, tmp_path: Path) -> None:
    options = ("--cpus-per-task", "2", "--signal", "TERM@600", "--kill-on-bad-exit=1")
    cluster.ask("srun", *ONE_TASK_A_NODE, *options, sys.executable, "-m", "megatron_ppo", "train", *flags(tmp_path, train_iters=1))
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 1
