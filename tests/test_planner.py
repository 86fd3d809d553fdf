"""The planner: counts against arithmetic done by hand and against the real classes, its forms against each other, its refusals.

Everything from config.json. That real ranks hold what is predicted is ``benchmarks/plan_memory.py``'s, of which a part runs here.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib import image

from megatron_ppo.__main__ import main
from megatron_ppo.config import Config
from megatron_ppo.families import canonical_tensors, network_shape
from megatron_ppo.plan_activations import Pass, in_flight, kept_by_layer, layer_terms
from megatron_ppo.plan_memory import engine_memory, optimizer_shards
from megatron_ppo.plan_networks import build_stages
from megatron_ppo.plan_search import layout_stages, nearest_meshes, search_meshes
from megatron_ppo.plan_time import Machine, bubble

ROOT = Path(__file__).resolve().parent.parent
SHAPES = ROOT / "megatron_ppo" / "model_shapes"
GIB = 2**30
PUBLISHED = {
    "llama2_7b": 6.74,
    "llama2_13b": 13.02,
    "llama3.1_8b": 8.03,
    "llama3.1_70b": 70.55,
    "llama3.1_405b": 405.85,
    "qwen2.5_7b": 7.62,
    "qwen2.5_14b": 14.77,
    "qwen2.5_32b": 32.76,
    "qwen2.5_72b": 72.71,
    "qwen3_8b": 8.19,
    "qwen3_30b_a3b": 30.53,
    "qwen3_235b_a22b": 235.09,
    "mixtral_8x7b": 46.70,
}
"""Billions of parameters that the models' pages state."""


def job(model: str, **fields: object) -> Config:
    """A bf16 job of a listed model."""
    start: dict[str, object] = {
        "model_path": str(SHAPES / model),
        "params_dtype": "bfloat16",
        "rollout_dtype": "bfloat16",
        "prompts_per_iteration": 128,
        "global_batch_size": 256,
    }
    return Config().replace(**(start | fields))


def flags(config_fields: dict[str, object]) -> list[str]:
    """The same on a command line."""
    words = []
    for name, value in config_fields.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{flag}")
        elif isinstance(value, dict):
            words += [f"--{flag}", *(str(part) for pair in value.items() for part in pair)]
        else:
            words += [f"--{flag}", str(value)]
    return words


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_shapes_of_the_listed_models_have_the_published_sizes(name: str) -> None:
    total = sum(math.prod(tensor.shape) for tensor in canonical_tensors(network_shape(SHAPES / name)))
    assert round(total / 1e9, 2) == PUBLISHED[name]


