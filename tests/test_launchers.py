"""The launch scripts: what they hand on, and what becomes of a preempted job.

Stand-ins for srun, scontrol and the interpreter of a torchrun of several nodes show the command lines; one job runs under the real
torchrun. The real Slurm is test_slurm_cluster.py's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from train_support import ROOT, make_inputs, read_lines, tiny_flags, warnings_in

STANDIN = """#!/bin/sh
variables="NNODES=$NNODES RDZV=$RDZV_ENDPOINT/$RDZV_ID CPUS=$SRUN_CPUS_PER_TASK SHARED=$TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
echo "$(basename "$0") $@ $variables" >> "$CALLS"
case "$2" in hostnames) echo node7; echo node8 ;; esac
case "$0" in */srun) [ -z "$PREEMPT" ] || { mkdir -p "$PREEMPT"; touch "$PREEMPT/PREEMPTED"; }; exit "${CODE:-0}" ;; esac
"""


def run_script(name: str, arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """The script with this environment's python."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "TORCHELASTIC"))}
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / name), *arguments],
        env=variables | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def run_in_slurm(folder: Path, arguments: list[str], **environment: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """train_slurm.sh as the script of job 30123 on two nodes, and what it called."""
    for name in ("srun", "scontrol"):
        (folder / name).write_text(STANDIN)
        (folder / name).chmod(0o755)
    calls = folder / "calls"
    calls.touch()
    job = {"CALLS": str(calls), "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "30123"}
    done = run_script("train_slurm.sh", arguments, PATH=f"{folder}:{os.environ['PATH']}", **(job | environment))
    return done, calls.read_text().splitlines()


@pytest.mark.parametrize("preempted", [True, False])
def test_the_slurm_script_starts_one_task_a_rank_and_queues_a_preempted_job_again(tmp_path: Path, preempted: bool) -> None:
    """The run folder is read as the program reads it: here from a YAML file. A PREEMPTED that an earlier start left does not count."""
    (tmp_path / "run.yaml").write_text(f"run_dir: {tmp_path / 'run'}\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "PREEMPTED").touch()
    arguments = ["--config", str(tmp_path / "run.yaml"), "--seed", "3"]
    environment = {"PREEMPT": str(tmp_path / "run") if preempted else "", "CODE": "143", "SLURM_CPUS_PER_TASK": "7"}
    done, said = run_in_slurm(tmp_path, arguments, **environment)
    assert done.returncode == (0 if preempted else 143), done.stderr
    assert f"srun --kill-on-bad-exit=1 --distribution=block {sys.executable} -m megatron_ppo train {' '.join(arguments)} " in said[0]
    assert "CPUS=7" in said[0]
    assert any("scontrol requeue 30123" in line for line in said) == preempted


def test_the_slurm_script_starts_an_agent_a_node(tmp_path: Path) -> None:
    done, said = run_in_slurm(tmp_path, ["--run-dir", str(tmp_path)], LAUNCHER="torchrun", SLURM_RESTART_COUNT="1")
    assert done.returncode == 0, done.stderr
    assert said[1].startswith(f"srun --ntasks=2 --ntasks-per-node=1 bash scripts/train_torchrun.sh --run-dir {tmp_path} ")
    assert f"NNODES=2 RDZV=node7:{20000 + 16 * 30123 % 10000}/30123.1" in said[1]


@pytest.mark.parametrize(
    ("environment", "code", "words"),
    [
        ({"SLURM_HET_SIZE": "2"}, 0, "--het-group=0-1"),
        ({"SLURM_HET_SIZE": "2", "LAUNCHER": "torchrun"}, 2, "use LAUNCHER=srun"),
        ({"LAUNCHER": "mpirun"}, 2, "LAUNCHER=mpirun must be srun or torchrun"),
    ],
)
def test_components_of_a_heterogeneous_job(tmp_path: Path, environment: dict[str, str], code: int, words: str) -> None:
    done, said = run_in_slurm(tmp_path, ["--run-dir", str(tmp_path)], **environment)
    assert done.returncode == code
    assert words in "".join(said) + done.stderr


def test_a_flag_that_does_not_exist_starts_nothing(tmp_path: Path) -> None:
    done, said = run_in_slurm(tmp_path, ["--tensor-model-paralel-size", "2"])
    assert done.returncode != 0 and said == []
    assert "--tensor-model-parallel-size" in done.stderr


def test_torchrun_on_several_nodes(tmp_path: Path) -> None:
    """What torchrun gets: one rendezvous for all nodes, restarts, and time to save after a SIGTERM."""
    (tmp_path / "interpreter").write_text(STANDIN)
    (tmp_path / "interpreter").chmod(0o755)
    environment = {
        "CALLS": str(tmp_path / "calls"),
        "NNODES": "2",
        "RDZV_ENDPOINT": "node7:29500",
        "NPROC_PER_NODE": "8",
        "MAX_RESTARTS": "5",
        "PYTHON": str(tmp_path / "interpreter"),
    }
    done = run_script("train_torchrun.sh", ["--seed", "3"], **environment)
    assert done.returncode == 0, done.stderr
    assert (
        (tmp_path / "calls")
        .read_text()
        .startswith(
            "interpreter -m torch.distributed.run --nnodes 2 "
            "--rdzv-backend c10d --rdzv-endpoint node7:29500 --rdzv-id megatron_ppo --nproc-per-node 8 "
            "--max-restarts 5 --shutdown-timeout 1800 -m megatron_ppo train --seed 3 "
        )
    )
    assert "SHARED=1" in (tmp_path / "calls").read_text()


def test_several_nodes_need_a_common_address() -> None:
    done = run_script("train_torchrun.sh", [], NNODES="2")
    assert done.returncode != 0 and "set RDZV_ENDPOINT to HOST:PORT" in done.stderr


@pytest.mark.slow
def test_the_torchrun_script_runs_grpo_without_a_critic_on_the_hugging_face_backend(tmp_path: Path) -> None:
    """Two ranks, no vLLM, no critic: the other algorithm and the other engine through the same loop."""
    fields = {"rollout_backend": "hf", "critic": "none", "advantage_estimator": "grpo", "verify_weights": True}
    done = run_script("train_torchrun.sh", tiny_flags(make_inputs(tmp_path / "inputs"), tmp_path / "run", **fields), NPROC_PER_NODE="2")
    assert done.returncode == 0, done.stdout + done.stderr
    records = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(records) == 2
    for record in records:
        assert record["refit/received_bytes"] == record["refit/shard_bytes"] > 0
        assert record["logprob_diff/max"] < 1e-4
        assert "loss/value" not in record and "values/mean" not in record
    assert warnings_in(done.stdout + done.stderr) == []
