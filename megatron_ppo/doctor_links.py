"""What doctor measures between ranks: every pair of meshes, over the same ``Bridge`` and ``DataBus`` that a run uses.

    training a -> rollout x    training a -> rollout y     one rank of each mesh on each node speaks for it; a link is measured by
    rollout x -> training a    ...                         itself, in both directions, while all other ranks wait
    training a -> training b   rollout x -> rollout y

Bandwidth is that of a broadcast of 64 MiB, as in a weight sync; latency that of a broadcast of 8 bytes. A link that does not come up, or
stops, is a finding of its own after ``LINK_TIMEOUT_S``; the others are measured all the same.
"""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch

from megatron_ppo import device
from megatron_ppo.bridge import Bridge
from megatron_ppo.data_bus import DataBus, DataHandle
from megatron_ppo.doctor_page import Finding
from megatron_ppo.types import TrajectoryBatch
from megatron_ppo.world import World

LINK_TIMEOUT_S = 30.0
"""For a link to come up, and for each transfer on it."""
_OTHERS_WAIT = timedelta(minutes=30)
"""For two ranks to measure their link, however slow it is; a rank that ends is its launcher's to notice."""
_MAX_LINKS = 64
_MESSAGE_BYTES = 64 * 2**20
_NUM_MESSAGES = 3
_NUM_PINGS = 20
_BUS_TOKENS = 2 * 2**20
"""Tokens of the batch on the data bus: 24 MiB with its log-probs."""
_REMEDY = (
    "is a firewall between the hosts, or is the address one that the other host cannot reach? "
    "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the interface; NCCL_DEBUG=INFO says which one NCCL took"
)


@dataclass(frozen=True)
class Link:
    """Two ranks between which something is measured."""

    name: str
    first: int
    second: int
    """Global ranks."""
    kind: Literal["groups", "bus"] = "groups"
    """groups: of the collectives' backend. bus: the second pulls from the first."""


def choose_links(training_ranks: Sequence[int], rollout_ranks: Sequence[int], nodes: Sequence[str]) -> tuple[list[Link], int]:
    """The links to measure, and how many there would be without the limit on their number. ``nodes[global rank]`` names a node.

    The first rank of a mesh on each node speaks for it; a mesh that has one node only also shows its first and last rank.
    """
    training, rollout = (_speakers(ranks, nodes) for ranks in (training_ranks, rollout_ranks))
    colocated = list(training_ranks) == list(rollout_ranks)
    links: list[Link] = []
    if not colocated:
        links += [Link("training - rollout", a, x) for a in training[:1] for x in rollout]
        links += [Link("training - rollout", a, x) for a in training[1:] for x in rollout[:1]]
        links += [Link("data bus", x, training[0], "bus") for x in rollout]
    for name, speakers, ranks in (("training", training, training_ranks), ("rollout", rollout, rollout_ranks)):
        if colocated and name == "rollout":
            continue
        others = speakers[1:] or ([ranks[-1]] if len(ranks) > 1 else [])
        links += [Link("inside both meshes" if colocated else f"inside {name}", speakers[0], other) for other in others]
    return links[:_MAX_LINKS], len(links)


def _speakers(ranks: Sequence[int], nodes: Sequence[str]) -> list[int]:
    first: dict[str, int] = {}
    for rank in ranks:
        first.setdefault(nodes[rank], rank)
    return list(first.values())


def measure_links(world: World) -> list[Finding]:
    """Measure all links, one after another. Collective over the launch; the findings on global rank 0, an empty list on all others."""
    nodes = [name.decode() for name in world.store.multi_get([f"node/{rank}" for rank in range(world.world_size)])]
    links, num_wanted = choose_links(world.training_ranks, world.rollout_ranks, nodes)
    bus = DataBus(world, timeout_s=LINK_TIMEOUT_S)
    found: list[Finding] = []
    for number, link in enumerate(links):
        if world.global_rank in (link.first, link.second):
            outcome = _attempt(functools.partial(_measure, world, bus, link, number))
            world.store.set(f"doctor/link/{number}/{world.global_rank}", json.dumps(outcome))
        ends = [f"doctor/link/{number}/{rank}" for rank in (link.first, link.second)]
        world.store.wait(ends, _OTHERS_WAIT)
        if world.global_rank == 0:
            found.append(_finding(world, nodes, link, [json.loads(world.store.get(end)) for end in ends]))
    if world.global_rank == 0:
        if num_wanted > len(links):
            found.append(Finding("links", f"{len(links)} of {num_wanted} were measured"))
        if not links:
            found.append(Finding("links", "one rank has none"))
        return found
    return []


