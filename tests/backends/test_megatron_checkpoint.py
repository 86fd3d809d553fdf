"""Checkpoints of the Megatron backend: a resume is exact on the mesh that saved, and carries weights and moments to any other.

Each launch proves many cases. On one mesh everything is compared bit by bit (F: B86). Between meshes the files are: a checkpoint that was
loaded on another mesh and saved again holds the same tensors (F: B89), and the next steps are those of the first mesh, within the
tolerances of ``test_megatron_parity.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_checkpoint_support import (
    Move,
    Resume,
    broken_saves,
    load_converted,
    move,
    refusals,
    resume,
    run_jobs,
    stored_tensors,
    while_training,
)
from megatron_parity_support import adam, difference, fields
from spawn import run_ranks
from toy_models import make_toy

from megatron_ppo.conversion import main as convert
from megatron_ppo.unsafe_pickle import check_torch_dist_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # all launches count as the time of the test that asks first
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # tests read files in one process
]

Results = list[dict[str, Any]]
TP2, PP2, EP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}, {"expert_model_parallel_size": 2}
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
PLAIN = {"use_distributed_optimizer": False}
BF16 = {"params_dtype": "bfloat16"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two layers, but four where stages hold several, or are cut in chunks."""
    root = tmp_path_factory.mktemp("models")
    return {
        "llama": str(make_toy(root / "llama", num_layers=2)),
        "deep": str(make_toy(root / "deep", num_layers=4)),
        "wide": str(make_toy(root / "wide", num_layers=2, ffn=64, vocab_size=131)),
        "tied": str(make_toy(root / "tied", "qwen2", tied=True, num_layers=2)),
        "mixtral": str(make_toy(root / "mixtral", "mixtral", num_layers=2)),
        "score": str(make_toy(root / "score", num_layers=2, score_head=True, seed=3)),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the checkpoints of this file lie, by the name of the case."""
    return tmp_path_factory.mktemp("checkpoints")


def meshes(models: Mapping[str, str]) -> dict[str, tuple[int, dict[str, object]]]:
    """Case -> ranks and fields; all save after two steps."""
    separate = {"critic": "separate", "critic_path": models["score"]}
    return {
        "tp1": (1, adam(models, **separate)),
        "tp1 bf16": (1, adam(models, **BF16, **PLAIN)),
        "tp2": (2, adam(models, critic="shared", **TP2)),
        "pp2": (2, adam(models, critic="shared", **PP2)),
        "tied pp2 bf16": (2, adam(models, model="tied", critic="separate", **PP2, **BF16)),
        "dp2": (2, adam(models, **separate)),
        "dp2 bf16": (2, adam(models, transformer_overrides={"overlap_grad_reduce": "true"}, **BF16)),
        "dp2 plain bf16": (2, adam(models, **BF16, **PLAIN)),
        "vpp2": (2, adam(models, model="deep", critic="shared", **VPP2)),
        "tp2 sgd": (2, fields(models, critic="shared", **TP2)),
        "ep2": (2, adam(models, model="mixtral", **EP2)),
        "ep2 plain bf16": (2, adam(models, model="mixtral", **EP2, **PLAIN, **BF16)),
        "tp2 pp2": (4, adam(models, model="deep", critic="shared", **TP2, **PP2)),
        "dp2 tp2 bf16": (4, adam(models, **TP2, sequence_parallel=True, **BF16)),
        "ep2 tp2": (4, adam(models, model="mixtral", sequence_parallel=True, **EP2, **TP2)),
    }


MOVES: dict[str, list[tuple[str, int, dict[str, object]]]] = {
    "tp1": [("dp2", 2, {}), ("tp2", 2, {**TP2, **PLAIN})],
    "tp1 bf16": [("dp2 sharded", 2, {"use_distributed_optimizer": True})],
    "tp2": [("pp2", 2, {**PP2, "tensor_model_parallel_size": 1}), ("dp2", 2, {"tensor_model_parallel_size": 1})],
    "pp2": [("tp2", 2, {**TP2, "pipeline_model_parallel_size": 1})],
    "tied pp2 bf16": [("one", 1, {"pipeline_model_parallel_size": 1}), ("tp2", 2, {**TP2, "pipeline_model_parallel_size": 1})],
    "dp2": [("tp2", 2, TP2), ("plain", 2, PLAIN), ("one", 1, {})],
    "dp2 bf16": [("pp2", 2, PP2)],
    "vpp2": [("pp2", 2, {"virtual_pipeline_model_parallel_size": None})],
    "tp2 sgd": [("pp2", 2, {**PP2, "tensor_model_parallel_size": 1})],
    "ep2": [("one", 1, {"expert_model_parallel_size": 1}), ("dp2 plain", 2, {"expert_model_parallel_size": 1, **PLAIN})],
    "tp2 pp2": [("one", 1, {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}), ("vpp2 dp2", 4, {**VPP2, **PLAIN})],
    "dp2 tp2 bf16": [("dp2 pp2", 4, {**PP2, "tensor_model_parallel_size": 1, "sequence_parallel": False})],
    "ep2 tp2": [("one", 1, {"expert_model_parallel_size": 1, "tensor_model_parallel_size": 1, "sequence_parallel": False})],
}
"""Case that saved -> (name, ranks, what changes) of the meshes that load it."""


@pytest.fixture(scope="module")
def launches(models: dict[str, str], folder: Path) -> dict[str, Results]:
    """Job -> what each of its ranks saw. Four launches: saves on 1, 2 and 4 ranks, each with the loads that can follow, and 1 again."""
    found: dict[str, Results] = {}
    for number, size in enumerate((1, 2, 4, 1)):
        jobs: dict[str, Any] = {}
        if number < 3:
            jobs |= _resumes(models, folder, size)
        if number > 0:
            jobs |= _moves(models, folder, size)
        if number == 1:
            jobs |= _converted(models, folder)
            jobs["refusals"] = partial(refusals, models, folder)
            jobs["while training"] = partial(while_training, adam(models, critic="separate", **BF16), folder / "background")
            jobs["broken"] = partial(broken_saves, adam(models, **TP2), folder / "broken")
        if number == 3:
            jobs["megatron reads"] = partial(read_with_megatron, str(folder / "ep2 tp2" / "megatron"))
        ranks = run_ranks(run_jobs, size, jobs, timeout_s=280)
        found |= {name: [rank[name] for rank in ranks] for name in jobs}
    return found


def _resumes(models: dict[str, str], folder: Path, size: int) -> dict[str, Any]:
    cases = {name: changed for name, (num_ranks, changed) in meshes(models).items() if num_ranks == size}
    jobs = {name: partial(resume, Resume(changed, str(folder / name))) for name, changed in cases.items()}
    if size == 2:
        start = adam(models, critic="shared", lr_warmup_steps=4)
        jobs["before the first step"] = partial(resume, Resume(start, str(folder / "first"), num_steps=0))
        jobs["after a skipped step"] = partial(resume, Resume({**start, **TP2}, str(folder / "skipped"), num_steps=1, skipped=True))
    return jobs


CONVERTED: dict[str, tuple[str, dict[str, object]]] = {
    "converted > tp2": ("llama", TP2),
    "converted > vpp2": ("deep", VPP2),
    "converted tied > pp2": ("tied", PP2),
    "converted mixture > ep2": ("mixtral", EP2),
}
"""Job -> model that ``convert`` makes a checkpoint of, and the mesh that loads it."""


def _converted(models: dict[str, str], folder: Path) -> dict[str, Any]:
    jobs = {}
    for name, (model, changes) in CONVERTED.items():
        target = folder / f"converted {model}"
        if not target.exists():
            assert convert(["--source", models[model], "--target", str(target)]) == 0
        jobs[name] = partial(load_converted, adam(models, model=model, **changes), target)
    return jobs


def _moves(models: dict[str, str], folder: Path, size: int) -> dict[str, Any]:
    jobs = {}
    for case, targets in MOVES.items():
        for name, num_ranks, changes in targets:
            to = f"{case} > {name}"
            if num_ranks == size:
                changed = meshes(models)[case][1] | changes
                jobs[to] = partial(move, Move(changed, str(folder / case), str(folder / to), same_mesh=name == "plain"))
    return jobs


@pytest.fixture(scope="module")
def seen(launches: dict[str, Results]) -> dict[str, Any]:
    """Job -> what rank 0 saw: it has the whole weights."""
    return {name: ranks[0] for name, ranks in launches.items()}


def test_b86_a_resume_on_the_same_mesh_is_exact(models: dict[str, str], seen: dict[str, Any]) -> None:
    """Weights, masters, moments, counts, rates, random numbers, on every rank; asserted there (``resume``)."""
    for name in (*meshes(models), "before the first step", "after a skipped step"):
        moved_by = difference(seen[name]["saved"]["actor"], seen[name]["end"]["actor"])
        assert moved_by > 1e-4, f"{name}: steps after the checkpoint changed weights by {moved_by} only"


@pytest.mark.parametrize("name", [f"{case} > {name}" for case, targets in MOVES.items() for name, *_ in targets])
def test_b89_another_mesh_gets_the_same_weights_and_moments(folder: Path, seen: dict[str, Any], name: str) -> None:
    case = name.split(" > ", maxsplit=1)[0]
    saved, again = stored_tensors(folder / case), stored_tensors(folder / name)
    assert saved.keys() == again.keys()
    for key, tensor in saved.items():
        assert tensor.dtype == again[key].dtype and torch.equal(tensor, again[key]), key
    adam_keys = [key for key in saved if ".optimizer.exp_avg_sq." in key]
    assert bool(adam_keys) == ("sgd" not in case)
    assert all(saved[key].abs().max() > 0 for key in adam_keys)
    for role, weights in seen[case]["saved"].items():
        assert difference(weights, seen[name]["saved"][role]) == 0.0
        if "bf16" not in case:  # there a last bit of a weight is more than a step
            assert difference(seen[case]["end"][role], seen[name]["end"][role]) < 2e-4


def test_files_hold_no_padding_and_pass_the_scan(folder: Path, seen: dict[str, Any]) -> None:
    for name in ("tp2", "dp2 bf16", "ep2 tp2", "tied pp2 bf16"):
        check_torch_dist_folder(folder / name / "megatron")
        saved = stored_tensors(folder / name)
        assert saved["actor.model.embedding.word_embeddings.weight"].shape == (130, 64)
        assert saved["actor.optimizer.num_steps"].item() == 2
        masters = {key.replace("optimizer.master", "model"): tensor for key, tensor in saved.items() if ".optimizer.master." in key}
        assert bool(masters) == (name in ("dp2 bf16", "tied pp2 bf16"))
        for key, master in masters.items():
            assert master.dtype == torch.float32 and torch.equal(master.bfloat16(), saved[key])


def test_megatron_core_reads_the_files_by_itself(folder: Path, seen: dict[str, Any]) -> None:
    saved = stored_tensors(folder / "ep2 tp2")
    found = seen["megatron reads"]
    assert found.keys() == saved.keys() and all(torch.equal(found[key], saved[key]) for key in saved)


def read_with_megatron(path: str) -> dict[str, torch.Tensor]:
    from megatron.core import dist_checkpointing

    return dist_checkpointing.load_plain_tensors(path)


REFUSED = {
    "another model": ["(2, 192, 64) there and (2, 128, 64) here", "(130, 64) there and (131, 64) here"],
    "another precision": ["params_dtype", "torch.float32 there and torch.bfloat16 here"],
    "another optimizer": ["also holds actor.optimizer.exp_avg.", "(optimizer, params_dtype)"],
    "no critic here": ["also holds critic.model.", "model.critic"],
    "no critic there": ["lacks critic.model.", "model.critic"],
    "no folder": ["metadata.json is missing"],
    "truncated": ["cannot be read"],
    "no random states": ["rank_00001.safetensors cannot be read"],
    "weights of another model": ["there and", "here"],
    "no role": ["holds no weights of actor"],
    "another model by load_hf": ["vocab_size is 131 there and 130 here", "intermediate_size is 64 there and 96 here"],
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_does_not_fit_is_refused_alike_on_all_ranks_and_changes_nothing(launches: dict[str, Results], case: str) -> None:
    texts = [rank[case] for rank in launches["refusals"]]
    assert texts[0] == texts[1]
    for words in REFUSED[case]:
        assert words in texts[0]


def test_the_notice_about_random_states_names_both_meshes(launches: dict[str, Results]) -> None:
    notices = [rank["notice"] for rank in launches["refusals"]]
    assert "random states are seeded anew: saved with TP1 PP1 VPP1 CP1 EP1 DP1, now TP1 PP1 VPP1 CP1 EP1 DP2" in notices[0]
    assert "random states" not in notices[1]


def test_weights_alone(launches: dict[str, Results]) -> None:
    """Asserted on the ranks: equal weights, masters that round to them, no moments, a fresh head that keeps its values."""
    for rank in launches["refusals"]:
        assert rank["weights"] == "loaded"


@pytest.mark.parametrize("job", list(CONVERTED))
def test_converted_weights_load_on_any_mesh(launches: dict[str, Results], job: str) -> None:
    """Asserted on the ranks: bit by bit what the Hugging Face folder gives."""
    assert len(launches[job]) == 2


def test_a_save_in_the_background_holds_the_moment_it_was_asked_for(folder: Path, launches: dict[str, Results]) -> None:
    """Steps were taken while each write was held up; both folders hold the same tensors, and loading was asserted on the ranks."""
    for rank in launches["while training"]:
        assert rank["steps meanwhile"] >= 2 and not rank["done at once"]
    assert_same_files(folder / "background" / "sync", folder / "background" / "async")


def assert_same_files(one: Path, other: Path) -> None:
    left, right = stored_tensors(one), stored_tensors(other)
    assert left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)
    names = sorted(path.name for path in (one / "ranks").iterdir())
    assert names == ["rank_00000.safetensors", "rank_00001.safetensors"]
    assert all((one / "ranks" / name).read_bytes() == (other / "ranks" / name).read_bytes() for name in names)


def test_a_rank_that_cannot_write_is_named_on_all(launches: dict[str, Results]) -> None:
    """The state is untouched, and the next save works: asserted on the ranks."""
    first, second = launches["broken"]
    assert first["sync"] == second["sync"] and "rank 1: " in first["sync"] and "File too large" in first["sync"]
    assert first["async"] == "" and "File too large" in second["async"]


def test_a_save_starts_no_process(launches: dict[str, Results]) -> None:
    for rank in launches["while training"]:
        assert rank["children"] == 0
