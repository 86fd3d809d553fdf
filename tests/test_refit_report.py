"""The traffic report: its sums against arithmetic done by hand, its three forms against each other, its refusals. All from config.json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image

from megatron_ppo.__main__ import main

TINY: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
LLAMA_405B = TINY | {
    "hidden_size": 16384,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "vocab_size": 128256,
}
TINY_MOE = TINY | {
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "vocab_size": 130,
}


def _folder(tmp_path: Path, content: dict[str, object]) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def _report(tmp_path: Path, content: dict[str, object], *flags: str) -> tuple[Any, Path]:
    """The JSON and the path of the picture."""
    json_file, png = tmp_path / "out" / "refit.json", tmp_path / "out" / "refit.png"
    outputs = ("--json", str(json_file), "--png", str(png))
    assert main(["plan", "--refit", "--model-path", str(_folder(tmp_path, content)), *flags, *outputs]) == 0
    return json.loads(json_file.read_text()), png


def _sizes(tp: int, pp: int, rollout: int, rollout_tp: int) -> tuple[str, ...]:
    return (
        *("--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)),
        *("--rollout-world-size", str(rollout), "--rollout-tensor-parallel-size", str(rollout_tp)),
    )


def _rank_lines(text: str) -> dict[int, list[str]]:
    """Rank -> sent, received, groups, messages, buckets, boxes as the table of the text gives them."""
    table = text.split("\nranks ")[1].split("\n\n", 1)[0].splitlines()[1:]
    found = {}
    for line in table:
        ranks, _, *numbers = re.split(r"\s{2,}", line)
        for span in ranks.split(" (")[0].split(", "):
            first, _, last = span.partition("-")
            found.update(dict.fromkeys(range(int(first), int(last or first) + 1), numbers))
    return found


def _text_of(num_bytes: int) -> str:
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"


def test_two_ranks_fill_two_and_each_gets_its_half(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, png = _report(tmp_path, TINY, *_sizes(2, 1, 2, 2), "--bucket-bytes", "65536")
    matrices, norms = 2 * 256 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64), 5 * 64
    half = 4 * (matrices // 2 + norms)
    assert found["model"]["bytes"] == 4 * (matrices + norms)
    assert [(row["rank"], row["bytes_sent"], row["bytes_received"], row["shard_bytes"]) for row in found["ranks"]] == [
        (0, half, 0, 0),
        (1, half, 0, 0),
        (2, 0, half, half),
        (3, 0, half, half),
    ]
    assert [row["received_from"] for row in found["ranks"][2:]] == [{"0": half}, {"1": half}]
    ((groups, messages, buckets),) = {(row["num_groups"], row["num_messages"], row["num_buckets"]) for row in found["ranks"]}
    assert groups == 1 and messages == buckets and half / 65536 <= buckets < 2 * half / 65536, "buckets are not always full"
    assert found["kinds"]["norms"] == {"model_bytes": 4 * norms, "bytes_sent": 8 * norms, "bytes_received": 8 * norms}
    assert found["kinds"]["embedding_and_head"]["bytes_sent"] == 4 * 2 * 256 * 64
    text = capsys.readouterr().out
    assert "received/shard    1.000 on every rollout rank" in text
    shown = f"{half / 2**10:.3f}"
    assert re.search(rf"KiB from training rank .*\n +2 +3\n0 +{shown} +\.\n1 +\. +{shown}\n", text)
    _is_diagonal(png)


def _is_diagonal(png: Path) -> None:
    """Of the cells of the drawn 2 x 2 matrix those on the diagonal are dark, the others light grey."""
    pixels = np.rint(image.imread(png)[..., :3] * 255).astype(int)
    dark, light = ((pixels == np.array(colour)).all(-1) for colour in ((68, 1, 84), (242, 242, 242)))
    lines, columns = (np.flatnonzero(light.sum(dim) > 200) for dim in (1, 0))  # edges of letters are light too
    top, bottom, left, right = lines[0], lines[-1], columns[0], columns[-1]
    y, x = (top + bottom) // 2, (left + right) // 2
    quadrants = [(slice(top, y), slice(left, x)), (slice(top, y), slice(x, right)), (slice(y, bottom), slice(left, x))]
    quadrants.append((slice(y, bottom), slice(x, right)))
    assert [bool(dark[part].mean() > 0.8) for part in quadrants] == [True, False, False, True]
    assert [bool(light[part].mean() > 0.8) for part in quadrants] == [False, True, True, False]


def test_405b_on_1152_ranks_moves_every_byte_of_every_shard_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    splits = ("account_for_embedding_in_pipeline_split", "true", "account_for_loss_in_pipeline_split", "true")
    flags = (*_sizes(8, 16, 128, 8), "--world-size", "1152", "--rollout-dtype", "bfloat16", "--transformer-overrides", *splits)
    found, png = _report(tmp_path, LLAMA_405B, *flags)
    assert found["model"]["num_parameters"] == 405_853_388_800
    norms = 2 * (2 * 126 + 1) * 16384
    shard = (found["model"]["bytes"] - norms) // 8 + norms
    rollout = found["ranks"][1024:]
    assert {row["bytes_received"] for row in rollout} == {row["shard_bytes"] for row in rollout} == {shard}
    assert found["bytes_received"] == 16 * 8 * shard == sum(row["bytes_received"] for row in found["kinds"].values())
    assert found["bytes_sent"] == 8 * shard == sum(row["bytes_sent"] for row in found["ranks"])
    assert max(row["bytes_sent"] for row in found["ranks"]) <= shard
    assert max(row["num_groups"] for row in rollout) <= 2 * 16
    assert [row["node"] for row in (found["ranks"][7], found["ranks"][8], rollout[-1])] == [0, 1, 143]
    assert rollout[9]["place"] == {"replica": 1, "tp": 1} and found["ranks"][1023]["place"] == {"tp": 7, "pp": 15, "dp": 7}
    text = capsys.readouterr().out
    assert "ranks 0-1023 (1024): TP 8 x PP 16 x CP 1 x DP 8" in text and "ranks 1024-1151 (128): 16 replicas x TP 8" in text
    assert re.search(r"full broadcast +would give every rollout rank the whole model, 755.96 GiB: 8.00 times", text)
    assert re.search(rf"silent +{found['training']['num_silent']} of 1024 training ranks", text)
    assert len(text.splitlines()) < 60
    height, width, _ = image.imread(png).shape
    assert min(height, width) > 1000


def test_text_and_json_say_the_same_of_every_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = _report(tmp_path, TINY | {"vocab_size": 1000}, *_sizes(2, 2, 4, 4), "--world-size", "12", "--bucket-bytes", "4096")
    text = capsys.readouterr().out
    lines = _rank_lines(text)
    assert sorted(lines) == list(range(12))
    for row in found["ranks"]:
        counts = [str(row[name]) for name in ("num_groups", "num_messages", "num_buckets", "num_transfers")]
        assert lines[row["rank"]] == [_text_of(row["bytes_sent"]), _text_of(row["bytes_received"]), *counts]
    assert sum(row["bytes_sent"] == 0 for row in found["ranks"][:8]) == found["training"]["num_silent"] == 4
    assert f"busiest sender    rank {found['busiest_sender']} " in text
    for kind, row in zip(("attention", "MLP", "embedding and head", "norms"), found["kinds"].values(), strict=True):
        assert re.search(rf"^{kind} +{' +'.join(map(_text_of, row.values()))}$", text, re.MULTILINE)
    matrix = {(source, row["rank"]): size for row in found["ranks"] for source, size in row["received_from"].items()}
    shown = text.split("(column)")[1].splitlines()[2:10]
    assert sum(cell != "." for line in shown for cell in line.split()[1:]) == len(matrix)


def test_shards_of_experts_and_vocabulary_are_counted_without_padding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four ranks hold 48 rows each of a vocabulary of 130: the last one has padding only."""
    flags = (*_sizes(2, 1, 8, 4), "--expert-model-parallel-size", "4", "--transformer-overrides", "expert_tensor_parallel_size", "1")
    found, _ = _report(tmp_path, TINY_MOE, *flags, "--sequence-parallel", "--vllm-overrides", "enable_expert_parallel", "true")
    assert [len(found["ranks"]), found["training"]["num_ranks"]] == [12, 4]  # the smallest launch: experts need 4 ranks, dense weights 2
    assert found["received_over_shard"] == {"min": 1.0, "max": 1.0}
    one_expert, heads, norms = 3 * 32 * 64, (2 * 64 * 64 + 2 * 64 * 32 * 2) // 4, 2 * (2 * 64 + 2 * 16) + 64  # 2 heads on 4 ranks: whole
    rest = 2 * (one_expert + heads + 4 * 64) + norms
    wanted = [4 * (rest + 2 * rows * 64) for rows in (48, 48, 34, 0)]
    assert [row["bytes_received"] for row in found["ranks"][4:]] == wanted * 2
    assert found["ranks"][3]["place"] == {"tp": 1, "pp": 0, "dp": 1, "ep": 3, "expert_tp": 0}
    text = capsys.readouterr().out
    assert "experts and router" in text and "experts: TP 1 x EP 4 x PP 1 x DP 1" in text and "2 replicas x TP 4, whole experts" in text


