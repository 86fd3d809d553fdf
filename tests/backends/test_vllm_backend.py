"""VLLMBackend on real engines: sampling, log-probs, live weights, prefix cache, replicas and tensor parallelism.

Engines are dear to start, so that one launch observes many things (module fixtures) and each test judges one of them.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from spawn import run_ranks
from toy_models import make_toy
from transformers import AutoModelForCausalLM, PreTrainedModel
from vllm_support import PROMPTS, SAMPLING, SEEDS, SIZES, engine_config, equal, hf_state, mean_error, refusal, worst_difference, write

from benchmarks.backends_rank import _key_value_cache, _num_bytes
from megatron_ppo.backends.hf import HFBackend
from megatron_ppo.backends.vllm import VLLMBackend
from megatron_ppo.families import network_shape
from megatron_ppo.resharding.vllm_layout import vllm_layout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LONG_PROMPT = [(7 * i) % 130 for i in range(200)]
"""Longer than a block of vLLM's cache on a CPU, so that it is cached."""


# -- what runs on the ranks -------------------------------------------------------------------------------------------


def _write(backend: VLLMBackend, folder: str, tp_size: int, tp_rank: int) -> None:
    """Write the folder's weights into the live parameters by the planned layout, as a sync does."""
    write(backend, hf_state(folder), vllm_layout(network_shape(folder), tensor_parallel_size=tp_size, tp_rank=tp_rank))


def _random_state() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()


def _observe_one(rank: int, world_size: int, folder: str, other: str, tied: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    before, classes = _random_state(), (torch.cuda.Event, torch.cuda.Stream, torch.set_num_threads)
    backend = VLLMBackend(engine_config(folder), seed=5)
    found["state kept by start"] = before == _random_state()
    found["classes kept"] = classes == (torch.cuda.Event, torch.cuda.Stream, torch.set_num_threads)
    found["unsynced"] = refusal(RuntimeError, backend.generate, PROMPTS, SAMPLING, SEEDS)
    for name, tensor in backend.weights().items():
        if name != "model.layers.1.mlp.gate_up_proj.weight":
            tensor.zero_()
    found["partial"] = refusal(RuntimeError, backend.after_weight_update)
    found["unsynced still"] = refusal(RuntimeError, backend.generate, PROMPTS, SAMPLING, SEEDS)

    _write(backend, folder, 1, 0)
    backend.after_weight_update()
    model = AutoModelForCausalLM.from_pretrained(folder)
    state = _random_state()
    found["first"] = backend.generate(PROMPTS, SAMPLING, SEEDS)
    found["state kept by generate"] = state == _random_state()
    _observe_log_probs(backend, model, found)
    plain, greedy = HFBackend(engine_config(folder), seed=5, load_weights=True), replace(SAMPLING, greedy=True)
    found["greedy"] = backend.generate(PROMPTS, greedy, SEEDS), plain.generate(PROMPTS, greedy, SEEDS)
    hot = replace(SAMPLING, temperature=1.3)
    found["same tokens"] = [worst_difference(folder, PROMPTS, b.generate(PROMPTS, hot, SEEDS), 1.3) for b in (backend, plain)]
    _observe_seeds(backend, found)
    _observe_stops(backend, found)
    found["refusals"] = _observe_refusals(backend)
    found["counted by the benchmark"] = _num_bytes(backend.weights().values()), _num_bytes(_key_value_cache(backend))
    found["bytes"] = backend.shard_bytes(), sum(t.numel() * 4 for t in model.state_dict().values())
    _observe_update(backend, model, other, found)
    state_dict = hf_state(folder)
    del state_dict["model.layers.0.self_attn.k_proj.weight"]
    found["loader without k_proj"] = refusal(RuntimeError, backend.load_hf_weights, list(state_dict.items()))
    backend.close()
    backend.close()
    found["default group lives"] = dist.is_initialized() and int(_all_reduced(1)) == 1
    found["closed"] = refusal(RuntimeError, backend.weights)
    _observe_second_engine(tied, found)
    dist.destroy_process_group()
    return found


def _all_reduced(value: int) -> torch.Tensor:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor)
    return tensor


