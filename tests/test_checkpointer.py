"""When checkpoints are written, by all training ranks alike; what a run goes on from; steps that are not finite.

Two real ranks on gloo and real folders. The engine is a stand-in that writes one file a rank: it is here to fail in chosen ways.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_folder_support import names_in
from spawn import free_port, run_ranks

from megatron_ppo.backends.base import StepResult
from megatron_ppo.backends.staged_save import PendingSave
from megatron_ppo.checkpoint import CheckpointFolder
from megatron_ppo.checkpoint_manifest import check_checkpoint
from megatron_ppo.checkpointer import Checkpointer
from megatron_ppo.config import Config
from megatron_ppo.config_io import config_text
from megatron_ppo.resume import ResumePoint, find_resume_point
from megatron_ppo.run_folder import LaunchRecord, RunFolder, drop_later_records, replace_folder
from megatron_ppo.training_engine import TrainingEngine
from megatron_ppo.watchdog import InputError
from megatron_ppo.world import World


class Engine:
    """What a checkpointer asks of ``TrainingEngine``. ``fails``: this rank's save raises; ``loses``: its file does not reach the disk."""

    def __init__(self, rank: int) -> None:
        self.rank, self.version = rank, 0
        self.num_optimizer_steps, self.consecutive_skipped = {"actor": 0}, {"actor": 0}
        self.fails = self.loses = False
        self.broken: list[str] = []

    def non_finite(self) -> list[str]:
        return self.broken

    def save_checkpoint(self, path: Path, *, asynchronous: bool = False) -> PendingSave:
        if self.fails:
            raise OSError("no space left on the device")
        if self.loses:
            (path / "megatron").mkdir(exist_ok=True)
            (path / "megatron" / f"rank_{self.rank:05d}").touch()  # the writer makes its files itself, and finds this one
        return PendingSave(path, {f"megatron/rank_{self.rank:05d}": io.BytesIO(b"weights of %d" % self.version)}, asynchronous=asynchronous)


def world_of(rank: int, world_size: int, store: dist.Store, port: int = 0, run_id: str = "first") -> World:
    """A launch that only trains. ``port``: of the store that ``connect`` reaches."""
    ranks = range(world_size), range(world_size, world_size)
    place = World(rank, world_size, rank, "training", rank, world_size, *ranks, 1, store, run_id)
    return dataclasses.replace(place, store_address=("127.0.0.1", port), store_prefix="launch")


