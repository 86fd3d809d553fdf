"""Checkpoints of the FSDP backend: exact resume, other meshes, asynchronous saves, and what is refused with nothing changed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from megatron_checkpoint_support import assert_equal, run_jobs, save, take_steps
from megatron_parity_support import adam, fields, nan_loss
from spawn import run_ranks
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from toy_models import make_toy

from megatron_ppo.config import Config
from megatron_ppo.unsafe_pickle import check_torch_dist_folder

pytestmark = pytest.mark.timeout(900)

Fields = Mapping[str, Any]


@contextmanager
def backend_of(fields: Fields) -> Iterator[Any]:
    """A fresh backend with fresh random states."""
    from megatron_ppo.backends.fsdp import FSDPBackend

    torch.manual_seed(11)
    numpy.random.seed(12)
    random.seed(13)
    yield FSDPBackend(Config().replace(**dict(fields)), num_optimizer_steps=8)


def state_of(backend: Any) -> dict[str, Tensor]:
    """Copies of everything on this rank that decides how training goes on."""
    from megatron_ppo.backends.random_states import random_states

    state = {f"random.{name}": tensor for name, tensor in random_states().items()}
    for role, network in backend._trained().items():
        state[f"{role}.num_steps"] = torch.tensor(network.optimizer.num_steps)
        kinds = {"model": network.shards(), **network.optimizer.moments()}
        state |= {f"{role}.{kind}.{name}": tensor.clone() for kind, named in kinds.items() for name, tensor in named.items()}
        for number, kept in enumerate(network.optimizer._optimizer.state.values()):
            if "step" in kept:  # sgd has none
                state[f"{role}.{number}.step"] = kept["step"].clone()
    return state


def go_on(fields: Fields, folder: Path, *, asynchronous: bool = False) -> dict[str, float]:
    """Train, one step of it skipped, save, train on; load in a fresh backend, train on: equal bit by bit."""
    with backend_of(fields) as backend:
        take_steps(backend, 2)
        take_steps(backend, 1, loss=nan_loss)
        pending = save(backend, folder, asynchronous=asynchronous)
        saved = state_of(backend)
        reports = take_steps(backend, 2)  # while a thread may still be writing: what is in the files does not change any more
        random.random(), numpy.random.rand(), torch.rand(())
        expected = state_of(backend)
        pending.wait()
        assert pending.done()
    torch.distributed.barrier()
    with backend_of(fields) as backend:
        backend.load_checkpoint(folder)
        assert_equal(state_of(backend), saved)
        assert take_steps(backend, 2) == reports
        random.random(), numpy.random.rand(), torch.rand(())
        assert_equal(state_of(backend), expected)
    return {"lr": reports[0].lr, "steps": float(saved["actor.num_steps"])}


def move(fields: Fields, source: Path, target: Path) -> float:
    """Load what another mesh saved, save it again, and take a step: its gradient norm."""
    with backend_of(fields) as backend:
        backend.load_checkpoint(source)
        save(backend, target)
        return take_steps(backend, 1)[0].grad_norm


def refusals(base: Fields, folder: Path, other: Fields) -> list[str]:
    """Messages of loads that must fail on all ranks alike, with nothing changed."""
    messages = []
    for settings, path in ((other, folder), ({**base, "optimizer": "sgd"}, folder), (base, folder.parent)):
        with backend_of(settings) as backend:
            before = state_of(backend)
            with pytest.raises(ValueError) as error:
                backend.load_checkpoint(path)
            assert_equal(state_of(backend), before)
        messages.append(str(error.value))
    return messages


def weights_alone(fields: Fields, folder: Path) -> dict[str, Tensor]:
    """The actor after ``load_weights`` in a run that has no critic, gathered by hand from two shards."""
    with backend_of(fields) as backend:
        backend.load_weights(folder)
        assert backend._trained()["actor"].optimizer.num_steps == 0
        return {name: tensor.clone() for name, tensor in backend.weights().items()}


def write_blocked(fields: Fields, folder: Path) -> str:
    """A save where rank 1 finds its file in the way: every rank is told the same."""
    with backend_of(fields) as backend:
        if torch.distributed.get_rank() == 0:
            (folder / "ranks" / "rank_00001.safetensors").mkdir(parents=True)
        torch.distributed.barrier()
        with pytest.raises(OSError, match="could not be written: rank 1") as error:
            backend.save_checkpoint(folder)
        return str(error.value)


def saved_tensors(folder: Path) -> dict[str, Tensor]:
    """Whole tensors of a checkpoint, read by torch alone."""
    reader = FileSystemReader(folder / "fsdp")
    metadata = reader.read_metadata().state_dict_metadata
    tensors = {key: torch.empty(value.size, dtype=value.properties.dtype) for key, value in metadata.items()}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of toy models."""
    root = tmp_path_factory.mktemp("models")
    return {
        "tied": str(make_toy(root / "tied", "llama", tied=True)),
        "mixture": str(make_toy(root / "mixture", "qwen3_moe")),
        "wide": str(make_toy(root / "wide", "llama", ffn=128)),
    }