def _observe_log_probs(backend: VLLMBackend, model: PreTrainedModel, found: dict[str, Any]) -> None:
    cases = {f"T {t}": replace(SAMPLING, temperature=t) for t in (0.5, 1.0, 1.3)}
    cases["greedy"] = replace(SAMPLING, greedy=True, temperature=0.5)
    cases["top_k"] = replace(SAMPLING, top_k=7, temperature=0.7)
    cases["top_p"] = replace(SAMPLING, top_p=0.6)
    cases["both"] = replace(SAMPLING, top_k=20, top_p=0.8)
    completions = {name: backend.generate(PROMPTS, sampling, SEEDS) for name, sampling in cases.items()}
    found["errors"] = {name: mean_error(model, PROMPTS, completions[name], cases[name]) for name in cases}
    found["lengths"] = {len(c.token_ids) == len(c.log_probs) for cs in completions.values() for c in cs}
    best = [
        int(model(torch.tensor([p + c.token_ids[:n]])).logits[0, -1].argmax())
        for p, c in zip(PROMPTS, completions["greedy"], strict=True)
        for n in range(12)
    ]
    found["greedy is argmax"] = best == [token for c in completions["greedy"] for token in c.token_ids]


def _observe_seeds(backend: VLLMBackend, found: dict[str, Any]) -> None:
    found["again"] = backend.generate(PROMPTS, SAMPLING, SEEDS)
    found["reversed"] = backend.generate(PROMPTS[::-1], SAMPLING, SEEDS[::-1])[::-1]
    crowd = [[i % 130, 3 * i % 130] for i in range(30)]
    found["in a crowd"] = backend.generate(crowd + PROMPTS, SAMPLING, list(range(30)) + SEEDS)[30:]
    found["alone"] = [backend.generate([p], SAMPLING, [s])[0] for p, s in zip(PROMPTS, SEEDS, strict=True)]
    found["same prompt"] = [tuple(c.token_ids) for c in backend.generate([PROMPTS[0]] * 8, SAMPLING, list(range(8)))]
    found["nothing"] = backend.generate([], SAMPLING, [])


def _observe_stops(backend: VLLMBackend, found: dict[str, Any]) -> None:
    free = found["first"][1].token_ids
    later = next(i for i in range(2, 12) if free[i] not in free[:i])
    never = next(token for token in range(130) if token not in free and token not in PROMPTS[1])
    for name, stops in {"later": {free[later], never}, "first token": {free[0], never}, "never": {never}, "in prompt": {5, 6}}.items():
        sampling = replace(SAMPLING, stop_token_ids=frozenset(stops))
        found[f"stop {name}"] = backend.generate([PROMPTS[1]], sampling, [SEEDS[1]])[0]
    found["stop at"] = later
    many = backend.generate([[i] for i in range(130)], SAMPLING, list(range(130)))
    found["folder's eos goes on"] = [c for c in many if 2 in c.token_ids[:-1] and len(c.token_ids) == 12]


def _observe_refusals(backend: VLLMBackend) -> dict[str, str]:
    long = [1] * 221
    cases: dict[str, tuple[Any, ...]] = {
        "empty": ([[]], SAMPLING, [1]),
        "long": ([long], SAMPLING, [1]),
        "seeds": ([[1], [2]], SAMPLING, [1]),
        "negative": ([[1]], SAMPLING, [-1]),
        "temperature": ([[1]], replace(SAMPLING, temperature=0.0), [1]),
        "budget": ([[1]], replace(SAMPLING, max_response_length=0), [1]),
    }
    return {name: refusal(ValueError, backend.generate, *arguments) for name, arguments in cases.items()}


def _observe_update(backend: VLLMBackend, model: PreTrainedModel, other: str, found: dict[str, Any]) -> None:
    """Other weights in place: at once for new prompts; for a cached prompt only after the cache was reset."""
    other_model = AutoModelForCausalLM.from_pretrained(other)
    found["old, cold"] = mean_error(model, [LONG_PROMPT], backend.generate([LONG_PROMPT], SAMPLING, [7]), SAMPLING)
    found["old, cached"] = mean_error(model, [LONG_PROMPT], backend.generate([LONG_PROMPT], SAMPLING, [8]), SAMPLING)
    _write(backend, other, 1, 0)
    found["new, short"] = mean_error(other_model, PROMPTS, backend.generate(PROMPTS, SAMPLING, SEEDS), SAMPLING)
    found["new, stale"] = mean_error(other_model, [LONG_PROMPT], backend.generate([LONG_PROMPT], SAMPLING, [9]), SAMPLING)
    backend.after_weight_update()
    found["new, reset"] = mean_error(other_model, [LONG_PROMPT], backend.generate([LONG_PROMPT], SAMPLING, [9]), SAMPLING)
    by_layout = {name: tensor.clone() for name, tensor in backend.weights().items()}
    backend.load_hf_weights(list(hf_state(other).items()))
    found["layout is loader's"] = equal(by_layout, backend.weights())


