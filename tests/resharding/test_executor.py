"""The executor over real gloo groups on both sides of a bridge, and its parts alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from dense_layouts import Dense, engine_mesh, fill, shard_elements, trainer_mesh
from gloo_support import PADDING, a_world, allocated_bytes, transposed, values
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_support import numbered, tiny
from spawn import run_ranks
from torch import Tensor

from megatron_ppo.bridge import Bridge
from megatron_ppo.families import canonical_tensors
from megatron_ppo.resharding.boxes import volume
from megatron_ppo.resharding.checksum import compare_checksums, destination_checksums, source_checksums, tensor_checksum
from megatron_ppo.resharding.executor import GroupBridge, ReshardExecutor, Work, compare_descriptions, slice_boxes
from megatron_ppo.resharding.layout import RankLayout, view
from megatron_ppo.resharding.megatron_layout import megatron_layout
from megatron_ppo.resharding.megatron_mesh import MegatronParallel, RankCoordinates
from megatron_ppo.resharding.plan import ReshardPlan, build_plan
from megatron_ppo.resharding.vllm_layout import vllm_layout


def test_slices_of_a_box_tile_it_in_order() -> None:
    for shape in ((), (7,), (3, 4), (2, 3, 5), (4, 1, 3)):
        full = torch.arange(volume(tuple((0, n) for n in shape))).reshape(shape)
        for start, stop in itertools.combinations_with_replacement(range(full.numel() + 1), 2):
            parts = [view(full, box).reshape(-1) for box in slice_boxes(shape, start, stop)]
            assert torch.cat([*parts, torch.empty(0, dtype=full.dtype)]).tolist() == list(range(start, stop))


# ---- over gloo: one launch, many cases


def case_topologies(model: Dense, num_training: int, num_rollout: int) -> list[tuple[dict[int, RankLayout], dict[int, RankLayout]]]:
    pairs = []
    for tp, pp in ((1, 1), (2, 1), (1, 2), (2, 2)):
        dp = num_training // (tp * pp)
        if not dp:
            continue
        for rollout_tp in (1, 2):
            sources = trainer_mesh(model, tp, pp, dp)
            pairs.append((sources, engine_mesh(model, rollout_tp, num_rollout // rollout_tp, num_training)))
    return pairs


def sync_all_cases(rank: int, world_size: int, num_training: int) -> list[str]:
    """Every topology, model, dtype and bucket size, on one set of processes; returns what differed."""
    torch.set_num_threads(1)
    world = a_world(rank, world_size, num_training)
    wrong: list[str] = []
    number = 0
    kinds = [
        (torch.float32, torch.bfloat16, 250, True),
        (torch.float32, torch.float32, 1 << 20, False),
        (torch.bfloat16, torch.bfloat16, 4096, True),
    ]
    for model in (Dense(), Dense(tied=True, bias=True, num_layers=2), Dense(qk_norm=True, num_layers=2, vocab=130)):
        for sources, destinations in case_topologies(model, num_training, world_size - num_training):
            number += 1
            trained, wire, bucket_bytes, turned = kinds[number % len(kinds)]
            plan = build_plan(sources, destinations, bytes_per_element=wire.itemsize)
            bridges: list[Bridge] = []

            def make(name: str, ranks: Sequence[int], number: int = number, bridges: list[Bridge] = bridges) -> Bridge:
                bridges.append(Bridge(f"{number}/{name}", ranks, world, "gloo", 60))
                return bridges[-1]

            executor = ReshardExecutor(plan, rank, make, bucket_bytes=bucket_bytes, transfer_dtype=wire)
            full = values(model, trained)
            what = f"case {number} {wire} {bucket_bytes} on rank {rank}"
            if rank < num_training:
                own = fill(sources[rank], full, padding=float("nan"))
                executor.send({name: torch.zeros_like(tensor) for name, tensor in own.items()})
                stats = executor.send(transposed(own) if turned else own)
                assert stats.bytes_received == 0
                if stats.bytes_sent != plan.summary(bucket_bytes)[rank].bytes_sent:
                    wrong.append(f"{what}: sent {stats.bytes_sent}")
            else:
                wrong += [f"{what}: {fault}" for fault in received_wrongly(executor, destinations[rank], full)]
            for bridge in bridges:
                bridge.close()
    return wrong


def received_wrongly(executor: ReshardExecutor, layout: RankLayout, full: dict[str, Tensor]) -> list[str]:
    """Receive twice (zeros first: the second sync must leave none) and compare with slicing the cast full tensors, bit for bit."""
    wire = executor.transfer_dtype
    expected = fill(layout, {name: tensor.to(wire) for name, tensor in full.items()}, padding=PADDING)
    live = {name: torch.full(shape, PADDING, dtype=wire) for name, shape in layout.shapes.items()}
    executor.receive(live)
    stats = executor.receive(live)
    faults = [name for name in expected if not torch.equal(live[name].view(torch.uint8), expected[name].view(torch.uint8))]
    if stats.bytes_received != shard_elements(layout) * wire.itemsize:
        faults.append(f"received {stats.bytes_received} bytes, the shard has {shard_elements(layout) * wire.itemsize}")
    if executor.bucket_bytes < 1000 and stats.num_buckets < stats.bytes_received // executor.bucket_bytes:
        faults.append(f"{stats.num_buckets} buckets")
    return faults


@pytest.mark.parametrize(("num_training", "num_rollout"), [(2, 2), (4, 2)])
def test_b31_every_rollout_rank_gets_its_shard_bit_for_bit(num_training: int, num_rollout: int) -> None:
    """B31: cast on the source as ``w.to(bfloat16)``, column-major sources, buckets smaller than a box; padding untouched; bytes counted."""
    results = run_ranks(sync_all_cases, num_training + num_rollout, num_training, timeout_s=120)
    assert [wrong for rank in results for wrong in rank] == []


# ---- on one rank: colocated, so that a plan needs no other process


def local_executor(
    dtype: torch.dtype = torch.bfloat16, bucket_bytes: int = 4096, model: Dense | None = None
) -> tuple[ReshardExecutor, dict[str, Tensor], dict[str, Tensor]]:
    """An executor of one rank that is source and destination, the source's parameters, and empty destination parameters."""
    model = model or Dense(num_layers=1)
    sources, destinations = trainer_mesh(model, 1, 1), engine_mesh(model, 1, 1, 0)
    plan = build_plan(sources, destinations, bytes_per_element=dtype.itemsize)
    executor = ReshardExecutor(plan, 0, no_group, bucket_bytes=bucket_bytes, transfer_dtype=dtype)
    live = {name: torch.full(shape, PADDING, dtype=dtype) for name, shape in destinations[0].shapes.items()}
    return executor, fill(sources[0], values(model, torch.float32)), live


