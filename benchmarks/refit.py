"""How fast weights get from training ranks to rollout ranks, what travels, and how much memory that takes: four ways, side by side.

    (a) exact      each rollout rank receives its own shard, from the training shards (``ReshardExecutor``, as a run uses it)
    (b) gather     the field's usual way, as good as it gets (``refit_gather.py``): all-gather, broadcast of full tensors, cut
    (c) megatron   megatron-core's own ``megatron.core.resharding`` between two ``GPTModel`` (``refit_megatron.py``)
    (d) limit      raw broadcasts of the bytes of (a) over the groups of (a), packed before, all groups at once

    python benchmarks/refit.py [--json FILE] [--png FILE] [--scale]

Starts its own ranks on this machine (one thread each, gloo): 2 + 2 and 4 + 4. Ranks hold plain tensors in the shapes that megatron-core and
vLLM give their parameters. All ways take turns in one run (a b d c, a b d c, ...); seconds are the median of the slowest rank's time
between two barriers over all ranks. (a), (b) and (c) are first shown to deliver every bit. Then every family and topology is
synchronised once with a tiny model (``refit_coverage.py``). Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import refit_output
import torch
from refit_coverage import run_coverage
from refit_launch import Ranks
from refit_megatron import MegatronRank
from refit_methods import TransferRank
from refit_model import DTYPE, Mesh, llama_like, num_bytes, tensor_parallel
from refit_scale import Links, predict

from megatron_ppo.families import FAMILIES, NetworkShape

MESHES = (
    Mesh(*tensor_parallel("TP2", 2), "TP1 x 2", 1, 2),
    Mesh(*tensor_parallel("TP2", 2), "TP2", 2, 1),
    Mesh(*tensor_parallel("PP2", 1, 2), "TP1 x 2", 1, 2),
    Mesh(*tensor_parallel("PP2", 1, 2), "TP2", 2, 1),
    Mesh(*tensor_parallel("TP2xPP2", 2, 2), "TP2 x 2", 2, 2),
    Mesh(*tensor_parallel("TP4", 4), "TP2 x 2", 2, 2),
)
TIMED = ("exact", "gather", "limit", "pack", "unpack")
CHECKED = ("exact", "gather")
TARGET_RANKS = 8
"""The targets of speed are set for 4 + 4 ranks."""


def case_name(mesh: Mesh) -> str:
    """``4+4: TP4 -> TP2 x 2``."""
    return f"{mesh.num_training}+{mesh.num_rollout}: {mesh.name}"


def run_case(mesh: Mesh, network: NetworkShape, bucket_bytes: int, repeats: int, *, with_megatron: bool) -> dict[str, Any]:
    """All methods on one topology. ``RuntimeError`` where (a) or (b) does not deliver every bit."""
    num_ranks = mesh.num_training + mesh.num_rollout
    methods: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as launches:
        ranks = launches.enter_context(Ranks(TransferRank, num_ranks, mesh, network, bucket_bytes))
        for method in CHECKED:
            methods[method] = {"extra_memory_bytes": ranks.ask("extra_memory", method), "same_bits": _is_exact(ranks, method)}
        ranks.ask("prepare_limit")
        ranks.ask("run", "limit")
        turns = [(ranks, method) for method in TIMED]
        if with_megatron:
            launch, methods["megatron"] = _start_megatron(mesh, network)
            if launch is not None:
                turns.insert(3, (launches.enter_context(launch), "megatron"))
        runs: dict[str, list[list[Any]]] = {method: [] for _, method in turns}
        profiles = []
        for _ in range(repeats):
            for where, method in turns:
                runs[method].append(where.ask("run", method))
                if method == "exact":
                    profiles.append(ranks.ask("profile"))
        for where, method in turns:
            methods.setdefault(method, {}).update(_figures(runs[method]), **_traffic(where, method))
        shards, largest = ranks.ask("shard_bytes"), ranks.ask("largest_block_bytes")
        _is_exact(ranks, "exact")  # ``unpack`` has written over the parameters: they must come back
    return {
        "case": case_name(mesh),
        "num_training": mesh.num_training,
        "methods": methods,
        "shard_bytes": shards,
        "profile_of_exact": [_median_profile([run[rank] for run in profiles]) for rank in range(num_ranks)],
        **_ratios(mesh, methods, shards, largest, bucket_bytes),
    }


def _is_exact(ranks: Ranks, method: str) -> bool:
    wrong = [block for blocks in ranks.ask("check", method) for block in blocks]
    if wrong:
        raise RuntimeError(f"{method} left {len(wrong)} blocks with other bits, first: {wrong[0]}")
    return True


def _start_megatron(mesh: Mesh, network: NetworkShape) -> tuple[Ranks | None, dict[str, Any]]:
    """megatron-core's launch after a checked transfer, or None and the reason."""
    try:
        ranks = Ranks(MegatronRank, mesh.num_training + mesh.num_rollout, mesh, network)
    except RuntimeError as error:
        return None, {"reason": str(error).strip().splitlines()[-1]}
    try:
        memory = ranks.ask("extra_memory", "megatron")
        return ranks, {"extra_memory_bytes": memory, "same_bits": _is_exact(ranks, "megatron")}
    except RuntimeError as error:
        ranks.__exit__(type(error), error, error.__traceback__)
        return None, {"reason": str(error).strip().splitlines()[-1]}