def _observe_second_engine(folder: str, found: dict[str, Any]) -> None:
    """In the same process: a tied bf16 model whose weights vLLM loads itself."""
    backend = VLLMBackend(engine_config(folder, rollout_dtype="bfloat16"), seed=6, load_weights=True)
    own = {name: tensor.clone() for name, tensor in backend.weights().items()}
    completions = backend.generate(PROMPTS, SAMPLING, SEEDS)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    found["bf16 error"] = mean_error(model, PROMPTS, completions, SAMPLING)
    backend.load_hf_weights(list(hf_state(folder).items()))  # fp32 tensors, cast on the way
    found["bf16 same"] = equal(own, backend.weights())
    found["bf16 names"] = "lm_head.weight" not in own and {t.dtype for t in own.values()} == {torch.bfloat16}
    distinct = sum(p.numel() * 2 for p in model.parameters())
    found["bf16 bytes"] = backend.shard_bytes(), distinct
    backend.close()


def _observe_two(rank: int, world_size: int, folders: dict[str, str]) -> dict[str, Any]:
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for name, folder in folders.items():
        found[name] = _observe_tensor_parallel(rank, world_size, folder, with_peers=name == "llama")
    replica = VLLMBackend(engine_config(folders["llama"]), seed=20 + rank)
    _write(replica, folders["llama"], 1, 0)
    replica.after_weight_update()
    mine = PROMPTS if rank == 0 else PROMPTS[::-1]
    seeds = SEEDS if rank == 0 else SEEDS[::-1]
    out = replica.generate(mine, SAMPLING, seeds)
    found["replica"] = out if rank == 0 else out[::-1]
    if rank == 0:  # replicas are independent: one alone may be asked more often
        replica.generate([[4]], SAMPLING, [4])
    replica.close()
    dist.destroy_process_group()
    return found


def _observe_tensor_parallel(rank: int, size: int, folder: str, *, with_peers: bool = False) -> dict[str, Any]:
    """One replica over all ranks: layout against vLLM's own loader, and log-probs."""
    shared_memory = _shared_memory()
    backend = VLLMBackend(engine_config(folder, rollout_world_size=size, rollout_tensor_parallel_size=size), seed=9)
    _write(backend, folder, size, rank)
    backend.after_weight_update()
    by_layout = {name: tensor.clone() for name, tensor in backend.weights().items()}
    backend.load_hf_weights(list(hf_state(folder).items()))
    backend.after_weight_update()
    completions = backend.generate(PROMPTS, SAMPLING, SEEDS)
    model = AutoModelForCausalLM.from_pretrained(folder)
    found = {
        "layout is loader's": equal(by_layout, backend.weights()),
        "completions": completions,
        "error": mean_error(model, PROMPTS, completions, SAMPLING),
        "bytes": backend.shard_bytes(),
        "shared memory": _shared_memory() - shared_memory,
    }
    if with_peers:
        found["peers"] = refusal(RuntimeError, backend.generate, [[1, 2, 3 + rank]], SAMPLING, [1])
        found["peers' seeds"] = refusal(RuntimeError, backend.generate, [[1, 2, 3]], SAMPLING, [1 + rank])
        found["after refusal"] = backend.generate(PROMPTS, SAMPLING, SEEDS) == completions
    backend.close()
    return found


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("*cpushm*")}


