"""How long building the weight-transfer plan of a large job takes, how much memory, and what the plan says: one table.

Needs no weights, no GPU and no second process: layouts of all ranks and the plan follow from the sizes alone. Each case runs in a
child process of its own, so that peak memory is that of the case. Transfer itself is measured elsewhere.

    python benchmarks/plan.py [--json FILE] [--case NAME ...] [--repeats N]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ppo.families import NetworkShape
from megatron_ppo.resharding.layout import RankLayout
from megatron_ppo.resharding.megatron_layout import training_layouts
from megatron_ppo.resharding.megatron_mesh import MegatronParallel
from megatron_ppo.resharding.plan import build_plan
from megatron_ppo.resharding.vllm_layout import vllm_layout

BUCKET_BYTES = 256 << 20
BYTES_PER_ELEMENT = 2

LLAMA_7B = NetworkShape("llama", 32, 4096, 32, 32, 128, 11008, 32000, tied=False)
LLAMA_70B = NetworkShape("llama", 80, 8192, 64, 8, 128, 28672, 128256, tied=False)
LLAMA_405B = NetworkShape("llama", 126, 16384, 128, 8, 128, 53248, 128256, tied=False)
QWEN3_235B_A22B = NetworkShape(
    "qwen3_moe", 94, 4096, 64, 4, 128, 1536, 151936, tied=False, has_qk_norm=True, num_experts=128, num_experts_per_tok=8
)
MIXTRAL_8X22B = NetworkShape("mixtral", 56, 6144, 48, 8, 128, 16384, 32768, tied=False, num_experts=8, num_experts_per_tok=2)


@dataclass(frozen=True)
class Case:
    """A job: a network, the training mesh, and replicas of a rollout TP size."""

    name: str
    network: NetworkShape
    parallel: MegatronParallel
    training_ranks: int
    rollout_tp: int
    replicas: int
    rollout_expert_parallel: bool = False

    def layouts(self) -> tuple[dict[int, RankLayout], dict[int, RankLayout]]:
        """Global rank -> layout of both sides; training ranks come first."""
        sources = training_layouts(self.network, self.parallel, self.training_ranks)
        whole = self.rollout_expert_parallel
        shards = [
            vllm_layout(self.network, tensor_parallel_size=self.rollout_tp, tp_rank=rank, expert_parallel=whole)
            for rank in range(self.rollout_tp)
        ]
        num_rollout = self.rollout_tp * self.replicas
        return sources, {self.training_ranks + n: shards[n % self.rollout_tp] for n in range(num_rollout)}


# 94 layers over 8 stages: 12 in each, and the embedding and the loss count as layers.
_QWEN = MegatronParallel(
    4, 8, expert_model_parallel_size=8, expert_tensor_parallel_size=1,
    account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True,
)  # fmt: skip
_405B = MegatronParallel(8, 16, account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True)
CASES = (
    Case("Llama-2 7B, TP2 PP2 DP2 -> 4 x TP2", LLAMA_7B, MegatronParallel(2, 2), 8, 2, 4),
    Case("Llama-3 70B, TP8 PP4 DP2 -> 4 x TP8", LLAMA_70B, MegatronParallel(8, 4), 64, 8, 4),
    Case("Llama-3.1 405B, TP8 PP16 DP8 -> 16 x TP8", LLAMA_405B, _405B, 1024, 8, 16),
    Case("Mixtral 8x22B, TP4 PP8 EP4 -> 8 x TP8", MIXTRAL_8X22B,
         MegatronParallel(4, 8, expert_model_parallel_size=4, expert_tensor_parallel_size=1), 256, 8, 8),
    Case("Mixtral 8x22B, TP4 PP8 EP4 -> 8 x TP8, whole experts", MIXTRAL_8X22B,
         MegatronParallel(4, 8, expert_model_parallel_size=4, expert_tensor_parallel_size=1), 256, 8, 8, True),
    Case("Qwen3 235B-A22B, TP4 PP8 EP8 -> 8 x TP8", QWEN3_235B_A22B, _QWEN, 256, 8, 8),
    Case("Qwen3 235B-A22B, TP4 PP8 EP8 -> 8 x TP8, whole experts", QWEN3_235B_A22B, _QWEN, 256, 8, 8, True),
)  # fmt: skip


def measure(case: Case) -> dict[str, Any]:
    """Build the layouts of all ranks and the plan once, in this process."""
    started, cpu_started = time.perf_counter(), time.process_time()
    sources, destinations = case.layouts()
    built = time.perf_counter()
    plan = build_plan(sources, destinations, bytes_per_element=BYTES_PER_ELEMENT)
    planned, cpu_planned = time.perf_counter(), time.process_time()
    plan.digest()
    digested = time.perf_counter()
    traffic = plan.summary(BUCKET_BYTES)
    return {
        "case": case.name,
        "ranks": len(sources) + len(destinations),
        "layout_s": built - started,
        "plan_s": planned - built,
        "digest_s": digested - planned,
        "build_s": planned - started,
        "build_cpu_s": cpu_planned - cpu_started,  # of the one core used; less moved by what else runs
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "groups": len(plan.groups),
        "transfers": sum(len(group.transfers) for group in plan.groups),
        "groups_per_rollout_rank": max(traffic[rank].num_groups for rank in destinations),
        "groups_per_training_rank": max(traffic[rank].num_groups for rank in sources),
        "messages_per_rollout_rank": max(traffic[rank].num_messages for rank in destinations),
        "busiest_sender_bytes": max(row.bytes_sent for row in traffic.values()),
        "busiest_receiver_bytes": max(row.bytes_received for row in traffic.values()),
        "senders": sum(row.bytes_sent > 0 for row in traffic.values()),
    }


def main() -> None:
    """Measure the cases, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--case", action="append", default=[], help="only cases whose name holds this text; may be repeated")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each case; seconds are the median")
    options = parser.parse_args()
    chosen = [case for case in CASES if not options.case or any(text in case.name for text in options.case)]
    print(f"{'':58} {'build s':>8} {'cpu s':>6} {'peak MiB':>9} {'groups':>7} {'a rank':>7} {'sender GB':>10} {'receiver GB':>12}")
    found = []
    for case in chosen:
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            runs = [pool.apply(measure, (case,)) for _ in range(options.repeats)]
        row = runs[0] | {key: statistics.median(run[key] for run in runs) for key in runs[0] if key.endswith("_s")}
        found.append(row)
        print(
            f"{row['case']:58} {row['build_s']:8.2f} {row['build_cpu_s']:6.2f} {row['peak_mib']:9.0f} {row['groups']:7} "
            f"{row['groups_per_rollout_rank']:7} {row['busiest_sender_bytes'] / 1e9:10.3f} {row['busiest_receiver_bytes'] / 1e9:12.3f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps({"cases": found}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
