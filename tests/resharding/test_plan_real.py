"""Plans between the layouts of real frameworks: all families and meshes at random, applied copy by copy, against gather-then-slice."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from layout_support import scatter, tiny
from plan_support import Layouts, apply, check, networks
from torch import Tensor

from megatron_ppo.families import EMBEDDING, Head, NetworkShape, canonical_tensors
from megatron_ppo.resharding.executor import ReshardExecutor
from megatron_ppo.resharding.megatron_layout import megatron_faults, training_layouts
from megatron_ppo.resharding.megatron_mesh import MegatronParallel
from megatron_ppo.resharding.plan import build_plan
from megatron_ppo.resharding.vllm_layout import hf_layout, vllm_faults, vllm_layout

# ---- random models and meshes


@dataclass(frozen=True)
class Job:
    """Both sides of a transfer."""

    network: NetworkShape
    head: Head
    parallel: MegatronParallel
    world: int
    destination: str
    rollout_tp: int
    replicas: int
    whole_experts: bool

    def sources(self) -> Layouts:
        return training_layouts(self.network, self.parallel, self.world, head=self.head)

    def destinations(self) -> Layouts:
        if self.destination == "hf":
            shards = [hf_layout(self.network)]
        else:
            shards = [
                vllm_layout(self.network, tensor_parallel_size=self.rollout_tp, tp_rank=rank, expert_parallel=self.whole_experts)
                for rank in range(self.rollout_tp)
            ]
        return {self.world + n: shards[n % len(shards)] for n in range(len(shards) * self.replicas)}


@st.composite
def stages(draw: st.DrawFn, num_layers: int) -> dict[str, int | bool | None]:
    """A cut of the layers: even, interleaved, with a first or last stage of its own size, or counting embedding and loss."""
    pp = draw(st.sampled_from([1, 2, 3, 4]))
    kind = draw(st.sampled_from(["even", "interleaved", "first", "last", "both", "embedding", "loss", "embedding and loss"]))
    cut: dict[str, int | bool | None] = {"pipeline_model_parallel_size": pp}
    if kind == "interleaved":
        cut["virtual_pipeline_model_parallel_size"] = draw(st.sampled_from([2, 3]))
    if kind in ("first", "both"):
        cut["num_layers_in_first_pipeline_stage"] = draw(st.integers(1, num_layers))
    if kind in ("last", "both"):
        cut["num_layers_in_last_pipeline_stage"] = draw(st.integers(1, num_layers))
    cut["account_for_embedding_in_pipeline_split"] = "embedding" in kind
    cut["account_for_loss_in_pipeline_split"] = "loss" in kind
    return cut


@st.composite
def meshes(draw: st.DrawFn, network: NetworkShape) -> tuple[MegatronParallel, int]:
    """A training mesh that megatron-core takes, and its number of ranks."""
    cut = draw(stages(network.num_layers))
    tp = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 8) if network.num_attention_heads % n == 0]))
    cp, dp = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3, 4]))
    ep, expert_tp = 1, None
    if network.experts is not None:
        ep = draw(st.sampled_from([n for n in (1, 2, 3, 4, 8) if network.num_experts % n == 0 and (tp * cp * dp) % n == 0]))
        if ep > 1:
            expert_tp = draw(st.sampled_from([n for n in (1, 2, 4) if (tp * cp * dp) % (n * ep) == 0]))
    parallel = MegatronParallel(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=expert_tp,
        make_vocab_size_divisible_by=draw(st.sampled_from([1, 4, 16])),
        **cut,  # type: ignore[arg-type]
    )
    world = tp * cp * dp * parallel.pipeline_model_parallel_size
    assume(not list(megatron_faults(network, parallel)) and world % (parallel.expert_tensor_size * ep) == 0)
    return parallel, world


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    network = draw(networks())
    parallel, world = draw(meshes(network))
    whole = network.experts is not None and draw(st.booleans())
    fitting = [tp for tp in (1, 2, 3, 4, 6, 8, 12, 16) if not list(vllm_faults(network, tp, whole))]
    return Job(
        network,
        draw(st.sampled_from(["lm", "lm+value"])),
        parallel,
        world,
        draw(st.sampled_from(["vllm", "vllm", "vllm", "hf"])),
        draw(st.sampled_from(fitting)),
        draw(st.sampled_from([1, 2, 3])),
        whole,
    )


def check_job(job: Job) -> None:
    sources, destinations = job.sources(), job.destinations()
    plan = check(job.network, sources, destinations, job.head)
    again = build_plan(dict(reversed(job.sources().items())), dict(reversed(job.destinations().items())), bytes_per_element=2)
    assert again.digest() == plan.digest() and again.groups == plan.groups


QUICK = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])


@QUICK
@given(job=jobs())
def test_any_plan_equals_gather_then_slice(job: Job) -> None:
    check_job(job)


@pytest.mark.slow
@settings(QUICK, max_examples=100)
@given(job=jobs())
def test_many_plans_equal_gather_then_slice(job: Job) -> None:
    check_job(job)


@QUICK
@given(data=st.data())
def test_any_plan_between_training_meshes_equals_gather_then_slice(data: st.DataObject) -> None:
    """Where mcore's own resharding fails: other stages, tied copies, other vocabulary padding, experts by number, all virtual chunks."""
    network = data.draw(networks())
    (parallel, world), (other, size) = data.draw(meshes(network)), data.draw(meshes(network))
    destinations = {world + rank: layout for rank, layout in training_layouts(network, other, size).items()}
    check(network, training_layouts(network, parallel, world), destinations)