def no_group(name: str, ranks: Sequence[int]) -> GroupBridge:
    raise AssertionError(f"{name} of {ranks} needs no group")


def test_a_colocated_rank_copies_without_a_group() -> None:
    executor, source, live = local_executor()
    stats = executor.exchange(source, live)
    model = Dense(num_layers=1)
    cast = {name: tensor.to(torch.bfloat16) for name, tensor in values(model, torch.float32).items()}
    expected = fill(engine_mesh(model, 1, 1, 0)[0], cast, padding=PADDING)
    assert all(torch.equal(live[name], expected[name]) for name in expected)
    assert stats.bytes_received == stats.bytes_sent == executor.plan.summary(executor.bucket_bytes)[0].bytes_received
    with pytest.raises(RuntimeError, match="call exchange"):
        executor.send(source)
    with pytest.raises(RuntimeError, match="call exchange"):
        executor.receive(live)


def test_stacked_experts_and_parameters_inside_larger_storages_are_read_and_written_in_place() -> None:
    """Boxes of three dims on one side, of two on the other; parameters that are parts of one buffer, as a flat optimizer keeps them."""
    network = tiny("mixtral", vocab_size=130, num_layers=2, num_experts=4)
    layouts = (
        megatron_layout(network, MegatronParallel(), RankCoordinates(0, 0, 0)),
        vllm_layout(network, tensor_parallel_size=1, tp_rank=0),
    )
    plan = build_plan({0: layouts[0]}, {0: layouts[1]}, bytes_per_element=4)
    executor = ReshardExecutor(plan, 0, no_group, bucket_bytes=1000, transfer_dtype=torch.float32)
    full = {name: tensor.float() for name, tensor in numbered(canonical_tensors(network)).items()}
    sources, live = (inside_one_storage(layout) for layout in layouts)
    for name, tensor in fill(layouts[0], full, PADDING).items():
        sources[name].copy_(tensor)
    executor.exchange(sources, live)
    expected = fill(layouts[1], full, PADDING)
    assert all(torch.equal(live[name], expected[name]) for name in expected)


