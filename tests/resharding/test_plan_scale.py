"""Plans of large models: what they say, and the memory that building them takes, counted in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parent.parent.parent / "benchmarks" / "plan.py"


def figures(case: str, folder: Path) -> list[dict[str, float]]:
    """The benchmark's rows of the cases whose name holds the text."""
    file = folder / "figures.json"
    result = subprocess.run([sys.executable, str(BENCHMARK), "--case", case, "--json", str(file)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows = json.loads(file.read_text(encoding="utf-8"))["cases"]
    assert all(row["case"] in result.stdout for row in rows)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "shards_bytes", "num_groups"),
    [
        ("405B", [405.853e9 / 8], [2 * 16]),
        # without rollout expert parallel each rank takes a slice of every expert: all 8 shares of each of 8 stages
        pytest.param("235B", [235.094e9 / 8] * 2, [8 * 8, 8 * 2 + 2], marks=pytest.mark.exhaustive),
    ],
)
def test_plans_of_large_models_take_little_memory_and_few_groups(
    case: str, shards_bytes: list[float], num_groups: list[int], tmp_path: Path
) -> None:
    rows = figures(case, tmp_path)
    assert len(rows) == len(num_groups)
    for row, shard, groups in zip(rows, shards_bytes, num_groups, strict=True):
        assert row["peak_mib"] < 2048
        assert case != "405B" or row["build_cpu_s"] < 10  # seconds of processor: the machine's load matters little
        assert row["groups_per_rollout_rank"] <= groups
        assert row["busiest_sender_bytes"] < row["busiest_receiver_bytes"]
        assert row["busiest_receiver_bytes"] == pytest.approx(2 * shard, rel=0.01)  # key/value heads may lie on several ranks
