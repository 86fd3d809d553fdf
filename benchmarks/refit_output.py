"""Shows the figures of ``refit.py``: tables on the terminal, a PNG, and the Markdown of ``docs/refit.md``.

    python benchmarks/refit_output.py FILE.json                          print the Markdown
    python benchmarks/refit_output.py FILE.json --into docs/refit.md     put it between the page's two marks
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

METHODS = {"exact": "(a) exact", "gather": "(b) gather + broadcast", "megatron": "(c) megatron-core", "limit": "(d) limit, packed"}
"""Key in the JSON -> what tables call it."""
_MARKS = ("<!-- figures: begin -->", "<!-- figures: end -->")
Row = Mapping[str, Any]


def case_table(cases: Sequence[Row]) -> list[list[str]]:
    """Header and one row a case and method."""
    rows = [["case", "method", "seconds", "MB received, rollout rank", "MB received, all ranks", "extra memory MB", "same bits"]]
    for case in cases:
        for key, title in METHODS.items():
            method = case["methods"].get(key)
            if method is None:
                continue
            first = case["case"] if key == "exact" else ""
            if "reason" in method:
                rows.append([first, title, f"not run: {method['reason']}", "", "", "", ""])
                continue
            received = method["bytes_received"]
            memory = method.get("extra_memory_bytes")
            rows.append(
                [
                    first,
                    title,
                    f"{method['seconds']:.3f}",
                    f"{max(received[case['num_training'] :]) / 1e6:.1f}",
                    f"{sum(received) / 1e6:.1f}",
                    "" if memory is None else f"{max(memory) / 1e6:.1f}",
                    {True: "yes", None: ""}[method.get("same_bits")],
                ]
            )
    return rows


def ratio_table(cases: Sequence[Row]) -> list[list[str]]:
    """Header and one row a case: how fast, how much, how near the limit."""
    ratios = ["time (b)/(a)", "bytes (b)/(a)", "(d)/(a)", "pack s", "unpack s", "(d + pack + unpack)/(a)"]
    rows = [["case", *ratios, "received/shard", "extra memory/bucket"]]
    for case in cases:
        methods = case["methods"]
        rows.append(
            [
                case["case"],
                f"{case['time_ratio']:.2f}",
                f"{case['bytes_ratio']:.2f}",
                f"{case['fraction_of_limit']:.2f}",
                f"{methods['pack']['seconds']:.3f}",
                f"{methods['unpack']['seconds']:.3f}",
                f"{case['fraction_of_limit_and_copies']:.2f}",
                f"{max(case['received_over_shard']):.3f}",
                f"{case['extra_memory_in_buckets']:.2f}",
            ]
        )
    return rows


def coverage_table(coverage: Sequence[Row]) -> list[list[str]]:
    """Header and one row a family and training mesh; a cell is received bytes / shard bytes, the furthest from 1 of all ranks."""
    rollouts = list(dict.fromkeys(row["rollout"] for row in coverage))
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in coverage:
        worst = max(row["received_over_shard"], key=lambda ratio: abs(ratio - 1))
        cells.setdefault((row["family"], row["training"]), {})[row["rollout"]] = f"{worst:.3f}"
    return [["family", "training", *rollouts], *([*key, *(found.get(name, "-") for name in rollouts)] for key, found in cells.items())]


def scale_table(scale: Sequence[Row]) -> list[list[str]]:
    """Header and one row a model."""
    predicted = ["s, exact", "s, full by stages", "s, full at best"]
    rows = [["job", "GB a rank, exact", "GB a rank, full", *predicted, "groups a rollout rank", "plan s"]]
    for row in scale:
        rows.append(
            [
                row["case"],
                f"{row['exact_received_bytes'] / 1e9:.2f}",
                f"{row['full_received_bytes'] / 1e9:.2f}",
                f"{row['exact_s']:.2f}",
                f"{row['full_by_stages_s']:.2f}",
                f"{row['full_at_best_s']:.2f}",
                str(row["groups_per_rollout_rank"]),
                f"{row['plan_s']:.1f}",
            ]
        )
    return rows


def show(title: str, rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    table = Table(title=title, title_justify="left")
    for number, heading in enumerate(rows[0]):
        table.add_column(heading, justify="left" if number < 2 else "right")
    for row in rows[1:]:
        table.add_row(*row)
    console = Console()
    console.width = max(console.width, 150)  # a log file is no terminal of 80 columns
    console.print(table)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def page(results: Row) -> str:
    """All tables of a result file, for the page."""
    model = results["model"]
    parts = [
        f"Measured on: {results['machine']}; a Llama of {model['num_layers']} layers, hidden {model['hidden_size']}, "
        f"{model['bytes'] / 1e6:.0f} MB in bfloat16; buckets of {results['bucket_bytes'] / 1e6:.1f} MB; median of {results['repeats']}.",
        markdown(case_table(results["cases"])),
        markdown(ratio_table(results["cases"])),
    ]
    if results.get("coverage"):
        parts += ["Received bytes / shard bytes, every family and topology:", markdown(coverage_table(results["coverage"]))]
    if results.get("scale"):
        links = results["links"]
        parts += [
            f"Predicted, with {links['network'] / 1e9:g} GB/s of network and {links['nvlink'] / 1e9:g} GB/s of NVLink a GPU:",
            markdown(scale_table(results["scale"])),
        ]
    return "\n\n".join(parts)


def draw(cases: Sequence[Row], file: Path) -> None:
    """Grouped bars: seconds, and bytes that a rollout rank receives."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 4.5), layout="constrained")
    shown = [key for key in METHODS if any("seconds" in case["methods"].get(key, {}) for case in cases)]
    width = 0.8 / len(shown)
    for axis, what in zip(axes, ("seconds (median)", "MB that a rollout rank receives"), strict=True):
        for number, key in enumerate(shown):
            heights = []
            for case in cases:
                method = case["methods"].get(key, {})
                if "seconds" not in method:
                    heights.append(0.0)
                elif axis is axes[0]:
                    heights.append(method["seconds"])
                else:
                    heights.append(max(method["bytes_received"][case["num_training"] :]) / 1e6)
            places = [index + (number - (len(shown) - 1) / 2) * width for index in range(len(cases))]
            bars = axis.bar(places, heights, width, label=METHODS[key])
            axis.bar_label(bars, fmt="%.2f" if axis is axes[0] else "%.0f", fontsize=7)
        axis.set_xticks(range(len(cases)), [case["case"].replace(": ", ":\n") for case in cases], fontsize=8)
        axis.set_title(what, loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def put_into(page: Path, text: str, marks: tuple[str, str]) -> None:
    """Replace what stands between the two marks of a page."""
    before, rest = page.read_text(encoding="utf-8").split(marks[0])
    after = rest.split(marks[1])[1]
    page.write_text(f"{before}{marks[0]}\n\n{text}\n\n{marks[1]}{after}", encoding="utf-8")


def main() -> None:
    """Print the Markdown of a result file, or put it into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="what refit.py --json wrote")
    parser.add_argument("--into", type=Path, help="page whose figures to replace")
    options = parser.parse_args()
    text = page(json.loads(options.file.read_text(encoding="utf-8")))
    if options.into is None:
        print(text)
        return
    put_into(options.into, text, _MARKS)


if __name__ == "__main__":
    main()
