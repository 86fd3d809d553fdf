"""Layout of megatron-core's parameters: the fused and padded forms row by row, and properties over many topologies."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from layout_support import PADDING, gather, numbered, scatter, tiny
from torch import Tensor

from megatron_ppo.config import Config
from megatron_ppo.families import EMBEDDING, LM_HEAD, SCORE_HEAD, NetworkShape, canonical_tensors
from megatron_ppo.resharding.layout import RankLayout
from megatron_ppo.resharding.megatron_layout import megatron_layout, padded_vocab_size, training_layouts
from megatron_ppo.resharding.megatron_mesh import MegatronParallel, RankCoordinates, megatron_parallel, rank_coordinates, stage_layers

QKV = "decoder.layers.0.self_attention.linear_qkv."


def all_ranks(network: NetworkShape, parallel: MegatronParallel, head: str = "lm") -> dict[tuple[int, int], RankLayout]:
    ranks = product(range(parallel.pipeline_model_parallel_size), range(parallel.tensor_model_parallel_size))
    return {(pp, tp): megatron_layout(network, parallel, RankCoordinates(0, pp, tp, expert_tp=tp), head=head) for pp, tp in ranks}


def filled(network: NetworkShape, parallel: MegatronParallel, head: str = "lm") -> dict[tuple[int, int], dict[str, Tensor]]:
    tensors = numbered(canonical_tensors(network, head))
    return {rank: scatter(layout, tensors) for rank, layout in all_ranks(network, parallel, head).items()}


def heads(tensor: Tensor, head_dim: int = 4) -> list[Tensor]:
    return list(tensor.split(head_dim))


def test_b01_vocabulary_padding_is_in_no_block() -> None:
    network, parallel = tiny(), MegatronParallel(4)
    assert padded_vocab_size(network, parallel) == 32256
    tensors = numbered(canonical_tensors(network))
    for name, parameter in ((EMBEDDING, "embedding.word_embeddings.weight"), (LM_HEAD, "output_layer.weight")):
        parts = [params[parameter] for params in filled(network, parallel).values()]
        assert [tuple(p.shape) for p in parts] == [(8064, 16)] * 4
        joined = torch.cat(parts)
        assert torch.equal(joined[:32001], tensors[name])
        assert (joined[32001:] == PADDING).all()


def test_b01_the_checkpoints_vocabulary_counts_not_the_tokenizers() -> None:
    network = tiny(vocab_size=152064, num_layers=1)
    layouts = all_ranks(network, MegatronParallel(2))
    stops = [b.canonical[0] for layout in layouts.values() for b in layout.blocks if b.name == EMBEDDING]
    assert stops == [(0, 76032), (76032, 152064)]


def test_b01_a_rank_may_hold_nothing_but_padding() -> None:
    layouts = all_ranks(tiny(vocab_size=130), MegatronParallel(4))
    assert [len([b for b in layout.blocks if b.name == EMBEDDING]) for layout in layouts.values()] == [1, 1, 0, 0]
    assert {layout.shapes["embedding.word_embeddings.weight"] for layout in layouts.values()} == {(128, 16)}


def test_b05_b06_qkv_is_interleaved_by_group_weight_and_bias_alike() -> None:
    tensors = numbered(canonical_tensors(tiny("qwen2")))
    for kind in ("weight", "bias"):
        q, k, v = (heads(tensors[f"model.layers.0.self_attn.{part}_proj.{kind}"]) for part in "qkv")
        expected = torch.cat([q[0], q[1], k[0], v[0], q[2], q[3], k[1], v[1]])
        assert expected.shape[0] == 32
        one = filled(tiny("qwen2"), MegatronParallel(1))
        assert torch.equal(one[0, 0][QKV + kind], expected)
        two = filled(tiny("qwen2"), MegatronParallel(2))
        assert torch.equal(two[0, 0][QKV + kind], expected[:16])
        assert torch.equal(two[0, 1][QKV + kind], expected[16:])


def test_b05_llama_gains_no_bias() -> None:
    layout = megatron_layout(tiny("llama"), MegatronParallel(), RankCoordinates(0, 0, 0))
    assert not [name for name in layout.shapes if name.endswith("bias")]


def test_b03_more_training_ranks_than_kv_heads_cut_the_fused_rows_evenly() -> None:
    """megatron-core splits the weight evenly and gathers activations; no row is held twice."""
    tensors = numbered(canonical_tensors(tiny()))
    q, k, v = (heads(tensors[f"model.layers.0.self_attn.{part}_proj.weight"]) for part in "qkv")
    four = filled(tiny(), MegatronParallel(4))
    expected = [[q[0], q[1]], [k[0], v[0]], [q[2], q[3]], [k[1], v[1]]]
    for rank, rows in enumerate(expected):
        assert torch.equal(four[0, rank][QKV + "weight"], torch.cat(rows))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_b07_fc1_holds_gate_then_up_of_its_rank(tp: int) -> None:
    tensors = numbered(canonical_tensors(tiny()))
    gate, up = (tensors[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    shards = [params["decoder.layers.0.mlp.linear_fc1.weight"] for params in filled(tiny(), MegatronParallel(tp)).values()]
    size = 24 // tp
    for rank, shard in enumerate(shards):
        assert torch.equal(shard, torch.cat([gate[rank * size : (rank + 1) * size], up[rank * size : (rank + 1) * size]]))
    naive = torch.cat(shards)
    assert torch.equal(naive, torch.cat([gate, up])) == (tp == 1)


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_b09_tied_head_is_a_copy_on_the_last_stage_only(pp: int) -> None:
    network = tiny(tied=True)
    params = filled(network, MegatronParallel(2, pp))
    for (stage, tp), local in params.items():
        assert ("embedding.word_embeddings.weight" in local) == (stage == 0)
        assert ("output_layer.weight" in local) == (stage == pp - 1 and pp > 1)
        if "output_layer.weight" in local:
            assert torch.equal(local["output_layer.weight"], params[0, tp]["embedding.word_embeddings.weight"])


@pytest.mark.parametrize(("pp", "vpp"), [(1, None), (2, None), (4, None), (2, 2)])
def test_b12_local_layer_numbers_are_translated(pp: int, vpp: int | None) -> None:
    parallel = MegatronParallel(1, pp, vpp)
    tensors = {t.name: torch.zeros(t.shape) for t in canonical_tensors(tiny())}
    for layer, name in product(range(4), tensors):
        if name.startswith(f"model.layers.{layer}."):
            tensors[name].fill_(layer)
    ranks = [(layout, scatter(layout, tensors)) for layout in all_ranks(tiny(), parallel).values()]
    back = gather(ranks, canonical_tensors(tiny()))
    for layer in range(4):
        assert {int(t.unique()) for name, t in back.items() if f"layers.{layer}." in name} == {layer}


def test_b12_interleaved_chunks_have_prefixed_names_and_megatrons_order() -> None:
    parallel = MegatronParallel(1, 2, 2)
    assert stage_layers(8, parallel) == [[range(0, 2), range(4, 6)], [range(2, 4), range(6, 8)]]
    first, last = (megatron_layout(tiny(), parallel, RankCoordinates(0, pp, 0)) for pp in range(2))
    assert all(name.startswith(("model0.", "model1.")) for name in (*first.shapes, *last.shapes))
    assert "model0.embedding.word_embeddings.weight" in first.shapes
    assert "model1.output_layer.weight" in last.shapes and "model1.decoder.final_layernorm.weight" in last.shapes
    norms = {b.parameter: b.name for b in last.blocks if b.name.endswith("input_layernorm.weight")}
    assert norms == {
        "model0.decoder.layers.0.input_layernorm.weight": "model.layers.1.input_layernorm.weight",
        "model1.decoder.layers.0.input_layernorm.weight": "model.layers.3.input_layernorm.weight",
    }


def test_b13_stages_hold_every_layer_once_or_are_refused_with_numbers() -> None:
    for layers in range(1, 13):
        for pp, vpp in product(range(1, 14), (None, 2, 3)):
            network, parallel = tiny(num_layers=layers, vocab_size=8), MegatronParallel(1, pp, vpp)
            chunks = vpp or 1
            if vpp and pp == 1:
                message = f"virtual_pipeline_model_parallel_size {vpp} needs"
            elif layers % pp:
                message = f"{layers} layers are not a multiple of pipeline_model_parallel_size = {pp}"
            elif layers // pp % chunks:
                message = f"has {layers // pp} layers, which virtual_pipeline_model_parallel_size {chunks} does not divide"
            else:
                message = None
            if message:
                with pytest.raises(ValueError, match=message):
                    megatron_layout(network, parallel, RankCoordinates(0, 0, 0))
                continue
            stages = stage_layers(layers, parallel)
            order = [layer for v in range(chunks) for stage in range(pp) for layer in stages[stage][v]]
            assert order == list(range(layers))


EMBEDDING_COUNTS = {"account_for_embedding_in_pipeline_split": True}
LOSS_COUNTS = {"account_for_loss_in_pipeline_split": True}


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "cut", "sizes"),
    [
        (7, 2, None, {"num_layers_in_first_pipeline_stage": 3}, [3, 4]),
        (9, 4, None, {"num_layers_in_last_pipeline_stage": 3}, [2, 2, 2, 3]),
        (8, 4, None, {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 3}, [1, 2, 2, 3]),
        (3, 2, None, {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 2}, [1, 2]),
        (7, 4, None, EMBEDDING_COUNTS, [1, 2, 2, 2]),
        (7, 4, None, LOSS_COUNTS, [2, 2, 2, 1]),
        (6, 4, None, EMBEDDING_COUNTS | LOSS_COUNTS, [1, 2, 2, 1]),
        (2, 4, None, EMBEDDING_COUNTS | LOSS_COUNTS, [0, 1, 1, 0]),
        (126, 16, None, EMBEDDING_COUNTS | LOSS_COUNTS, [7, *[8] * 14, 7]),
        (6, 2, 2, EMBEDDING_COUNTS | LOSS_COUNTS, [3, 3]),
        (12, 2, 2, {"num_layers_in_first_pipeline_stage": 4}, [4, 8]),
    ],
)
def test_b13_uneven_stages_hold_every_layer_once(
    layers: int, pp: int, vpp: int | None, cut: dict[str, int | bool], sizes: list[int]
) -> None:
    """Disjoint, ordered, and together 0..L-1; given as the strings of ``transformer_overrides`` they mean the same."""
    parallel = MegatronParallel(1, pp, vpp, **cut)
    stages = stage_layers(layers, parallel)
    assert [sum(map(len, chunks)) for chunks in stages] == sizes
    assert [layer for v in range(vpp or 1) for stage in stages for layer in stage[v]] == list(range(layers))
    if vpp is None:
        assert [layer for stage in stages for layer in stage[0]] == list(range(layers))
    config = Config().replace(
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        transformer_overrides={name: str(value).lower() for name, value in cut.items()},
    )
    assert megatron_parallel(config) == parallel
    network = tiny(num_layers=layers, vocab_size=8)
    held = [b.name for layout in all_ranks(network, parallel).values() for b in layout.blocks if b.name.endswith("input_layernorm.weight")]
    assert sorted(held) == sorted(f"model.layers.{layer}.input_layernorm.weight" for layer in range(layers))


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "cut", "message"),
    [
        (30, 4, None, {}, "30 layers are not a multiple of pipeline_model_parallel_size = 4; it may be one of"),
        (8, 4, None, {"num_layers_in_first_pipeline_stage": 3}, "8 layers.*first_pipeline_stage = 3.*leave 5 for the other 3 of 4 stages"),
        (4, 2, None, {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 1}, "leave 1 for the other 0 of 2"),
        (4, 2, None, {"num_layers_in_first_pipeline_stage": 4}, "leave 0 for the other 1 of 2"),
        (4, 2, None, {"num_layers_in_first_pipeline_stage": 0}, "first_pipeline_stage = 0"),
        (4, 1, None, {"num_layers_in_first_pipeline_stage": 4}, "4 layers"),
        (4, 2, None, EMBEDDING_COUNTS, r"4 layers \+ embedding are not a multiple of pipeline_model_parallel_size = 2"),
        (5, 4, None, EMBEDDING_COUNTS | LOSS_COUNTS, r"5 layers \+ embedding \+ loss"),
        (7, 4, None, EMBEDDING_COUNTS | {"num_layers_in_first_pipeline_stage": 1}, "exclude each other"),
        (10, 2, 2, {"num_layers_in_first_pipeline_stage": 3}, "stage 0 has 3 layers, which virtual_pipeline_model_parallel_size 2"),
    ],
)
def test_b13_uneven_stages_that_do_not_fit_are_refused_with_numbers(
    layers: int, pp: int, vpp: int | None, cut: dict[str, int | bool], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        megatron_layout(tiny(num_layers=layers, vocab_size=8), MegatronParallel(1, pp, vpp, **cut), RankCoordinates(0, 0, 0))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_layers_in_first_pipeline_stage", "three", "num_layers_in_first_pipeline_stage = 'three' must be a whole number"),
        ("num_layers_in_last_pipeline_stage", "2.5", "must be a whole number"),
        ("expert_tensor_parallel_size", "-1", "must be a whole number"),
        ("account_for_loss_in_pipeline_split", "yes", "account_for_loss_in_pipeline_split = 'yes' must be true or false"),
        ("account_for_embedding_in_pipeline_split", "1", "must be true or false"),
    ],
)
def test_b13_overrides_that_are_no_number_or_switch_are_refused(name: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        megatron_parallel(Config().replace(transformer_overrides={name: value}))


def test_overrides_may_be_left_to_megatron_in_words() -> None:
    unset = Config().replace(transformer_overrides={"num_layers_in_first_pipeline_stage": "None", "expert_tensor_parallel_size": "null"})
    assert megatron_parallel(unset) == MegatronParallel()


def test_b15_head_dim_is_not_derived() -> None:
    network = tiny(hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, head_dim=128, num_layers=1, vocab_size=8)
    layout = megatron_layout(network, MegatronParallel(), RankCoordinates(0, 0, 0))
    assert layout.shapes[QKV + "weight"] == (4096, 1024)
    assert layout.shapes["decoder.layers.0.self_attention.linear_proj.weight"] == (1024, 2048)


def test_transformer_engine_spec_fuses_the_norms() -> None:
    plain = megatron_layout(tiny("qwen3"), MegatronParallel(), RankCoordinates(0, 0, 0))
    fused = megatron_layout(tiny("qwen3"), MegatronParallel(), RankCoordinates(0, 0, 0), transformer_engine_names=True)
    renamed = {
        name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight").replace(
            ".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight"
        ): shape
        for name, shape in plain.shapes.items()
    }
    assert renamed == fused.shapes and plain.shapes != fused.shapes


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_transformer_engine_keeps_experts_in_one_module_and_their_norm_unfused(family: str) -> None:
    """``experts.linear_fc1.weight{j}``; a router stands between the norm and the experts."""
    parallel, place = MegatronParallel(expert_model_parallel_size=4), RankCoordinates(0, 0, 0, ep=1)
    plain = megatron_layout(tiny(family), parallel, place)
    fused = megatron_layout(tiny(family), parallel, place, transformer_engine_names=True)
    mlp = "decoder.layers.0.mlp."
    assert {f"{mlp}experts.{part}.weight{j}" for part in ("linear_fc1", "linear_fc2") for j in range(2)} <= fused.shapes.keys()
    assert "decoder.layers.0.pre_mlp_layernorm.weight" in fused.shapes and f"{mlp}router.weight" in fused.shapes
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in fused.shapes
    assert not [name for name in fused.shapes if "local_experts" in name or "linear_fc1.layer_norm" in name or "input_layernorm" in name]
    assert [(b.name, b.canonical) for b in fused.blocks] == [(b.name, b.canonical) for b in plain.blocks]
    assert list(fused.shapes.values()) == list(plain.shapes.values())


@pytest.mark.parametrize("transformer_engine_names", [False, True])
def test_b18_local_expert_j_of_rank_r_is_expert_2r_plus_j(transformer_engine_names: bool) -> None:
    """8 experts, EP 4, expert e filled with e: names carry the global number before the projection, and nothing is lost or doubled."""
    network = tiny("qwen3_moe", num_layers=1, vocab_size=40)
    tensors = numbered(canonical_tensors(network))
    experts = {name: int(name.split(".experts.")[1].split(".")[0]) for name in tensors if ".experts." in name}
    assert {name for name in experts if name.endswith("gate_proj.weight")} == {
        f"model.layers.0.mlp.experts.{e}.gate_proj.weight" for e in range(8)
    }
    for name, number in experts.items():
        tensors[name].fill_(number)
    parallel = MegatronParallel(expert_model_parallel_size=4)
    layouts = training_layouts(network, parallel, 4, transformer_engine_names=transformer_engine_names)
    local = {rank: scatter(layout, tensors) for rank, layout in layouts.items()}
    for rank, j, part in product(range(4), range(2), ("linear_fc1", "linear_fc2")):
        name = f"{part}.weight{j}" if transformer_engine_names else f"local_experts.{j}.{part}.weight"
        assert local[rank][f"decoder.layers.0.mlp.experts.{name}"].unique().tolist() == [2 * rank + j]
    back = gather([(layouts[rank], local[rank]) for rank in layouts], canonical_tensors(network))
    assert all(back[name].unique().tolist() == [number] for name, number in experts.items())
    assert sum(t.numel() for t in back.values()) == sum(t.numel() for t in tensors.values())
    held = [sum(b.num_elements for b in layout.blocks if ".experts." in b.name) for layout in layouts.values()]
    assert sum(held) == sum(tensors[name].numel() for name in experts) and len(set(held)) == 1


def test_b18_expert_tensor_parallel_ranks_share_each_expert() -> None:
    """TP 4, EP 2, expert TP 2: rank 2e + t holds experts 4e onwards, rows [gate_t; up_t] and columns t of each."""
    network = tiny("mixtral", num_layers=1, vocab_size=40)
    tensors = numbered(canonical_tensors(network))
    parallel = MegatronParallel(4, expert_model_parallel_size=2, expert_tensor_parallel_size=2)
    layouts = training_layouts(network, parallel, 4)
    for rank, layout in layouts.items():
        place = rank_coordinates(rank, 4, parallel)
        assert (place.tp, place.ep, place.expert_tp) == (rank, rank // 2, rank % 2)
        part, local = slice(12 * place.expert_tp, 12 * place.expert_tp + 12), scatter(layout, tensors)
        for j in range(4):
            gate, up, down = (tensors[f"model.layers.0.block_sparse_moe.experts.{4 * place.ep + j}.{w}.weight"] for w in ("w1", "w3", "w2"))
            experts = f"decoder.layers.0.mlp.experts.local_experts.{j}."
            assert torch.equal(local[f"{experts}linear_fc1.weight"], torch.cat([gate[part], up[part]]))
            assert torch.equal(local[f"{experts}linear_fc2.weight"], down[:, part])
    full = gather([(layout, scatter(layout, tensors)) for layout in layouts.values()], canonical_tensors(network))
    assert all(torch.equal(full[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(("head", "output", "value"), [("lm", 1, 0), ("value", 0, 1), ("lm+value", 1, 1), ("score", 0, 1)])
@pytest.mark.parametrize("tied", [False, True])
def test_heads_stand_on_the_last_stage(head: str, output: int, value: int, tied: bool) -> None:
    layouts = all_ranks(tiny(tied=tied), MegatronParallel(2, 2), head)
    for (stage, _), layout in layouts.items():
        assert ("output_layer.weight" in layout.shapes) == bool(output and stage == 1)
        assert ("value_head.weight" in layout.shapes) == bool(value and stage == 1)
        for block in layout.blocks:
            if block.parameter == "value_head.weight":
                assert block.name == SCORE_HEAD and block.canonical == block.local == ((0, 1), (0, 16))


@pytest.mark.parametrize(
    ("network", "parallel", "message"),
    [
        (tiny(num_attention_heads=6, num_key_value_heads=3), MegatronParallel(2), "3 key/value heads.*size = 2"),
        (tiny(), MegatronParallel(3), "4 attention heads.*size = 3"),
        (tiny(intermediate_size=26), MegatronParallel(4), "intermediate_size 26.*size = 4"),
        (tiny(num_key_value_heads=1, head_dim=3), MegatronParallel(4), "18 rows of linear_qkv.*size = 4"),
        (tiny(), MegatronParallel(0), "at least 1"),
        (tiny(), MegatronParallel(expert_model_parallel_size=2), "expert_model_parallel_size = 2, but llama is a dense family"),
        (tiny(), MegatronParallel(expert_tensor_parallel_size=1), "expert_tensor_parallel_size = 1, but llama is a dense family"),
        (tiny("mixtral"), MegatronParallel(expert_model_parallel_size=3), "8 experts.*expert_model_parallel_size = 3"),
        (tiny("mixtral"), MegatronParallel(2, expert_tensor_parallel_size=1), "expert_tensor_parallel_size = 1 differs from.*= 2"),
        (tiny("mixtral"), MegatronParallel(expert_model_parallel_size=0), "at least 1"),
        (
            tiny("qwen3_moe", intermediate_size=26),
            MegatronParallel(4, expert_model_parallel_size=2, expert_tensor_parallel_size=4),
            "moe_intermediate_size 26 is not a multiple of the 4 ranks",
        ),
        (tiny(num_layers=5), MegatronParallel(1, 2), "5 layers.*size = 2"),
    ],
)
def test_b03_sizes_that_do_not_divide_are_refused_with_both_numbers(
    network: NetworkShape, parallel: MegatronParallel, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        megatron_layout(network, parallel, RankCoordinates(0, 0, 0))


def test_rank_outside_the_mesh_is_refused() -> None:
    with pytest.raises(ValueError, match="no rank"):
        megatron_layout(tiny(), MegatronParallel(2), RankCoordinates(0, 0, 2))


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    family=st.sampled_from(["llama", "qwen2", "qwen3"]),
    head=st.sampled_from(["lm", "value", "lm+value", "score"]),
    tied=st.booleans(),
    tp=st.sampled_from([1, 2, 3, 4, 6, 8]),
    stages=st.sampled_from([(1, None), (2, None), (4, None), (8, None), (2, 2), (2, 4), (4, 2)]),
    groups=st.sampled_from([1, 2, 3, 4, 8]),
    queries_per_group=st.sampled_from([1, 2, 3, 4]),
    head_dim=st.sampled_from([2, 4]),
    vocab_size=st.integers(1, 70),
    divisible_by=st.sampled_from([1, 4, 16]),
)
def test_every_element_has_one_place_and_comes_back(
    *,
    family: str,
    head: str,
    tied: bool,
    tp: int,
    stages: tuple[int, int | None],
    groups: int,
    queries_per_group: int,
    head_dim: int,
    vocab_size: int,
    divisible_by: int,
) -> None:
    """All ranks together hold every canonical element; every local element outside vocabulary padding is in one block."""
    assume((groups * queries_per_group) % tp == 0 and (groups % tp == 0 or tp % groups == 0))
    network = tiny(
        family,
        tied=tied,
        num_layers=8,
        hidden_size=4,
        num_attention_heads=groups * queries_per_group,
        num_key_value_heads=groups,
        head_dim=head_dim,
        intermediate_size=24,
        vocab_size=vocab_size,
    )
    assume((network.query_size + 2 * network.kv_size) % tp == 0)
    parallel = MegatronParallel(tp, *stages, make_vocab_size_divisible_by=divisible_by)
    expected = canonical_tensors(network, head)
    tensors = numbered(expected)
    layouts = all_ranks(network, parallel, head)
    ranks = [(layout, scatter(layout, tensors)) for layout in layouts.values()]
    padding = 0
    for _, parameters in ranks:
        for name, value in parameters.items():
            holes = int((value == PADDING).sum())
            assert not holes or name.endswith(("word_embeddings.weight", "output_layer.weight"))
            padding += holes
    copies = 1 + (head in ("lm", "lm+value") and not (tied and stages[0] == 1))
    assert padding == copies * 4 * (padded_vocab_size(network, parallel) - vocab_size)
    back = gather(ranks, expected)
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