def base(models: Mapping[str, str], model: str = "tied", **changes: object) -> dict[str, object]:
    """Adam, actor and critic."""
    return adam(models, model=model, **({"critic": "separate", "backend": "fsdp", "lr_warmup_steps": 6} | changes))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all checkpoints."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def two_ranks(models: dict[str, str], root: Path) -> list[dict[str, Any]]:
    """Saves and loads of two ranks, in one launch."""
    copies = base(models, fsdp_shard_size=1)
    jobs = {
        "sharded": partial(go_on, base(models), root / "sharded"),
        "copies, asynchronous": partial(go_on, copies, root / "copies", asynchronous=True),
        "mixture bf16": partial(go_on, base(models, "mixture", critic="shared", params_dtype="bfloat16"), root / "mixture"),
        "sharded -> copies": partial(move, copies, root / "sharded", root / "moved"),
        "refusals": partial(refusals, base(models), root / "sharded", base(models, "wide")),
        "weights": partial(weights_alone, fields(models, "tied", backend="fsdp"), root / "sharded"),
        "blocked": partial(write_blocked, base(models), root / "blocked"),
    }
    return run_ranks(run_jobs, 2, jobs, timeout_s=500)


@pytest.mark.parametrize("case", ["sharded", "copies, asynchronous", "mixture bf16"])
def test_b84_resume_is_exact(two_ranks: list[dict[str, Any]], case: str) -> None:
    """Weights, moments, step counts, schedule and random states; the skipped step does not count."""
    for results in two_ranks:
        assert results[case] == {"lr": pytest.approx(1e-3 * 3 / 6), "steps": 2.0}


def test_b85_another_mesh_holds_the_same_bits(two_ranks: list[dict[str, Any]], root: Path) -> None:
    assert two_ranks[0]["sharded -> copies"] > 0
    one, other = saved_tensors(root / "sharded"), saved_tensors(root / "moved")
    assert_equal(one, other)
    assert one["actor.model.model.embed_tokens.weight"].shape == (130, 64)
    assert {"actor.optimizer.exp_avg_sq.model.norm.weight", "critic.optimizer.num_steps", "critic.model.score.weight"} <= set(one)
    assert not any("lm_head" in key for key in one), "a tied head is one tensor"


def test_files_are_shared_by_the_copies_and_safe_to_open(two_ranks: list[dict[str, Any]], root: Path) -> None:
    """Each row is written once, by ranks in turn; the scan of pickles finds nothing to refuse."""
    for name in ("sharded", "copies", "mixture"):
        check_torch_dist_folder(root / name / "fsdp")
        tensors = saved_tensors(root / name)
        size = sum(tensor.nbytes for tensor in tensors.values())
        files = [file.stat().st_size for file in (root / name / "fsdp").glob("*.distcp")]
        assert len(files) == 2 and sum(files) < 1.1 * size + 2**21 and min(files) > 0.3 * sum(files), (files, size)


def test_what_does_not_fit_is_refused_and_changes_nothing(two_ranks: list[dict[str, Any]]) -> None:
    assert two_ranks[0]["refusals"] == two_ranks[1]["refusals"]
    wide, sgd, nothing = two_ranks[0]["refusals"]
    assert "actor.model.model.layers.0.mlp.down_proj.weight is (64, 96) there and (64, 128) here" in wide
    assert "also holds actor.optimizer.exp_avg." in sgd and "(optimizer, params_dtype)" in sgd
    assert "is missing: this is no checkpoint of backend fsdp" in nothing


def test_weights_alone_leave_the_optimizer_new(two_ranks: list[dict[str, Any]], root: Path) -> None:
    saved = saved_tensors(root / "sharded")
    for name in two_ranks[0]["weights"]:
        assert torch.equal(torch.cat([results["weights"][name] for results in two_ranks]), saved[f"actor.model.{name}"])


def test_a_rank_that_cannot_write_is_told_of_by_all(two_ranks: list[dict[str, Any]]) -> None:
    assert two_ranks[0]["blocked"] == two_ranks[1]["blocked"]


@pytest.mark.slow
def test_b85_two_shards_go_on_as_four_and_as_two_copies_of_two(two_ranks: list[dict[str, Any]], models: dict[str, str], root: Path) -> None:
    """The files of all three meshes hold the same bits, and the next step has the same gradient."""
    jobs = {
        "four": partial(move, base(models), root / "sharded", root / "four"),
        "hybrid": partial(move, base(models, fsdp_shard_size=2), root / "four", root / "hybrid"),
    }
    results = run_ranks(run_jobs, 4, jobs, timeout_s=500)[0]
    expected = saved_tensors(root / "sharded")
    for name in ("four", "hybrid"):
        assert_equal(saved_tensors(root / name), expected)
        assert results[name] == pytest.approx(two_ranks[0]["sharded -> copies"], rel=1e-5)