def inside_one_storage(layout: RankLayout) -> dict[str, Tensor]:
    """Parameters with storage offsets of their own."""
    sizes = [torch.Size(shape).numel() for shape in layout.shapes.values()]
    parts = torch.full((sum(sizes) + 5,), PADDING)[5:].split(sizes)
    return {name: part.view(shape) for (name, shape), part in zip(layout.shapes.items(), parts, strict=True)}


def test_b28_b31_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    """B28, B31: missing or unknown names, other shapes, another dtype (which mcore's resharding reinterprets), tied memory, no tensors."""
    executor, source, live = local_executor()
    norm, head = "model.norm.weight", "lm_head.weight"
    tied = live["model.embed_tokens.weight"]
    cases = [
        (source, {n: t for n, t in live.items() if n not in (norm, head)}, rf"missing {head}, {norm}|missing {norm}, {head}"),
        (source, live | {"adapter.weight": torch.zeros(1)}, r"fills no adapter\.weight"),
        (source, live | {norm: torch.zeros(17, dtype=torch.bfloat16)}, r"model\.norm\.weight has shape \(17,\), the plan \(16,\)"),
        (source, live | {norm: torch.zeros(16)}, r"model\.norm\.weight is torch\.float32, the wire torch\.bfloat16"),
        (source, live | {head: tied}, "share memory, so that a tied weight would be written twice"),
        ({n: t for n, t in source.items() if "final" not in n}, live, r"missing decoder\.final_layernorm\.weight"),
        (source | {"output_layer.weight": torch.zeros(24, 16, dtype=torch.int16)}, live, r"torch\.int16, which is not cast"),
        ({}, live, "missing"),
        (source, {}, "missing"),
    ]
    for given_source, given_live, message in cases:
        with pytest.raises(ValueError, match=message):
            executor.exchange(given_source, given_live)
        assert all(bool((tensor == PADDING).all()) for name, tensor in live.items())
        with pytest.raises(ValueError, match=message):
            compare_descriptions([executor.describe(sources=given_source, destinations=given_live)])
    compare_descriptions([executor.describe(sources=source, destinations=live)] * 2)


def test_b31_ends_that_disagree_both_raise() -> None:
    """B31: both sides compare the same descriptions, so that the same error is raised on both, before the first byte."""
    here = local_executor()
    others = ((local_executor(torch.float16), "dtype on the wire differs"), (local_executor(bucket_bytes=64), "bucket_bytes differs"))
    for other, message in others:
        descriptions = [one.describe(sources=source, destinations=live) for one, source, live in (here, other)]
        with pytest.raises(ValueError, match=message):
            compare_descriptions(descriptions)
    wider = local_executor(model=Dense(num_layers=1, ffn=32))
    with pytest.raises(ValueError, match=r"plan digest differs: [0-9a-f]{64} on ranks"):
        compare_descriptions([one.describe(sources=source, destinations=live) for one, source, live in (here, wider)])
    with pytest.raises(ValueError, match="counts 2 bytes an element"):
        ReshardExecutor(here[0].plan, 0, no_group, bucket_bytes=64, transfer_dtype=torch.float32)
    with pytest.raises(ValueError, match="cannot hold one element"):
        ReshardExecutor(here[0].plan, 0, no_group, bucket_bytes=1, transfer_dtype=torch.bfloat16)


class Failing:
    """A group whose peer is lost at the third broadcast."""

    def __init__(self) -> None:
        self.started = 0

    def broadcast(self, tensor: Tensor, source: int, async_op: bool = False) -> Work | None:
        self.started += 1
        if self.started == 3:
            raise ConnectionError("peer lost")
        return None


