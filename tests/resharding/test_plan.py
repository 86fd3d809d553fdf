"""The plan alone: it equals slicing the full tensors, writes every element once, and refuses what cannot be right."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch
from dense_layouts import Dense, engine_mesh, fill, shard_elements, trainer_mesh
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_ppo.families import NetworkShape, canonical_tensors, network_shape
from megatron_ppo.resharding.boxes import intersect, subtract, volume
from megatron_ppo.resharding.layout import Block, Ranges, RankLayout, view
from megatron_ppo.resharding.megatron_layout import megatron_layout
from megatron_ppo.resharding.megatron_mesh import MegatronParallel, RankCoordinates
from megatron_ppo.resharding.plan import ReshardPlan, build_plan
from megatron_ppo.resharding.vllm_layout import vllm_layout

PADDING = -1.0


def follow(plan: ReshardPlan, sources: dict[int, dict[str, Tensor]], destinations: dict[int, RankLayout]) -> dict[int, dict[str, Tensor]]:
    """What the plan brings about, done by plain copies; fails where an element is written twice."""
    results = {r: {n: torch.full(s, PADDING, dtype=torch.float64) for n, s in d.shapes.items()} for r, d in destinations.items()}
    for group in plan.groups:
        for rank, transfer in itertools.product(group.destinations, group.transfers):
            target = view(results[rank][transfer.destination_parameter], transfer.destination)
            assert bool((target == PADDING).all()), f"{transfer} writes again what was written"
            target.copy_(view(sources[group.source][transfer.source_parameter], transfer.source))
    return results


def check_equals_slicing(model: Dense, sources: dict[int, RankLayout], destinations: dict[int, RankLayout]) -> ReshardPlan:
    tensors = model.tensors()
    plan = build_plan(sources, destinations, bytes_per_element=2)
    results = follow(plan, {rank: fill(layout, tensors, padding=-7.0) for rank, layout in sources.items()}, destinations)
    summary = plan.summary(1 << 20)
    for rank, layout in destinations.items():
        expected = fill(layout, tensors, padding=PADDING)
        assert results[rank].keys() == expected.keys()
        assert all(torch.equal(results[rank][name], expected[name]) for name in expected)
        assert summary[rank].bytes_received == 2 * shard_elements(layout)
    return plan


MODELS = {
    "llama": Dense(),
    "llama-tied": Dense(tied=True),
    "qwen2-bias": Dense(num_layers=2, bias=True, kv_heads=4),
    "qwen3-norms": Dense(num_layers=2, qk_norm=True, kv_heads=1, head_dim=6, vocab=33),
    "mha": Dense(num_layers=2, kv_heads=8, vocab=64),
}


@pytest.mark.parametrize("family", MODELS)
def test_every_topology_equals_slicing(family: str) -> None:
    model = MODELS[family]
    cases = 0
    for tp, pp, rollout_tp in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8)):
        if model.kv_heads % tp or pp > model.num_layers:
            continue
        for dp, vpp, replicas in {(1, 1, 1), (2, 2 if pp == 2 else 1, 2)}:
            sources = trainer_mesh(model, tp, pp, dp, vpp)
            plan = check_equals_slicing(model, sources, engine_mesh(model, rollout_tp, replicas, len(sources)))
            per_rank = max(plan.summary(1 << 20)[rank].num_groups for rank in plan.destination_shapes)
            # what a shard that spans several training shards cannot do without, and one more where norms spare the busiest sender
            assert dp > 1 or per_rank <= pp * (max(2, tp // rollout_tp + 1) + 1), plan.groups
            cases += 1
    assert cases >= 16


def hf_config(**changes: object) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 130,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        **changes,
    }


REAL = {
    "llama": hf_config(),
    "llama-tied": hf_config(tie_word_embeddings=True),
    "qwen2": hf_config(model_type="qwen2", architectures=["Qwen2ForCausalLM"], tie_word_embeddings=True),
    "qwen3": hf_config(model_type="qwen3", architectures=["Qwen3ForCausalLM"], head_dim=4, num_key_value_heads=4),
}


@pytest.mark.parametrize("family", REAL)
@pytest.mark.parametrize(
    ("tp", "pp", "vpp", "rollout_tp"), [(1, 1, None, 2), (2, 2, None, 1), (2, 2, 2, 8), (4, 1, None, 4), (1, 4, None, 4)]
)
def test_real_layouts_equal_slicing(family: str, tp: int, pp: int, vpp: int | None, rollout_tp: int) -> None:
    """megatron_layout -> vllm_layout, 128-row against 64-row vocabulary padding, shares of the vocabulary that are all padding included."""
    network = network_shape(json.loads(json.dumps(REAL[family])))
    parallel = MegatronParallel(tp, pp, vpp)
    sources = {p * tp + r: megatron_layout(network, parallel, RankCoordinates(0, p, r)) for p in range(pp) for r in range(tp)}
    engines = [vllm_layout(network, tensor_parallel_size=rollout_tp, tp_rank=r) for r in range(rollout_tp)]
    destinations = {100 + i: engines[i % rollout_tp] for i in range(2 * rollout_tp)}
    check_real(network, sources, destinations)


def check_real(network: NetworkShape, sources: dict[int, RankLayout], destinations: dict[int, RankLayout]) -> None:
    """The plan's copies equal slicing, and what a destination receives is what its own share of the model holds."""
    tensors, start = {}, 1
    for tensor in canonical_tensors(network):
        count = torch.Size(tensor.shape).numel()
        tensors[tensor.name] = torch.arange(start, start + count, dtype=torch.float64).reshape(tensor.shape)
        start += count
    plan = build_plan(sources, destinations, bytes_per_element=2)
    results = follow(plan, {rank: fill(layout, tensors) for rank, layout in sources.items()}, destinations)
    summary = plan.summary(1 << 20)
    shards = {id(layout): fill(layout, tensors, padding=PADDING) for layout in destinations.values()}  # replicas share an object
    for rank, layout in destinations.items():
        expected = shards[id(layout)]
        assert results[rank].keys() == expected.keys()
        assert all(torch.equal(results[rank][name], expected[name]) for name in expected)
        assert summary[rank].bytes_received == 2 * shard_elements(layout)


ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
HEADS: dict[str, dict[str, object]] = {
    "8/8 llama": {"num_key_value_heads": 8, "vocab_size": 64},
    "8/4 tied qwen2, vocabulary 67": {"model_type": "qwen2", "num_key_value_heads": 4, "vocab_size": 67, "tie_word_embeddings": True},
    "8/2 qwen3, vocabulary 130": {"model_type": "qwen3", "num_key_value_heads": 2, "vocab_size": 130},
    "8/1 llama, vocabulary 33": {"num_key_value_heads": 1, "vocab_size": 33},
    "8/1 qwen2": {"model_type": "qwen2", "num_key_value_heads": 1, "vocab_size": 128},
    "12/6 llama, vocabulary 191": {"num_attention_heads": 12, "num_key_value_heads": 6, "vocab_size": 191},
}
"""Query heads / key-value heads; Megatron pads the vocabulary to a multiple of 4 x TP here, vLLM to one of 64."""
SIZES = range(1, 9)


