"""Full tensors on their way into an engine's loader: what arrives, what is said where the loader or a rank fails, slow receivers.

Real gloo groups; the loader at the end is a function here, so that it can fail. Real engines are in ``test_other_model_jobs.py``.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_config import two_by_two
from other_models import make_other
from spawn import free_port, rank_environment, run_ranks, start_process
from torch import Tensor
from train_support import promised

from megatron_ppo.bridge import Bridge
from megatron_ppo.families import canonical_tensors
from megatron_ppo.generic_network import describe_network
from megatron_ppo.resharding.executor import compare_descriptions
from megatron_ppo.resharding.fsdp_layout import fsdp_layouts
from megatron_ppo.resharding.hf_checkpoint import HFCheckpoint, load_hf_weights
from megatron_ppo.resharding.hf_weight_loader import HFWeightLoader, compare_full
from megatron_ppo.watchdog import Watchdog
from megatron_ppo.world import World, init_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def parts(world: World, folder: str, load: Callable[[Iterable[tuple[str, Tensor]]], None], dtype: torch.dtype) -> Any:
    """Two training ranks with uneven rows of each tensor; the rest receive: (this rank's loader, its parameters)."""
    torch.set_num_threads(1)
    network = describe_network(folder)
    layouts = fsdp_layouts(network, world_size=2, shard_size=2)
    own: dict[str, Tensor] = {}
    if world.is_training:
        own = {name: torch.zeros(shape) for name, shape in layouts[world.rank].shapes.items()}
        load_hf_weights(folder, layouts[world.rank], own)
    loader = HFWeightLoader(
        canonical_tensors(network),
        layouts,
        rank=world.global_rank,
        training_ranks=world.training_ranks,
        rollout_ranks=world.rollout_ranks,
        make_group=lambda name, ranks: Bridge(name, ranks, world, timeout_s=100),
        transfer_dtype=dtype,
        device=torch.device("cpu"),
        load=load if world.is_rollout else None,
    )
    return loader, own


def deliver(rank: int, world_size: int, folder: str) -> Any:
    """Two whole syncs, the second to a receiver that sleeps; then one whose loader stops in the middle."""
    taken: list[tuple[str, Tensor]] = []
    mood = ["whole"]

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        taken.clear()
        for number, pair in enumerate(weights):
            if mood[0] == "slow" and rank == 2 and number < 2:
                time.sleep(1.5)
            if mood[0] == "unknown" and number == last:  # nobody is left waiting for it
                raise KeyError(pair[0])
            if mood[0] == "idle" and number == 3:
                return
            taken.append(pair)

    world = init_world(two_by_two(str(Path(folder).parent)))
    loader, own = parts(world, folder, load, torch.bfloat16)
    last = len(HFCheckpoint(folder).shapes) - 1
    end = Bridge("end", range(world_size), world, timeout_s=100)
    compare_descriptions([str(text) for text in end.all_gather_objects(loader.describe(sources=own))])
    found: dict[str, Any] = {"full": loader.full_bytes}
    loader.keeps_checksums = True
    for mood[0] in ("whole", "slow"):
        stats = loader.send(own) if world.is_training else loader.receive({})
        found[mood[0]] = (stats.bytes_sent, stats.bytes_received, dict(loader.checksums))
        found["tensors"] = dict(taken)
        end.barrier()
    mood[0] = "unknown" if rank == 2 else "idle"
    found["errors"] = []
    for _ in range(2):
        try:
            if world.is_training:
                loader.send(own)
                found["errors"].append("")
                break
            loader.receive({})
        except RuntimeError as error:
            found["errors"].append(str(error))
    return found


def test_full_tensors_arrive_and_failures_are_said(tmp_path: Path) -> None:
    """Rows of three families' worth of shapes: stacked experts come one by one, bf16 is rounded once, at the source."""
    two_by_two(str(tmp_path))
    folder = make_other(tmp_path / "olmoe", "olmoe", vocab_size=131)
    checkpoint = HFCheckpoint(folder)
    first, second, slow, idle = run_ranks(deliver, 4, str(folder), timeout_s=150)
    assert first["full"] == 2 * sum(torch.Size(shape).numel() for shape in checkpoint.shapes.values())
    assert first["whole"][:2] == (first["full"], 0) and second["whole"][:2] == (0, 0)
    for one in (slow, idle):
        for kind in ("whole", "slow"):
            assert one[kind][:2] == (0, one["full"])
            assert compare_full(first[kind][2], one[kind][2]) == []
        assert set(one["tensors"]) == set(checkpoint.shapes)
        assert all(torch.equal(tensor, checkpoint.read(name).bfloat16()) for name, tensor in one["tensors"].items())
    name = list(slow["tensors"])[-1]
    assert slow["errors"][0] == f"the engine's own loader failed, at {name}: '{name}'"
    assert f"did not take {len(checkpoint.shapes) - 4} tensors" in idle["errors"][0]
    assert "failed midway; restart the run" in slow["errors"][1] and "failed midway; restart the run" in idle["errors"][1]
    assert compare_full(first["whole"][2], {**slow["whole"][2], name: [1, 2]})[0].startswith(f"{name}: checksums ")
    assert len(compare_full(first["whole"][2], {})) == len(checkpoint.shapes)


def sync_for_ever(rank: int, world_size: int, folder: str) -> None:
    """One rank, whose loader takes its time."""

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        for _ in weights:
            time.sleep(0.01)

    world = init_world(two_by_two(str(Path(folder).parent)))
    loader, own = parts(world, folder, load, torch.float32)
    with Watchdog(world, 6.0) as watchdog:
        for version in range(1, 10_000):
            with watchdog.phase(f"weight sync v{version}"):
                print(f"begins v{version}", flush=True)
                loader.send(own) if world.is_training else loader.receive({})


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_that_dies_ends_the_others_with_the_phase(tmp_path: Path, victim: int) -> None:
    """The rank that sends, and one that receives."""
    two_by_two(str(tmp_path))
    folder, port = str(make_other(tmp_path / "gpt2", "gpt2")), free_port()
    logs = [tmp_path / f"{rank}.log" for rank in range(4)]
    processes = [start_process(sync_for_ever, (rank, 4, folder), rank_environment(rank, 4, port), logs[rank]) for rank in range(4)]
    try:
        until = time.monotonic() + 100
        while not all(log.exists() and "begins v3" in log.read_text() for log in logs):
            assert time.monotonic() < until, [log.read_text() for log in logs if log.exists()]
            time.sleep(0.05)
        os.kill(processes[victim].pid or 0, signal.SIGKILL)
        for rank, process in enumerate(processes):
            if rank != victim:
                process.join(promised(15))
                assert process.exitcode not in (None, 0), logs[rank].read_text()
                assert "weight sync v" in logs[rank].read_text().partition("lost")[2] or "weight sync v" in logs[rank].read_text()
    finally:
        for process in processes:
            if process.exitcode is None:
                os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