def _attempt(measure: Callable[[], dict[str, float]]) -> dict[str, float | str]:
    try:
        return dict(measure())
    except Exception as error:  # a finding; the other links are still to be measured
        return {"error": describe(error)}


def _measure(world: World, bus: DataBus, link: Link, number: int) -> dict[str, float]:
    """This end's part of one link: what it received."""
    if link.kind == "bus":
        return _over_bus(world, bus, link, number)
    bridge = Bridge(f"doctor/{number}", (link.first, link.second), world, device.process_group_backend(), LINK_TIMEOUT_S)
    try:
        latency_s = _seconds(bridge, world, torch.zeros(8, dtype=torch.uint8, device=bridge.device), _NUM_PINGS)
        message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8, device=bridge.device)
        transfer_s = _seconds(bridge, world, message, _NUM_MESSAGES)
    finally:
        bridge.close()
    return {"latency_us": 1e6 * latency_s, "gb_per_s": _MESSAGE_BYTES / transfer_s / 1e9}


def _seconds(bridge: Bridge, world: World, message: torch.Tensor, num_messages: int) -> float:
    """Median time in which this end receives ``message``, of several; the first one, which opens connections, is not counted."""
    times: list[float] = []
    for source in bridge.ranks:
        for _ in range(1 + num_messages):
            bridge.barrier()
            start = time.perf_counter()
            bridge.broadcast(message, source)
            device.synchronize()
            if source != world.global_rank:
                times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _over_bus(world: World, bus: DataBus, link: Link, number: int) -> dict[str, float]:
    handle = DataHandle(link.first, f"doctor/{number}")
    if world.global_rank == link.first:
        bus.put(_batch(_BUS_TOKENS), handle.key)
        world.store.wait([f"doctor/link/{number}/{link.second}"], timedelta(seconds=2 * LINK_TIMEOUT_S))
        bus.delete(handle)
        return {}
    bus.wait([handle], timeout_s=LINK_TIMEOUT_S)  # until it is there; what counts is the pull
    start = time.perf_counter()
    batch = bus.get(handle, LINK_TIMEOUT_S)
    seconds = time.perf_counter() - start
    assert isinstance(batch, TrajectoryBatch)
    return {"gb_per_s": batch.tokens.numel() * 12 / seconds / 1e9}


def _batch(num_tokens: int) -> TrajectoryBatch:
    def one() -> torch.Tensor:
        return torch.ones(1, dtype=torch.int64)  # a tensor of its own: safetensors refuses shared memory

    return TrajectoryBatch(
        tokens=torch.zeros(1, num_tokens, dtype=torch.int64),
        prompt_lengths=one(),
        response_lengths=one(),
        rollout_log_probs=torch.zeros(1, num_tokens),
        scores=torch.zeros(1),
        truncated=torch.zeros(1, dtype=torch.bool),
        prompt_ids=one(),
        sample_indices=one(),
        version=0,
    )


def _finding(world: World, nodes: Sequence[str], link: Link, outcomes: Sequence[dict[str, float | str]]) -> Finding:
    """One line of a link, out of what both ends saw."""
    first, second = (f"{world.describe(rank)} on node {nodes[rank]}" for rank in (link.first, link.second))
    faults = [
        f"rank {rank}: {outcome['error']}" for rank, outcome in zip((link.first, link.second), outcomes, strict=True) if "error" in outcome
    ]
    if faults:
        return Finding(link.name, f"{first} and {second}: {'; '.join(faults)}", "broken", _REMEDY)
    at_first, at_second = outcomes
    if link.kind == "bus":
        return Finding(link.name, f"{at_second['gb_per_s']:.2f} GB/s, {second} pulls from {first}")
    latency = statistics.mean(float(outcome["latency_us"]) for outcome in outcomes)
    speeds = f"{at_second['gb_per_s']:.2f} GB/s there, {at_first['gb_per_s']:.2f} GB/s back, {latency:.0f} us"
    return Finding(link.name, f"{speeds}; {first} and {second}, {device.process_group_backend()}")


def describe_failure(error: BaseException) -> Finding:
    """The finding of a launch whose ranks did not come together at all."""
    return Finding("launch", describe(error), "broken", _REMEDY)


def describe(error: BaseException) -> str:
    """Class and first words of an error."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