def dividing(heads: int, kv_heads: int, vocab_multiple: int) -> list[int]:
    """Tensor-parallel sizes up to 8 that cut these heads, and a vocabulary padded to the multiple, evenly."""
    fits = [tp for tp in SIZES if heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)]
    return [tp for tp in fits if vocab_multiple % tp == 0]


@pytest.mark.parametrize("name", HEADS)
def test_real_layouts_of_all_meshes_equal_slicing(name: str) -> None:
    """Training meshes (TP x PP <= 8, with and without virtual stages) x rollout meshes (TP x replicas <= 8) that divide.

    All are too many: each network takes a fifth of the pairs, (i + j + number of the network) % 5 == 0. So it meets every mesh, and the
    five networks of 8 heads together meet every pair. As many layers as stages, and at least 2.
    """
    config = hf_config(hidden_size=8, head_dim=4, intermediate_size=24, **HEADS[name])
    architecture = ARCHITECTURES[str(config["model_type"])]
    heads, kv_heads = int(str(config["num_attention_heads"])), int(str(config["num_key_value_heads"]))
    training = [
        (tp, pp, vpp)
        for tp in dividing(heads, kv_heads, 840)
        for pp in SIZES
        for vpp in ((None, 2, 4) if pp > 1 else (None,))
        if tp * pp <= 8 and pp * (vpp or 1) <= 8
    ]
    rollout = [(tp, replicas) for tp in dividing(heads, kv_heads, 64) for replicas in SIZES if tp * replicas <= 8]
    met: set[tuple[int, int]] = set()
    for (i, (tp, pp, vpp)), (j, (rollout_tp, replicas)) in itertools.product(enumerate(training), enumerate(rollout)):
        if (i + j + list(HEADS).index(name)) % 5:
            continue
        network = network_shape(config | {"num_hidden_layers": max(2, pp * (vpp or 1)), "architectures": [architecture]})
        parallel = MegatronParallel(tp, pp, vpp, make_vocab_size_divisible_by=4)
        sources = {p * tp + r: megatron_layout(network, parallel, RankCoordinates(0, p, r)) for p in range(pp) for r in range(tp)}
        engines = [vllm_layout(network, tensor_parallel_size=rollout_tp, tp_rank=r) for r in range(rollout_tp)]
        check_real(network, sources, {len(sources) + n: engines[n % rollout_tp] for n in range(rollout_tp * replicas)})
        met.add((i, j))
    assert {i for i, _ in met} == set(range(len(training))) and {j for _, j in met} == set(range(len(rollout)))


