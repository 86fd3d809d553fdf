"""The meshes of a plan as a picture: a box a rank, in its node; its colour says its pipeline stage, its text its place and how full it is.

Drawn by ``planner.py --png``. Of a large launch the first nodes of each kind are drawn, and the text under them counts the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ppo.plan_job import GIB, Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 4
"""Nodes side by side."""
_SHOWN_NODES = 32
_ROLLOUT_COLOUR = "#f4a261"


def draw_meshes(plan: Plan, path: Path) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    per_node = plan.machine.ranks_per_node
    num_nodes = -(-plan.world_size // per_node)
    shown = _shown_nodes(plan, num_nodes)
    wide = min(per_node, 4)
    rows = -(-len(shown) // _COLUMNS)
    width, height = wide + 0.5, -(-min(per_node, plan.world_size) // wide) + 0.7
    columns = min(_COLUMNS, len(shown))
    figure = pyplot.figure(figsize=(max(7.0, columns * width * 0.95), rows * height * 0.75 + 1.6), dpi=130)
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    axes.set_axis_off()
    axes.set_xlim(0, max(columns * width, 7.0))
    axes.set_ylim(-rows * height - 0.3, 1.7)
    for place, node in enumerate(shown):
        left, top = place % _COLUMNS * width, -(place // _COLUMNS) * height
        _draw_node(axes, plan, node, left + 0.1, top, wide)
    _draw_words(axes, plan, num_nodes - len(shown))
    figure.savefig(path)
    pyplot.close(figure)


def _shown_nodes(plan: Plan, num_nodes: int) -> list[int]:
    """All, or the first of the training and of the rollout mesh."""
    if num_nodes <= _SHOWN_NODES:
        return list(range(num_nodes))
    border = plan.config.training_size(plan.world_size) // plan.machine.ranks_per_node
    rollout = min(_COLUMNS * 2, num_nodes - border)
    training = min(border, _SHOWN_NODES - rollout)
    step = border / training
    return [*(int(index * step) for index in range(training)), *range(border, border + rollout)]


def _draw_node(axes: Axes, plan: Plan, node: int, left: float, top: float, wide: int) -> None:
    from matplotlib.patches import FancyBboxPatch, Rectangle

    per_node = plan.machine.ranks_per_node
    ranks = range(node * per_node, min((node + 1) * per_node, plan.world_size))
    height = -(-len(ranks) // wide)
    frame = FancyBboxPatch((left, top - height), wide, height, boxstyle="round,pad=0.06", facecolor="none", edgecolor="#888888")
    axes.add_patch(frame)
    axes.text(left, top + 0.12, f"node {node}", fontsize=7, va="bottom")
    for place, rank in enumerate(ranks):
        x, y = left + place % wide, top - place // wide - 1
        colour, text = _rank_look(plan, rank)
        axes.add_patch(Rectangle((x + 0.03, y + 0.03), 0.94, 0.94, facecolor=colour, edgecolor="white"))
        axes.text(x + 0.5, y + 0.5, text, fontsize=5.2, ha="center", va="center", linespacing=1.25)


def _rank_look(plan: Plan, rank: int) -> tuple[str, str]:
    """(colour, text) of one rank."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    config = plan.config
    num_training = config.training_size(plan.world_size)
    if rank >= num_training:
        tp = config.parallel.rollout_tensor_parallel_size
        at = rank - num_training
        return _ROLLOUT_COLOUR, f"{rank}\nengine {at // tp}\ntp {at % tp}\n{plan.engine_total / GIB:.0f} GiB"
    place = plan.traffic.rows[rank].place
    number = place.get("pp", 0)
    stages = config.parallel.pipeline_model_parallel_size
    stage = next(one for one in plan.stages if number in one.stage.stages)
    shade = colormaps["Blues"](0.2 + 0.45 * number / max(1, stages - 1))
    where = f"pp {number} dp {place['dp']}\ntp {place['tp']}" if "pp" in place else f"copy {place['copy']}\nshard {place['shard']}"
    if "ep" in place:
        where += f" ep {place['ep']}"
    return to_hex(shade), f"{rank}\n{where}\n{stage.peak / GIB:.0f} GiB"


def _draw_words(axes: Axes, plan: Plan, num_hidden: int) -> None:
    traffic = plan.traffic
    name = Path(plan.config.model.model_path).name
    title = f"{name}: {plan.world_size} ranks; training {traffic.training_mesh}; rollout {traffic.rollout_mesh}"
    axes.text(0.1, 1.35, title, fontsize=9, weight="bold", va="center")
    verdict, (left, memory) = "fits" if not plan.faults else "DOES NOT FIT", plan.fullest
    text = (
        f"{verdict}: {left / GIB:.1f} of {memory / GIB:g} GiB left on the fullest rank; "
        f"each box: rank, place, most GiB. Blue trains (darker: later pipeline stage), orange samples"
    )
    if plan.config.is_colocated:
        text += "; colocated: every rank does both by turns"
    if num_hidden:
        text += f"; {num_hidden} more nodes are not drawn"
    axes.text(0.1, 0.8, text, fontsize=7.5, va="center")
