"""The traffic of one weight sync as a picture: senders down, receivers across, colour for bytes (logarithmic), bars for each rank's sum.

Drawn by ``refit_report.py``. Lines mark the borders of nodes, of pipeline stages (senders) and of replicas (receivers). Of a large
training mesh only the ranks that send are drawn: the others are copies whose rows would be empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_ppo.refit_traffic import RankRow, RefitTraffic, size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ALL_SHOWN = 32
"""A training mesh of up to so many ranks is drawn with those that send nothing."""
_WRITTEN = 8
"""Up to so many senders and receivers, every cell holds its number."""
_NODE: dict[str, Any] = {"color": "tab:orange", "linestyle": (0, (4, 3))}
_PART: dict[str, Any] = {"color": "black"}
_LEFT, _RIGHT, _TOP, _BOTTOM, _BAR, _GAP = 1.35, 1.75, 1.4, 1.05, 1.3, 0.12
"""Inches around the matrix; bars of this length."""


def draw_png(traffic: RefitTraffic, path: Path) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    senders = [row for row in traffic.training if len(traffic.training) <= _ALL_SHOWN or row.bytes_sent]
    cells = traffic.matrix[[row.rank for row in senders]].astype(float)
    height, width = (_extent(count) for count in cells.shape)
    figure = pyplot.figure(figsize=(_LEFT + width + _GAP + _BAR + _RIGHT, _TOP + _BAR + _GAP + height + _BOTTOM), dpi=150)
    matrix = _axes(figure, _LEFT, _BOTTOM, width, height)
    sent = _axes(figure, _LEFT + width + _GAP, _BOTTOM, _BAR, height)
    received = _axes(figure, _LEFT, _BOTTOM + height + _GAP, width, _BAR)
    scale = _axes(figure, _LEFT + width + _GAP + _BAR + 0.55, _BOTTOM, 0.16, min(height, 4.5))
    image = _draw_matrix(matrix, cells)
    _colour_scale(figure, image, scale, cells)
    _draw_borders(matrix, senders, traffic.rollout, traffic)
    _label(matrix, senders, traffic)
    _draw_sums(sent, received, senders, traffic.rollout)
    _draw_title(figure, traffic)
    figure.savefig(path)
    pyplot.close(figure)


def _extent(count: int) -> float:
    """Inches for ``count`` ranks: large cells for few, never less than three pixels a rank."""
    return max(3.6, min(count * 0.62, 7.5), count * 3 / 150)


def _axes(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Axes at a place in inches."""
    total_width, total_height = figure.get_size_inches()
    return figure.add_axes((left / total_width, bottom / total_height, width / total_width, height / total_height))


def _draw_matrix(axes: Axes, cells: Any) -> Any:
    from matplotlib.colors import LogNorm

    low, high = cells[cells > 0].min(), cells.max()
    shown = np.ma.masked_equal(cells, 0)
    axes.set_facecolor("#f2f2f2")
    norm = LogNorm(vmin=min(low, high / 4), vmax=high)
    image = axes.imshow(shown, aspect="auto", interpolation="nearest", cmap="viridis_r", norm=norm)
    if max(cells.shape) <= _WRITTEN:
        for (y, x), size in np.ndenumerate(cells):
            if size:
                colour = "white" if norm(size) > 0.4 else "black"
                axes.text(x, y, size_text(int(size)).replace(" ", "\n"), ha="center", va="center", fontsize=7, color=colour)
    return image