def boxes_of_grid(shape: tuple[int, ...], cuts: list[list[int]]) -> list[Ranges]:
    edges = [sorted({0, size, *(c % size for c in cut)}) for size, cut in zip(shape, cuts, strict=True)]
    return [tuple(box) for box in itertools.product(*(list(itertools.pairwise(e)) for e in edges))]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_boxes(data: st.DataObject) -> None:
    """Any grid against any grid, pieces dealt to ranks at random, some held by several (also overlapping ones)."""
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    cuts = st.lists(st.lists(st.integers(0, 6), max_size=3), min_size=len(shape), max_size=len(shape))
    tensor = {"w": torch.arange(1, volume(tuple((0, n) for n in shape)) + 1, dtype=torch.float64).reshape(shape)}
    held = boxes_of_grid(shape, data.draw(cuts))
    whole = tuple((0, n) for n in shape)
    num_sources = data.draw(st.integers(1, 4))
    owners = [data.draw(st.sets(st.integers(0, num_sources - 1), min_size=1)) for _ in held]
    sources = {rank: standing([box for box, who in zip(held, owners, strict=True) if rank in who]) for rank in range(num_sources)}
    if data.draw(st.booleans()):
        sources[num_sources] = standing([whole])
    wanted = boxes_of_grid(shape, data.draw(cuts))
    num_destinations = data.draw(st.integers(1, 3))
    chosen = [data.draw(st.lists(st.sampled_from(wanted), min_size=1, unique=True)) for _ in range(num_destinations)]
    destinations = {10 + i: standing(boxes) for i, boxes in enumerate(chosen)} | {20: standing(wanted)}
    plan = build_plan(sources, destinations, bytes_per_element=4)
    results = follow(plan, {rank: fill(layout, tensor) for rank, layout in sources.items()}, destinations)
    for rank, layout in destinations.items():
        assert all(torch.equal(results[rank][n], t) for n, t in fill(layout, tensor, padding=PADDING).items())


def standing(boxes: list[Ranges]) -> RankLayout:
    """Each box of ``w`` in a parameter of its own."""
    blocks = [Block("w", box, f"p{i}", tuple((0, b - a) for a, b in box)) for i, box in enumerate(boxes)]
    return RankLayout(tuple(blocks), {b.parameter: tuple(stop for _, stop in b.local) for b in blocks})


def test_subtract_and_intersect_partition() -> None:
    box, hole = ((0, 5), (1, 4)), ((2, 3), (2, 9))
    common = intersect(box, hole)
    assert common == ((2, 3), (2, 4))
    parts = [common, *subtract(box, common)]
    assert sum(map(volume, parts)) == volume(box)
    assert all(intersect(a, b) is None for a, b in itertools.combinations(parts, 2))


def test_replicas_cost_their_source_nothing() -> None:
    """mcore's own resharding sends n copies to n replicas; here a broadcast: the busiest sender does not depend on their number."""
    model = Dense()
    sources = trainer_mesh(model, 2, 2, 2)
    sent = []
    for replicas in (1, 2, 4):
        summary = build_plan(sources, engine_mesh(model, 2, replicas, 8), bytes_per_element=2).summary(1 << 20)
        sent.append(sum(row.bytes_sent for row in summary.values()))
    assert sent[0] == sent[1] == sent[2]