# ---- shapes of released models


LLAMAS = {
    "Llama-2 7B": (tiny(num_attention_heads=32, num_key_value_heads=32, head_dim=2, intermediate_size=86, vocab_size=320), 2),
    "Llama-2 70B": (tiny(num_attention_heads=64, num_key_value_heads=8, head_dim=2, intermediate_size=224, vocab_size=320), 8),
    "Llama-3 8B": (tiny(num_attention_heads=32, num_key_value_heads=8, head_dim=2, intermediate_size=112, vocab_size=1282), 4),
    "Llama-3.1 405B": (tiny(num_layers=6, num_attention_heads=128, num_key_value_heads=8, head_dim=2, intermediate_size=208), 16),
    "Llama-3.2 1B": (tiny(tied=True, num_attention_heads=32, num_key_value_heads=8, head_dim=2, intermediate_size=64, vocab_size=1282), 2),
    "Llama-3.2 3B": (tiny(tied=True, num_attention_heads=24, num_key_value_heads=8, head_dim=2, intermediate_size=64, vocab_size=1282), 1),
}
"""Head counts are the models' own; widths are a hundredth."""


@pytest.mark.parametrize("name", LLAMAS)
def test_llamas_of_all_generations(name: str) -> None:
    network, rollout_tp = LLAMAS[name]
    network = replace(network, hidden_size=8, vocab_size=min(network.vocab_size, 1282))
    for tp, pp in ((1, 1), (2, 2), (8, 1)) if network.intermediate_size % 8 == 0 else ((1, 1), (2, 2)):
        job = Job(network, "lm", MegatronParallel(tp, pp), tp * pp * 2, "vllm", rollout_tp, 2, False)
        plan = check(network, job.sources(), job.destinations())
        names = {transfer.name for group in plan.groups for transfer in group.transfers}
        assert ("lm_head.weight" in names) == (not network.tied)


# ---- what mcore's own resharding lacks


def test_traffic_does_not_grow_with_replicas() -> None:
    network = tiny("mixtral", vocab_size=130)
    totals = []
    for replicas in (1, 2, 4):
        job = Job(network, "lm", MegatronParallel(2, 2, expert_model_parallel_size=2), 8, "vllm", 2, replicas, False)
        traffic = build_plan(job.sources(), job.destinations(), bytes_per_element=2).summary(1 << 20)
        totals.append(sum(row.bytes_sent for row in traffic.values()))
    assert totals[0] == totals[1] == totals[2] > 0


@pytest.mark.parametrize(("ep", "other"), [(1, 2), (2, 1), (2, 4), (4, 2), (2, 2)])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_b18_experts_land_by_their_global_number(family: str, ep: int, other: int) -> None:
    """Sequential experts, EP to EP: expert e is filled with e, and lies in local slot e % (E / EP) of rank e // (E / EP)."""
    network = tiny(family, vocab_size=8, num_layers=1)
    sources = training_layouts(network, MegatronParallel(expert_model_parallel_size=ep), 4)
    target = training_layouts(network, MegatronParallel(expert_model_parallel_size=other), 4)
    destinations = {4 + rank: layout for rank, layout in target.items()}
    plan = check(network, sources, destinations)
    tensors = {
        t.name: torch.full(t.shape, int(t.name.split(".experts.")[1].split(".")[0]) if ".experts." in t.name else 99)
        for t in canonical_tensors(network)
    }
    live = apply(plan, {rank: scatter(layout, tensors) for rank, layout in sources.items()}, destinations)
    held = 8 // other
    for rank in range(4):
        for local in range(held):
            for part in ("linear_fc1", "linear_fc2"):
                value = live[4 + rank][f"decoder.layers.0.mlp.experts.local_experts.{local}.{part}.weight"]
                assert value.unique().tolist() == [rank % other * held + local]