def write_on_two_ranks(rank: int, world_size: int, run_dir: str, asynchronous: bool) -> dict[str, Any]:
    """Saves that succeed and saves that fail, on both ranks; what each rank saw."""
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    config = Config().replace(run_dir=run_dir, rollout_world_size=0, async_save=asynchronous)
    engine, root, seen = Engine(rank), Path(run_dir) / "checkpoints", dict[str, Any]()
    keeper = Checkpointer(config, world_of(rank, 2, store, port), engine, newest=None, prompts="p")  # type: ignore[arg-type]

    def save(iteration: int, *, must: bool = False) -> str:
        """One save to its end; what it raised."""
        engine.version = iteration
        try:
            keeper.save(iteration, kl_coef=0.5, wandb_run_id="abc", must=must)
            keeper.conclude(must=must)
        except (RuntimeError, FloatingPointError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            dist.barrier()
            seen[f"names after {iteration}"] = names_in(root)
            dist.barrier()
        return ""

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        play(engine, save, seen)
    seen["said by rank 0"] = [said.getvalue()]
    dist.broadcast_object_list(seen["said by rank 0"], src=0)
    seen["newest"] = keeper.newest
    keeper.close()
    dist.barrier()
    dist.destroy_process_group()
    return seen


def play(engine: Engine, save: Any, seen: dict[str, Any]) -> None:
    """Good and bad saves, one after the other."""
    rank = engine.rank
    seen["good"] = save(1)
    engine.fails = rank == 1
    seen["a rank fails"] = save(2)
    engine.fails, engine.loses = False, rank == 1
    seen["a file is lost"] = save(3)
    seen["the last one fails"] = save(4, must=True)
    engine.loses, engine.broken = False, ["actor.weight of rank 1"]
    seen["not finite"] = save(5)
    engine.broken = []
    seen["good again"] = save(6, must=True)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_save_that_fails_costs_the_checkpoint_not_the_run(tmp_path: Path, asynchronous: bool) -> None:
    """All ranks see the same; nothing of a failed save is left; the last one must succeed; NaN is never saved."""
    first, second = run_ranks(write_on_two_ranks, 2, str(tmp_path), asynchronous, timeout_s=120)
    assert first == second
    assert (first["good"], first["a rank fails"], first["a file is lost"], first["good again"]) == ("", "", "", "")
    assert "the checkpoint of iteration 4 cannot be written" in first["the last one fails"]
    assert first["not finite"].startswith("FloatingPointError") and "actor.weight of rank 1" in first["not finite"]
    for iteration in (1, 2, 3, 4, 5):
        assert first[f"names after {iteration}"] == {"iter_0000001", "latest"}
    assert first["names after 6"] == {"iter_0000001", "iter_0000006", "latest"} and first["newest"] == 6
    (said,) = first["said by rank 0"]
    assert "no space left on the device" in said and said.count("warning: the checkpoint of iteration") == 2
    newest = CheckpointFolder(tmp_path / "checkpoints", None).newest_complete()
    assert newest is not None and newest.name == "iter_0000006"
    check_checkpoint(newest)
    assert (newest / "megatron" / "rank_00001").read_bytes() == b"weights of 6"
    state = json.loads((newest / "state.json").read_text())
    assert state["kl_coef"] == 0.5 and state["wandb_run_id"] == "abc" and state["mesh"]["dp"] == 2


# -- what a run goes on from ------------------------------------------------------------------------------------------


@pytest.fixture
def one_rank() -> Iterator[World]:
    """A launch of one training rank."""
    port = free_port()
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield world_of(0, 1, server, port)
    dist.destroy_process_group()


def make_run(world: World, run_dir: Path, *iterations: int, going_on_after: int | None = None, **fields: object) -> Config:
    """A run folder with whole checkpoints, as a launch writes them."""
    config = Config().replace(run_dir=str(run_dir), rollout_world_size=0, keep_checkpoints=None, **fields)
    folder = RunFolder(config)
    folder.begin(LaunchRecord(world.run_id, config.checkpoint.resume), going_on_after)
    folder.close()
    engine = Engine(0)
    keeper = Checkpointer(config, world, engine, newest=None, prompts="p")  # type: ignore[arg-type]
    for iteration in iterations:
        engine.version = iteration
        keeper.save(iteration, kl_coef=0.5, wandb_run_id=None, must=True)
    keeper.close()
    return config


def found(config: Config, world: World, run_id: str = "second", prompts: str = "p") -> ResumePoint:
    """A new launch's answer: its store is empty."""
    return find_resume_point(config, world_of(0, 1, dist.HashStore(), run_id=run_id), prompts)


@pytest.fixture
def without_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in's checkpoints have no megatron/; the scan of real ones is tested in test_unsafe_pickle.py and in whole jobs."""
    monkeypatch.setattr("megatron_ppo.resume.check_torch_dist_folder", lambda _: None)


@pytest.mark.usefixtures("without_scan")
def test_another_backends_tensors_are_refused_with_the_way_over_an_export(one_rank: World, tmp_path: Path) -> None:
    """Also where the field may change: it says what is meant, and makes nothing readable."""
    config = make_run(one_rank, tmp_path / "run", 2)
    with pytest.raises(InputError, match=r"written with backend megatron and cannot be read with backend fsdp.*--load-hf RUN/hf"):
        found(config.replace(backend="fsdp", allow_changed=["backend"]), one_rank)


@pytest.mark.usefixtures("without_scan")
def test_a_run_goes_on_from_its_newest_whole_checkpoint(one_rank: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """B82: a damaged one is passed over, and said; where none is whole the run does not begin anew in silence."""
    config = make_run(one_rank, tmp_path / "run", 2, 9, 10)
    root = tmp_path / "run" / "checkpoints"
    assert found(config, one_rank).iteration == 10
    assert found(config.replace(resume="never"), one_rank) == ResumePoint()
    with (root / "iter_0000010" / "megatron" / "rank_00000").open("r+b") as file:
        file.write(b"W")
    with caplog.at_level(logging.WARNING):
        point = found(config, one_rank)
    assert point.iteration == 9 and point.is_own and point.state is not None and point.state.kl_coef == 0.5
    assert "iter_0000010" in caplog.text and "rank_00000" in caplog.text
    for name in ("iter_0000002", "iter_0000009"):
        (root / name / "COMPLETE").unlink()
    with pytest.raises(InputError, match=r"(?s)no checkpoint in .* can be used:.*iter_0000010.*iter_0000009.*--resume never"):
        found(config, one_rank)


@pytest.mark.usefixtures("without_scan")
def test_another_runs_checkpoint_is_where_a_new_run_starts(one_rank: World, tmp_path: Path) -> None:
    """By the name of a checkpoint or of its run; a launch that is repeated goes on from its own; a new order is a new order."""
    make_run(one_rank, tmp_path / "old", 3, 4)
    old, older = str(tmp_path / "old"), str(tmp_path / "old" / "checkpoints" / "iter_0000003")
    config = Config().replace(run_dir=str(tmp_path / "new"), rollout_world_size=0, keep_checkpoints=None)
    for name, iteration in ((older, 3), (old, 4)):
        point = found(config.replace(resume=name), one_rank)
        assert (point.iteration, point.is_own) == (iteration, False)
    make_run(one_rank, tmp_path / "new", 5, resume=old)
    assert found(config.replace(resume=old), one_rank).iteration == 5, "the same command again"
    point = found(config.replace(resume=older), one_rank)
    assert (point.iteration, point.is_own) == (3, False)


@pytest.mark.usefixtures("without_scan")
def test_an_order_holds_once_and_a_restart_goes_on(one_rank: World, tmp_path: Path) -> None:
    """``never`` and the name of an older checkpoint of the same run: the launcher's restart of that launch does not lose what it saved."""
    config = make_run(one_rank, tmp_path, 3, 6)
    back = config.replace(resume=str(tmp_path / "checkpoints" / "iter_0000003"))
    point = found(back, one_rank)
    assert (point.iteration, point.is_own) == (3, True)
    never = config.replace(resume="never")
    assert found(never, one_rank) == ResumePoint()
    make_run(one_rank, tmp_path, 1, resume="never")
    assert (tmp_path / "checkpoints.1" / "iter_0000006").is_dir()
    assert found(never, one_rank, run_id="first").iteration == 1, "a restart of the launch that began anew"
    assert found(never, one_rank, run_id="another") == ResumePoint()
    make_run(one_rank, tmp_path, 4, going_on_after=1, resume=str(tmp_path / "checkpoints" / "iter_0000001"))
    again = config.replace(resume=str(tmp_path / "checkpoints" / "iter_0000001"))
    assert found(again, one_rank, run_id="first").iteration == 4
    assert found(again, one_rank, run_id="another").iteration == 1


@pytest.mark.usefixtures("without_scan")
def test_other_prompts_are_refused_and_a_new_kl_coef_is_taken(one_rank: World, tmp_path: Path) -> None:
    """B84: a file that has grown would be drawn from in another order. The controller's value stands unless another one is ordered."""
    config = make_run(one_rank, tmp_path, 3, kl_coef=0.1)
    with pytest.raises(InputError, match=r"prompts are not those .*--allow-changed prompt_data"):
        found(config, one_rank, prompts="others")
    assert found(config.replace(allow_changed=["prompt_data"]), one_rank, prompts="others").iteration == 3
    for changed, expected in ((config, 0.5), (config.replace(kl_coef=0.2, allow_changed=["kl_coef"]), 0.2)):
        point = found(changed, one_rank)
        assert point.state is not None and point.state.kl_coef == expected


@pytest.mark.usefixtures("without_scan")
def test_a_changed_meaning_is_refused_unless_it_is_named(one_rank: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both values in two columns; what changes no number passes, and so does a longer run."""
    config = make_run(one_rank, tmp_path, 3)
    changed = config.replace(gamma=0.5, micro_batch_size=2, train_iters=200)
    with pytest.raises(InputError, match=r"(?s)gamma +1\.0 +0\.5\n.*--allow-changed gamma"):
        found(changed, one_rank)
    assert found(changed.replace(allow_changed=["gamma"]), one_rank).iteration == 3
    assert found(config.replace(train_iters=3), one_rank).iteration == 3
    assert "nothing is left to do" in capsys.readouterr().out
    with pytest.raises(InputError, match="has finished 3 iterations, but train_iters = 2"):
        found(config.replace(train_iters=2), one_rank)


@pytest.mark.usefixtures("without_scan")
def test_weights_alone_begin_a_run_at_its_first_iteration(one_rank: World, tmp_path: Path) -> None:
    """What ``convert`` makes has no state."""
    make_run(one_rank, tmp_path / "old", 3)
    folder = tmp_path / "old" / "checkpoints" / "iter_0000003"
    manifest = json.loads((folder / "COMPLETE").read_text())
    del manifest["files"]["state.json"]
    (folder / "state.json").unlink()
    (folder / "COMPLETE").write_text(json.dumps(manifest))
    point = found(Config().replace(run_dir=str(tmp_path / "new"), rollout_world_size=0, resume=str(folder)), one_rank)
    assert (point.folder, point.state, point.iteration) == (folder, None, 0)


def test_a_checkpoint_with_a_pickle_that_does_something_is_refused(one_rank: World, tmp_path: Path) -> None:
    """B108: its digests are right, so that only the scan can tell; the marker is not touched."""
    import pickle

    from megatron_ppo.checkpoint_manifest import write_manifest

    marker = tmp_path / "marker"

    class Attack:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.system, (f"touch {marker}",)

    folder = tmp_path / "given"
    (folder / "megatron").mkdir(parents=True)
    (folder / "megatron" / ".metadata").write_bytes(pickle.dumps(Attack()))
    (folder / "config.yaml").write_text(config_text(Config()))
    write_manifest(folder, {})
    config = Config().replace(run_dir=str(tmp_path / "new"), rollout_world_size=0, resume=str(folder))
    with pytest.raises(InputError, match=r"(?s)cannot be used:.*\.metadata"):
        found(config, one_rank)
    assert not marker.exists()


def test_records_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    """Also a line that a crash has cut off, or spoilt. A response may hold what other programs take for the end of a line."""
    file = tmp_path / "metrics.jsonl"
    rows = [json.dumps({"iteration": i, "x": "a\u2028b"}, ensure_ascii=False) + "\n" for i in range(5)]
    file.write_text("".join([rows[0], "\0\0\n", *rows[1:]]) + '{"iteration": 5, "x')
    drop_later_records(file, 3)
    assert [json.loads(line)["iteration"] for line in file.read_text().split("\n")[:-1]] == [0, 1, 2]
    drop_later_records(tmp_path / "absent.jsonl", 3)
    assert (tmp_path / "absent.jsonl").read_text() == ""


def test_an_export_replaces_one_of_the_same_name(tmp_path: Path) -> None:
    """What a launch that was cut off has left does not stop the next one."""
    for content in ("first", "second"):
        (tmp_path / ".hf.tmp").mkdir()
        (tmp_path / ".hf.tmp" / "file").write_text(content)
        replace_folder(tmp_path / ".hf.tmp", tmp_path / "hf")
    assert (tmp_path / "hf" / "file").read_text() == "second" and names_in(tmp_path) == {"hf"}


# -- steps that are not finite ----------------------------------------------------------------------------------------


def test_b91_a_run_ends_after_too_many_skipped_steps_in_a_row() -> None:
    """Counted a role; a good step begins anew; a step without a token says nothing."""

    class Backend:
        def train_step(self, role: str, micro_batches: object, loss_fn: object, *, temperature: float) -> StepResult:
            return results.pop(0)

    config = Config().replace(max_skipped_steps=2)
    engine = TrainingEngine(config, None, None, Backend(), torch.device("cpu"))  # type: ignore[arg-type]
    good, bad, empty = StepResult(grad_norm=1.0), StepResult(grad_norm=float("nan"), skipped=True), StepResult(skipped=True)
    results = [bad, bad, good, bad, empty, bad]
    while results:
        engine._step("actor", [], None)  # type: ignore[arg-type]
    results = [bad]
    engine._step("critic", [], None)  # type: ignore[arg-type]
    assert engine.consecutive_skipped == {"actor": 2, "critic": 1} and engine.num_optimizer_steps == {"actor": 1, "critic": 0}
    results = [StepResult(grad_norm=float("inf"), skipped=True)]
    with pytest.raises(FloatingPointError, match=r"3 optimizer steps of the actor in a row .*max_skipped_steps = 2"):
        engine._step("actor", [], None)  # type: ignore[arg-type]
