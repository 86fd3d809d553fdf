"""The fault drill: kill -9 of every process in every phase, and what becomes of the job. Real launches, real signals.

    python benchmarks/fault_drill.py [--json FILE] [--repeats N] [--phases sync save] [--victims agent] [--launcher torchrun|srun|both]

A job of four ranks (two train, two sample) on the quickstart's tiny model saves a checkpoint after each iteration. It is killed in its
third (``fault_kill.py``): each of the four ranks, and torchrun's agent, in each of sync, rollout, score, update and save. Then all other
processes must have ended within 10 s, by themselves, with exit codes other than 0, each saying which rank was lost in which phase;
nothing may be left running, and no half checkpoint may load. The job goes on by itself under ``torchrun --max-restarts 2``, or is
launched once more where nobody restarts it (no agent left, no restarts allowed, ranks started with srun's variables), and ends with the
weights, moments, random states, metrics and samples of a job that nobody touched, bit for bit (``fault_judge.py``).

The repeats differ: TP 2, PP 2 with checkpoints written in the background, TP 2 with vLLM; and the moment within the phase moves on
(``fault_kill.MOMENTS``). To save launches a job takes two kills, one after the other; its end speaks for both. Exit code 0: every cell is
good. A cell takes about 30 s of CPU time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402

from benchmarks.fault_jobs import VARIANTS, VICTIMS, Cell, Drill, LauncherName, Outcome  # noqa: E402
from benchmarks.fault_judge import END_S  # noqa: E402
from benchmarks.fault_kill import PHASES  # noqa: E402

KILLS_OF_A_JOB = 2
LAUNCHERS: tuple[LauncherName, ...] = ("torchrun", "srun")


def cells_of(phases: Sequence[str], victims: Sequence[str], launchers: Sequence[LauncherName], repeats: int) -> list[list[Cell]]:
    """The cells, grouped into jobs: up to two phases of one victim. A save comes first: a resume from a later kill finds it done.

    (A save that is killed costs its checkpoint: the job goes on from the one before, and comes to the same iteration once more.)
    """
    jobs: list[list[Cell]] = []
    ordered = [phase for phase in dict.fromkeys(("save", *PHASES)) if phase in phases]
    for repeat, launcher, victim in itertools.product(range(repeats), launchers, victims):
        if launcher == "srun" and VICTIMS[victim] is None:
            continue  # srun's ranks have no agent
        for start in range(0, len(ordered), KILLS_OF_A_JOB):
            jobs.append([Cell(phase, victim, launcher, repeat) for phase in ordered[start : start + KILLS_OF_A_JOB]])
    return jobs


def table(outcomes: Iterable[Outcome]) -> str:
    """Phase x victim, a block a launcher: the longest time to stop, how many of the kills were resumed from, how many ended equal."""
    found: dict[tuple[str, str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        found[outcome.cell.launcher, outcome.cell.phase, outcome.cell.victim].append(outcome)
    lines = []
    for launcher in LAUNCHERS:
        rows = [(key, group) for key, group in found.items() if key[0] == launcher]
        if not rows:
            continue
        lines += [f"{launcher}", f"  {'phase':<9}{'killed':<12}{'time to stop':>13}  {'resumed':>8}  {'equal':>6}  faults"]
        order: list[tuple[str, str, str]] = [(launcher, phase, victim) for phase in PHASES for victim in VICTIMS]
        for (_, phase, victim), group in sorted(rows, key=lambda row: order.index(row[0])):
            stops = [outcome.seconds_to_stop for outcome in group]
            slowest = "never" if None in stops else f"{max(stop for stop in stops if stop is not None):.1f} s"
            resumed, equal = sum(outcome.resumed for outcome in group), sum(outcome.equal for outcome in group)
            faults = sum(bool(outcome.faults) for outcome in group)
            shown = f"{resumed}/{len(group)}", f"{equal}/{len(group)}"
            lines.append(f"  {phase:<9}{victim:<12}{slowest:>13}  {shown[0]:>8}  {shown[1]:>6}  {faults or '-'}")
    return "\n".join(lines)


def summarise(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts, and the longest time to stop."""
    stops = [outcome.seconds_to_stop for outcome in outcomes if outcome.seconds_to_stop is not None]
    return {
        "cells": len(outcomes),
        "good": sum(outcome.good for outcome in outcomes),
        "slowest_stop_s": max(stops, default=None),
        "limit_s": END_S,
    }


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write every cell to this file (it grows with the drill)")
    parser.add_argument("--repeats", type=int, default=3, help="kills of each process in each phase")
    parser.add_argument("--phases", nargs="+", choices=tuple(PHASES), default=tuple(PHASES))
    parser.add_argument("--victims", nargs="+", choices=tuple(VICTIMS), default=tuple(VICTIMS), help="e.g. 'training 0' agent")
    parser.add_argument("--launcher", choices=("torchrun", "srun", "both"), default="both")
    parser.add_argument("--keep", type=Path, help="work in this folder, which must be empty, and leave it")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    if options.keep is not None and options.keep.exists() and any(options.keep.iterdir()):
        parser.error(f"--keep {options.keep} is not empty")
    return options


def run_drill(jobs: Sequence[Sequence[Cell]], folder: Path, json_file: Path | None) -> list[Outcome]:
    """All jobs, each cell reported when it is done."""
    drill, outcomes, started = Drill(folder), list[Outcome](), time.monotonic()
    total = sum(map(len, jobs))
    for cells in jobs:
        outcomes += drill.run(cells)
        for outcome in outcomes[-len(cells) :]:
            cell, stop = outcome.cell, outcome.seconds_to_stop
            seconds = "never stopped" if stop is None else f"stopped in {stop:.1f} s"
            where = f"{cell.launcher}, {cell.variant.name}: {cell.victim} in {cell.phase}, {cell.moment}"
            print(f"{where}: {seconds}, resumed from {outcome.resumed_from}: {'good' if outcome.good else 'BAD'}", flush=True)
            for fault in outcome.faults:
                print("    " + fault.replace("\n", "\n    "), flush=True)
        left = (time.monotonic() - started) / len(outcomes) * (total - len(outcomes))
        print(f"[{len(outcomes)}/{total}, {left / 60:.0f} min left]", flush=True)
        if json_file is not None:
            write_json(json_file, outcomes, time.monotonic() - started)
    return outcomes


def write_json(file: Path, outcomes: Sequence[Outcome], seconds: float) -> None:
    """Cells, summary, and where they were measured."""
    found = {
        "summary": summarise(outcomes),
        "cells": [outcome.as_json() for outcome in outcomes],
        "variants": [variant.name for variant in VARIANTS],
        "seconds": seconds,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, gloo",
    }
    file.write_text(json.dumps(found, indent=1), encoding="utf-8")


def main() -> int:
    """Run, print the table, write the file; 0 where all cells are good."""
    options = parse_options()
    launchers = LAUNCHERS if options.launcher == "both" else (options.launcher,)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of all that ends the launches
    jobs = cells_of(options.phases, options.victims, launchers, options.repeats)
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
        outcomes = run_drill(jobs, options.keep, options.json)
    else:
        with tempfile.TemporaryDirectory(prefix="fault_drill_") as folder:
            outcomes = run_drill(jobs, Path(folder), options.json)
    print(table(outcomes))
    found = summarise(outcomes)
    print(f"cells {found['cells']}, good {found['good']}")
    return 0 if outcomes and found["good"] == found["cells"] else 1


if __name__ == "__main__":
    sys.exit(main())