@pytest.mark.parametrize(("pp", "other"), [(1, 2), (2, 1), (2, 2), (1, 4), (4, 2)])
def test_a_tied_embedding_reaches_every_copy_once(pp: int, other: int) -> None:
    network = tiny(tied=True, vocab_size=130)
    destinations = {16 + rank: layout for rank, layout in training_layouts(network, MegatronParallel(2, other), 2 * other).items()}
    plan = check(network, training_layouts(network, MegatronParallel(1, pp), pp), destinations)
    copies = {t.destination_parameter for group in plan.groups for t in group.transfers if t.name == EMBEDDING}
    assert copies == {"embedding.word_embeddings.weight"} | ({"output_layer.weight"} if other > 1 else set())


@pytest.mark.parametrize(("one", "other"), [(128, 64), (16, 128), (1, 128)])
def test_vocabularies_padded_differently_lose_no_row(one: int, other: int) -> None:
    network = tiny(vocab_size=1001)
    target = training_layouts(network, MegatronParallel(4, make_vocab_size_divisible_by=other), 4)
    check(
        network,
        training_layouts(network, MegatronParallel(2, make_vocab_size_divisible_by=one), 2),
        {2 + rank: layout for rank, layout in target.items()},
    )


def test_every_virtual_chunk_is_sent() -> None:
    network = tiny(num_layers=8, vocab_size=130)
    job = Job(network, "lm", MegatronParallel(1, 2, 4), 2, "vllm", 2, 1, False)
    plan = check(network, job.sources(), job.destinations())
    sent = {transfer.source_parameter.split(".")[0] for group in plan.groups for transfer in group.transfers}
    assert sent == {"model0", "model1", "model2", "model3"}


# ---- the executor's buckets


class NoGroup:
    """A process group that is only counted."""

    def broadcast(self, tensor: Tensor, source: int, async_op: bool = False) -> None:
        raise AssertionError("nothing is sent here")


@settings(QUICK, max_examples=10)
@given(job=jobs(), bucket_bytes=st.sampled_from([2, 50, 4096, 1 << 20]), colocated=st.booleans())
def test_the_summary_counts_what_the_executor_schedules(job: Job, bucket_bytes: int, colocated: bool) -> None:
    sources = job.sources()
    shift = job.world if colocated else 0  # the first rollout ranks are training ranks as well
    destinations = {rank - shift: layout for rank, layout in job.destinations().items()}
    plan = build_plan(sources, destinations, bytes_per_element=2)
    if bucket_bytes < 50:
        assume(sum(group.num_elements for group in plan.groups) < 20000)
    traffic = plan.summary(bucket_bytes)
    for rank, row in traffic.items():
        made: list[str] = []

        def make(name: str, ranks: object, made: list[str] = made) -> NoGroup:
            made.append(name)
            return NoGroup()

        executor = ReshardExecutor(plan, rank, make, bucket_bytes=bucket_bytes, transfer_dtype=torch.bfloat16)
        buckets = executor._buckets
        assert row.num_groups == len(made) == len(set(made))
        assert row.num_buckets == len(buckets)
        assert row.num_messages == sum(bucket.bridge is not None for bucket in buckets)
        assert row.bytes_sent == 2 * sum(bucket.content.num_elements for bucket in buckets if bucket.is_source)
        assert row.bytes_received == 2 * sum(bucket.content.num_elements for bucket in buckets if bucket.is_destination)
        assert all(0 < 2 * bucket.content.num_elements <= bucket_bytes for bucket in buckets)


def test_a_bucket_too_small_for_an_element_is_refused() -> None:
    job = Job(tiny(vocab_size=8), "lm", MegatronParallel(), 1, "hf", 1, 1, False)
    with pytest.raises(ValueError, match="bucket_bytes 1 cannot hold one element of 2 bytes"):
        build_plan(job.sources(), job.destinations(), bytes_per_element=2).summary(1)
