"""``python -m megatron_ppo plan --refit``: who sends which bytes to whom in one weight sync, as text, picture and JSON.

Needs the model's config.json and the sizes of the meshes; no weights, no GPU, no launch. Counts come from the very plan that the ranks of
a launch would build (``weight_synchronizer.refit_plan``), by ``refit_traffic.py``; ``refit_picture.py`` draws. Example, 8 training ranks
that fill two vLLM replicas of 4::

    python -m megatron_ppo plan --refit --model-path MODEL --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 \\
        --rollout-world-size 8 --rollout-tensor-parallel-size 4 --png refit.png --json refit.json
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_ppo.config import Config
from megatron_ppo.refit_picture import draw_png
from megatron_ppo.refit_traffic import KINDS, RankRow, RefitTraffic, largest_unit, refit_traffic, size_text
from megatron_ppo.weight_synchronizer import refit_plan

_MATRIX_RANKS = 16
"""The text holds a matrix of up to so many senders and receivers."""
_TABLE_ROWS = 40
"""Lines of the table of ranks; the JSON holds every rank."""
_SHOWN_SPANS = 3


def show(config: Config, world_size: int, ranks_per_node: int, *, png: Path | None, json_file: Path | None) -> int:
    """Print the report and write the files that are asked for; 0. ``ValueError`` with the equations that do not hold."""
    if ranks_per_node < 1:
        raise ValueError(f"--ranks-per-node {ranks_per_node} must be at least 1")
    config.validate(world_size, needs_data=False)
    traffic = refit_traffic(refit_plan(config, world_size), config, ranks_per_node=ranks_per_node)
    print(report_text(traffic, config))
    for path, write in ((json_file, _write_json), (png, draw_png)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(traffic, path)
            print(f"wrote {path}")
    return 0


# ---- text


def report_text(traffic: RefitTraffic, config: Config) -> str:
    """The whole report."""
    parts = [_header(traffic, config), _totals(traffic), _kinds(traffic), _rank_table(traffic), _matrix(traffic)]
    return "\n\n".join(parts)


def _header(traffic: RefitTraffic, config: Config) -> str:
    network, num_training, num_rollout = traffic.network, len(traffic.training), len(traffic.rollout)
    experts = f", {network.num_experts} experts a layer" if network.experts else ""
    return "\n".join(
        [
            "traffic of one weight sync, counted from its plan",
            f"model      {config.model.model_path}: {network.family}, {network.num_layers} layers{experts}, "
            f"{traffic.num_parameters / 1e9:.4g} billion parameters",
            f"wire       {config.rollout.rollout_dtype}: {size_text(traffic.model_bytes)} a copy, buckets of "
            f"{size_text(config.parallel.bucket_bytes)}",
            f"training   ranks 0-{num_training - 1} ({num_training}): {traffic.training_mesh}",
            f"rollout    ranks {traffic.rollout[0].rank}-{traffic.rollout[-1].rank} ({num_rollout}): {traffic.rollout_mesh}",
        ]
    )


def _totals(traffic: RefitTraffic) -> str:
    sender, receiver = traffic.busiest_sender, traffic.busiest_receiver
    low, high = (f"{ratio:.3f}" for ratio in traffic.received_over_shard)
    lines = [
        ("sent", f"{size_text(traffic.bytes_sent)} in {traffic.num_groups} groups; a broadcast counts once, however many listen"),
        ("received", f"{size_text(traffic.bytes_received)} by {len(traffic.rollout)} ranks"),
        ("received/shard", f"{low} on every rollout rank" if low == high else f"{low} to {high}"),
        ("busiest sender", f"rank {sender.rank} ({_place([sender])}): {size_text(sender.bytes_sent)}"),
        ("busiest receiver", f"rank {receiver.rank} ({_place([receiver])}): {size_text(receiver.bytes_received)}"),
        ("silent", f"{traffic.num_idle} of {len(traffic.training)} training ranks send nothing"),
        (
            "full broadcast",
            f"would give every rollout rank the whole model, {size_text(traffic.model_bytes)}: "
            f"{traffic.full_broadcast_factor:.2f} times the bytes received",
        ),
    ]
    return _columns(lines, left=2)


def _kinds(traffic: RefitTraffic) -> str:
    names = {"attention": "attention", "mlp": "MLP", "embedding_and_head": "embedding and head", "norms": "norms"}
    if traffic.network.experts:
        names["mlp"] = "experts and router"
    lines: list[tuple[str, ...]] = [("tensors", "one copy", "sent", "received")]
    for kind in KINDS:
        row = traffic.kinds[kind]
        lines.append((names[kind], *map(size_text, (row.model_bytes, row.bytes_sent, row.bytes_received))))
    return _columns(lines, left=1)


def _rank_table(traffic: RefitTraffic) -> str:
    """A line for all ranks of a mesh with equal numbers."""
    alike: dict[tuple[object, ...], list[RankRow]] = {}
    for row in traffic.rows:
        counts = (row.num_groups, row.num_messages, row.num_buckets, row.num_transfers)
        numbers = (row.is_training, row.bytes_sent, row.bytes_received, *counts)
        alike.setdefault(numbers, []).append(row)
    lines: list[tuple[str, ...]] = [("ranks", "place", "sent", "received", "groups", "messages", "buckets", "boxes")]
    for rows in alike.values():
        one = rows[0]
        shown = (one.num_groups, one.num_messages, one.num_buckets, one.num_transfers)
        lines.append((_ranks(rows), _place(rows), size_text(one.bytes_sent), size_text(one.bytes_received), *map(str, shown)))
    left_out = len(lines) - 1 - _TABLE_ROWS
    rest = f"\n... and {left_out} more lines; --json FILE writes every rank" if left_out > 0 else ""
    return _columns(lines[: _TABLE_ROWS + 1], left=2) + rest


def _ranks(rows: Sequence[RankRow]) -> str:
    spans = _spans([row.rank for row in rows])
    more = f", ... {spans[-1]}" if len(spans) > _SHOWN_SPANS + 1 else f", {spans[-1]}" if len(spans) > _SHOWN_SPANS else ""
    count = f" ({len(rows)})" if len(rows) > 1 else ""
    return f"{', '.join(spans[:_SHOWN_SPANS])}{more}{count}"


def _place(rows: Sequence[RankRow]) -> str:
    """``tp 0-3 pp 1 dp 0``: the coordinates that occur on each axis."""
    parts = []
    for axis in rows[0].place:
        spans = _spans(sorted({row.place[axis] for row in rows}))
        if len(spans) > _SHOWN_SPANS:
            spans = [*spans[: _SHOWN_SPANS - 1], f"...{spans[-1]}"]
        parts.append(f"{axis} {','.join(spans)}")
    return " ".join(parts)


def _spans(numbers: Sequence[int]) -> list[str]:
    """Ascending numbers as ``0-3``, ``7``."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return [str(first) if first == last else f"{first}-{last}" for first, last in found]


