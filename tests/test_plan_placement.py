"""The planner where both meshes share ranks, where frozen networks lie on rollout ranks, where GPUs differ, and what it refuses.

Sums are worked out by hand from the published sizes of Llama 3.1 8B; parameters are counted from layouts, which ``test_planner.py`` holds
to the real classes. What two real ranks hold of a colocated job is compared with its plan, byte by byte.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from other_models import make_other
from spawn import run_ranks
from toy_models import make_toy

from megatron_ppo.config import Config
from megatron_ppo.plan_job import GIB, Plan, plan_from_stages
from megatron_ppo.plan_memory import COLOCATED_UTILIZATION
from megatron_ppo.plan_search import layout_stages, search_meshes
from megatron_ppo.plan_time import Machine
from megatron_ppo.planner import main

SHAPES = Path(__file__).resolve().parent.parent / "megatron_ppo" / "model_shapes"
BF16: dict[str, Any] = {"params_dtype": "bfloat16", "rollout_dtype": "bfloat16", "prompts_per_iteration": 128, "global_batch_size": 256}
TP4: dict[str, Any] = {"tensor_model_parallel_size": 4, "sequence_parallel": True}
BUCKETS = 2 * 64 * 2**20
RESERVE = 4 * GIB


def llama(**fields: Any) -> Config:
    return Config().replace(model_path=str(SHAPES / "llama3.1_8b"), **(BF16 | fields))


def planned(config: Config, world_size: int, **machine: Any) -> Plan:
    """The plan, with parameters from layouts: without child processes."""
    return plan_from_stages(config, world_size, Machine(**machine), layout_stages(config, config.training_size(world_size)))


def llama_elements(tp: int, vocabulary: int) -> tuple[int, int]:
    """(elements of a rank's share of the trunk, of its share of the head), with so many rows of embedding and head."""
    attention, mlp = 4096 * (4096 + 2 * 1024) + 4096 * 4096, 3 * 4096 * 14336
    layer = 2 * 4096 + (attention + mlp) // tp
    return 32 * layer + 4096 + vocabulary // tp * 4096, vocabulary // tp * 4096


@pytest.mark.parametrize("offload", ["none", "sampling"])
def test_colocated_ranks_hold_both_sides_by_turns(offload: str) -> None:
    """16 ranks train as TP 4 x DP 4 and sample as 8 engines of TP 2: PPO with a critic and a reference."""
    config = llama(**TP4, rollout_world_size=0, rollout_tensor_parallel_size=2, kl_coef=0.1, cpu_offload=offload)
    plan = planned(config, 16)
    trunk, head = llama_elements(4, 128512)  # 128256 rows, to a multiple of 128 x 4
    trained, frozen = (trunk + head) + (trunk + 4096), trunk + head  # the critic's head is one row, on every rank
    weights, gradients, optimizer = 2 * (trained + frozen), 4 * trained, 12 * trained // 4
    engine = 2 * sum(llama_elements(2, 128256))
    share = COLOCATED_UTILIZATION * 80 * GIB
    (stage,) = plan.stages
    away = 0 if offload == "sampling" else gradients + optimizer
    assert plan.engine.weights == engine and plan.engine.total == pytest.approx(share)
    assert stage.total("sync") == pytest.approx(weights + away + engine + BUCKETS + RESERVE)
    assert stage.total("rollout") == pytest.approx(weights + away + share + BUCKETS + RESERVE)
    for phase in ("score", "update"):  # the engine sleeps
        parts = stage.phases[phase]  # type: ignore[index]
        held = sum(parts[name] for name in ("weights", "gradients", "optimizer", "buckets", "reserve"))
        assert held == pytest.approx(weights + gradients + optimizer + BUCKETS + RESERVE)
        assert not parts.keys() & {"engine weights", "key/value cache"} and parts["working"] > 0
    assert plan.fullest == (80 * GIB - stage.peak, 80 * GIB)
    # The same trainer alone: neither engine nor cache beside it, in no phase; its engines have 85% of their own GPUs.
    (alone,) = planned(config.replace(rollout_world_size=8, cpu_offload="none"), 24).stages
    assert alone.total("rollout") == alone.total("sync") == pytest.approx(weights + gradients + optimizer + BUCKETS + RESERVE)
    assert alone.total("update") == pytest.approx(stage.total("update"))


def test_what_the_search_says_of_a_colocated_mesh_is_its_plan() -> None:
    config = llama(rollout_world_size=1, kl_coef=0.05)
    found = [one for one in search_meshes(config, 16, Machine()) if one.config.is_colocated]
    assert found
    for one in found:
        assert one.config.parallel.cpu_offload == "sampling"
        plan = planned(one.config, 16)
        assert plan.faults == () and plan.headroom == pytest.approx(one.headroom)
        assert plan.seconds.rollout == pytest.approx(one.seconds.rollout) and plan.seconds.update == pytest.approx(one.seconds.update)
        share = float(one.config.rollout.vllm_overrides["gpu_memory_utilization"])
        room = plan.memory - plan.stages[0].total("rollout")
        assert share == 0.9 or 0 <= room < 0.011 * plan.memory  # all that the trainer leaves, in hundredths
    assert not any(one.config.is_colocated for one in search_meshes(config, 16, Machine(rollout_gpu_memory_gib=139)))


def test_plain_generation_holds_its_rows_and_what_it_evaluates_with_and_does_not_sleep() -> None:
    """hf: no share of the GPU is set aside; at most 256 of a replica's responses are in its cache; frozen copies are whole."""
    fields = {"backend": "fsdp", "rollout_backend": "hf", "critic": "shared", "kl_coef": 0.1, "compute_on": "rollout"}
    apart = planned(llama(**fields, rollout_world_size=2), 10)
    model = sum(llama_elements(1, 128256))
    assert apart.engine.weights == 2 * (model + 4096) and apart.engine.frozen == {"reference": 2 * model}  # with the value head
    assert apart.engine.cache == 256 * 1024 * (2 * 32 * 8 * 128 * 2)
    few = planned(llama(**fields, rollout_world_size=32), 40)
    assert few.engine.cache == 4 * 8 * 1024 * (2 * 32 * 8 * 128 * 2)  # 4 prompts x 8 samples
    assert set(apart.stages[0].resident) == {"actor"}
    on_training = planned(llama(**(fields | {"compute_on": "training"}), rollout_world_size=2), 10)
    assert on_training.engine.frozen == {} and set(on_training.stages[0].resident) == {"actor", "reference"}
    assert on_training.stages[0].resident["reference"].weights == 2 * model // 8
    assert apart.seconds.rollout > on_training.seconds.rollout and apart.seconds.score < on_training.seconds.score
    shard = model // 16 + 4096  # the value head's one row is on the first rank
    both = planned(llama(**fields, rollout_world_size=0, cpu_offload="sampling"), 16).stages[0]
    for phase, parts in both.phases.items():
        assert (parts["engine weights"], parts["frozen copies"]) == (2 * (model + 4096), 2 * model), phase
        # FSDP makes gradients in a step and keeps none; moments are away while the engine is filled and samples.
        assert parts["gradients"] == (4 * shard if phase == "update" else 0)
        assert parts["optimizer"] == (8 * shard if phase in ("score", "update") else 0)


def test_rollout_ranks_may_have_larger_gpus() -> None:
    """405B in bfloat16: an engine's rank of eight holds 94.5 GiB of weights; a training rank needs less than 80."""
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 14, "sequence_parallel": True, "recompute_granularity": "full",
        "rollout_world_size": 64, "rollout_tensor_parallel_size": 8, "micro_batch_size": 1, "kl_coef": 0.05,
    }  # fmt: skip
    config = llama(**fields).replace(model_path=str(SHAPES / "llama3.1_405b"))
    world_size = 64 + 8 * 14 * 4
    large = planned(config, world_size, rollout_gpu_memory_gib=139)
    assert large.faults == () and not any("whole nodes" in note for note in large.notes)
    assert large.engine_total == pytest.approx(0.85 * 139 * GIB + BUCKETS + RESERVE)
    left = [(80 * GIB - stage.peak, 80 * GIB) for stage in large.stages]
    assert large.fullest == min([*left, (139 * GIB - large.engine_total, 139 * GIB)])
    small = planned(config, world_size)
    assert any("the engine's key/value cache holds no whole sequence" in fault and "94.5 GiB of weights" in fault for fault in small.faults)
    odd = planned(llama(**TP4, rollout_world_size=4), 16, rollout_gpu_memory_gib=139)
    assert any("fill only 4 of the 8 GPUs of their last node" in note for note in odd.notes)


