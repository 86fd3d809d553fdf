"""Weights after a real update, moved from Megatron shards into live vLLM engines, held to what vLLM's own loader makes of an export.

One launch is one pair of meshes. Its ranks run the parts of a run by hand (no watchdog, no logs): sync of version 0, rollout, one
optimizer step, sync of version 1, rollout; then vLLM loads the Hugging Face export of the trained actor by itself, and nothing may differ.
At last a sync is spoilt on purpose, and its check must name what was spoilt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from spawn import run_ranks
from torch import Tensor
from toy_models import Family, make_toy
from toy_tokenizers import make_bpe_tokenizer

from megatron_ppo import device
from megatron_ppo.bridge import Bridge
from megatron_ppo.config import Config
from megatron_ppo.data_bus import DataBus, DataHandle
from megatron_ppo.experience import make_experience
from megatron_ppo.resharding.compare import compare_blocks
from megatron_ppo.resharding.executor import ReshardExecutor, TransferStats
from megatron_ppo.rollout_engine import PromptBatch, RemoteRollout, RemoteTraining, RolloutWorker
from megatron_ppo.tokenizer import load_tokenizer
from megatron_ppo.training_engine import TrainingEngine
from megatron_ppo.types import Prompt, TrajectoryBatch
from megatron_ppo.weight_synchronizer import WeightSynchronizer, refit_plan, rollout_layouts, transfer_dtype
from megatron_ppo.world import World, close_world, init_world

pytestmark = pytest.mark.timeout(600)

PROMPTS = tuple(Prompt(i, tuple(range(3 + i, 5 + 3 * i)), text="") for i in range(6))
SPOILT = "model.layers.1.self_attn.o_proj.weight"
"""The parameter that the last sync finds changed, on the last rank."""


@dataclass(frozen=True)
class Case:
    """A toy model and two meshes."""

    family: Family
    world_size: int
    fields: Mapping[str, object]
    toy: Mapping[str, Any] = field(default_factory=dict)


TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
TWO_REPLICAS, ROLLOUT_TP2 = {"rollout_tensor_parallel_size": 1}, {"rollout_tensor_parallel_size": 2}
BF16 = {"rollout_dtype": "bfloat16"}
SHARED = {"critic": "shared", "advantage_estimator": "gae"}

CASES = {
    "llama tp2 with shared critic to two replicas": Case("llama", 4, TP2 | TWO_REPLICAS | SHARED),
    "tied qwen2 pp2 to tp2": Case("qwen2", 4, PP2 | ROLLOUT_TP2, {"tied": True}),
    "qwen3 tp2 pp2 to tp2 in bf16": Case("qwen3", 6, TP2 | PP2 | ROLLOUT_TP2 | BF16, {"vocab_size": 201}),
    "llama tp2 pp2 with shared critic to two replicas": Case("llama", 6, TP2 | PP2 | TWO_REPLICAS | SHARED, {"vocab_size": 201}),
    "qwen3_moe pp2 ep2 to tp2 in bf16": Case("qwen3_moe", 6, PP2 | EP2 | ROLLOUT_TP2 | BF16, {"vocab_size": 201}),
    "qwen2 tp2 to tp2, trained in bf16": Case("qwen2", 4, TP2 | ROLLOUT_TP2 | BF16 | {"params_dtype": "bfloat16"}, {"vocab_size": 201}),
}
MARKS = {  # the exhaustive ones differ from others, and from what test_verify.py moves, in single factors only
    "llama tp2 with shared critic to two replicas": [],
    "llama tp2 pp2 with shared critic to two replicas": [pytest.mark.slow, pytest.mark.exhaustive],
    "qwen3 tp2 pp2 to tp2 in bf16": [pytest.mark.slow, pytest.mark.exhaustive],
    "qwen2 tp2 to tp2, trained in bf16": [pytest.mark.slow, pytest.mark.exhaustive],
}


# -- what runs on the ranks -------------------------------------------------------------------------------------------


def refit(rank: int, world_size: int, config: Config, export: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    world = init_world(config)
    bus = DataBus(world, timeout_s=240)
    executor = ReshardExecutor(
        refit_plan(config, world_size),
        rank,
        lambda name, ranks: Bridge(name, ranks, world),
        bucket_bytes=config.parallel.bucket_bytes,
        transfer_dtype=transfer_dtype(config),
    )
    found = (_train if world.is_training else _sample)(config, world, bus, executor, export)
    found["plan"] = executor.plan.digest()
    end = Bridge("end", range(world_size), world)
    end.barrier()  # rank 0 hosts the launch's store
    close_world(world)
    return found


def _train(config: Config, world: World, bus: DataBus, executor: ReshardExecutor, export: str) -> dict[str, Any]:
    from megatron_ppo.backends.megatron import MegatronBackend

    backend = MegatronBackend(config, num_optimizer_steps=4)
    engine = TrainingEngine(config, world, bus, backend, device.device())
    rollout = RemoteRollout(world)
    synchronizer = WeightSynchronizer(world, bus, executor, verify_always=False)
    before = {name: tensor.clone() for name, tensor in backend.weights().items()}
    synchronizer.sync(engine, rollout)
    found = {"step": _update(config, engine, bus, engine.fetch(rollout.collect(0)))}
    found["changed"] = {name: not torch.equal(before[name], tensor) for name, tensor in backend.weights().items()}
    stats = synchronizer.sync(engine, rollout)
    found["sent"] = stats.bytes_sent
    batch = engine.fetch(rollout.collect(1))
    difference = (engine.compute_log_probs(batch) - batch.rollout_log_probs).abs()[batch.response_mask]
    found["log-prob difference"] = float(difference.max()), float(difference.mean())
    found["tokens"] = len(difference)
    backend.export_hf(Path(export))
    if world.rank == 0:
        world.store.set("exported", "yes")
    engine.version += 1
    WeightSynchronizer(world, bus, executor, verify_always=True).sync(engine, rollout)
    return found


def _update(config: Config, engine: TrainingEngine, bus: DataBus, batch: TrajectoryBatch) -> dict[str, float]:
    """One optimizer step on the trajectories, by scores that differ within every group."""
    batch = dataclasses.replace(batch, scores=(batch.tokens.sum(dim=1) % 7).float())
    log_probs, values = engine.compute_log_probs(batch), engine.compute_values(batch)
    experience, _ = make_experience(batch, log_probs, values, None, None, config.algorithm, 0.0)
    return engine.update_policy(bus.put(experience), config.algorithm)


def _sample(config: Config, world: World, bus: DataBus, executor: ReshardExecutor, export: str) -> dict[str, Any]:
    from megatron_ppo.backends.vllm import VLLMBackend

    backend = VLLMBackend(config, seed=world.replica)
    stops = frozenset(range(0, 120, 15))
    worker = RolloutWorker(config, world, bus, backend, executor, load_tokenizer(config), stops, rewards=None)
    training = RemoteTraining(world)
    synchronizer = WeightSynchronizer(world, bus, executor, verify_always=False)
    synchronizer.sync(training, worker)
    worker.collect(bus.put(PromptBatch(0, PROMPTS)))
    first = {name: tensor.clone() for name, tensor in backend.weights().items()}
    training.finished_update()
    stats = synchronizer.sync(training, worker)
    found: dict[str, Any] = {"received": stats.bytes_received, "shard": backend.shard_bytes(), "version": worker.version}
    worker.collect(bus.put(PromptBatch(1, PROMPTS)))
    live = {name: tensor.clone() for name, tensor in backend.weights().items()}
    layout = rollout_layouts(config)[world.replica_tp_rank]
    found["stale"] = [one.block for one in compare_blocks(layout, first, live) if not one.num_differing]

    world.store.wait(["exported"])
    backend.load_hf_weights([pair for file in sorted(Path(export).glob("*.safetensors")) for pair in load_file(file).items()])
    own = backend.weights()
    assert set(own) == set(live)
    found["differs from vLLM's loader"] = [str(one) for one in compare_blocks(layout, live, own) if one.num_differing]
    found["dtypes"] = {str(tensor.dtype) for tensor in own.values()}

    training.finished_update()
    spoiling = _Spoiling(worker, spoil=world.global_rank == world.world_size - 1)
    try:
        WeightSynchronizer(world, bus, executor, verify_always=True).sync(training, spoiling)
        found["verdict"] = ""
    except RuntimeError as error:
        found["verdict"] = str(error)
    worker.close()
    return found


class _Spoiling:
    """The worker, after whose sync a bit of one live parameter is another."""

    def __init__(self, worker: RolloutWorker, *, spoil: bool) -> None:
        self._worker = worker
        self._spoil = spoil

    def set_weights(self, handle: DataHandle) -> TransferStats:
        stats = self._worker.set_weights(handle)
        if self._spoil:
            row = self._worker.live_weights()[SPOILT][0]
            row[0] = torch.nextafter(row[0], torch.tensor(9.0, dtype=row.dtype))
        return stats

    def live_weights(self) -> dict[str, Tensor]:
        return self._worker.live_weights()


# -- judgement --------------------------------------------------------------------------------------------------------


def make_config(folder: Path, case: Case) -> Config:
    """Everything small, and buckets so small that parameters are cut across several of them."""
    options = {"hidden_size": 128, "vocab_size": 130} | dict(case.toy)
    model = make_toy(folder / "model", case.family, **options)
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    fields: dict[str, Any] = {
        "model_path": str(model),
        "tokenizer_path": str(make_bpe_tokenizer(folder / "tokenizer")),
        "prompt_data": str(prompts),
        "reward": "length",
        "critic": "none",
        "advantage_estimator": "grpo",
        "lr": 1e-2,
        "rollout_world_size": 2,
        "global_batch_size": 12,
        "micro_batch_size": 3,
        "prompts_per_iteration": 6,
        "samples_per_prompt": 2,
        "max_prompt_length": 32,
        "max_response_length": 10,
        "temperature": 0.8,
        "vllm_overrides": {"kv_cache_memory_bytes": "53687091"},
        "bucket_bytes": 50_000,
    }
    return Config().replace(**(fields | dict(case.fields)))


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, [pytest.mark.slow])) for name in CASES])
def test_a_trained_actor_arrives_in_vllm_bit_for_bit(tmp_path: Path, name: str) -> None:
    """B28 and the refit as a whole: every element, every byte counted, log-probs equal, a spoilt weight named."""
    case = CASES[name]
    config = make_config(tmp_path, case)
    found = run_ranks(refit, case.world_size, config, str(tmp_path / "export"), timeout_s=500)
    training, rollout = found[:-2], found[-2:]
    assert len({one["plan"] for one in found}) == 1

    for one in training:
        assert one["step"]["skipped_steps"] == 0 and one["step"]["grad_norm"] > 0
        unchanged = [key for key, changed in one["changed"].items() if not changed]
        assert not unchanged, "the update must change every parameter, or the comparison proves nothing for it"
    for one in rollout:
        assert one["differs from vLLM's loader"] == [] and one["stale"] == []
        assert one["dtypes"] == {f"torch.{config.rollout.rollout_dtype}"}
        assert one["received"] == one["shard"] > 0
        assert one["version"] == 1
    # A replica's shards hold each element once, but for key/value heads and norms; two replicas hear the same broadcast.
    assert sum(one["sent"] for one in training) == _expected_sent(config, [one["received"] for one in rollout])

    largest, mean = training[0]["log-prob difference"]
    assert training[0]["tokens"] > 12
    assert all(one["log-prob difference"] == training[0]["log-prob difference"] for one in training)
    if config.rollout.rollout_dtype == "float32":
        assert largest < 1e-4
    else:
        assert mean < 0.05, "rounding of bf16 is all that may differ"

    assert rollout[0]["verdict"] == ""
    verdict = rollout[1]["verdict"]
    assert "1 blocks of weights v2" in verdict and SPOILT in verdict and f"rank {case.world_size - 1} (rollout rank 1)" in verdict


def _expected_sent(config: Config, received: list[int]) -> int:
    """Bytes that leave the trainer: those of one replica, for all replicas hear one broadcast."""
    return received[0] if config.parallel.rollout_tensor_parallel_size == 1 else sum(received)
