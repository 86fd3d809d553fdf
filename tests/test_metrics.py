"""Metrics: what is written where, in which order, and what a broken dashboard may not do."""

from __future__ import annotations

import json
import math
import resource
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from toy_batches import make_trajectories

from megatron_ppo.config import Config
from megatron_ppo.config_io import read_yaml
from megatron_ppo.experience import make_experience
from megatron_ppo.learning_curve import draw_png, draw_text, read_metrics, time_split
from megatron_ppo.metrics import MetricsWriter, RecordFile, Stopwatch, summarise
from megatron_ppo.run_folder import LaunchRecord, RunFolder
from megatron_ppo.types import TrajectoryBatch


def _writer(folder: Path, **fields: object) -> MetricsWriter:
    return MetricsWriter(Config().replace(run_dir=str(folder), train_iters=10, **fields))


def test_b105_each_record_has_its_iteration_and_order_is_strict(tmp_path: Path) -> None:
    writer = _writer(tmp_path)
    writer.log(0, {"reward/mean": 0.5})
    writer.log(1, {"reward/mean": 0.6})
    for repeated in (1, 0):
        with pytest.raises(ValueError, match=f"iteration {repeated} come after those of iteration 1"):
            writer.log(repeated, {"reward/mean": 0.7})
    writer.close()
    assert read_metrics(tmp_path) == [{"iteration": 0, "reward/mean": 0.5}, {"iteration": 1, "reward/mean": 0.6}]


def test_b106_json_has_no_nan_or_infinity(tmp_path: Path) -> None:
    writer = _writer(tmp_path)
    writer.log(0, {"a": math.nan, "b": -math.inf, "c": 1.0})
    writer.log_samples([{"reward": math.inf, "nested": [math.nan, {"x": math.nan}], "text": "\u4f60"}])
    writer.close()

    def refuse(literal: str) -> float:
        raise AssertionError(literal)

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=refuse) == {"iteration": 0, "a": None, "b": None, "c": 1.0}
    (line,) = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=refuse) == {"reward": None, "nested": [None, {"x": None}], "text": "\u4f60"}


def test_b106_numbers_are_of_all_ranks_rows_not_means_of_means() -> None:
    """Rewards [1, 1, 1] of one replica and [0] of another: mean .75, max 1, min 0; a name seen by one replica only is its own."""
    import dataclasses

    seen = {"only/one": [4.0], "reward/timeouts": [1.0]}
    first = dataclasses.replace(make_trajectories([1] * 3, [2] * 3), scores=torch.ones(3), metrics=seen)
    second = dataclasses.replace(make_trajectories([1], [2]), scores=torch.zeros(1), metrics={"reward/timeouts": [2.0]})
    batch = TrajectoryBatch.from_bytes(TrajectoryBatch.concatenate([first, second]).to_bytes())
    values = torch.zeros(batch.tokens.shape)
    _, metrics = make_experience(batch, batch.rollout_log_probs, values, None, None, Config().algorithm, 0.0)
    assert (metrics["reward/mean"], metrics["reward/max"], metrics["reward/min"], batch.num_rows) == (0.75, 1.0, 0.0, 4)
    assert summarise(batch.metrics) == {"only/one": 4.0, "reward/timeouts": 3.0}
    assert summarise({"time/rollout_s": [1.0, 3.0], "other": [1.0, 3.0], "none": []}) == {"time/rollout_s": 3.0, "other": 2.0}


def test_b104_wandb_offline_makes_one_run_without_key_or_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    writer = _writer(tmp_path, loggers=["wandb"])
    writer.log(0, {"reward/mean": 0.5})
    writer.close()
    runs = [path for path in (tmp_path / "wandb").iterdir() if path.name.startswith("offline-run")]
    assert len(runs) == 1
    assert len(read_metrics(tmp_path)) == 1