def test_data_parallel_ranks_share_the_sending_only_where_it_is_the_limit() -> None:
    model = Dense(num_layers=2)
    receiving = build_plan(trainer_mesh(model, 2, 1, 4), engine_mesh(model, 2, 3, 8), bytes_per_element=2).summary(1 << 20)
    assert sum(row.bytes_sent > 0 for row in receiving.values()) == 2
    sending = build_plan(trainer_mesh(model, 1, 1, 4), engine_mesh(model, 4, 3, 4), bytes_per_element=2).summary(1 << 20)
    assert sum(row.bytes_sent > 0 for row in sending.values()) == 4
    assert max(row.bytes_sent for row in sending.values()) == max(row.bytes_received for row in sending.values())
    three = build_plan(trainer_mesh(model, 1, 1, 3), engine_mesh(model, 4, 3, 3), bytes_per_element=2).summary(1 << 20)
    total = sum(row.bytes_sent for row in three.values())
    largest = 2 * max(volume(tuple((0, n) for n in shape)) for shape in model.shapes().values())
    assert max(row.bytes_sent for row in three.values()) <= total / 3 * (1 + 1 / 64) + largest


def test_the_digest_and_the_order_depend_on_the_layouts_alone() -> None:
    model = Dense()
    sources, destinations = trainer_mesh(model, 2, 2, 2), engine_mesh(model, 4, 2, 8)
    again = {r: RankLayout(own.blocks, dict(reversed(own.shapes.items()))) for r, own in reversed(sources.items())}
    first = build_plan(sources, destinations, bytes_per_element=2)
    assert build_plan(again, dict(reversed(destinations.items())), bytes_per_element=2).digest() == first.digest()
    assert build_plan(sources, destinations, bytes_per_element=4).digest() != first.digest()
    padded = {r: replace(own, shapes=own.shapes | {"lm_head.weight": (99, 16)}) for r, own in destinations.items()}
    assert build_plan(sources, padded, bytes_per_element=2).digest() != first.digest()
    assert len({group.name for group in first.groups}) == len(first.groups)


def test_a_tied_model_of_two_stages_fills_one_parameter_once() -> None:
    """Megatron keeps a copy on the last stage (where mcore's resharding fails); the engine has one parameter, so it is written once."""
    model = Dense(tied=True)
    plan = check_equals_slicing(model, trainer_mesh(model, 1, 2), engine_mesh(model, 1, 1, 2))
    embeddings = [t for g in plan.groups for t in g.transfers if t.name == "model.embed_tokens.weight"]
    assert sum(t.num_elements for t in embeddings) == model.vocab * model.hidden
    back = check_equals_slicing(model, trainer_mesh(model, 1, 1), {4 + r: layout for r, layout in trainer_mesh(model, 1, 2).items()})
    assert len({t.destination_parameter for g in back.groups for t in g.transfers if t.name == "model.embed_tokens.weight"}) == 2


def test_b12_stage_local_layer_numbers_are_refused() -> None:
    """B12: both stages naming layers 0 and 1 leaves the last layers without a source; two chunks of one rank name a layer twice."""
    model = Dense()
    sources = trainer_mesh(model, 1, 2)
    local = {2: "0", 3: "1"}
    wrong = [replace(b, name=rename(b.name, local)) for b in sources[1].blocks]
    with pytest.raises(ValueError, match=r"model\.layers\.2\..*held by no source"):
        build_plan({0: sources[0], 1: replace(sources[1], blocks=tuple(wrong))}, engine_mesh(model, 1, 1, 2), bytes_per_element=2)
    one = trainer_mesh(model, 1, 1)[0]
    twice = tuple(replace(b, name=rename(b.name, local)) for b in one.blocks)
    with pytest.raises(ValueError, match=r"rank 0 names model\.layers\.0\.input_layernorm\.weight \[0:16\] twice: decoder\.layers\.0"):
        build_plan({0: replace(one, blocks=twice)}, engine_mesh(model, 1, 1, 2), bytes_per_element=2)


def rename(name: str, layers: dict[int, str]) -> str:
    for layer, new in layers.items():
        name = name.replace(f"layers.{layer}.", f"layers.{new}.")
    return name


def test_b28_what_no_source_holds_is_named() -> None:
    """B28: a name, or a part of one, that would keep its old weights is an error that names it."""
    model = Dense(num_layers=1)
    sources, destinations = trainer_mesh(model, 2, 1), engine_mesh(model, 1, 1, 2)
    without = {r: without_block(own, "model.layers.0.mlp.up_proj.weight") for r, own in sources.items()}
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.up_proj\.weight: wanted by a destination, held by no source"):
        build_plan(without, destinations, bytes_per_element=2)
    half = {0: without[0], 1: sources[1]}
    with pytest.raises(ValueError, match=r"no source holds \S+mlp\.up_proj\.weight \[0:8, 0:16\] for \S+gate_up_proj.* rank 2"):
        build_plan(half, destinations, bytes_per_element=2)
    starved = replace(destinations[2], shapes=destinations[2].shapes | {"rotary.scale": (4,)})
    with pytest.raises(ValueError, match=r"rank 2: rotary\.scale \(4,\) gets nothing"):
        build_plan(sources, {2: starved}, bytes_per_element=2)


