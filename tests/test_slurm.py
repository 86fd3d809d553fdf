"""Where the ranks of a Slurm step meet. The environments are as srun 22.05 gave them to its tasks (test_slurm_cluster.py)."""

from __future__ import annotations

import pytest

from megatron_ppo.slurm import hosts, rank0_host, step_port
from megatron_ppo.world import read_launch

STEP = {
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "30123",
    "SLURM_STEP_ID": "0",
    "SLURMD_NODENAME": "gpu08",
    "SLURM_JOB_NODELIST": "gpu[06-08]",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
HETEROGENEOUS = STEP | {
    # Training on gpu08, rollout on gpu07: the union is sorted by name, the ranks are not.
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "gpu08",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "gpu07",
}


@pytest.mark.parametrize(
    ("short", "names"),
    [
        ("node7", ["node7"]),
        ("gpu[08-10,12],login", ["gpu08", "gpu09", "gpu10", "gpu12", "login"]),
        ("127.0.0.[1-2]", ["127.0.0.1", "127.0.0.2"]),
        ("rack[1-2]n[3,5]x,a-1", ["rack1n3x", "rack1n5x", "rack2n3x", "rack2n5x", "a-1"]),
    ],
)
def test_node_lists(short: str, names: list[str]) -> None:
    assert list(hosts(short)) == names


def test_b98_plain_srun_needs_no_address() -> None:
    """B98: the first node of the step (not of the job), and a port that all its ranks know; what is exported stands above both."""
    launch = read_launch(STEP)
    assert (launch.global_rank, launch.world_size, launch.local_rank, launch.node) == (2, 4, 0, "1")
    assert (launch.master_addr, launch.master_port, launch.run_id) == ("gpu07", 20000 + 16 * 30123 % 10000, "30123.0")
    told = read_launch(STEP | {"MASTER_ADDR": "other", "MASTER_PORT": "1234"})
    assert (told.master_addr, told.master_port) == ("other", 1234)


def test_b98_steps_and_jobs_side_by_side_have_ports_of_their_own() -> None:
    """B98: a second run on the same nodes does not meet the first."""
    ports = {step_port({"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}) for job in (70000, 70001, 70002) for step in range(3)}
    assert len(ports) == 9 and all(20000 <= port < 30000 for port in ports)


@pytest.mark.parametrize(
    ("changes", "host"),
    [
        ({}, "gpu08"),
        ({"SLURM_STEP_NODELIST": "gpu07"}, "gpu07"),  # srun --het-group=1
        # srun itself, without sbatch, uses the older names
        ({"SLURM_JOB_NODELIST_HET_GROUP_0": "", "SLURM_JOB_NODELIST_HET_GROUP_1": "", "SLURM_JOB_NODELIST_PACK_GROUP_0": "gpu08"}, "gpu08"),
    ],
)
def test_rank_0_of_a_heterogeneous_step_is_on_its_first_component(changes: dict[str, str], host: str) -> None:
    environ = {name: text for name, text in (HETEROGENEOUS | changes).items() if text}
    assert rank0_host(environ) == host


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({name: text for name, text in STEP.items() if "NODELIST" not in name}, "MASTER_ADDR is not set, nor SLURM_STEP_NODELIST"),
        ({name: text for name, text in STEP.items() if name != "SLURM_JOB_ID"}, "MASTER_PORT is not set, nor SLURM_JOB_ID"),
        (STEP | {"SLURM_PROCID": "0"}, "rank 0 runs on gpu08, but the first node of this step is gpu07: export MASTER_ADDR=gpu08"),
        (STEP | {"MASTER_PORT": "many"}, "MASTER_PORT='many' is not a whole number"),
    ],
)
def test_b98_what_does_not_follow_is_named(environ: dict[str, str], words: str) -> None:
    """B98: a clear message and what to export; tasks that were placed by hand (srun --distribution=arbitrary) are noticed by rank 0."""
    with pytest.raises(ValueError, match=words):
        read_launch(environ)
