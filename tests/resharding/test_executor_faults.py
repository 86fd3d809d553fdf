"""What must not go wrong between real ranks, and how it shows if it does: what megatron-core's own resharding leaves unguarded.

Dtypes that differ are refused and not reinterpreted; replicas cost their source nothing; memory is bounded by the buckets; every block of
a mixture of experts is covered by the proof, and a spoilt one is named.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from checkpoint_support import Mesh, shapes_of
from dense_layouts import Dense, engine_mesh, fill, shard_elements, trainer_mesh
from gloo_support import PADDING, a_world, allocated_bytes, transposed, values
from safetensors.torch import load_file
from spawn import run_ranks
from torch import Tensor
from toy_models import make_toy

from megatron_ppo.bridge import Bridge
from megatron_ppo.data_bus import DataBus, DataHandle
from megatron_ppo.families import EMBEDDING, FAMILIES, LM_HEAD, network_shape
from megatron_ppo.resharding.boxes import box_text
from megatron_ppo.resharding.checksum import compare_checksums, destination_checksums
from megatron_ppo.resharding.executor import ReshardExecutor, TransferStats, compare_descriptions
from megatron_ppo.resharding.layout import RankLayout
from megatron_ppo.resharding.megatron_layout import training_layouts
from megatron_ppo.resharding.megatron_mesh import MegatronParallel
from megatron_ppo.resharding.plan import build_plan
from megatron_ppo.resharding.vllm_layout import vllm_layout
from megatron_ppo.rollout_engine import RemoteRollout, RemoteTraining
from megatron_ppo.weight_synchronizer import WeightSynchronizer
from megatron_ppo.world import World

_BYTES_RECEIVED, _BYTES_SENT, _BYTES_RETRANSMITTED = 128, 200, 208
"""Offsets of ``tcpi_bytes_received``, ``tcpi_bytes_sent`` and ``tcpi_bytes_retrans``, 64 bits each, in the kernel's ``struct tcp_info``."""


class Groups:
    """Makes the bridges of one executor, and closes them."""

    def __init__(self, world: World, prefix: str) -> None:
        self._world = world
        self._prefix = prefix
        self.made: list[Bridge] = []

    def __call__(self, name: str, ranks: Sequence[int]) -> Bridge:
        self.made.append(Bridge(f"{self._prefix}/{name}", ranks, self._world, "gloo", 60))
        return self.made[-1]

    def close(self) -> None:
        """All that were made."""
        for bridge in self.made:
            bridge.close()


# -- bytes on the wire, and memory -----------------------------------------------------------------------------------------


def wire_bytes() -> dict[str, tuple[int, int]]:
    """TCP connection of this process -> bytes that it has sent and received, as the kernel counts them."""
    counts: dict[str, tuple[int, int]] = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(entry))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                name = os.readlink(f"/proc/self/fd/{connection.fileno()}")
        except OSError:  # no socket, or not TCP
            continue
        received, out, again = (struct.unpack_from("Q", info, at)[0] for at in (_BYTES_RECEIVED, _BYTES_SENT, _BYTES_RETRANSMITTED))
        counts[name] = (out - again, received)
    return counts


