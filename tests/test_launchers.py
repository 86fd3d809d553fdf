"""The launch scripts: what they hand on, and what becomes of a preempted Slurm job. torchrun is real, Slurm's commands are stand-ins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from train_support import ROOT, make_inputs, read_lines, tiny_flags

STANDIN = """#!/bin/sh
echo "$0 $@ MASTER_ADDR=$MASTER_ADDR MASTER_PORT=$MASTER_PORT" >> "$CALLS"
case "$2" in hostnames) echo node7; echo node8 ;; esac
[ -z "$PREEMPT" ] || case "$0" in */srun) mkdir -p "$PREEMPT"; touch "$PREEMPT/PREEMPTED" ;; esac
"""


def run_script(name: str, arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """The script with this environment's python first on the path."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "TORCHELASTIC"))}
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / name), *arguments],
        env=variables | {"PATH": path, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.parametrize("preempted", [True, False])
def test_the_slurm_script_starts_one_task_a_rank_and_queues_a_preempted_job_again(tmp_path: Path, preempted: bool) -> None:
    """The run folder is read as the program reads it: here from a YAML file."""
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text(STANDIN)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "run.yaml").write_text(f"run_dir: {tmp_path / 'run'}\n")
    calls = tmp_path / "calls"
    environment = {"CALLS": str(calls), "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "30123"}
    environment["PREEMPT"] = str(tmp_path / "run") if preempted else ""
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = run_script("train_slurm.sh", ["--config", str(tmp_path / "run.yaml"), "--seed", "3"], PATH=path, **environment)
    assert done.returncode == 0, done.stderr
    said = calls.read_text().splitlines()
    assert "scontrol show hostnames node[7-8]" in said[0]
    assert f"srun --kill-on-bad-exit=1 python -m megatron_ppo train --config {tmp_path / 'run.yaml'} --seed 3" in said[1]
    assert said[1].endswith("MASTER_ADDR=node7 MASTER_PORT=20123")
    assert any("scontrol requeue 30123" in line for line in said) == preempted


def test_several_nodes_need_a_common_address() -> None:
    done = run_script("train_torchrun.sh", [], NNODES="2")
    assert done.returncode != 0 and "set RDZV_ENDPOINT to HOST:PORT" in done.stderr


@pytest.mark.slow
def test_the_torchrun_script_runs_a_job(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path / "inputs")
    flags = tiny_flags(inputs, tmp_path / "run", rollout_backend="hf", critic="none", advantage_estimator="grpo", train_iters=1)
    done = run_script("train_torchrun.sh", flags, NPROC_PER_NODE="2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 1