def _figures(runs: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """``runs``: [repeat][rank]."""
    slowest = [max(run.seconds for run in ranks) for ranks in runs]
    return {
        "seconds": statistics.median(slowest),
        "all_seconds": slowest,
        "cpu_user_s": statistics.median(sum(run.user_s for run in ranks) for ranks in runs),
        "cpu_system_s": statistics.median(sum(run.system_s for run in ranks) for ranks in runs),
    }


def _traffic(ranks: Ranks, method: str) -> dict[str, Any]:
    """Empty for what moves nothing."""
    if method in ("pack", "unpack"):
        return {}
    found = ranks.ask("traffic", method)
    return {"bytes_sent": [one.bytes_sent for one in found], "bytes_received": [one.bytes_received for one in found]}


def _median_profile(profiles: Sequence[Any]) -> dict[str, float]:
    """Median seconds of each part, over the repeats of one rank."""
    return {key: statistics.median(asdict(one)[key] for one in profiles) for key in asdict(profiles[0])}


def _ratios(mesh: Mesh, methods: dict[str, dict[str, Any]], shards: list[int], largest: list[int], bucket_bytes: int) -> dict[str, Any]:
    exact, gather, limit = (methods[name] for name in ("exact", "gather", "limit"))
    copies = methods["pack"]["seconds"] + methods["unpack"]["seconds"]
    time_ratio = gather["seconds"] / exact["seconds"]
    bytes_ratio = sum(gather["bytes_received"]) / sum(exact["bytes_received"])
    over_shard = [exact["bytes_received"][rank] / shards[rank] for rank in range(mesh.num_training, len(shards))]
    bounds = [2 * bucket_bytes + block for block in largest]
    ratios = {
        "received_over_shard": over_shard,
        "time_ratio": time_ratio,
        "bytes_ratio": bytes_ratio,
        "fraction_of_limit": limit["seconds"] / exact["seconds"],
        "fraction_of_limit_and_copies": (limit["seconds"] + copies) / exact["seconds"],
        "extra_memory_in_buckets": max(exact["extra_memory_bytes"]) / bucket_bytes,
    }
    checks = {
        "received_is_shard": all(ratio == 1 for ratio in over_shard),
        "never_slower": time_ratio >= 1,
        "memory_within_bound": all(used <= bound for used, bound in zip(exact["extra_memory_bytes"], bounds, strict=True)),
    }
    if len(shards) == TARGET_RANKS:
        checks["time_ratio_is_0.9_of_bytes_ratio"] = time_ratio >= 0.9 * bytes_ratio
        checks["60_percent_of_limit"] = ratios["fraction_of_limit"] >= 0.60
        checks["85_percent_of_limit_and_copies"] = ratios["fraction_of_limit_and_copies"] >= 0.85
    return {**ratios, "checks": checks}


def summarise(cases: Sequence[dict[str, Any]], coverage: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The worst of each figure: speed over the cases of 4 + 4 ranks where there are such, the rest over everything that ran."""
    timed = [case for case in cases if len(case["shard_bytes"]) == TARGET_RANKS] or list(cases)
    over_shard = [ratio for part in (cases, coverage) for row in part for ratio in row["received_over_shard"]]
    found = {"received_over_shard": max(over_shard, key=lambda ratio: abs(ratio - 1))} if over_shard else {}
    if timed:
        found["speedup_over_gather"] = min(case["time_ratio"] for case in timed)
        found["fraction_of_limit"] = min(case["fraction_of_limit"] for case in timed)
        found["extra_memory_in_buckets"] = max(case["extra_memory_in_buckets"] for case in cases)
    return found


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--png", type=Path, help="draw seconds and bytes into this file")
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each method; seconds are the median")
    parser.add_argument("--model-bytes", type=int, default=512 * 2**20, help="the model has at least so many bytes")
    parser.add_argument("--bucket-bytes", type=int, default=16 * 2**20, help="of (a) and (b) alike")
    parser.add_argument("--case", action="append", default=[], help="only cases whose name holds this text; may be repeated")
    parser.add_argument("--family", action="append", choices=sorted(FAMILIES), help="only these families in the coverage; may be repeated")
    parser.add_argument("--skip", nargs="*", default=[], choices=("megatron", "coverage"), help="parts to leave out")
    parser.add_argument("--scale", action="store_true", help="also predict 7B, 70B and 405B from their plans")
    parser.add_argument("--nvlink-gb-s", type=float, default=450.0, help="GB/s of a GPU's NVLink, one direction")
    parser.add_argument("--network-gb-s", type=float, default=50.0, help="GB/s of a GPU's network link, one direction")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    options = parser.parse_args()
    if min(options.repeats, options.gpus_per_node) < 1 or min(options.nvlink_gb_s, options.network_gb_s) <= 0:
        parser.error("--repeats, --gpus-per-node and the link speeds must be above 0")
    if options.bucket_bytes < 1024:
        parser.error(f"--bucket-bytes {options.bucket_bytes} must be at least 1024")
    return options


def main() -> None:
    """Measure, print the tables, write the files."""
    options = parse_options()
    network = llama_like(options.model_bytes)
    chosen = [mesh for mesh in MESHES if not options.case or any(text in case_name(mesh) for text in options.case)]
    cases: list[dict[str, Any]] = []
    for mesh in chosen:
        print(f"{case_name(mesh)} ...", flush=True)
        cases.append(run_case(mesh, network, options.bucket_bytes, options.repeats, with_megatron="megatron" not in options.skip))
    coverage = [] if "coverage" in options.skip else run_coverage(options.family or tuple(FAMILIES))
    links = Links(options.nvlink_gb_s * 1e9, options.network_gb_s * 1e9, options.gpus_per_node)
    results = {
        "cases": cases,
        "summary": summarise(cases, coverage),
        "coverage": coverage,
        "scale": predict(links) if options.scale else [],
        "links": asdict(links),
        "model": {**asdict(network), "bytes": num_bytes(network), "dtype": str(DTYPE)},
        "bucket_bytes": options.bucket_bytes,
        "repeats": options.repeats,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, gloo",
    }
    _report(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if options.png and cases:
        refit_output.draw(cases, options.png)


def _report(results: dict[str, Any]) -> None:
    if results["cases"]:
        refit_output.show("Four ways to move the same weights", refit_output.case_table(results["cases"]))
        refit_output.show("Ratios", refit_output.ratio_table(results["cases"]))
    if results["coverage"]:
        refit_output.show("Received bytes / shard bytes", refit_output.coverage_table(results["coverage"]))
    if results["scale"]:
        refit_output.show("Predicted from the plans", refit_output.scale_table(results["scale"]))
    for name, value in results["summary"].items():
        print(f"{name}: {value:.3f}")
    for case in results["cases"]:
        for name in (name for name, passed in case["checks"].items() if not passed):
            print(f"missed in {case['case']}: {name}")


if __name__ == "__main__":
    main()