def _observe_four(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    found = _observe_tensor_parallel(rank, world_size, folder)
    dist.destroy_process_group()
    return found


# -- what is judged ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        "llama": str(make_toy(root / "llama", "llama", **SIZES)),
        "qwen2": str(make_toy(root / "qwen2", "qwen2", tied=True, **SIZES)),
        "qwen3": str(make_toy(root / "qwen3", "qwen3", tied=True, **SIZES)),
        "other": str(make_toy(root / "other", "llama", seed=1, **SIZES)),
    }


@pytest.fixture(scope="module")
def one(folders: dict[str, str]) -> dict[str, Any]:
    return run_ranks(_observe_one, 1, folders["llama"], folders["other"], folders["qwen3"], timeout_s=500)[0]


@pytest.fixture(scope="module")
def two(folders: dict[str, str]) -> list[dict[str, Any]]:
    families = {name: folders[name] for name in ("llama", "qwen2", "qwen3")}
    return run_ranks(_observe_two, 2, families, timeout_s=500)


def test_start_leaves_the_process_as_it_was(one: dict[str, Any]) -> None:
    assert one["state kept by start"] and one["classes kept"] and one["state kept by generate"]
    assert one["default group lives"]
    assert "closed" in one["closed"]


def test_b28_no_sampling_before_all_weights_came(one: dict[str, Any]) -> None:
    assert "no weights yet" in one["unsynced"] and "no weights yet" in one["unsynced still"]
    assert one["partial"].startswith("1 parameter(s)") and "model.layers.1.mlp.gate_up_proj.weight" in one["partial"]
    assert "model.layers.0.self_attn.qkv_proj.weight" in one["loader without k_proj"]


def test_b32_log_probs_are_hugging_faces_at_the_sampling_temperature(one: dict[str, Any]) -> None:
    assert one["errors"].keys() == {"T 0.5", "T 1.0", "T 1.3", "greedy", "top_k", "top_p", "both"}
    assert max(one["errors"].values()) < 1e-5, one["errors"]
    assert one["greedy is argmax"]


def test_hf_backend_answers_greedily_as_vllm(one: dict[str, Any]) -> None:
    engine, plain = one["greedy"]
    assert [c.token_ids for c in engine] == [c.token_ids for c in plain]
    difference = torch.tensor([c.log_probs for c in engine]) - torch.tensor([c.log_probs for c in plain])
    assert difference.abs().max() < 1e-5


def test_hf_backends_log_probs_are_vllms_for_the_same_tokens(one: dict[str, Any]) -> None:
    """Through the network that both have: what it gives vLLM's tokens, and the other backend's own, token by token."""
    assert max(one["same tokens"]) < 1e-5


def test_b36_as_many_log_probs_as_ids(one: dict[str, Any]) -> None:
    assert one["lengths"] == {True}


def test_b42_seeded_requests_do_not_depend_on_their_company(one: dict[str, Any]) -> None:
    for case in ("again", "reversed", "in a crowd", "alone"):
        assert [c.token_ids for c in one[case]] == [c.token_ids for c in one["first"]], case
        assert [c.log_probs for c in one[case]] == [c.log_probs for c in one["first"]], case


def test_b43_samples_of_one_prompt_differ_by_seed(one: dict[str, Any]) -> None:
    assert len(set(one["same prompt"])) == 8
    assert one["nothing"] == []


def test_b34_any_stop_id_ends_a_response_and_belongs_to_it(one: dict[str, Any]) -> None:
    free, later = one["first"][1].token_ids, one["stop at"]
    assert one["stop later"].token_ids == free[: later + 1] and not one["stop later"].truncated
    assert one["stop never"].token_ids == free and one["stop never"].truncated
    prompt_only = one["stop in prompt"]
    assert prompt_only.truncated == (not {5, 6} & set(free)) and prompt_only.token_ids == free[: len(prompt_only.token_ids)]


def test_b34_the_folders_own_eos_id_does_not_end_a_response(one: dict[str, Any]) -> None:
    """Its config.json says 2; only ``stop_token_ids`` counts."""
    assert one["folder's eos goes on"]
    assert all(c.truncated for c in one["folder's eos goes on"])


def test_b40_a_response_may_be_its_stop_id_alone(one: dict[str, Any]) -> None:
    response = one["stop first token"]
    assert response.token_ids == one["first"][1].token_ids[:1] and len(response.log_probs) == 1 and not response.truncated


