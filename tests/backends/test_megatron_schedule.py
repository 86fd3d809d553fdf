"""Parts of the Megatron schedule on two ranks that need no network: how rows are cut over context ranks, how metrics are reduced, and how
tokens travel whose number differs from rank to rank."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from spawn import run_ranks
from toy_batches import make_trajectories

from megatron_ppo.config import Config
from megatron_ppo.packing import make_micro_batch
from megatron_ppo.types import MicroBatch


def eight_tokens() -> MicroBatch:
    """One row whose token at position t has the id t: a prompt of 3, a response of 3 that positions 2 to 4 predict, and padding to 8."""
    batch = make_trajectories((3,), (3,), length=8)
    batch = dataclasses.replace(batch, tokens=torch.arange(8)[None, :])
    return make_micro_batch(batch, torch.tensor([0]), length_multiple=8)


def uneven_metrics(rank: int) -> list[dict[str, torch.Tensor]]:
    """(sum, count) of the micro-batches of a rank: rewards [1, 1, 1] on rank 0 and [0] on rank 1, and names that one rank alone has."""
    if rank == 0:
        part = {"reward": torch.tensor([1.0, 1.0]), "only on rank 0": torch.tensor([6.0, 4.0])}
        return [part, {"reward": torch.tensor([2.0, 2.0]), "nowhere counted": torch.zeros(2)}]
    return [{"reward": torch.tensor([0.0, 1.0]), "only on rank 1": torch.tensor([-3.0, 2.0])}]


def exchange_uneven(rank: int) -> tuple[list[float], list[float]]:
    """What megatron-core does with tokens of experts that are cut: gather parts of 1 and of 3 rows, send back the sum of the gradients."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    own = torch.tensor([[0.0]] if rank == 0 else [[1.0], [2.0], [3.0]], requires_grad=True)
    whole = gather_from_sequence_parallel_region(own, group=dist.group.WORLD, output_split_sizes=[1, 3])
    (whole.squeeze(1) * torch.tensor([1.0, 2.0, 3.0, 4.0]) * (1 + 9 * rank)).sum().backward()
    assert own.grad is not None
    return whole.squeeze(1).tolist(), own.grad.squeeze(1).tolist()


def use_schedule(rank: int, world_size: int) -> dict[str, Any]:
    from megatron_ppo.backends.megatron_schedule import context_part, reduce_metrics
    from megatron_ppo.backends.megatron_setup import destroy_megatron, initialize_megatron

    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    found: dict[str, Any] = {}
    for name, fields in {"dp2": {}, "cp2": {"context_parallel_size": 2}, "pp2": {"pipeline_model_parallel_size": 2}}.items():
        initialize_megatron(Config().replace(**fields), seed=1)
        found[name] = reduce_metrics(uneven_metrics(rank))
        if name == "dp2":
            found["uneven"] = exchange_uneven(rank)
            found["nothing on rank 1"] = reduce_metrics(uneven_metrics(0) if rank == 0 else [])
        if name == "cp2":
            whole = eight_tokens()
            found["part"] = context_part(whole)
            found["positions"] = context_part(dataclasses.replace(whole, tokens=torch.arange(8)[None, :])).tokens.tolist()
        destroy_megatron()
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(use_schedule, 2, timeout_s=100)


def test_b64_rows_are_cut_after_labels_are_shifted(two_ranks: list[dict[str, Any]]) -> None:
    """B64: zig-zag chunks, and the label of a chunk's last position is the next chunk's first token, which another rank holds."""
    assert [found["positions"] for found in two_ranks] == [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    parts: list[MicroBatch] = [found["part"] for found in two_ranks]
    # The row has 6 real tokens: ids 6 and 7 in the batch are padding, which the micro-batch writes as id 0.
    assert parts[0].tokens.tolist() == [[0, 1, 0, 0]] and parts[1].tokens.tolist() == [[2, 3, 4, 5]]
    assert parts[0].labels.tolist() == [[1, 2, 0, 0]], "position 1 is told token 2, although rank 1 holds it"
    assert parts[1].labels.tolist() == [[3, 4, 5, 0]]
    assert not parts[0].loss_mask.any(), "rank 0 has no position that predicts a response token"
    assert parts[1].loss_mask.tolist() == [[True, True, True, False]]


def test_b106_metrics_that_one_rank_has_are_reduced_over_that_rank(two_ranks: list[dict[str, Any]]) -> None:
    """B106: a mean over all tokens and not of means; no rank waits for a name that it does not have; the same dict everywhere."""
    one, other = two_ranks
    assert one["dp2"] == other["dp2"] == {"reward": 0.75, "only on rank 0": 1.5, "only on rank 1": -1.5}
    assert one["nothing on rank 1"] == other["nothing on rank 1"] == {"reward": 1.0, "only on rank 0": 1.5}


def test_b106_of_a_replica_one_rank_counts(two_ranks: list[dict[str, Any]]) -> None:
    """Context-parallel ranks hold the same metrics: the first counts. Of pipeline stages the last alone has any."""
    for found in two_ranks:
        assert found["cp2"] == {"reward": 1.0, "only on rank 0": 1.5}
        assert found["pp2"] == {"reward": 0.0, "only on rank 1": -1.5}


def test_ranks_exchange_different_numbers_of_tokens(two_ranks: list[dict[str, Any]]) -> None:
    assert two_ranks[0]["uneven"] == ([0.0, 1.0, 2.0, 3.0], [11.0])
    assert two_ranks[1]["uneven"] == ([0.0, 1.0, 2.0, 3.0], [22.0, 33.0, 44.0])