def test_a_transfer_that_fails_midway_raises_and_ends_the_executor() -> None:
    model = Dense(num_layers=1)
    sources = trainer_mesh(model, 1, 1)
    plan = build_plan(sources, engine_mesh(model, 1, 1, 1), bytes_per_element=4)
    executor = ReshardExecutor(plan, 0, lambda name, ranks: Failing(), bucket_bytes=64, transfer_dtype=torch.float32)
    with pytest.raises(ConnectionError, match="peer lost"):
        executor.send(fill(sources[0], values(model, torch.float32)))
    with pytest.raises(RuntimeError, match="failed midway"):
        executor.send(fill(sources[0], values(model, torch.float32)))


def test_whole_buckets_of_a_parameter_are_sent_and_received_in_place() -> None:
    """No copy in between where one piece of a row-major parameter fills a bucket."""
    model = Dense(num_layers=1, hidden=64, ffn=128, head_dim=16, vocab=500)
    layouts = trainer_mesh(model, 1, 1)[0], engine_mesh(model, 1, 1, 0)[0]
    plan = build_plan({0: layouts[0]}, {1: layouts[1]}, bytes_per_element=2)
    full, log = values(model, torch.bfloat16), list[tuple[int, int]]()
    source, live = fill(layouts[0], full), fill(layouts[1], full)
    for rank, parameters in ((0, source), (1, live)):
        log.clear()
        executor = ReshardExecutor(plan, rank, lambda *_: Recording(log, [0]), bucket_bytes=4096, transfer_dtype=torch.bfloat16)
        (executor.send if rank == 0 else executor.receive)(parameters)
        own = {tensor.untyped_storage().data_ptr() for tensor in parameters.values()}
        in_place = sum(address in own for address, _ in log)
        large = [tensor.nbytes // 4096 for name, tensor in full.items() if "k_proj" not in name and "v_proj" not in name]
        assert in_place >= sum(large) and len({address for address, _ in log} - own) <= 2
        assert max(flying for _, flying in log) == 4, "what needs no buffer does not wait for one"
        assert len(log) == plan.summary(4096)[rank].num_buckets


class Recording:
    """A group that remembers which memory it was given, and how many broadcasts are under way."""

    def __init__(self, log: list[tuple[int, int]], under_way: list[int]) -> None:
        self.log, self.under_way = log, under_way

    def broadcast(self, tensor: Tensor, source: int, async_op: bool = False) -> Work | None:
        self.under_way[0] += 1
        self.log.append((tensor.untyped_storage().data_ptr(), self.under_way[0]))
        return Landing(self.under_way)


class Landing:
    """Ends when waited for."""

    def __init__(self, under_way: list[int]) -> None:
        self.under_way = under_way

    def wait(self) -> None:
        self.under_way[0] -= 1


def test_two_buffers_are_all_the_memory_and_two_broadcasts_all_that_fly() -> None:
    model = Dense(num_layers=1, hidden=64, ffn=128, head_dim=16, vocab=500)
    sources = trainer_mesh(model, 1, 1)
    plan = build_plan(sources, engine_mesh(model, 2, 2, 1), bytes_per_element=2)
    log: list[tuple[int, int]] = []
    under_way = [0]
    bucket_bytes = 4096
    executor = ReshardExecutor(
        plan, 0, lambda name, ranks: Recording(log, under_way), bucket_bytes=bucket_bytes, transfer_dtype=torch.bfloat16
    )
    weights = transposed(fill(sources[0], values(model, torch.float32)))
    allocated = allocated_bytes(lambda: executor.send(weights))
    assert len({address for address, _ in log}) == 2
    assert max(flying for _, flying in log) == 2 and under_way == [0]
    assert len(log) == plan.summary(bucket_bytes)[0].num_messages
    assert 0 < sum(allocated) <= 2 * bucket_bytes
    log.clear()
    assert sum(allocated_bytes(lambda: executor.send(weights))) == 0, "the second sync must reuse the buffers"


# ---- the order in which buckets are served


@settings(max_examples=12, deadline=None)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(300, 3000))
def test_the_global_order_cannot_deadlock(tp: int, pp: int, rollout_tp: int, replicas: int, bucket_bytes: int) -> None:
    """Ranks that start their broadcasts in order, two at a time, each of which ends when all members have started it: all end."""
    model = Dense(num_layers=2, kv_heads=4)
    sources = trainer_mesh(model, tp, pp, 2)
    destinations = engine_mesh(model, rollout_tp, replicas, len(sources))
    plan = build_plan(sources, destinations, bytes_per_element=2)
    queues = {rank: broadcasts_of(plan, rank, bucket_bytes) for rank in [*sources, *destinations]}
    members = {group.name: group.ranks for group in plan.groups}
    ended: set[tuple[str, int]] = set()
    while any(queues.values()):
        started = {rank: set(queue[:2]) for rank, queue in queues.items()}
        ready = {b for begun in started.values() for b in begun if all(b in started[rank] for rank in members[b[0]])} - ended
        assert ready, f"nobody can go on after {len(ended)} buckets"
        ended |= ready
        for queue in queues.values():  # a rank waits for its oldest broadcast first
            while queue and queue[0] in ended:
                queue.pop(0)


