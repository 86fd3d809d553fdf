"""Benchmarks run, find the same results on all sides, and count what they move and hold. Nothing here looks at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUCKET_BYTES = 1 << 18


def run_script(name: str, *arguments: str) -> str:
    """Output of a file of benchmarks/, which must succeed."""
    command = [sys.executable, f"benchmarks/{name}", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280)
    assert result.returncode == 0, result.stdout
    return result.stdout


def run_refit(folder: Path, *arguments: str) -> dict[str, Any]:
    """What the benchmark wrote, for a model of a few MB in buckets that cut its tensors."""
    sizes = ["--model-bytes", "3000000", "--bucket-bytes", str(BUCKET_BYTES), "--repeats", "1"]
    run_script("refit.py", *sizes, "--json", str(folder / "refit.json"), "--png", str(folder / "refit.png"), *arguments)
    found = json.loads((folder / "refit.json").read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def test_refit_benchmark_moves_each_shard_once_and_writes_its_figures(tmp_path: Path) -> None:
    found = run_refit(tmp_path, "--case", "2+2: TP2 -> TP2", "--skip", "megatron", "coverage")
    assert set(found["summary"]) == {"received_over_shard", "speedup_over_gather", "fraction_of_limit", "extra_memory_in_buckets"}
    assert found["summary"]["received_over_shard"] == 1.0
    (case,) = found["cases"]
    model, shards, methods = found["model"]["bytes"], case["shard_bytes"], case["methods"]
    assert sum(shards) > model and max(shards) < model  # norms are on both ranks
    assert methods["exact"]["bytes_received"] == methods["limit"]["bytes_received"] == shards
    assert methods["exact"]["bytes_sent"] == methods["limit"]["bytes_sent"]
    assert min(methods["gather"]["bytes_received"][2:]) >= model  # the whole model, and the rows that pad its vocabulary
    assert methods["exact"]["same_bits"] and methods["gather"]["same_bits"]
    assert case["checks"]["memory_within_bound"] and 0 < min(methods["exact"]["extra_memory_bytes"]) <= 2 * BUCKET_BYTES
    assert (tmp_path / "refit.png").stat().st_size > 10_000
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- figures: begin -->\nOLD ONES\n<!-- figures: end -->\nafter\n", encoding="utf-8")
    run_script("refit_output.py", str(tmp_path / "refit.json"), "--into", str(page))
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("after\n") and "OLD ONES" not in text and "| 2+2: TP2 -> TP2 | (a) exact |" in text


@pytest.mark.slow
@pytest.mark.exhaustive
def test_refit_benchmark_covers_experts_megatron_core_and_large_jobs(tmp_path: Path) -> None:
    found = run_refit(tmp_path, "--case", "4+4: TP4", "--family", "mixtral", "--scale")
    assert found["summary"]["received_over_shard"] == 1.0
    assert len(found["coverage"]) == 6 * 4 and {row["family"] for row in found["coverage"]} == {"mixtral"}
    assert all(row["received_bytes"] == row["shard_bytes"] for row in found["coverage"])
    (case,) = found["cases"]
    megatron, exact = case["methods"]["megatron"], case["methods"]["exact"]
    assert megatron["same_bits"]
    assert sum(megatron["bytes_sent"]) > 1.9 * sum(exact["bytes_sent"])  # once for each of the two replicas
    assert max(megatron["extra_memory_bytes"]) > 2 * max(case["shard_bytes"])  # everything at once, twice
    assert [row["case"].split(",")[0] for row in found["scale"]] == ["Llama-2 7B", "Llama-3 70B", "Llama-3.1 405B"]
    assert all(row["exact_received_bytes"] < row["full_received_bytes"] for row in found["scale"])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=pytest.mark.exhaustive)])
def test_backends_benchmark_compares_equal_jobs_and_counts_their_memory(tmp_path: Path, engine: str) -> None:
    """Megatron on four colocated ranks and FSDP on 2 + 2, as small as can be. The program itself compares samples and first steps.

    What it counts of a vLLM engine: ``test_vllm_backend.py``.
    """
    sizes = ["--hidden", "128", "--layers", "2", "--vocab", "256", "--iterations", "2", "--samples", "2", "--response-length", "4"]
    chosen = ["--rounds", "1", "--case", "TP2 DP2", "--case", "FSDP 2, 2 + 2", "--rollout-backend", engine]
    run_script("backends.py", *sizes, *chosen, "--json", str(tmp_path / "backends.json"), "--png", str(tmp_path / "backends.png"))
    found = json.loads((tmp_path / "backends.json").read_text(encoding="utf-8"))
    assert found["faults"] == [] and (tmp_path / "backends.png").stat().st_size > 10_000
    megatron, fsdp = found["cases"]
    assert [(rank["trains"], rank["samples"]) for rank in megatron["ranks"]] == [(True, True)] * 4
    assert [(rank["trains"], rank["samples"]) for rank in fsdp["ranks"]] == [(True, False)] * 2 + [(False, True)] * 2
    whole, head, value_head = 4 * found["parameters"], 4 * 256 * 128, 4 * 128
    trainers = [rank["bytes"] for rank in fsdp["ranks"][:2]]
    assert sum(held["weights"] for held in trainers) == whole + (whole - head + value_head)  # actor and critic
    assert sum(held["frozen"] for held in trainers) == sum(held["gradients"] for held in trainers) == whole  # one network's at a time
    for held in trainers:
        assert held["optimizer"] == 2 * held["weights"] and held["cache"] == held["engine"] == 0 < held["gathered"] < whole
    for rank in fsdp["ranks"][2:] + megatron["ranks"]:
        assert rank["bytes"]["engine"] >= whole and (rank["bytes"]["cache"] > 0) == (engine == "vllm")
    for rank in megatron["ranks"]:
        held = rank["bytes"]
        assert held["gathered"] == 0 and held["gradients"] >= held["weights"] > whole / 2
        assert abs(held["optimizer"] - held["weights"]) < 0.05 * held["weights"]  # two moments, over two data-parallel ranks
        assert rank["peak_resident"] > sum(held.values())
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- figures: begin -->\nOLD ONES\n<!-- figures: end -->\nafter\n", encoding="utf-8")
    run_script("backends_output.py", str(tmp_path / "backends.json"), "--into", str(page))
    text = page.read_text(encoding="utf-8")
    assert "OLD ONES" not in text and "| Megatron TP2 DP2, colocated | do both |" in text and "| FSDP 2, 2 + 2 ranks | sample |" in text