def without_block(layout: RankLayout, name: str) -> RankLayout:
    return replace(layout, blocks=tuple(b for b in layout.blocks if b.name != name))


def test_tensors_that_nobody_wants_are_refused_but_for_the_value_head() -> None:
    model = Dense(num_layers=1)
    sources, destinations = trainer_mesh(model, 1, 1), engine_mesh(model, 1, 1, 1)
    for name, fine in (("score.weight", True), ("adapter.weight", False)):
        head = Block(name, ((0, 1), (0, 16)), name, ((0, 1), (0, 16)))
        extra = {0: RankLayout((*sources[0].blocks, head), sources[0].shapes | {name: (1, 16)})}
        if fine:
            assert name not in {t.name for g in build_plan(extra, destinations, bytes_per_element=2).groups for t in g.transfers}
        else:
            with pytest.raises(ValueError, match=r"adapter\.weight: held by sources, wanted by no destination"):
                build_plan(extra, destinations, bytes_per_element=2)


def test_sides_of_different_models_are_refused() -> None:
    """B01's other face: a destination with fewer rows would otherwise lose real ones in silence."""
    with pytest.raises(ValueError, match=r"embed_tokens\.weight: sources span \[0:21, 0:16\], destinations \[0:20, 0:16\]"):
        build_plan(trainer_mesh(Dense(), 1, 1), engine_mesh(Dense(vocab=20), 1, 1, 1), bytes_per_element=2)
    with pytest.raises(ValueError, match="layouts of both sides"):
        build_plan({}, engine_mesh(Dense(), 1, 1, 1), bytes_per_element=2)


def test_a_destination_box_written_twice_is_refused() -> None:
    model = Dense(num_layers=1)
    layout = engine_mesh(model, 1, 1, 1)[1]
    clash = Block("lm_head.weight", ((0, 2), (0, 16)), "lm_head.weight", ((5, 7), (0, 16)))
    with pytest.raises(ValueError, match=r"lm_head\.weight \[5:7, 0:16\] is written twice"):
        build_plan(trainer_mesh(model, 1, 1), {1: replace(layout, blocks=(*layout.blocks, clash))}, bytes_per_element=2)


def test_a_rollout_rank_is_in_at_most_two_groups_a_stage() -> None:
    """A 7B model whose vocabulary is padded differently on both sides (32001 rows to 32256 and to 32064), so that shares shift."""
    model = Dense(num_layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=11008, vocab=32001)
    for tp, rollout_tp, dp in ((8, 8, 2), (4, 4, 1), (2, 8, 2), (4, 2, 3)):
        sources = trainer_mesh(model, tp, 4, dp, multiple=128)
        traffic = build_plan(sources, engine_mesh(model, rollout_tp, 2, 100, multiple=64), bytes_per_element=2).summary(1 << 20)
        per_stage = max(1, tp // rollout_tp)  # and one neighbour for the shifted rows in the first and in the last stage
        assert max(row.num_groups for r, row in traffic.items() if r >= 100) == 4 * per_stage + 2
        assert max(row.bytes_sent for row in traffic.values()) <= max(row.bytes_received for row in traffic.values())


def test_a_plan_of_405b() -> None:
    """Llama 3.1 405B, TP 8 x PP 16 x DP 8 to 16 engines of TP 8; 126 layers do not divide by 16, so stages are uneven."""
    model = Dense(num_layers=126, hidden=16384, heads=128, kv_heads=8, head_dim=128, ffn=53248, vocab=128256)
    sources, destinations = trainer_mesh(model, 8, 16, 8), engine_mesh(model, 8, 16, 1024)
    traffic = build_plan(sources, destinations, bytes_per_element=2).summary(1 << 20)
    assert len(sources) == 1024
    assert {traffic[r].bytes_received for r in destinations} == {2 * shard_elements(layout) for layout in destinations.values()}
    assert max(traffic[r].num_groups for r in destinations) == 16
    assert max(t.bytes_sent for t in traffic.values()) < max(t.bytes_received for t in traffic.values()) / 10
