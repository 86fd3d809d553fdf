"""Tables and pictures of ``backends.py``'s figures, and the Markdown of them that stands in ``docs/fsdp.md``.

    python benchmarks/backends_output.py FILE.json                          print the Markdown
    python benchmarks/backends_output.py FILE.json --into docs/fsdp.md      put it between the page's two marks
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from benchmarks.refit_output import markdown, put_into, show  # noqa: E402
from megatron_ppo.metrics import PHASES  # noqa: E402

__all__ = ["draw", "memory_table", "page", "show", "time_table"]

_MARKS = ("<!-- figures: begin -->", "<!-- figures: end -->")
KINDS = ("weights", "gradients", "optimizer", "frozen", "gathered", "engine", "cache", "buckets")
"""What memory is counted: trained weights, their gradients, moments and masters, frozen networks, parameters that FSDP has gathered; the
inference engine's weights and key/value cache; buckets of the weight sync."""
_DOES = {(True, True): "do both", (True, False): "train", (False, True): "sample"}
Row = Mapping[str, Any]


def time_table(rows: Sequence[Row]) -> list[list[str]]:
    """Header and one row a case: seconds of the phases, as the first training rank sees them."""
    table = [["case", *PHASES, "iteration"]]
    return table + [[row["case"], *(f"{row['seconds'][name]:.2f}" for name in (*PHASES, "iteration"))] for row in rows]


def memory_table(rows: Sequence[Row]) -> list[list[str]]:
    """Header and one row a case and kind of rank: that rank of the kind which holds most."""
    table = [["case", "ranks that", *KINDS, "sum", "peak RSS"]]
    for row in rows:
        for name, rank in _largest_ranks(row):
            sizes = [rank["bytes"][kind] for kind in KINDS]
            shown = [f"{size / 1e6:.1f}" if size else "" for size in sizes]
            table.append([row["case"], name, *shown, f"{sum(sizes) / 1e6:.1f}", f"{rank['peak_resident'] / 1e6:.0f}"])
    return table


def _largest_ranks(row: Row) -> list[tuple[str, Row]]:
    """What a kind of rank does -> the one of the kind that holds most."""
    named: dict[str, list[Row]] = {}
    for rank in row["ranks"]:
        named.setdefault(_DOES[rank["trains"], rank["samples"]], []).append(rank)
    return [(name, max(ranks, key=lambda rank: sum(rank["bytes"].values()))) for name, ranks in named.items()]


def page(results: Row) -> str:
    """Both tables of a result file, for the page."""
    job = results["job"]
    return "\n\n".join(
        [
            f"Measured on: {results['machine']}, {results['num_ranks']} ranks; a Llama of {results['parameters'] / 1e6:.0f} M parameters, "
            f"fp32, {job['prompts'] * job['samples']} responses of at most {job['response_length']} tokens an iteration; "
            f"median of {results['rounds'] * (job['iterations'] - 1)} iterations. Seconds:",
            markdown(time_table(results["cases"])),
            "MB of the rank that holds most; peak RSS is the whole process, libraries and activations included:",
            markdown(memory_table(results["cases"])),
        ]
    )


def draw(rows: Sequence[Row], file: Path) -> None:
    """Two stacked bars a case: seconds by phase, and bytes of the largest rank of each kind."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(14, 0.55 * len(rows) + 2), layout="constrained")
    _stack(axes[0], [(row["case"], row["seconds"]) for row in rows], PHASES, 1.0)
    bars = [(f"{row['case']}: {name}", rank["bytes"]) for row in rows for name, rank in _largest_ranks(row)]
    _stack(axes[1], bars, KINDS, 1e6)
    axes[0].set_title("seconds of an iteration (medians)", loc="left", fontsize=10)
    axes[1].set_title("MB a rank", loc="left", fontsize=10)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def _stack(axis: Any, bars: Sequence[tuple[str, Row]], parts: Sequence[str], unit: float) -> None:
    starts = [0.0] * len(bars)
    for part in parts:
        widths = [values[part] / unit for _, values in bars]
        axis.barh(range(len(bars)), widths, left=starts, label=part)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axis.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=8)
    axis.invert_yaxis()
    axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axis.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Print the Markdown of a result file, or put it into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="what backends.py --json wrote")
    parser.add_argument("--into", type=Path, help="page whose figures to replace")
    options = parser.parse_args()
    text = page(json.loads(options.file.read_text(encoding="utf-8")))
    if options.into is None:
        print(text)
        return
    put_into(options.into, text, _MARKS)


if __name__ == "__main__":
    main()