def broadcasts_of(plan: ReshardPlan, rank: int, bucket_bytes: int) -> list[tuple[str, int]]:
    """(group, number) of a rank's broadcasts in its order, as the executor itself would start them."""
    order: list[tuple[str, int]] = []

    class Counting:
        def __init__(self, name: str) -> None:
            self.name, self.count = name, 0

        def broadcast(self, tensor: Tensor, source: int, async_op: bool = False) -> Work | None:
            order.append((self.name, self.count))
            self.count += 1
            return None

    executor = ReshardExecutor(plan, rank, lambda name, ranks: Counting(name), bucket_bytes=bucket_bytes, transfer_dtype=torch.bfloat16)
    if rank in plan.source_shapes:
        executor.send({name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in plan.source_shapes[rank].items()})
    else:
        executor.receive({name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in plan.destination_shapes[rank].items()})
    return order


# ---- checksums


def test_checksums_name_what_differs() -> None:
    executor, source, live = local_executor()
    executor.exchange(source, live)
    plan = executor.plan
    sent = {0: source_checksums(plan, 0, source, torch.bfloat16)}
    assert compare_checksums(plan, sent, {0: destination_checksums(plan, 0, live)}) == []
    live["model.layers.0.mlp.gate_up_proj.weight"][20, 3] += 1
    found = compare_checksums(plan, sent, {0: destination_checksums(plan, 0, live)})
    assert len(found) == 1
    assert found[0].startswith("model.layers.0.mlp.up_proj.weight [0:16, 0:16]: ")
    assert "at rank 0 (model.layers.0.mlp.gate_up_proj.weight)" in found[0]
    partial = destination_checksums(plan, 0, live)
    partial.pop(next(iter(partial)))
    assert len(compare_checksums(plan, sent, {0: partial})) == 2
    assert len(compare_checksums(plan, {}, {0: partial})) == len(partial) + 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_a_checksum_sees_values_and_places_but_not_strides(shape: list[int], random: Any) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(random.randrange(1 << 30)))
    turned = tensor.permute(*reversed(range(tensor.dim()))).contiguous().permute(*reversed(range(tensor.dim())))
    assert tensor_checksum(tensor) == tensor_checksum(turned)
    assert tensor_checksum(tensor.bfloat16()) == tensor_checksum(tensor, torch.bfloat16)
    flat = tensor.reshape(-1)
    if flat.numel() > 1:
        one, other = random.sample(range(flat.numel()), 2)
        swapped = flat.clone()
        swapped[[one, other]] = flat[[other, one]]
        assert tensor_checksum(swapped)[0] == tensor_checksum(flat)[0]
        assert tensor_checksum(swapped) != tensor_checksum(flat)
    changed = flat.clone()
    changed[random.randrange(flat.numel())] *= -1
    assert tensor_checksum(changed) != tensor_checksum(flat)


def test_a_checksum_in_slices_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(37, 11)
    whole = tensor_checksum(tensor)
    monkeypatch.setattr("megatron_ppo.resharding.checksum._SLICE", 13)
    assert tensor_checksum(tensor) == whole
