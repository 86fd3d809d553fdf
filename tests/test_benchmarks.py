"""The refit benchmark runs, delivers every bit, and counts what it moves. Nothing here looks at a time."""

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
    page.write_text("before\n<!-- figures: begin -->\nold\n<!-- figures: end -->\nafter\n", encoding="utf-8")
    run_script("refit_output.py", str(tmp_path / "refit.json"), "--into", str(page))
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text and "| 2+2: TP2 -> TP2 | (a) exact |" in text


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