def test_bad_requests_are_refused_with_numbers(one: dict[str, Any]) -> None:
    refusals = one["refusals"]
    assert "prompt 0 has no tokens" in refusals["empty"]
    assert all(number in refusals["long"] for number in ("221", "12", "232"))
    assert "2 prompts came with 1 seeds" in refusals["seeds"]
    assert "-1" in refusals["negative"] and "greedy=True" in refusals["temperature"] and "at least 1" in refusals["budget"]


def test_b27_update_takes_effect_at_once_and_the_prefix_cache_must_go(one: dict[str, Any]) -> None:
    assert max(one["old, cold"], one["old, cached"], one["new, short"]) < 1e-5
    assert one["new, stale"] > 1e-3, "without a reset the long prompt must come from the old weights' cache, or this proves nothing"
    assert one["new, reset"] < 1e-5


def test_planned_layout_is_what_vllms_own_loader_does(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    assert one["layout is loader's"]
    assert all(rank[family]["layout is loader's"] for rank in two for family in ("llama", "qwen2", "qwen3"))


def test_shard_bytes_leave_padding_out(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    assert one["bytes"][0] == one["bytes"][1]
    assert one["bf16 bytes"][0] == one["bf16 bytes"][1]
    norms = 5 * 128 * 4  # replicated: two a layer and the last one
    assert sum(rank["llama"]["bytes"] for rank in two) == one["bytes"][0] + norms


def test_the_benchmark_of_backends_counts_an_engines_memory(one: dict[str, Any]) -> None:
    """Its weights with the rows that pad the vocabulary, and its cache: whole blocks in what it was given."""
    weights, cache = one["counted by the benchmark"]
    assert weights == one["bytes"][0] + 2 * (192 - 130) * 128 * 4
    assert 0.9 * 53687091 < cache <= 53687091


def test_b31_bf16_engine(one: dict[str, Any]) -> None:
    assert one["bf16 names"] and one["bf16 same"]
    assert one["bf16 error"] < 0.03


def test_b42_ranks_of_a_replica_agree(two: list[dict[str, Any]]) -> None:
    for family in ("llama", "qwen2", "qwen3"):
        assert two[0][family]["completions"] == two[1][family]["completions"]
        assert two[0][family]["error"] < 1e-5


def test_b42_peers_given_other_requests_are_told_so(two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert "tensor-parallel rank(s) [1]" in rank["llama"]["peers"]
        assert "tensor-parallel rank(s) [1]" in rank["llama"]["peers' seeds"]
        assert rank["llama"]["after refusal"]


def test_b42_replicas_agree_bit_for_bit_whatever_their_seed_and_order(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    assert two[0]["replica"] == two[1]["replica"] == one["first"]


def test_tensor_parallel_launches_leave_no_shared_memory_behind(two: list[dict[str, Any]]) -> None:
    """vLLM's own names are alike for all launches: what one leaves would keep the next from starting."""
    assert all(not rank[family]["shared memory"] for rank in two for family in ("llama", "qwen2", "qwen3"))


def test_tensor_parallel_samples_the_same(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    """Sums run in another order over two ranks, so log-probs may differ in the last bits; ids do not here."""
    split = two[0]["llama"]["completions"]
    assert [c.token_ids for c in split] == [c.token_ids for c in one["first"]]
    difference = torch.tensor([c.log_probs for c in split]) - torch.tensor([c.log_probs for c in one["first"]])
    assert difference.abs().max() < 1e-5


@pytest.mark.exhaustive  # four ranks of two key/value heads are in the default run of test_verify.py, and so is this family on two
def test_four_ranks_share_two_key_value_heads(tmp_path: Path) -> None:
    folder = str(make_toy(tmp_path / "qwen2", "qwen2", **SIZES))
    found = run_ranks(_observe_four, 4, folder, timeout_s=500)
    assert all(rank["layout is loader's"] for rank in found)
    assert all(rank["completions"] == found[0]["completions"] for rank in found)
    assert found[0]["error"] < 1e-5


def test_a_head_that_cpu_attention_cannot_compute_is_refused_at_the_start() -> None:
    from megatron_ppo.backends.vllm import _check_head_size

    _check_head_size(64)
    with pytest.raises(ValueError, match="head_dim 16 is not supported"):
        _check_head_size(16)