def test_a_replica_without_vllm_takes_the_whole_model(tmp_path: Path) -> None:
    found, _ = _report(tmp_path, TINY, *_sizes(2, 1, 2, 1), "--rollout-backend", "hf")
    assert {row["bytes_received"] for row in found["ranks"][2:]} == {found["model"]["bytes"]}
    assert found["full_broadcast_factor"] == 1.0


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ((*_sizes(4, 1, 2, 2), "--world-size", "7"), "TP 4 x PP 1 x CP 1 = 4"),
        (_sizes(1, 1, 3, 2), "rollout_world_size = 3, which is not a multiple of rollout_tensor_parallel_size = 2"),
        (_sizes(3, 1, 1, 1), "4 attention heads are not a multiple of tensor_model_parallel_size = 3"),
        (_sizes(1, 3, 1, 1), "2 layers are not a multiple of pipeline_model_parallel_size"),
        ((*_sizes(1, 1, 1, 1), "--expert-model-parallel-size", "2"), "expert_model_parallel_size = 2, but llama is a dense family"),
        (
            (*_sizes(1, 2, 1, 1), "--transformer-overrides", "num_layers_in_first_pipeline_stage", "2"),
            "2 layers, of which num_layers_in_first_pipeline_stage = 2",
        ),
        (("--bucket-bytes", "3"), "bucket_bytes 3 cannot hold one element"),
        (("--ranks-per-node", "0"), "--ranks-per-node 0 must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_end_with_code_2_and_the_equation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], reason: str
) -> None:
    assert main(["plan", "--refit", "--model-path", str(_folder(tmp_path, TINY)), *flags]) == 2
    shown = capsys.readouterr()
    assert reason in shown.err and shown.out == ""


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--refit", "--model-path", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    folder = _folder(tmp_path, TINY)
    assert main(["plan", "--refit", "--model-path", str(folder), "--json", str(tmp_path / "file" / "x.json")]) == 2
    assert "file" in capsys.readouterr().err