def test_formulas_give_numbers_worked_out_by_hand() -> None:
    llama = job("llama3.1_8b", tensor_model_parallel_size=4, sequence_parallel=True, recompute_granularity="full")
    one = Pass(network_shape(SHAPES / "llama3.1_8b"), llama, "transformer_engine", num_rows=2, length=1024)
    assert kept_by_layer(one) == 2 * 1024 * 4096 * 2 / 4  # what a layer was given, a quarter of the sequence, bf16
    assert layer_terms(one)["mlp"] == 5 * 2048 * 14336 / 4 * 2
    cache = engine_memory(llama, shard_elements=0, gpu_memory=80 * GIB).cache_bytes_per_token
    assert cache == 2 * 32 * 8 * 128 * 2  # keys and values, layers, heads, head size, bf16
    # 1F1B on 4 stages: the first holds 4 micro-batches, the last 1; fewer where there are fewer.
    pipeline = job("llama3.1_8b", pipeline_model_parallel_size=4)
    assert [in_flight(pipeline, stage, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight(pipeline, stage, 2) for stage in range(4)] == [2, 2, 2, 1]
    assert bubble(pipeline, 12) == 3 / 12
    # arXiv:2104.04473, figure 4: 4 devices, 2 chunks: the first runs 11 forward chunks before its first backward one.
    chunks = pipeline.replace(virtual_pipeline_model_parallel_size=2)
    assert [in_flight(chunks, stage, 8) for stage in range(4)] == [11, 9, 7, 5]
    mixture = job(
        "qwen3_30b_a3b", tensor_model_parallel_size=4, expert_model_parallel_size=8,
        transformer_overrides={"expert_tensor_parallel_size": "1"},
    )  # fmt: skip
    assert optimizer_shards(mixture, 32) == (8, 4)


@pytest.mark.slow
def test_layouts_and_the_real_classes_count_the_same_parameters() -> None:
    """The search counts from layouts, the plan builds. Uneven stages, virtual ones, padding, tied and replicated heads, experts, FSDP."""
    uneven = {"account_for_embedding_in_pipeline_split": "true", "account_for_loss_in_pipeline_split": "true"}
    split = {"tensor_model_parallel_size": 4, "sequence_parallel": True}
    cases = [
        (job("llama3.1_405b", **split, pipeline_model_parallel_size=16, transformer_overrides=uneven, kl_coef=0.1), 128),
        (job("qwen2.5_7b", tensor_model_parallel_size=2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2), 4),
        (job("qwen3_8b", critic="shared"), 2),
        (job("qwen3_30b_a3b", tensor_model_parallel_size=8, sequence_parallel=True, expert_model_parallel_size=4,
             transformer_overrides={"expert_tensor_parallel_size": "2"}), 16),
        (job("mixtral_8x7b", backend="fsdp", kl_coef=0.1), 6),
        (job("llama2_7b", backend="fsdp", fsdp_shard_size=4), 8),
    ]  # fmt: skip
    built = build_stages([config for config, _ in cases], [size for _, size in cases])
    for (config, size), stages in zip(cases, built, strict=True):
        counted = layout_stages(config, size)
        assert [(one.stages, one.num_layers, one.rank) for one in stages] == [(one.stages, one.num_layers, one.rank) for one in counted]
        for real, plain in zip(stages, counted, strict=True):
            for role, held in real.networks.items():
                other = plain.networks[role]
                what = (config.model.model_path, real.stages, role)
                assert (held.num_dense, held.num_expert) == (other.num_dense, other.num_expert), what
                assert (held.largest_unit, held.root_unit) == (other.largest_unit, other.root_unit), what
    first, middle, last = built[0]
    assert (first.num_layers, middle.num_layers, last.num_layers) == ((7,), (8,), (7,)) and middle.stages == tuple(range(1, 15))
    assert sum(one.networks["actor"].total * len(one.stages) for one in built[0]) * 4 == pytest.approx(405.853e9, rel=1e-3)


@pytest.mark.slow
def test_405b_is_planned_and_its_three_forms_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields: dict[str, object] = {
        "tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 14, "sequence_parallel": True, "rollout_world_size": 64,
        "rollout_tensor_parallel_size": 16, "kl_coef": 0.05, "recompute_granularity": "full", "micro_batch_size": 1,
        "params_dtype": "bfloat16", "rollout_dtype": "bfloat16", "prompts_per_iteration": 128, "global_batch_size": 256,
    }  # fmt: skip
    outputs = ["--json", str(tmp_path / "p.json"), "--png", str(tmp_path / "p.png")]
    command = ["plan", "--model-path", str(SHAPES / "llama3.1_405b"), "--world-size", str(64 + 8 * 14 * 4), "--ranks-per-node", "16"]
    assert main([*command, *flags(fields), *outputs]) == 0
    shown = capsys.readouterr().out
    plan: dict[str, Any] = json.loads((tmp_path / "p.json").read_text())
    assert plan["fits"] and plan["mesh"] | {"tp": 8, "pp": 14, "dp": 4, "replicas": 4} == plan["mesh"]
    assert [stage["stages"] for stage in plan["stages"]] == [[0], list(range(1, 13)), [13]]
    for stage in plan["stages"]:
        for role, found in stage["resident"].items():
            held = stage["parameters"][role]
            trained = role != "reference"
            assert found["weights"] == 2 * held and found["gradients"] == 4 * held * trained
            assert found["optimizer"] == (12 * held // 4 if trained else 0)  # master and two moments, over 4 data-parallel ranks
        for phase, parts in stage["phases"].items():
            assert parts["total"] == pytest.approx(sum(size for name, size in parts.items() if name != "total")), phase
            assert f"{parts['total'] / GIB:.2f}" in shown
    # Each micro-batch in flight keeps what 9 layers were given: the first stage holds 14.
    assert plan["batches"]["in_flight"] == list(range(14, 0, -1)) and plan["batches"]["num_micro_batches"] == 64
    kept = plan["stages"][0]["phases"]["update"]["activations"]
    assert kept == pytest.approx(14 * 9 * 1024 * 16384 * 2 / 8, rel=0.02)
    engine = plan["engine"]
    assert engine["weights"] == pytest.approx(405.853e9 * 2 / 16, rel=0.02)  # 8 key/value heads on 16 ranks
    assert engine["weights"] + engine["working"] + engine["cache"] == pytest.approx(0.85 * 80 * GIB)
    assert plan["seconds"]["bubble"] == pytest.approx(13 / 64)
    assert plan["seconds"]["total"] == pytest.approx(sum(plan["seconds"][name] for name in ("sync", "rollout", "score", "update")))
    assert len(plan["ranks"]) == 64 + 448 and plan["ranks"][447]["place"] == {"tp": 7, "pp": 13, "dp": 3}
    assert "fits:" in shown and "1-12" in shown and "placement" in shown
    picture = image.imread(tmp_path / "p.png")
    assert picture.shape[0] > 300 and picture.std() > 0.05


def test_what_does_not_divide_or_fit_is_said_with_the_nearest_that_does(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(SHAPES / "llama3.1_8b")
    bf16 = ["--params-dtype", "bfloat16", "--rollout-dtype", "bfloat16"]
    batch = ["--prompts-per-iteration", "128", "--global-batch-size", "256"]
    assert main(["plan", "--model-path", path, *bf16, *batch, "--world-size", "16", "--tensor-model-parallel-size", "3"]) == 2
    shown = capsys.readouterr()
    assert "32 attention heads are not a multiple of tensor_model_parallel_size = 3" in shown.err
    assert "nearest meshes of 16 ranks that fit" in shown.out and "--tensor-model-parallel-size" in shown.out
    assert main(["plan", "--model-path", path, "--mfu", "0"]) == 2
    assert "--mfu 0.0 must be a finite number above 0" in capsys.readouterr().err
    assert main(["plan", "--model-path", str(SHAPES / "llama4")]) == 2
    assert "config.json" in capsys.readouterr().err


@pytest.mark.slow
def test_a_job_too_large_says_by_how_much_and_the_proposal_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, target = str(SHAPES / "llama3.1_8b"), tmp_path / "p.json"
    command = ["plan", "--model-path", path, "--params-dtype", "bfloat16", "--rollout-dtype", "bfloat16", "--json", str(target)]
    command += ["--prompts-per-iteration", "128", "--global-batch-size", "256", "--rollout-world-size", "4"]
    assert main([*command, "--world-size", "8"]) == 1
    shown = capsys.readouterr().out
    plan = json.loads(target.read_text())
    update = plan["stages"][0]["phases"]["update"]["total"] / GIB
    assert not plan["fits"] and plan["headroom_bytes"] < 0
    assert f"update on stage 0 needs {update:.1f} GiB of 80: {update - 80:.1f} GiB too much" in shown
    proposal = shown.split("the first: ")[1].splitlines()[0].split()
    again = [*command, *proposal]
    assert main(again) == 0
    assert json.loads(target.read_text())["fits"] and "fits:" in capsys.readouterr().out


@pytest.mark.parametrize("model", ["llama3.1_70b", "qwen3_30b_a3b"])
def test_the_search_lists_meshes_that_divide_and_fit_the_fastest_first(model: str) -> None:
    config = job(model, kl_coef=0.05, max_response_length=2048)
    found = search_meshes(config, 64, Machine())
    times = [one.seconds.total for one in found]
    assert 5 <= len(found) <= 10 and times == sorted(times)
    assert {one.config.is_colocated for one in found} <= {False, True}
    for one in found:
        one.config.validate(64, needs_data=False)
        assert one.headroom >= 0
        repeated = job(model, kl_coef=0.05, max_response_length=2048).replace(**one.fields)
        assert repeated.parallel == one.config.parallel and repeated.training == one.config.training
    assert nearest_meshes(found[0].config, 64, Machine())[0].fields == found[0].fields  # type: ignore[index]
    assert search_meshes(config, 8, Machine(gpu_memory_gib=16, reserve_gib=2)) == []


@pytest.mark.slow
def test_real_ranks_hold_what_is_predicted(tmp_path: Path) -> None:
    """Two cases of the benchmark; it ends with 1 where weights, gradients, optimizer or activations are off by more than 10%."""
    command = [sys.executable, "benchmarks/plan_memory.py", "--case", "bf16, TP2 x PP2, sequence parallel", "FSDP 2, bf16"]
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- measured: begin -->\nold\n<!-- measured: end -->\nafter\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [*command, "--json", str(tmp_path / "m.json"), "--into", str(page)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text and "| FSDP 2, bf16 |" in text
    cases = json.loads((tmp_path / "m.json").read_text())["cases"]
    assert [len(case["ranks"]) for case in cases.values()] == [4, 2]
    for case in cases.values():
        for predicted, measured in case["ranks"]:
            assert all(abs(predicted[kind] - measured[kind]) <= 0.1 * measured[kind] and measured[kind] for kind in predicted)
