"""Layout of vLLM's parameters (and of whole Hugging Face models), row by row and over many sizes."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from layout_support import PADDING, gather, numbered, scatter, tiny
from torch import Tensor

from megatron_ppo.families import EMBEDDING, LM_HEAD, NetworkShape, canonical_tensors
from megatron_ppo.resharding.megatron_layout import megatron_layout
from megatron_ppo.resharding.megatron_mesh import MegatronParallel, RankCoordinates
from megatron_ppo.resharding.vllm_layout import hf_layout, vllm_layout

QKV = "model.layers.0.self_attn.qkv_proj."


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
