"""Layout of models that FSDP2 shards: rows by hand, every element once, and plans to vLLM's and Hugging Face's layouts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_support import PADDING, gather, numbered, scatter, tiny
from plan_support import check, networks

from megatron_ppo.families import EMBEDDING, FAMILIES, LM_HEAD, SCORE_HEAD, Head, NetworkShape, canonical_tensors
from megatron_ppo.resharding.fsdp_layout import fsdp_faults, fsdp_layout, fsdp_layouts, shard_rows
from megatron_ppo.resharding.vllm_layout import hf_layout, vllm_faults, vllm_layout


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 7, 8, 130])
@pytest.mark.parametrize("shard_size", [1, 2, 3, 4, 8])
def test_rows_are_cut_as_torch_cuts_them(num_rows: int, shard_size: int) -> None:
    """FSDP2 takes ``torch.chunk`` and gives the ranks that are left over nothing."""
    chunks = list(torch.arange(num_rows).chunk(shard_size))
    for rank in range(shard_size):
        start, stop = shard_rows(num_rows, shard_size, rank)
        assert list(range(start, stop)) == (chunks[rank].tolist() if rank < len(chunks) else [])


def test_uneven_rows_a_head_of_one_row_and_a_tied_embedding() -> None:
    """Vocabulary 130 on 4 ranks: 33, 33, 33 and 31 rows; the value head is rank 0's alone; a tied model has no second matrix."""
    network = tiny(tied=True, vocab_size=130)
    tensors = numbered(canonical_tensors(network, "lm+value"))
    for rank in range(4):
        layout = fsdp_layout(network, shard_size=4, shard_rank=rank, head="lm+value")
        held = scatter(layout, tensors)
        assert torch.equal(held[EMBEDDING], tensors[EMBEDDING][33 * rank : 33 * (rank + 1)])
        assert held[SCORE_HEAD].shape == (rank == 0, network.hidden_size)
        assert LM_HEAD not in held
        assert all((tensor != PADDING).all() for tensor in held.values())


def test_a_rank_holds_whole_experts() -> None:
    network = tiny("qwen3_moe", num_experts=8)
    tensors, name = numbered(canonical_tensors(network)), "model.layers.1.mlp.experts."
    held = scatter(fsdp_layout(network, shard_size=4, shard_rank=2), tensors)
    for slot, number in enumerate((4, 5)):
        gate, up, down = (tensors[f"{name}{number}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        assert torch.equal(held[f"{name}gate_up_proj"][slot], torch.cat([gate, up]))
        assert torch.equal(held[f"{name}down_proj"][slot], down)


def test_copies_are_one_object_and_sizes_must_fit() -> None:
    layouts = fsdp_layouts(tiny(), world_size=6, shard_size=3)
    assert all(layouts[rank] is layouts[rank + 3] for rank in range(3))
    assert fsdp_faults(4, 4) == fsdp_faults(4, 1) == ""
    for wrong in (3, 0, 8):
        with pytest.raises(ValueError, match=rf"fsdp_shard_size = {wrong}: .* 4 training ranks, so it may be one of \[1, 2, 4\]"):
            fsdp_layouts(tiny(), world_size=4, shard_size=wrong)
    with pytest.raises(ValueError, match="no rank 2 among 2"):
        fsdp_layout(tiny(), shard_size=2, shard_rank=2)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), network=networks(), head=st.sampled_from(["lm", "lm+value", "value", "score"]))
def test_every_element_is_held_once_a_copy(data: st.DataObject, network: NetworkShape, head: Head) -> None:
    expected = canonical_tensors(network, head)
    tensors, shard_size = numbered(expected), data.draw(st.integers(1, 9))
    layouts = fsdp_layouts(network, world_size=2 * shard_size, shard_size=shard_size, head=head)
    ranks = [(layouts[rank], scatter(layouts[rank], tensors)) for rank in range(shard_size)]
    back = gather(ranks, expected)
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    assert sum(block.num_elements for layout, _ in ranks for block in layout.blocks) == sum(tensor.numel() for tensor in tensors.values())


@settings(deadline=None, max_examples=60)
@given(data=st.data(), network=networks(), with_values=st.booleans())
def test_every_rollout_rank_receives_its_shard_from_any_fsdp_mesh(data: st.DataObject, network: NetworkShape, with_values: bool) -> None:
    """1D and 2D meshes, to vLLM TP 1 to 4 and to whole models: exact bytes, every element, nothing written twice."""
    head: Head = "lm+value" if with_values else "lm"
    shard_size, copies, replicas = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    whole_experts = FAMILIES[network.family].experts is not None and data.draw(st.booleans())
    sizes = [tp for tp in (1, 2, 4) if not list(vllm_faults(network, tp, whole_experts))]
    shards = [hf_layout(network)]
    if sizes and data.draw(st.booleans()):
        tp = data.draw(st.sampled_from(sizes))
        shards = [vllm_layout(network, tensor_parallel_size=tp, tp_rank=rank, expert_parallel=whole_experts) for rank in range(tp)]
    sources = fsdp_layouts(network, world_size=copies * shard_size, shard_size=shard_size, head=head)
    first = len(sources)
    check(network, sources, {first + n: shards[n % len(shards)] for n in range(len(shards) * replicas)}, head)
