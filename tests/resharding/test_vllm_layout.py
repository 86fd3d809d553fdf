"""Layout of vLLM's parameters (and of whole Hugging Face models), row by row and over many sizes."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from layout_support import PADDING, gather, numbered, scatter, tiny
from torch import Tensor

from megatron_ppo.families import EMBEDDING, LM_HEAD, Head, NetworkShape, canonical_tensors
from megatron_ppo.resharding.megatron_layout import megatron_layout
from megatron_ppo.resharding.megatron_mesh import MegatronParallel, RankCoordinates
from megatron_ppo.resharding.vllm_layout import held_experts, hf_layout, vllm_layout

QKV = "model.layers.0.self_attn.qkv_proj."
BLOCKS = {"mixtral": ("block_sparse_moe", ("w1", "w3", "w2")), "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj"))}
"""Block of experts, and gate, up and down of an expert, as checkpoints call them."""


def filled(network: NetworkShape, tp: int) -> list[dict[str, Tensor]]:
    tensors = numbered(canonical_tensors(network))
    return [scatter(vllm_layout(network, tensor_parallel_size=tp, tp_rank=rank), tensors) for rank in range(tp)]


def test_b03_kv_heads_are_replicated_where_ranks_outnumber_them() -> None:
    """Train TP 2 -> rollout TP 4: rank r gets query head r and KV head r // 2, twelve rows."""
    tensors = numbered(canonical_tensors(tiny("qwen2")))
    for kind in ("weight", "bias"):
        q, k, v = (tensors[f"model.layers.0.self_attn.{part}_proj.{kind}"].split(4) for part in "qkv")
        for rank, params in enumerate(filled(tiny("qwen2"), 4)):
            assert params[QKV + kind].shape[0] == 12
            assert torch.equal(params[QKV + kind], torch.cat([q[rank], k[rank // 2], v[rank // 2]]))


def test_b03_training_shards_hold_what_each_rollout_rank_wants() -> None:
    network = tiny()
    tensors = numbered(canonical_tensors(network))
    sources = [megatron_layout(network, MegatronParallel(2), RankCoordinates(0, 0, rank)) for rank in range(2)]
    full = gather([(layout, scatter(layout, tensors)) for layout in sources], canonical_tensors(network))
    for rank, params in enumerate(filled(network, 4)):
        wanted = scatter(vllm_layout(network, tensor_parallel_size=4, tp_rank=rank), full)
        assert all(torch.equal(params[name], wanted[name]) for name in params)


@pytest.mark.parametrize(("tp", "rows"), [(1, 192), (2, 96), (4, 48)])
def test_vocabulary_is_padded_to_64_and_then_split(tp: int, rows: int) -> None:
    """Vocabulary 130: the sizes that vLLM 0.32 was seen to allocate."""
    network = tiny(vocab_size=130)
    tensors = numbered(canonical_tensors(network))
    for name in (EMBEDDING, LM_HEAD):
        parts = [params[name] for params in filled(network, tp)]
        assert {part.shape for part in parts} == {(rows, 16)}
        joined = torch.cat(parts)
        assert torch.equal(joined[:130], tensors[name]) and (joined[130:] == PADDING).all()


def test_gate_up_is_fused_per_rank() -> None:
    tensors = numbered(canonical_tensors(tiny()))
    gate, up = (tensors[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    for rank, params in enumerate(filled(tiny(), 2)):
        rows = slice(rank * 12, (rank + 1) * 12)
        assert torch.equal(params["model.layers.1.mlp.gate_up_proj.weight"], torch.cat([gate[rows], up[rows]]))


def test_tied_model_has_no_lm_head() -> None:
    assert LM_HEAD not in vllm_layout(tiny(tied=True), tensor_parallel_size=1, tp_rank=0).shapes
    assert LM_HEAD not in hf_layout(tiny(tied=True)).shapes


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_element_has_one_place_and_comes_back(family: str) -> None:
    seen = 0
    for tp, groups, queries, head_dim, tied in product((1, 2, 3, 4, 6, 8), (1, 2, 3, 4, 8), (1, 2, 3, 4), (2, 4), (False, True)):
        if (groups * queries) % tp or (groups % tp and tp % groups):
            continue
        network = tiny(
            family,
            tied=tied,
            num_layers=2,
            hidden_size=4,
            num_attention_heads=groups * queries,
            num_key_value_heads=groups,
            head_dim=head_dim,
            vocab_size=150,  # 192 padded rows: divisible by every size above
        )
        expected = canonical_tensors(network)
        tensors = numbered(expected)
        layouts = [vllm_layout(network, tensor_parallel_size=tp, tp_rank=rank) for rank in range(tp)]
        ranks = [(layout, scatter(layout, tensors)) for layout in layouts]
        for _, parameters in ranks:
            assert all((value != PADDING).all() for name, value in parameters.items() if name not in (EMBEDDING, LM_HEAD))
        back = gather(ranks, expected)
        assert all(torch.equal(back[name], tensors[name]) for name in tensors)
        seen += 1
    assert seen > 100


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_every_rank_holds_its_rows_of_every_expert(family: str) -> None:
    """w13 is [gate_r; up_r] of each expert, w2 the columns of down that belong to them; routers are whole."""
    network = tiny(family, vocab_size=130)
    tensors, block, (gate, up, down) = numbered(canonical_tensors(network)), *BLOCKS[family]
    for rank, params in enumerate(filled(network, 2)):
        part = slice(rank * 12, (rank + 1) * 12)
        layer = f"model.layers.3.{block}."
        w13, w2 = (params[f"{layer}experts.routed_experts.{name}_weight"] for name in ("w13", "w2"))
        assert w13.shape == (8, 24, 16) and w2.shape == (8, 16, 12)
        for expert in range(8):
            source = f"{layer}experts.{expert}."
            rows = torch.cat([tensors[f"{source}{name}.weight"][part] for name in (gate, up)])
            assert torch.equal(w13[expert], rows) and torch.equal(w2[expert], tensors[f"{source}{down}.weight"][:, part])
        assert torch.equal(params[f"{layer}gate.weight"], tensors[f"{layer}gate.weight"])


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize(("count", "held"), [(4, [[0, 1], [2, 3]]), (5, [[0, 1, 2], [3, 4]]), (7, [[0, 1], [2, 3], [4, 5], [6]])])
def test_expert_parallel_ranks_hold_whole_experts_and_the_first_ranks_hold_more(family: str, count: int, held: list[list[int]]) -> None:
    """Width 25, which no number of ranks has to divide here."""
    network = tiny(family, vocab_size=130, num_experts=count, intermediate_size=25)
    tensors, block, (gate, up, down) = numbered(canonical_tensors(network)), *BLOCKS[family]
    for rank, numbers in enumerate(held):
        layout = vllm_layout(network, tensor_parallel_size=len(held), tp_rank=rank, expert_parallel=True)
        params = scatter(layout, tensors)
        sources = [f"model.layers.2.{block}.experts.{number}." for number in numbers]
        w13 = torch.stack([torch.cat([tensors[f"{source}{name}.weight"] for name in (gate, up)]) for source in sources])
        w2 = torch.stack([tensors[f"{source}{down}.weight"] for source in sources])
        stacked = f"model.layers.2.{block}.experts.routed_experts."
        assert torch.equal(params[f"{stacked}w13_weight"], w13) and torch.equal(params[f"{stacked}w2_weight"], w2)
        assert list(held_experts(network, len(held), rank, True)) == numbers


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_every_element_of_a_mixture_has_one_place_and_comes_back(family: str) -> None:
    for tp, count, whole in product((1, 2, 4, 8), (4, 5, 8), (False, True)):
        if count < tp and (whole or family == "qwen3_moe"):
            continue
        network = tiny(family, num_layers=1, hidden_size=4, num_attention_heads=8, vocab_size=130, num_experts=count)
        expected = canonical_tensors(network)
        tensors = numbered(expected)
        layouts = [vllm_layout(network, tensor_parallel_size=tp, tp_rank=rank, expert_parallel=whole) for rank in range(tp)]
        ranks = [(layout, scatter(layout, tensors)) for layout in layouts]
        for _, parameters in ranks:
            assert all((value != PADDING).all() for name, value in parameters.items() if name not in (EMBEDDING, LM_HEAD))
        back = gather(ranks, expected)
        assert all(torch.equal(back[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("head", ["lm", "lm+value", "value"])
def test_hf_layout_stacks_experts_and_leaves_the_rest_alone(family: str, head: Head) -> None:
    network = tiny(family, vocab_size=130)
    expected, (block, (gate, up, down)) = canonical_tensors(network, head), BLOCKS[family]
    tensors = numbered(expected)
    params = scatter(hf_layout(network, head), tensors)
    for layer in range(4):
        source, target = f"model.layers.{layer}.{block}.", f"model.layers.{layer}.mlp."
        pairs = [(tensors.pop(f"{source}experts.{e}.{gate}.weight"), tensors.pop(f"{source}experts.{e}.{up}.weight")) for e in range(8)]
        assert torch.equal(params.pop(f"{target}experts.gate_up_proj"), torch.stack([torch.cat(pair) for pair in pairs]))
        downs = [tensors.pop(f"{source}experts.{e}.{down}.weight") for e in range(8)]
        assert torch.equal(params.pop(f"{target}experts.down_proj"), torch.stack(downs))
        assert torch.equal(params.pop(f"{target}gate.weight"), tensors.pop(f"{source}gate.weight"))
    assert params.keys() == tensors.keys() and all(torch.equal(params[name], tensors[name]) for name in params)


@pytest.mark.parametrize(
    ("network", "tp", "whole", "message"),
    [
        (tiny("mixtral", intermediate_size=26), 4, False, "intermediate_size 26.*size = 4"),
        (tiny("qwen3_moe", intermediate_size=26), 4, False, "moe_intermediate_size 26.*size = 4"),
        (tiny("mixtral", num_experts=3), 4, True, "3 experts.*size = 4"),
        (tiny("qwen3_moe", num_experts=3), 4, False, "3 experts.*size = 4"),
        (tiny(), 2, True, "enable_expert_parallel.*llama is a dense family"),
    ],
)
def test_mixtures_that_do_not_divide_are_refused_with_both_numbers(network: NetworkShape, tp: int, whole: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vllm_layout(network, tensor_parallel_size=tp, tp_rank=0, expert_parallel=whole)


def test_slices_of_fewer_experts_than_ranks_are_fine_where_vllm_takes_them() -> None:
    layout = vllm_layout(tiny("mixtral", num_experts=3), tensor_parallel_size=4, tp_rank=3)
    assert layout.shapes["model.layers.0.block_sparse_moe.experts.routed_experts.w13_weight"] == (3, 12, 16)


def test_hf_layout_is_the_identity() -> None:
    for head in ("lm", "value"):
        expected = canonical_tensors(tiny("qwen3"), head)
        layout = hf_layout(tiny("qwen3"), head)
        assert layout.shapes == {t.name: t.shape for t in expected}
        tensors = numbered(expected)
        assert all(torch.equal(value, tensors[name]) for name, value in scatter(layout, tensors).items())


@pytest.mark.parametrize(
    ("network", "tp", "message"),
    [
        (tiny(num_attention_heads=6, num_key_value_heads=3), 2, "3 key/value heads.*size = 2"),
        (tiny(), 3, "4 attention heads.*size = 3"),
        (tiny(intermediate_size=26), 4, "intermediate_size 26.*size = 4"),
        (tiny(num_attention_heads=6, num_key_value_heads=6, vocab_size=60), 3, "60, padded to 64 rows.*size = 3"),
        (tiny(), 0, "at least 1"),
    ],
)
def test_b03_sizes_that_do_not_divide_are_refused_with_both_numbers(network: NetworkShape, tp: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vllm_layout(network, tensor_parallel_size=tp, tp_rank=0)


def test_rank_outside_the_replica_is_refused() -> None:
    with pytest.raises(ValueError, match="no rank 2"):
        vllm_layout(tiny(), tensor_parallel_size=2, tp_rank=2)