def moved_since(before: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """(sent, received) since then. What was closed since then belonged to groups of an earlier part, which gloo closes at its own time."""
    moved = [[now - then for now, then in zip(counts, before.get(name, (0, 0)), strict=True)] for name, counts in wire_bytes().items()]
    return sum(sent for sent, _ in moved), sum(received for _, received in moved)


REPLICATED = Dense(num_layers=2, hidden=128, heads=8, kv_heads=2, head_dim=16, ffn=512, vocab=2000)
"""About 4 MB in fp32: what connections and the store exchange beside it is nothing."""


def count_replicas(rank: int, world_size: int) -> dict[int, dict[str, Any]]:
    """Rank 0 trains; 1, 2, then 3 replicas listen. Bytes by the executor's count, by the plan's and by the kernel's, and memory."""
    torch.set_num_threads(1)
    world = a_world(rank, world_size, 1)
    full = values(REPLICATED, torch.float32)
    found: dict[int, dict[str, Any]] = {}
    everyone = Bridge("everyone", range(world_size), world)
    for replicas in range(1, world_size):
        sources, destinations = trainer_mesh(REPLICATED, 1, 1), engine_mesh(REPLICATED, 1, replicas, 1)
        plan = build_plan(sources, destinations, bytes_per_element=4)
        if rank <= replicas:
            groups = Groups(world, f"replicas{replicas}")
            executor = ReshardExecutor(plan, rank, groups, bucket_bytes=1 << 18, transfer_dtype=torch.float32)
            found[replicas] = _count(executor, groups.made[0], sources, destinations, full)
            groups.close()
        everyone.barrier()
    return found


def _count(
    executor: ReshardExecutor,
    group: Bridge,
    sources: dict[int, RankLayout],
    destinations: dict[int, RankLayout],
    full: dict[str, Tensor],
) -> dict[str, Any]:
    rank = executor.rank
    stats: list[TransferStats] = []
    if rank == 0:
        own = transposed(fill(sources[0], full))

        def once() -> None:
            stats.append(executor.send(own))
    else:
        live = {name: torch.full(shape, PADDING) for name, shape in destinations[rank].shapes.items()}

        def once() -> None:
            stats.append(executor.receive(live))

    allocated = allocated_bytes(once)
    group.barrier()  # what was sent before it on the same connections has left the kernel's queues
    before = wire_bytes()
    group.barrier()
    once()
    group.barrier()
    sent, received = moved_since(before)
    found = {
        "stats": stats[-1],
        "plan": executor.plan.summary(executor.bucket_bytes)[rank],
        "sent": sent,
        "received": received,
        "allocated": sum(allocated),
    }
    if rank:
        expected = fill(destinations[rank], full, padding=PADDING)
        found["wrong"] = [name for name in expected if not torch.equal(expected[name], live[name])]
    return found


@pytest.fixture(scope="module")
def replicas() -> list[dict[int, dict[str, Any]]]:
    return run_ranks(count_replicas, 4, timeout_s=120)


def test_replicas_hear_one_broadcast(replicas: list[dict[int, dict[str, Any]]]) -> None:
    """1, 2 and 3 replicas: what is broadcast does not grow, and by the kernel's count every rank takes in its own shard, once.

    gloo passes a broadcast on along a tree, so that the source itself sends at most log2 of the members; as much in all as is taken in.
    """
    shard = 4 * shard_elements(engine_mesh(REPLICATED, 1, 1, 1)[1])
    assert [replicas[0][n]["stats"].bytes_sent for n in (1, 2, 3)] == [shard] * 3
    assert [replicas[0][n]["plan"].bytes_sent for n in (1, 2, 3)] == [shard] * 3
    slack = shard // 100
    for n, depth in ((1, 1), (2, 2), (3, 2)):
        for rank in range(1, n + 1):
            found = replicas[rank][n]
            assert found["wrong"] == []
            assert found["stats"].bytes_received == shard
            assert shard <= found["received"] < shard + slack
        assert replicas[0][n]["received"] < slack
        assert shard <= replicas[0][n]["sent"] < depth * shard + slack
        assert sum(replicas[rank][n]["sent"] for rank in range(n + 1)) < n * shard + n * slack


def test_memory_is_two_buckets_on_every_rank(replicas: list[dict[int, dict[str, Any]]]) -> None:
    """All memory that torch allocates in a first sync, counted, given back or not; weights are 15 times a bucket.

    The source's tensors are column-major: torch turns one that fits into a bucket (two a layer) in a tile of 60 x 60 elements, which it
    gives back before the next.
    """
    tiles = 2 * REPLICATED.num_layers * 60 * 60 * 4
    for rank, counted in enumerate(replicas):
        for n, found in counted.items():
            assert 0 < found["allocated"] <= 2 * (1 << 18) + (tiles if rank == 0 else 0), f"rank {rank} of 1 + {n}"
    assert 4 * shard_elements(engine_mesh(REPLICATED, 1, 1, 1)[1]) > 15 * (1 << 18)


# -- ends that do not fit --------------------------------------------------------------------------------------------------

WIRE = torch.bfloat16
NORM, FUSED = "model.norm.weight", "model.layers.0.mlp.gate_up_proj.weight"


def misfits(own: dict[str, Tensor], live: dict[str, Tensor], model: Dense) -> dict[str, tuple[dict[str, Any], str]]:
    """Case -> what differs from the rest on one side, and what both sides must say."""
    changed = {
        "dtype of a live weight": ({"live": live | {FUSED: live[FUSED].float()}}, f"rank 1: {FUSED} is torch.float32, the wire {WIRE}"),
        "dtype of a trained weight": (
            {"own": own | {"output_layer.weight": own["output_layer.weight"].to(torch.int16)}},
            f"rank 0: output_layer.weight is torch.int16, which is not cast to {WIRE}",
        ),
        "shape": ({"live": live | {NORM: torch.zeros(17, dtype=WIRE)}}, rf"rank 1: {NORM} has shape (17,), the plan (16,)"),
        "missing": ({"live": {n: t for n, t in live.items() if n != FUSED}}, f"rank 1: missing {FUSED}"),
        "missing at its source": (
            {"own": {n: t for n, t in own.items() if n != "decoder.final_layernorm.weight"}},
            "rank 0: missing decoder.final_layernorm.weight",
        ),
        "no tensors at all": ({"live": {}}, f"rank 1: missing {', '.join(live)}"),
        "none to send": ({"own": {}}, f"rank 0: missing {', '.join(own)}"),
        "unknown to the plan": ({"live": live | {"lora.weight": torch.zeros(1, dtype=WIRE)}}, "rank 1: the plan fills no lora.weight"),
        "wire": ({"wire": torch.float16}, "dtype on the wire differs: torch.bfloat16 on ranks [0], torch.float16 on ranks [1]"),
        "bucket": ({"bucket_bytes": 512}, "bucket_bytes differs: 1024 on ranks [0], 512 on ranks [1]"),
        "shapes planned": ({"model": Dense(num_layers=1, ffn=32)}, "plan digest differs: "),
        "order planned": ({"order": True}, "plan digest differs: "),
        "nothing": ({}, ""),
    }
    assert all(isinstance(text, str) for _, text in changed.values()) and model.num_layers == 1
    return changed


def refuse_misfits(rank: int, world_size: int) -> dict[str, str]:
    """Both ends build, describe and compare through the store as a run does; returns what each says, and what was written nonetheless."""
    torch.set_num_threads(1)
    world = a_world(rank, world_size, 1)
    model = Dense(num_layers=1)
    base = trainer_mesh(model, 1, 1)[0]
    own = fill(base, values(model, torch.float32))
    live = {name: torch.full(shape, PADDING, dtype=WIRE) for name, shape in engine_mesh(model, 1, 1, 1)[1].shapes.items()}
    said: dict[str, str] = {}
    for case, (changes, _) in misfits(own, live, model).items():
        mine = changes if rank == 1 else {}
        planned = mine.get("model", model)
        plan = build_plan(trainer_mesh(planned, 1, 1), engine_mesh(planned, 1, 1, 1), bytes_per_element=2)
        if "order" in mine:
            (group,) = plan.groups
            plan = replace(plan, groups=(replace(group, transfers=group.transfers[::-1]),))
        groups = Groups(world, case)
        executor = ReshardExecutor(plan, rank, groups, bucket_bytes=mine.get("bucket_bytes", 1024), transfer_dtype=mine.get("wire", WIRE))
        ends = {"sources": changes.get("own", own)} if rank == 0 else {"destinations": changes.get("live", live)}
        world.store.set(f"{case}/{rank}", executor.describe(**ends))
        try:
            compare_descriptions([world.store.get(f"{case}/{other}").decode() for other in range(2)])
            said[case] = ""
            (executor.send if rank == 0 else executor.receive)(next(iter(ends.values())))
        except ValueError as error:
            said[case] = str(error)
        if said[case] and not all(bool((tensor == PADDING).all()) for tensor in live.values()):
            said[case] += " BUT SOMETHING WAS WRITTEN"
        groups.close()
    expected = fill(engine_mesh(model, 1, 1, 1)[1], {n: t.to(WIRE) for n, t in values(model, torch.float32).items()}, padding=PADDING)
    said["arrived"] = str(rank == 0 or all(torch.equal(live[name], expected[name]) for name in expected))
    Bridge("end", range(2), world).barrier()
    return said


def test_b28_b31_ends_that_do_not_fit_both_say_so_before_the_first_byte() -> None:
    """B28, B31: dtype, shape, order, missing, unknown and no tensors: the same words on both ranks, nothing written, nobody waits."""
    said = run_ranks(refuse_misfits, 2, timeout_s=60)
    model = Dense(num_layers=1)
    own = fill(trainer_mesh(model, 1, 1)[0], values(model, torch.float32))
    live = {name: torch.zeros(shape, dtype=WIRE) for name, shape in engine_mesh(model, 1, 1, 1)[1].shapes.items()}
    for case, (_, text) in misfits(own, live, model).items():
        for rank in range(2):
            assert text in said[rank][case] and bool(text) == bool(said[rank][case]), f"{case} on rank {rank}: {said[rank][case]}"
            assert "SOMETHING WAS WRITTEN" not in said[rank][case]
        assert said[0][case] == said[1][case]
    assert [one["arrived"] for one in said] == ["True", "True"]


# -- the proof of a mixture ------------------------------------------------------------------------------------------------

TP2_EP2_PP2 = Mesh(4, MegatronParallel(2, 2, expert_model_parallel_size=2, expert_tensor_parallel_size=1))
EP2_CUT = Mesh(4, MegatronParallel(1, expert_model_parallel_size=2, expert_tensor_parallel_size=2), transformer_engine_names=True)
MIXTURES: dict[str, tuple[Literal["mixtral", "qwen3_moe"], Mesh, bool]] = {
    "qwen3_moe tp2 ep2 pp2 to tp2": ("qwen3_moe", TP2_EP2_PP2, False),
    "qwen3_moe tp2 ep2 pp2 to whole experts": ("qwen3_moe", TP2_EP2_PP2, True),
    "mixtral ep2, experts cut, one module to tp2": ("mixtral", EP2_CUT, False),
    "mixtral ep2, experts cut, one module to whole experts": ("mixtral", EP2_CUT, True),
}
"""Family, training mesh, and whether each of two rollout ranks holds whole experts."""
TRAINING = 4


class Source:
    """Stands for the training engine: hands out tensors."""

    def __init__(self, bus: DataBus, parameters: dict[str, Tensor]) -> None:
        self.version = 0
        self._bus = bus
        self._parameters = parameters

    def get_weights(self) -> DataHandle:
        """A handle of what it was given."""
        return self._bus.put(self._parameters, f"weights/{self.version}")


class SpoilingEngine:
    """Stands for the rollout worker: receives, and then changes one bit of one element."""

    def __init__(self, executor: ReshardExecutor, live: dict[str, Tensor]) -> None:
        self.version: int | None = None
        self.spoils: str | None = None
        self._executor = executor
        self._live = live

    def set_weights(self, handle: DataHandle) -> TransferStats:
        """One sync."""
        self.version = None
        stats = self._executor.receive(self._live)
        if self.spoils is not None:
            self._live[self.spoils].view(torch.int16).flatten()[-1] ^= 1
        self.version = int(handle.key.rpartition("/")[2])
        return stats

    def live_weights(self) -> dict[str, Tensor]:
        """What it holds."""
        return self._live


def prove_mixtures(rank: int, world_size: int, folders: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Each case: a sync that is right, every block spoilt in turn, and a sync that the last rank spoils."""
    torch.set_num_threads(1)
    world = a_world(rank, world_size, TRAINING)
    everyone = Bridge("everyone", range(world_size), world)
    found = {}
    for number, (case, (family, mesh, whole_experts)) in enumerate(MIXTURES.items()):
        network, stored = network_shape(Path(folders[family])), load_file(Path(folders[family]) / "model.safetensors")
        names = mesh.transformer_engine_names
        sources = training_layouts(network, mesh.parallel, TRAINING, transformer_engine_names=names)
        layouts = [vllm_layout(network, tensor_parallel_size=2, tp_rank=r, expert_parallel=whole_experts) for r in range(2)]
        plan = build_plan(sources, {TRAINING + r: layouts[r] for r in range(2)}, bytes_per_element=2)
        groups = Groups(world, case)
        executor = ReshardExecutor(plan, rank, groups, bucket_bytes=3000, transfer_dtype=WIRE)
        bus = DataBus(world, timeout_s=60)
        synchronizer = WeightSynchronizer(world, bus, executor, verify_always=True)
        if rank < TRAINING:
            source = Source(bus, fill(sources[rank], stored))
            for source.version in (10 * number, 10 * number + 1):
                synchronizer.sync(source, RemoteRollout(world))
                everyone.barrier()
        else:
            training = RemoteTraining(world)
            training.version = 10 * number
            found[case] = _prove(synchronizer, executor, training, layouts[rank - TRAINING], stored, everyone)
        groups.close()
    return found


def _prove(
    synchronizer: WeightSynchronizer,
    executor: ReshardExecutor,
    training: RemoteTraining,
    layout: RankLayout,
    stored: dict[str, Tensor],
    everyone: Bridge,
) -> dict[str, Any]:
    rank, plan = executor.rank, executor.plan
    live = {name: torch.full(shape, PADDING, dtype=WIRE) for name, shape in layout.shapes.items()}
    engine = SpoilingEngine(executor, live)
    verdicts, versions = [_verdict(synchronizer, training, engine)], [engine.version]
    expected = fill(layout, {name: tensor.to(WIRE) for name, tensor in stored.items()}, padding=PADDING)
    found: dict[str, Any] = {"wrong": [name for name in expected if not torch.equal(live[name], expected[name])]}
    blocks = [(transfer, group.source) for group in plan.groups_of(rank) for transfer in group.transfers]
    found["covered"] = sum(transfer.num_elements for transfer, _ in blocks), shard_elements(layout)
    keys = {source: f"checksums/{source}/v{training.version}" for _, source in blocks}
    sent = {source: json.loads(synchronizer._world.store.get(key)) for source, key in keys.items()}
    everyone.barrier()
    found["blocks"] = []
    for block, source in blocks:
        # the last element of the block: a sum that stops short would miss it
        element = live[block.destination_parameter].view(torch.int16)[tuple(stop - 1 for _, stop in block.destination)]
        element ^= 1
        names = f"{block.name} {box_text(block.canonical)}", f"({block.destination_parameter})", f"at rank {source} "
        found["blocks"].append((names, compare_checksums(plan, sent, {rank: destination_checksums(plan, rank, live)})))
        element ^= 1
    training.finished_update()
    if rank == max(plan.destination_shapes):
        engine.spoils = next(block.destination_parameter for block, _ in blocks if block.destination_parameter.endswith("w2_weight"))
        found["spoilt"] = engine.spoils
    verdicts.append(_verdict(synchronizer, training, engine))
    versions.append(engine.version)
    everyone.barrier()
    return found | {"verdicts": verdicts, "versions": versions}


def _verdict(synchronizer: WeightSynchronizer, training: RemoteTraining, engine: SpoilingEngine) -> str:
    try:
        synchronizer.sync(training, engine)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def proofs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], list[dict[str, dict[str, Any]]]]:
    """Folders of the families, and what the two rollout ranks found."""
    root = tmp_path_factory.mktemp("mixtures")
    folders = {name: make_toy(root / name, name, hidden_size=32, head_dim=8, ffn=16) for name in ("mixtral", "qwen3_moe")}
    texts = {name: str(folder) for name, folder in folders.items()}
    return folders, run_ranks(prove_mixtures, TRAINING + 2, texts, timeout_s=280)[TRAINING:]


@pytest.mark.parametrize("case", list(MIXTURES))
def test_the_proof_covers_every_block_of_a_mixture(proofs: tuple[dict[str, Path], list[dict[str, Any]]], case: str) -> None:
    """Experts over expert-parallel ranks arrive in their slots, and one bit of any block, changed at its end, is found and named.

    What is not proved may not be sampled from: the engine that was spoilt has no version, the other has.
    """
    family, _, whole_experts = MIXTURES[case]
    folder, (whole, spoilt) = proofs[0][family], (one[case] for one in proofs[1])
    version = 10 * list(MIXTURES).index(case)
    for found in (whole, spoilt):
        assert found["wrong"] == []
        assert found["covered"][0] == found["covered"][1]
        for names, differences in found["blocks"]:
            assert len(differences) == 1 and all(name in differences[0] for name in names), (names, differences)
    assert whole["verdicts"] == ["", ""] and whole["versions"] == [version, version + 1]
    assert spoilt["verdicts"][0] == "" and spoilt["versions"] == [version, None]
    verdict = spoilt["verdicts"][1]
    assert verdict.startswith(f"1 blocks of weights v{version + 1} on rank 5 (rollout rank 1) are not those that were sent"), verdict
    assert f"({spoilt['spoilt']})" in verdict

    experts = FAMILIES[family].experts
    assert experts is not None
    proved = [{names[0].split(" ")[0] for names, _ in found["blocks"]} for found in (whole, spoilt)]
    everything = set(shapes_of(folder))
    of_experts = {name for name in everything if f".{experts.block}.experts." in name}
    assert proved[0] | proved[1] == everything
    for names in proved:
        assert names >= everything - of_experts - {EMBEDDING, LM_HEAD}
        assert len(names & of_experts) == len(of_experts) // (2 if whole_experts else 1)