def _colour_scale(figure: Figure, image: Any, axes: Axes, cells: Any) -> None:
    """Ticks at powers of two, in binary units."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = image.norm.vmin, image.norm.vmax
    first, last = int(np.ceil(np.log2(low))), int(np.floor(np.log2(high)))
    ticks = [2.0**power for power in range(first, last + 1, max(1, (last - first) // 7))]
    bar = figure.colorbar(image, cax=axes, format=FuncFormatter(_tick_text))
    bar.locator, bar.minorlocator = FixedLocator(ticks), NullLocator()
    bar.update_ticks()
    bar.ax.tick_params(labelsize=7)
    bar.ax.set_title("bytes", fontsize=8)


def _tick_text(size: float, position: int) -> str:
    return size_text(int(size)).replace(".00", "")


def _draw_borders(axes: Axes, senders: Sequence[RankRow], receivers: Sequence[RankRow], traffic: RefitTraffic) -> None:
    for rows, part, line in ((senders, "copy" if traffic.fsdp_shard_size else "pp", axes.axhline), (receivers, "replica", axes.axvline)):
        width = min(0.9, _extent(len(rows)) * 72 / len(rows) / 6)  # thin beside the cells
        for numbers, style in (([row.place[part] for row in rows], _PART), ([row.node for row in rows], _NODE)):
            for at in _borders(numbers):
                line(at, linewidth=width, **style)


def _borders(numbers: Sequence[int]) -> list[float]:
    """Where neighbours differ, between their places."""
    return [place + 0.5 for place, (one, other) in enumerate(pairwise(numbers)) if one != other]


def _label(axes: Axes, senders: Sequence[RankRow], traffic: RefitTraffic) -> None:
    """Global rank numbers, then the stage or replica that they belong to."""
    receivers = traffic.rollout
    height, width = (_extent(len(rows)) for rows in (senders, receivers))
    rows, columns = (_ticks(len(ranks), inches) for ranks, inches in ((senders, height), (receivers, width)))
    axes.set_yticks(rows, [str(senders[at].rank) for at in rows], fontsize=7)
    axes.set_xticks(columns, [str(receivers[at].rank) for at in columns], fontsize=7, rotation=90)
    stages = [row.place["pp"] for row in senders] if traffic.parallel.pipeline_model_parallel_size > 1 else []
    for at, name in _spans(stages, height, 0.16):
        axes.annotate(f"pp {name}", (0, at), (-38, 0), ("axes fraction", "data"), "offset points", ha="right", va="center", fontsize=7)
    for at, name in _spans([row.place["replica"] for row in receivers], width, 0.26):
        text = f"replica {name}" if width * traffic.replica_size / len(receivers) > 0.6 else str(name)
        axes.annotate(text, (at, 0), (0, -32), ("data", "axes fraction"), "offset points", ha="center", va="top", fontsize=7)
    some = len(senders) < len(traffic.training)
    which = f"training ranks that send: {len(senders)} of {len(traffic.training)}" if some else "training rank"
    axes.annotate(f"sender ({which})", (0, 0.5), (-76, 0), "axes fraction", "offset points", ha="center", va="center", rotation=90)
    axes.annotate("receiver (rollout rank; replica)", (0.5, 0), (0, -54), "axes fraction", "offset points", ha="center", va="center")


def _ticks(count: int, inches: float) -> list[int]:
    """Every rank, or every 2nd, 4th, 8th ... where they would touch."""
    step = 1
    while count / step > inches / 0.13:
        step *= 2
    return list(range(0, count, step))


def _spans(numbers: Sequence[int], inches: float, least: float) -> list[tuple[float, int]]:
    """(middle, number) of each run of equal neighbours; some left out where there are less than ``least`` inches for each."""
    if not numbers:
        return []
    edges = [-0.5, *_borders(numbers), len(numbers) - 0.5]
    found = [((start + stop) / 2, numbers[int(start + 1)]) for start, stop in pairwise(edges)]
    step = int(np.ceil(len(found) * least / inches))
    return found[::step]


def _draw_sums(sent: Axes, received: Axes, senders: Sequence[RankRow], receivers: Sequence[RankRow]) -> None:
    """Bars along the sides, one a rank."""
    from matplotlib.ticker import FixedLocator, FuncFormatter

    thick = [0.8 if len(rows) <= 200 else 1.0 for rows in (senders, receivers)]
    sent.barh(range(len(senders)), [row.bytes_sent for row in senders], height=thick[0], color="tab:blue")
    received.bar(range(len(receivers)), [row.bytes_received for row in receivers], width=thick[1], color="tab:green")
    sent.set(ylim=(len(senders) - 0.5, -0.5), yticks=[])
    received.set(xlim=(-0.5, len(receivers) - 0.5), xticks=[])
    sent.set_title("sent", fontsize=9)
    received.set_ylabel("received", fontsize=9)
    most = (max(row.bytes_sent for row in senders), max(row.bytes_received for row in receivers))
    for axis, highest in zip((sent.xaxis, received.yaxis), most, strict=True):
        step = 2 ** (highest.bit_length() - 2)  # two or three steps
        axis.set_major_locator(FixedLocator(range(0, highest + 1, step)))
        axis.set_major_formatter(FuncFormatter(_tick_text))
        axis.set_tick_params(labelsize=7)
    sent.tick_params(axis="x", rotation=45)
    for side in (sent, received):
        side.spines[["top", "right"]].set_visible(False)


def _draw_title(figure: Figure, traffic: RefitTraffic) -> None:
    from matplotlib.lines import Line2D

    network, (low, high) = traffic.network, traffic.received_over_shard
    ratio = f"{low:.3f}" if f"{low:.3f}" == f"{high:.3f}" else f"{low:.3f} to {high:.3f}"
    lines = [
        f"one weight sync: {network.family}, {traffic.num_parameters / 1e9:.4g} billion parameters, {size_text(traffic.model_bytes)}",
        f"training {len(traffic.training)} ranks: {traffic.training_mesh}",
        f"rollout {len(traffic.rollout)} ranks: {traffic.rollout_mesh}",
        f"received / shard {ratio}; full broadcast would move {traffic.full_broadcast_factor:.2f} times as much",
    ]
    height = figure.get_size_inches()[1]
    figure.text(0.02, 1 - 0.1 / height, "\n".join(lines), ha="left", va="top", fontsize=8.5, linespacing=1.4)
    marks = [
        Line2D([], [], **_NODE, label=f"border of nodes of {traffic.ranks_per_node} ranks"),
        Line2D([], [], **_PART, label=f"border of {'copies' if traffic.fsdp_shard_size else 'pipeline stages'}, of replicas"),
    ]
    place = (0.02, 1 - 1.05 / height)
    figure.legend(handles=marks, loc="upper left", bbox_to_anchor=place, ncols=2, fontsize=7, frameon=False, borderaxespad=0)
