"""The fault drill: what its judge lets pass and what not, and a few of its cells on real launches (the benchmark runs all of them)."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.fault_drill import cells_of, summarise, table
from benchmarks.fault_jobs import VARIANTS, VICTIMS, Cell, Drill, Outcome
from benchmarks.fault_judge import Stop, checkpoint_faults, differences, newest_iteration, same, stop_faults
from benchmarks.fault_kill import MOMENTS, PHASES
from megatron_ppo.checkpoint import CheckpointFolder, TrainerState

LOST = "rank 2 (rollout rank 0) lost in phase weight sync v2; this is rank {} in phase weight sync v2; ending\n"
GONE = "rank 1 (training rank 1) failed in phase update of iteration 2: its launcher (process 77) is gone; "

# -- the judge --------------------------------------------------------------------------------------------------------


def good_stop() -> Stop:
    """Rank 2 of 4, started without a launcher, was killed in a sync, and everything is as it should be."""
    output = "".join(LOST.format(rank) for rank in (0, 1, 3))
    return Stop(2, ("weight sync v2",), 4, 2, 1.5, output, exit_codes={0: 1, 1: 1, 2: -9, 3: 1})


def test_a_stop_without_faults_has_none() -> None:
    assert stop_faults(good_stop()) == []
    assert stop_faults(dataclasses.replace(good_stop(), victim_phases=("rollout of iteration 2", "weight sync v2"))) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"seconds": 10.5}, "ended after 10.5 s"),
        ({"seconds": None, "survivors": ["77 python"]}, "killed by the drill: 77 python"),
        ({"exit_codes": {0: 1, 1: 0, 2: -9, 3: 1}}, "rank 1 survived the kill and ended with code 0"),
        ({"exit_codes": {0: 1, 1: -9, 2: -9, 3: 1}}, "rank 1 survived the kill and ended with code -9"),
        ({"exit_codes": {0: 1, 1: 1, 2: 1, 3: 1}}, "rank 2 was to be killed, but ended with code 1"),
        ({"exit_codes": {-1: 0}}, "torchrun survived the kill and ended with code 0"),
        ({"output": LOST.format(0) + LOST.format(3)}, r"ranks \[1\] did not say that rank 2 .* was lost in phase weight sync v2"),
        ({"victim_phases": ("rollout of iteration 2",)}, r"ranks \[0, 1, 3\] did not say .* in phase rollout of iteration 2"),
        ({"victim": 3, "exit_codes": {}}, r"ranks \[0, 1, 2\] did not say that rank 3"),
        ({"output": good_stop().output + "PID 5 forcefully exiting via Signals.SIGKILL"}, "torchrun had to end a survivor"),
        ({"checkpoint_faults": ["iter_0000002 has a final name"]}, "iter_0000002 has a final name"),
    ],
)
def test_every_fault_of_a_stop_is_found(change: dict[str, object], fault: str) -> None:
    (found,) = stop_faults(dataclasses.replace(good_stop(), **change))  # type: ignore[arg-type]
    assert re.search(fault, found), found


def test_the_launchers_end_is_told_by_every_rank() -> None:
    """Each rank gives the first verdict and where it was itself; the one whose verdict it is has said so already."""
    lines = [GONE + "ending\n"] + [GONE + f"this is rank {rank} in phase rollout of iteration 2; ending\n" for rank in (0, 2, 3)]
    stop = Stop(None, (), 4, 2, 1.5, "".join(lines), exit_codes={-1: -9})
    assert stop_faults(stop) == []
    assert stop_faults(dataclasses.replace(stop, output="".join(lines[1:]))) == ["ranks [1] did not say the lost launcher"]
    assert stop_faults(dataclasses.replace(stop, output="".join(lines[:3]))) == ["ranks [3] did not say the lost launcher"]


def write_run(run_dir: Path, tensors: dict[str, Tensor], *, iteration: int = 3, reward: float = 0.5, seconds: float = 1.0) -> Path:
    """A run folder with one checkpoint and one record; returns the checkpoint."""
    folder = CheckpointFolder(run_dir / "checkpoints", None)
    path = folder.begin(iteration)
    (path / "ranks").mkdir()
    dcp.save(dict(tensors), checkpoint_id=path / "megatron", no_dist=True)
    torch.save({"step": 6}, path / "megatron" / "common.pt")
    save_file({"cpu": torch.arange(8, dtype=torch.uint8)}, path / "ranks" / "rank_00000.safetensors")
    skipped = {"actor": 0, "critic": 0}
    state = TrainerState(iteration, iteration, 0.05, {"actor": 6}, skipped, wandb_run_id=str(run_dir), prompts="", mesh={"tp": 2})
    finished = folder.finish(iteration, state, f"run_dir: {run_dir}\n")
    record = {"iteration": 0, "reward/mean": reward, "time/sync_s": seconds, "tokens_per_s": 7 * seconds}
    (run_dir / "metrics.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    (run_dir / "samples.jsonl").write_text('{"iteration": 0, "response": "1 2"}\n', encoding="utf-8")
    return finished


def weights() -> dict[str, Tensor]:
    """One weight, one moment, and a NaN, which equals itself here."""
    weight = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    weight[0, 0] = math.nan
    return {"actor.model.weight": weight, "actor.optimizer.exp_avg": torch.ones(5)}


def test_jobs_with_the_same_end_do_not_differ(tmp_path: Path) -> None:
    """Times, the run folder's own name and the dashboard's id do not count."""
    write_run(tmp_path / "one", weights())
    write_run(tmp_path / "two", weights(), seconds=9.0)
    assert differences(tmp_path / "one", tmp_path / "two", 3) == []


@pytest.mark.parametrize(
    ("tensors", "record", "line"),
    [
        ({"actor.optimizer.exp_avg": torch.tensor([1, 1, 1, 1, 1 + 2**-23])}, {}, "actor.optimizer.exp_avg differs by up to 1.19e-07"),
        ({"actor.optimizer.exp_avg": torch.ones(5).double()}, {}, "actor.optimizer.exp_avg differs by up to 0"),
        ({"critic.model.weight": torch.ones(2)}, {}, "critic.model.weight should not be there"),
        ({}, {"reward": 0.25}, "metrics.jsonl record 0 differs in reward/mean"),
    ],
)
def test_a_job_that_ends_otherwise_is_reported_bad(
    tmp_path: Path, tensors: dict[str, Tensor], record: dict[str, float], line: str
) -> None:
    """One bit of a moment is enough, and the cell is not good."""
    write_run(tmp_path / "one", weights())
    write_run(tmp_path / "two", weights() | tensors, **record)  # type: ignore[arg-type]
    unlike = differences(tmp_path / "one", tmp_path / "two", 3)
    assert unlike == [line]
    cell = Cell("sync", "rollout 0", "srun")
    good = Outcome(cell, 1.5, "weight sync v2", newest_checkpoint=2, resumed_from=2, equal=True)
    bad = dataclasses.replace(good, equal=not unlike)
    assert good.good and not bad.good
    assert summarise([good, bad]) == {"cells": 2, "good": 1, "slowest_stop_s": 1.5, "limit_s": 10.0}
    assert table([good, bad]).splitlines()[-1].split() == ["sync", "rollout", "0", "1.5", "s", "2/2", "1/2", "-"]


def test_what_is_missing_is_a_difference(tmp_path: Path) -> None:
    write_run(tmp_path / "one", weights())
    write_run(tmp_path / "two", weights())
    (tmp_path / "two" / "samples.jsonl").unlink()
    assert differences(tmp_path / "one", tmp_path / "two", 3) == ["samples.jsonl record 0 is missing"]
    assert "has no checkpoint of iteration 4" in differences(tmp_path / "one", tmp_path / "two", 4)[0]


def test_a_job_that_began_anew_is_not_one_that_resumed() -> None:
    """It would end equal all the same, so that its first iteration is looked at."""
    outcome = Outcome(Cell("sync", "agent", "torchrun"), 1.5, None, newest_checkpoint=2, resumed_from=0, equal=True)
    assert not outcome.resumed and not outcome.good
    assert not dataclasses.replace(outcome, resumed_from=None).good
    assert dataclasses.replace(outcome, resumed_from=2).good
    assert not dataclasses.replace(outcome, resumed_from=2, faults=["rank 1 ..."]).good


def test_half_checkpoints_are_told_from_whole_ones(tmp_path: Path) -> None:
    whole = write_run(tmp_path, weights(), iteration=1)
    root = whole.parent
    assert checkpoint_faults(tmp_path) == [] and newest_iteration(tmp_path) == 1
    half = CheckpointFolder(root, None).begin(2)
    (half / "state.json").write_text("{}", encoding="utf-8")
    assert checkpoint_faults(tmp_path) == [] and newest_iteration(tmp_path) == 1
    half.rename(root / "iter_0000002")
    assert "iter_0000002 has a final name, but" in checkpoint_faults(tmp_path)[0]
    (root / "latest").write_text("iter_0000002\n", encoding="utf-8")
    assert "latest names iter_0000002, which does not load" in checkpoint_faults(tmp_path)[1]
    assert checkpoint_faults(tmp_path / "nothing") == [] and newest_iteration(tmp_path / "nothing") == 0


def test_values_are_compared_bit_by_bit_inside_of_containers() -> None:
    assert same({"a": [1, (torch.zeros(2), math.nan)]}, {"a": [1, (torch.zeros(2), math.nan)]})
    assert not same({"a": [torch.zeros(2)]}, {"a": [-torch.zeros(2)]})
    assert not same({"a": 1}, {"a": 1.0}) and not same([1], [1, 2]) and not same({"a": 1}, {"b": 1})
    assert same(torch.empty(0), torch.empty(0)) and not same(torch.zeros(2, 3), torch.zeros(3, 2))


# -- the cells --------------------------------------------------------------------------------------------------------


def test_the_drill_kills_everything_everywhere() -> None:
    """Each rank and the agent in each phase, as often as asked, without an agent where there is none; a save is a job's first kill."""
    jobs = cells_of(tuple(PHASES), tuple(VICTIMS), ("torchrun", "srun"), 3)
    cells = [cell for job in jobs for cell in job]
    assert len(cells) == len(set(cells)) == 3 * (5 * 5 + 5 * 4)
    assert {(cell.phase, cell.victim) for cell in cells if cell.launcher == "torchrun"} == {(p, v) for p in PHASES for v in VICTIMS}
    assert {cell.variant for cell in cells} == set(VARIANTS)
    assert {(cell.phase, cell.moment) for cell in cells} == {(phase, moment) for phase in PHASES for moment in MOMENTS[phase]}
    for job in jobs:
        assert len({(cell.variant, cell.launcher) for cell in job}) == 1
        assert "save" not in [cell.phase for cell in job[1:]]


@pytest.fixture(scope="module")
def drill(tmp_path_factory: pytest.TempPathFactory) -> Drill:
    """Holds the undisturbed jobs, so that each runs once."""
    return Drill(tmp_path_factory.mktemp("drill"))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "cells",
    [
        [Cell("save", "training 0", "torchrun"), Cell("sync", "rollout 0", "torchrun"), Cell("score", "agent", "torchrun")],
        [Cell("rollout", "training 1", "srun", 1), Cell("update", "rollout 1", "srun", 1)],
    ],
    ids=["torchrun restarts, until its agent is killed", "ranks under srun's variables"],
)
def test_b82_b92_killed_jobs_end_soon_resume_and_end_equal(drill: Drill, cells: list[Cell]) -> None:
    """B82, B92: as ``benchmarks/fault_drill.py`` has it: every phase, every kind of victim, three ways to be started again."""
    for outcome in drill.run(cells):
        assert outcome.good, json.dumps(outcome.as_json(), indent=1).replace("\\n", "\n")