def _refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 2
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    return shown.err + shown.out


def test_bad_input_is_refused_with_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """Each at once, before any network is built."""
    start = ["--model-path", str(SHAPES / "llama3.1_8b"), "--params-dtype", "bfloat16", "--rollout-dtype", "bfloat16"]
    for words, said in {
        "--gpu-memory-gib -1": "--gpu-memory-gib -1.0 must be a finite number above 0",
        "--rollout-gpu-memory-gib 0": "--rollout-gpu-memory-gib 0.0 must be a finite number above 0",
        "--rollout-gpu-memory-gib 3": "--reserve-gib 4.0 must be at least 0 and below --rollout-gpu-memory-gib 3.0",
        "--rollout-gpu-memory-gib 139 --rollout-world-size 0": "every rank is of both meshes: leave it out",
        "--world-size 0": "--world-size 0 must be at least 1 and at most 16384",
        "--world-size 1000000": "--world-size 1000000 must be at least 1 and at most 16384",
        "--tensor-model-parallel-size 32 --pipeline-model-parallel-size 1024": "has 32769 ranks, and at most 16384 are planned",
        "--search 1": "--search 1: a launch has at least 2 ranks",
        "--search 8 --world-size 16": "--search 8 is the number of ranks, and --world-size 16 another",
        "--search 8 --refit": "give one of them",
        "--search 8 --png plan.png": "--search draws no picture",
        "--search 8 --micro-batch-size 0": "micro_batch_size = 0 must be at least 1",
        "--search 8 --max-response-length 200000": "max_prompt_length + max_response_length = 200512 exceeds",
        "--json /tmp": "/tmp is a folder",
        "--vllm-overrides gpu_memory_utilization 1.5": "gpu_memory_utilization = '1.5' must be a number above 0 and at most 1",
        "--vllm-overrides max_num_seqs 0": "max_num_seqs = '0' must be a whole number of at least 1",
        "--vllm-overrides kv_cache_memory_bytes 1e9": "kv_cache_memory_bytes = '1e9' must be a whole number",
        "--global-batch-size 7": "256 responses are not a multiple of global_batch_size = 7; the nearest that divides is 8",
        "--prompts-per-iteration 2 --global-batch-size 16 --rollout-world-size 4": "is less than the 4 rollout replicas",
        "--pipeline-model-parallel-size 4 --virtual-pipeline-model-parallel-size 3": "pipeline stage 0 has 8 layers",
        "--backend fsdp --fsdp-shard-size 3 --world-size 9": "replicas x shards = 8 training ranks, so it may be one of [1, 2, 4, 8]",
        "--backend fsdp --context-parallel-size 2": "context_parallel_size = 2 is megatron-core's",
        "--rollout-backend hf --rollout-world-size 2 --rollout-tensor-parallel-size 2": "set it to 1, or use vllm",
        "--compute-on rollout": "compute_on = rollout needs rollout_backend = hf",
    }.items():
        text = _refused(capsys, *start, *words.split())
        assert said in text, (words, text)
        if any(part in words for part in ("--world-size 0", "--world-size 1000000", "--max-response-length", "--global-batch-size 7")):
            assert "nearest meshes" not in text, words  # no mesh would help