def _matrix(traffic: RefitTraffic) -> str:
    rows, columns = traffic.matrix.shape
    if max(rows, columns) > _MATRIX_RANKS:
        return f"who sends to whom: a matrix of {rows} x {columns} ranks; --png FILE draws it"
    name, unit = largest_unit(int(traffic.matrix.max()))
    lines: list[tuple[str, ...]] = [("", *(str(row.rank) for row in traffic.rollout))]
    for row, cells in zip(traffic.training, traffic.matrix, strict=True):
        lines.append((str(row.rank), *(_cell(int(cell) / unit) if cell else "." for cell in cells)))
    return f"{name} from training rank (line) to rollout rank (column); every replica's copy counts\n{_columns(lines, left=0)}"


def _cell(number: float) -> str:
    return f"{number:.3f}" if number >= 0.001 else "<0.001"


def _columns(lines: Sequence[Sequence[str]], *, left: int) -> str:
    """Aligned columns: the first ``left`` to the left, numbers to the right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    aligned: Iterable[Iterable[str]] = (
        (text.ljust(width) if column < left else text.rjust(width) for column, (text, width) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )
    return "\n".join("  ".join(line).rstrip() for line in aligned)


# ---- JSON


def report_json(traffic: RefitTraffic) -> dict[str, object]:
    """All numbers of the text, for every rank. ``received_from`` of a rollout rank: training rank -> bytes; all sizes are bytes."""
    low, high = traffic.received_over_shard
    return {
        "model": {
            "family": traffic.network.family,
            "num_layers": traffic.network.num_layers,
            "num_experts": traffic.network.num_experts,
            "num_parameters": traffic.num_parameters,
            "bytes": traffic.model_bytes,
            "bytes_per_element": traffic.bytes_per_element,
        },
        "training": {"num_ranks": len(traffic.training), "mesh": traffic.training_mesh, "num_silent": traffic.num_idle},
        "rollout": {"num_ranks": len(traffic.rollout), "mesh": traffic.rollout_mesh},
        "bytes_sent": traffic.bytes_sent,
        "bytes_received": traffic.bytes_received,
        "shard_bytes": traffic.shard_bytes,
        "received_over_shard": {"min": low, "max": high},
        "full_broadcast_factor": traffic.full_broadcast_factor,
        "num_groups": traffic.num_groups,
        "busiest_sender": traffic.busiest_sender.rank,
        "busiest_receiver": traffic.busiest_receiver.rank,
        "kinds": {kind: asdict(row) for kind, row in traffic.kinds.items()},
        "ranks": [asdict(row) | {"received_from": _received_from(traffic, row)} for row in traffic.rows],
    }


def _received_from(traffic: RefitTraffic, row: RankRow) -> dict[str, int]:
    if row.is_training:
        return {}
    column = traffic.matrix[:, row.rank - traffic.rollout[0].rank]
    return {str(source): int(column[source]) for source in column.nonzero()[0]}


def _write_json(traffic: RefitTraffic, path: Path) -> None:
    path.write_text(json.dumps(report_json(traffic), indent=1) + "\n", encoding="utf-8")