@pytest.mark.parametrize(
    ("fault", "said"),
    [("not installed", "ModuleNotFoundError"), ("no key", "WANDB_MODE=offline"), ("init fails", "no route"), ("log fails", "no route")],
)
def test_b104_where_wandb_fails_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: str, said: str
) -> None:
    class Run:
        id = "abc"

        def define_metric(self, *_: object, **__: object) -> None:
            pass

        def log(self, *_: object, **__: object) -> None:
            raise OSError("no route")

        def finish(self) -> None:
            raise AssertionError("a sink that failed is not used again")

    class Broken:
        Settings = dict
        api = SimpleNamespace(api_key=None)

        @staticmethod
        def setup() -> SimpleNamespace:
            return SimpleNamespace(settings=SimpleNamespace(mode="online" if fault == "no key" else "offline"))

        @staticmethod
        def init(**_: object) -> Run:
            assert fault != "no key", "wandb would ask for it"
            if fault == "init fails":
                raise OSError("no route")
            return Run()

    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", None if fault == "not installed" else Broken)
    writer = _writer(tmp_path, loggers=["wandb"])
    for iteration in range(3):
        writer.log(iteration, {"reward/mean": 0.1 * iteration})
    writer.close()
    assert len(read_metrics(tmp_path)) == 3
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning:")]
    assert len(warnings) == 1
    assert "andb" in warnings[0] and said in warnings[0]


def test_tensorboard_events_are_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    writer = _writer(tmp_path, loggers=["tensorboard"])
    writer.log(0, {"reward/mean": 0.5})
    writer.close()
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


def test_the_console_line_says_progress_time_left_and_where_it_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = _writer(tmp_path, kl_coef=0.1)
    writer.log(3, {"reward/mean": 0.25, "kl/mean": 0.01, "time/iteration_s": 30.0, "time/sync_s": 1.0, "time/update_s": 20.0})
    writer.close()
    line = capsys.readouterr().out
    for part in ("iteration  4/10", "reward 0.250", "kl 0.0100", "sync 1.00", "update 20.00", "3:00 left"):
        assert part in line, line


def test_pictures_of_a_run(tmp_path: Path) -> None:
    records = [{"iteration": i, "reward/mean": i / 9, "time/iteration_s": 2.0, "time/rollout_s": 1.5} for i in range(10)]
    draw_png(records, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "mean reward" in draw_text(records)
    assert "10 iterations in 20.0 s" in time_split(records)
    assert "rollout 15.0 s (75%)" in time_split(records)


def test_stopwatch_books_every_second_once() -> None:
    watch = Stopwatch()
    watch.lap("a")
    watch.lap("b")
    watch.lap("a")
    assert set(watch.seconds) == {"a", "b"}
    assert watch.total == pytest.approx(sum(watch.seconds.values()))


def test_a_second_run_in_the_same_folder_sets_aside_what_the_first_one_left(tmp_path: Path) -> None:
    """All records of a run get one number; a run that fails before it begins changes nothing."""
    config = Config().replace(run_dir=str(tmp_path))
    for run in range(3):
        folder = RunFolder(config.replace(seed=run))
        folder.begin(LaunchRecord("a", "auto"), None)
        writer = _writer(tmp_path)
        writer.log(0, {"run": float(run)})
        writer.close()
        if run != 1:
            (tmp_path / "hf").mkdir()
        folder.close()
    RunFolder(config).close()
    for name, run in (("metrics.1.jsonl", 0), ("metrics.2.jsonl", 1), ("metrics.jsonl", 2)):
        assert json.loads((tmp_path / name).read_text())["run"] == run
        assert read_yaml(tmp_path / name.replace("metrics", "config").replace("jsonl", "yaml")).training.seed == run
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("hf")) == ["hf", "hf.1"]


def test_a_folder_belongs_to_one_live_run(tmp_path: Path) -> None:
    config = Config().replace(run_dir=str(tmp_path / "run"))
    first = RunFolder(config)
    with pytest.raises(ValueError, match="belongs to a run that has not ended"):
        RunFolder(config)
    first.close()
    RunFolder(config).close()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file/run cannot be used"):
        RunFolder(config.replace(run_dir=str(tmp_path / "file" / "run")))


def test_a_full_disk_costs_no_record_and_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Records wait in memory, and follow when there is room; the warning comes once."""
    file = RecordFile(tmp_path / "records.jsonl")
    file.append({"iteration": 0})
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, limit[1]))
        file.append({"iteration": 1})
        file.append({"iteration": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    file.append({"iteration": 3})
    file.close()
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [0, 1, 2, 3]
    assert capsys.readouterr().err.count("warning:") == 1
