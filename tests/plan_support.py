"""Plans between real layouts, applied copy by copy in one process, and random networks to plan for. Test support only."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from hypothesis import strategies as st
from layout_support import PADDING, gather, numbered, scatter, tiny
from torch import Tensor

from megatron_ppo.families import FAMILIES, Head, NetworkShape, canonical_tensors
from megatron_ppo.resharding.layout import RankLayout, view
from megatron_ppo.resharding.plan import ReshardPlan, build_plan

Layouts = dict[int, RankLayout]


def apply(plan: ReshardPlan, sources: Mapping[int, dict[str, Tensor]], destinations: Layouts) -> dict[int, dict[str, Tensor]]:
    """Copies in the plan's order, in one process; fails where an element is written twice."""
    live = {rank: {name: torch.full(shape, PADDING) for name, shape in own.shapes.items()} for rank, own in destinations.items()}
    for group in plan.groups:
        for transfer, rank in itertools.product(group.transfers, group.destinations):
            target = view(live[rank][transfer.destination_parameter], transfer.destination)
            assert (target == PADDING).all(), f"{transfer} writes again what was written"
            target.copy_(view(sources[group.source][transfer.source_parameter], transfer.source))
    return live


def check(network: NetworkShape, sources: Layouts, destinations: Layouts, head: Head = "lm") -> ReshardPlan:
    """Every element of every destination equals the gathered model's, padding is untouched, and received bytes are the shard's."""
    tensors = numbered(canonical_tensors(network, head))
    filled = {id(layout): scatter(layout, tensors) for layout in sources.values()}
    layouts = {id(layout): layout for layout in sources.values()}
    full = gather([(layouts[key], filled[key]) for key in layouts], canonical_tensors(network, head))
    plan = build_plan(sources, destinations, bytes_per_element=2)
    live = apply(plan, {rank: filled[id(layout)] for rank, layout in sources.items()}, destinations)
    traffic = plan.summary(1 << 20)
    expected = {id(layout): scatter(layout, full) for layout in destinations.values()}
    for rank, layout in destinations.items():
        shard = expected[id(layout)]
        assert live[rank].keys() == shard.keys()
        assert all(torch.equal(live[rank][name], shard[name]) for name in shard)
        assert traffic[rank].bytes_received == 2 * sum(int((tensor != PADDING).sum()) for tensor in shard.values())
    return plan


@st.composite
def networks(draw: st.DrawFn) -> NetworkShape:
    """Any family; 8, 12 or 16 query heads in any grouping, key/value heads fewer than ranks included."""
    heads = draw(st.sampled_from([8, 12, 16]))
    changes = {
        "num_layers": draw(st.sampled_from([2, 3, 4, 6, 8])),
        "hidden_size": draw(st.sampled_from([2, 6])),
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0])),
        "head_dim": draw(st.sampled_from([2, 4])),
        "intermediate_size": draw(st.sampled_from([16, 48])),
        "vocab_size": draw(st.integers(3, 200)),
    }
    family = draw(st.sampled_from(sorted(FAMILIES)))
    if FAMILIES[family].experts is not None:
        changes["num_experts"] = draw(st.sampled_from([4, 6, 8]))
    return tiny(family, tied=draw(st.booleans()), **changes)
