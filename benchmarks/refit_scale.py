"""What the plans of large jobs move, and how long that would take on given links: arithmetic, nothing is run.

    exact               a rank's own shard over its own network link: max over ranks of bytes / link, sent and received apart
    full, by stages     as the field does it, one pipeline stage after another: the whole model leaves by one rank's link at a time
    full, at best       all stages at once, each byte enters a node once, spread over all its links, and NVLink hands it on: the largest of
                        a stage over its source's link, the model over a node's links, the model over a rank's NVLink

Both full ways also gather a stage over NVLink; that is taken as hidden behind the broadcast. No latency, no protocol: all three are lower
bounds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from plan import BYTES_PER_ELEMENT, CASES, Case

from megatron_ppo.resharding.layout import RankLayout
from megatron_ppo.resharding.plan import build_plan

MODELS = ("7B", "70B", "405B")
_BUCKET_BYTES = 64 << 20


@dataclass(frozen=True)
class Links:
    """Speeds in bytes a second and direction, for each GPU."""

    nvlink: float
    network: float
    gpus_per_node: int


def predict(links: Links) -> list[dict[str, Any]]:
    """One row a model."""
    return [_row(case, links) for case in CASES if any(f" {model}," in case.name for model in MODELS)]


def _row(case: Case, links: Links) -> dict[str, Any]:
    sources, destinations = case.layouts()
    started = time.perf_counter()
    plan = build_plan(sources, destinations, bytes_per_element=BYTES_PER_ELEMENT)
    plan_s = time.perf_counter() - started
    traffic = plan.summary(_BUCKET_BYTES)
    sent, received = max(row.bytes_sent for row in traffic.values()), max(row.bytes_received for row in traffic.values())
    stages = _stage_bytes(sources, case.parallel.pipeline_model_parallel_size)
    model = sum(stages)
    node = min(links.gpus_per_node, len(destinations))
    return {
        "case": case.name,
        "plan_s": plan_s,
        "model_bytes": model,
        "exact_sent_bytes": sent,
        "exact_received_bytes": received,
        "full_sent_bytes": max(stages),
        "full_received_bytes": model,
        "groups_per_rollout_rank": max(traffic[rank].num_groups for rank in destinations),
        "exact_s": max(sent, received) / links.network,
        "full_by_stages_s": model / links.network,
        "full_at_best_s": max(max(stages) / links.network, model / (node * links.network), model / links.nvlink),
    }


def _stage_bytes(sources: dict[int, RankLayout], num_stages: int) -> list[int]:
    """Bytes of each pipeline stage's distinct blocks."""
    per_stage = len(sources) // num_stages
    found = []
    for stage in range(num_stages):
        layouts = {id(layout): layout for rank, layout in sources.items() if rank // per_stage == stage}
        blocks = {(block.name, block.canonical): block.num_elements for layout in layouts.values() for block in layout.blocks}
        found.append(sum(blocks.values()) * BYTES_PER_ELEMENT)
    return found