def test_models_outside_the_tables_are_refused_with_what_is_known(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Their parameters are counted on transformers' own model; what their layers keep has no formula."""
    folder = make_other(tmp_path / "model", "gemma2")
    (folder / "model.safetensors").unlink()
    lengths = ["--max-prompt-length", "8", "--max-response-length", "8", "--backend", "fsdp", "--rollout-backend", "hf"]
    for more in ([], ["--search", "4"]):
        text = _refused(capsys, "--model-path", str(folder), *lengths, *more)
        assert "model_type 'gemma2' is not supported" in text and "FSDP over S ranks holds" in text and "--refit" in text, text
        assert "nearest meshes" not in text
    assert main(["--refit", "--model-path", str(folder), *lengths]) == 0
    assert "received/shard  1.000" in " ".join(capsys.readouterr().out.split()).replace("received/shard 1.000", "received/shard  1.000")


@pytest.mark.slow
def test_two_real_colocated_ranks_hold_what_is_predicted(tmp_path: Path) -> None:
    """FSDP over two ranks, each of which also samples and has its own reference and reward model, in another dtype than the engine."""
    make_toy(tmp_path / "model")
    make_toy(tmp_path / "reward", seed=1, num_layers=3, score_head=True)
    fields = {
        "model_path": str(tmp_path / "model"), "reward_model_path": str(tmp_path / "reward"), "critic": "shared", "kl_coef": 0.1,
        "params_dtype": "bfloat16", "backend": "fsdp", "rollout_backend": "hf", "rollout_world_size": 0, "compute_on": "rollout",
        "max_prompt_length": 8, "max_response_length": 8,
    }  # fmt: skip
    config = Config().replace(**fields)
    plan = planned(config, 2)
    measured = run_ranks(_held_bytes, 2, fields)
    actor = plan.stages[0].resident["actor"]
    assert set(plan.stages[0].resident) == {"actor"}
    for found in measured:
        assert found["trained"] == ["actor"] and found["engine"] == plan.engine.weights
        assert {name: found[name] for name in ("reference", "reward")} == plan.engine.frozen
        assert found["asleep"] == plan.engine.weights + sum(plan.engine.frozen.values())  # plain generation cannot sleep
        assert 0.98 * actor.weights < found["shard"] <= actor.weights  # the last rank has fewer rows of some
    assert measured[0]["shard"] == actor.weights


def _held_bytes(rank: int, world_size: int, fields: dict[str, Any]) -> dict[str, Any]:
    from megatron_ppo.backends.fsdp import FSDPBackend
    from megatron_ppo.backends.hf import HFBackend

    dist.init_process_group("gloo")
    config = Config().replace(**fields)
    engine = HFBackend(config, seed=rank)
    trainer = FSDPBackend(config, num_optimizer_steps=1)
    evaluation = engine._evaluation
    assert evaluation is not None and evaluation._reference is not None and evaluation._reward is not None
    copies = {"reference": evaluation._reference, "reward": evaluation._reward}
    found: dict[str, Any] = {name: sum(p.numel() * p.element_size() for p in module.parameters()) for name, module in copies.items()}
    found["engine"] = sum(tensor.numel() * tensor.element_size() for tensor in engine.weights().values())
    engine.sleep()
    modules = [engine._live_actor, *copies.values()]
    found["asleep"] = sum(p.numel() * p.element_size() for module in modules for p in module.parameters())
    found["trained"] = list(trainer._networks)
    found["shard"] = sum(tensor.numel() * tensor.element_size() for tensor in trainer._networks["actor"].shards().values())
    return found
