"""The learning curve of a finished run, from its metrics.jsonl: in the terminal and as learning_curve.png."""

from __future__ import annotations

import json
import re
from pathlib import Path

from megatron_ppo.metrics import PHASES


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The records of a run folder, one an iteration."""
    with (run_dir / "metrics.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def draw_png(records: list[dict[str, float]], path: Path) -> None:
    """Reward, KL with entropy, response length and the time split over the iterations."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    x = [r["iteration"] for r in records]
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 6.5), layout="constrained")
    curve, drift, length, split = axes.flat
    curve.plot(x, [r.get("reward/mean") for r in records], color="tab:green")
    curve.set(title="mean reward", xlabel="iteration")
    drift.plot(x, [r.get("kl/mean") for r in records], label="KL (nats a token)")
    drift.plot(x, [r.get("entropy/mean") for r in records], label="entropy (nats)")
    drift.set(title="drift and exploration", xlabel="iteration")
    drift.legend()
    length.plot(x, [r.get("response_length/mean") for r in records], color="tab:purple")
    length.set(title="mean response length (tokens)", xlabel="iteration", ylim=(0, None))
    split.stackplot(x, [[r.get(f"time/{p}_s", 0.0) for r in records] for p in PHASES], labels=PHASES)
    split.set(title="where the time goes (s)", xlabel="iteration")
    split.legend(loc="upper right")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_text(records: list[dict[str, float]], *, width: int = 90, height: int = 16) -> str:
    """The mean reward over the iterations, for a terminal."""
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(width, height)
    plotext.plot([r["iteration"] for r in records], [r["reward/mean"] for r in records], marker="braille")
    plotext.title("mean reward")
    plotext.xlabel("iteration")
    last = len(records) - 1
    positions = sorted({last * k // 4 for k in range(5)})
    plotext.xticks([records[i]["iteration"] for i in positions], [str(records[i]["iteration"]) for i in positions])
    return re.sub(r"\x1b\[[0-9;]*m", "", str(plotext.build()))  # without colours: it is often read in a log


def time_split(records: list[dict[str, float]]) -> str:
    """Share of each phase in the run's time, one line."""
    totals = {phase: sum(r.get(f"time/{phase}_s") or 0.0 for r in records) for phase in PHASES}
    whole = sum(r.get("time/iteration_s") or 0.0 for r in records)
    parts = [f"{phase} {seconds:.1f} s ({seconds / whole:.0%})" for phase, seconds in totals.items()]
    return f"{len(records)} iterations in {whole:.1f} s: " + ", ".join(parts)
