"""Which layers a pipeline stage holds: our arithmetic against megatron-core's own, for even and uneven stages. One process, no groups."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from megatron_ppo import device
from megatron_ppo.resharding.megatron_mesh import MegatronParallel, stage_layers

Case = tuple[int, MegatronParallel]


FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"


def cases() -> Iterator[Case]:
    """All small numbers of layers, stages and chunks, with every way to make stages uneven."""
    ends = [{FIRST: first, LAST: last} for first, last in product((None, 1, 2, 3, 4), repeat=2)]
    counted = [{EMBEDDING: embedding, LOSS: loss} for embedding, loss in ((True, False), (False, True), (True, True))]
    for layers, stages, chunks in product(range(1, 15), range(1, 7), (None, 2, 3)):
        if stages > 1 or chunks is None:
            for uneven in [{}, *counted] if stages == 1 else [*ends, *counted]:
                yield layers, MegatronParallel(1, stages, chunks, **uneven)


def megatron_core_layers(layers: int, parallel: MegatronParallel) -> list[list[range]] | None:
    """[stage][chunk] -> layers, by megatron-core; None where it refuses or fails."""
    device.prepare_megatron()
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    stages, chunks = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    try:
        config: Any = TransformerConfig(
            num_layers=layers,
            hidden_size=8,
            num_attention_heads=1,
            pipeline_model_parallel_size=stages,
            virtual_pipeline_model_parallel_size=chunks,
            pipeline_dtype=None if stages == 1 else "float32",
            cuda_graph_scope=[],
            num_layers_in_first_pipeline_stage=parallel.num_layers_in_first_pipeline_stage,
            num_layers_in_last_pipeline_stage=parallel.num_layers_in_last_pipeline_stage,
            account_for_embedding_in_pipeline_split=parallel.account_for_embedding_in_pipeline_split,
            account_for_loss_in_pipeline_split=parallel.account_for_loss_in_pipeline_split,
        )
        found = []
        for stage, chunk in product(range(stages), range(chunks or 1)):
            where = (config, None if chunks is None else chunk, stage)
            first = get_transformer_layer_offset(*where)
            found.append(range(first, first + get_num_layers_to_build(*where)))
    except (ValueError, AssertionError, ZeroDivisionError):
        return None
    return [found[start : start + (chunks or 1)] for start in range(0, len(found), chunks or 1)]


def test_b13_stages_are_megatron_cores_or_refused() -> None:
    """B13: every layer once and in order, empty stages among them; what megatron-core refuses, or gets wrong, is refused here too."""
    agreed, empty, uneven = 0, 0, 0
    for layers, parallel in cases():
        try:
            ours = stage_layers(layers, parallel)
        except ValueError:
            continue
        theirs = megatron_core_layers(layers, parallel)
        assert theirs is not None, f"megatron-core refuses {layers} layers under {parallel}"
        order = [layer for chunk in range(parallel.num_chunks) for stage in ours for layer in stage[chunk]]
        assert order == list(range(layers)), parallel
        assert [[list(chunk) for chunk in stage] for stage in ours] == [[list(chunk) for chunk in stage] for stage in theirs], parallel
        agreed += 1
        empty += any(not chunk for stage in ours for chunk in stage)
        uneven += len({sum(map(len, stage)) for stage in ours}) > 1
    assert agreed > 300 and empty > 20 and uneven > 100, (agreed, empty, uneven)


def test_what_megatron_core_can_cut_is_not_refused() -> None:
    refused = []
    for layers, parallel in cases():
        theirs = megatron_core_layers(layers, parallel)
        order = [layer for chunk in range(parallel.num_chunks) for stage in theirs or () for layer in stage[chunk]]
        if order == list(range(layers)):
            try:
                stage_layers(layers, parallel)
            except ValueError as error:
                refused.append(f"{parallel}: {error}")
    assert refused == []


@pytest.mark.parametrize(
    ("layers", "parallel", "message"),
    [
        (6, MegatronParallel(1, 2, 2, num_layers_in_first_pipeline_stage=2, num_layers_in_last_pipeline_stage=4), "not both"),
        (6, MegatronParallel(1, 3, num_layers_in_first_pipeline_stage=1), "leave 5 for the other 2 of 3 stages"),
        (4, MegatronParallel(1, 2, account_for_embedding_in_pipeline_split=True), r"4 layers \+ embedding are not a multiple"),
    ],
)
def test_stages_that_cannot_be_cut_are_refused_with_numbers(layers: int, parallel: MegatronParallel, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stage_layers(layers, parallel)
