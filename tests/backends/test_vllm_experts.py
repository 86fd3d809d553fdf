"""Mixtures of experts on real vLLM engines: layout, live parameters and log-probs, with and without expert parallelism.

Engines are dear to start: one launch of each size observes all its cases, and each test judges one thing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layout_support import tiny
from safetensors.torch import load_file, save_file
from spawn import run_ranks
from torch import nn
from toy_models import make_toy
from transformers import AutoModelForCausalLM
from vllm_support import PROMPTS, SAMPLING, SEEDS, SIZES, engine_config, equal, mean_error, refusal, write

from megatron_ppo.backends import vllm as vllm_backend
from megatron_ppo.backends.vllm import VLLMBackend
from megatron_ppo.backends.vllm_experts import GPU_BACKEND, LIVE_BACKENDS, check_experts, expert_options, mixture
from megatron_ppo.families import network_shape
from megatron_ppo.resharding.vllm_layout import held_experts, vllm_layout

Case = tuple[str, bool, str]
"""Folder, expert parallelism, dtype."""

# -- what runs on the ranks -------------------------------------------------------------------------------------------


def _changed(folder: str) -> str:
    """The same model with other experts and routers, large enough to be heard."""
    return f"{folder}-changed"


def _tensors(folder: str) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def _build(rank: int, size: int, case: Case, **fields: Any) -> VLLMBackend:
    folder, expert_parallel, dtype = case
    sizes = {"rollout_world_size": size, "rollout_tensor_parallel_size": size}
    config = engine_config(folder, rollout_dtype=dtype, **sizes)
    overrides = config.rollout.vllm_overrides | {"enable_expert_parallel": str(expert_parallel).lower()}
    config = config.replace(vllm_overrides=overrides)
    return VLLMBackend(config, seed=3, **fields)


def _observe(rank: int, size: int, case: Case) -> dict[str, Any]:
    """Weights by the planned layout, then by vLLM's own loader, then other experts in place."""
    folder, expert_parallel, dtype = case
    backend = _build(rank, size, case)
    layout = vllm_layout(network_shape(folder), tensor_parallel_size=size, tp_rank=rank, expert_parallel=expert_parallel)
    write(backend, _tensors(folder), layout)
    backend.after_weight_update()
    by_layout = {name: tensor.clone() for name, tensor in backend.weights().items()}
    first = backend.generate(PROMPTS, SAMPLING, SEEDS)
    backend.load_hf_weights(_tensors(folder).items())
    backend.after_weight_update()
    found: dict[str, Any] = {
        "layout is loader's": equal(by_layout, backend.weights()),
        "loaded": backend.generate(PROMPTS, SAMPLING, SEEDS) == first,
        "first": first,
        "backwards": backend.generate(PROMPTS[::-1], SAMPLING, SEEDS[::-1])[::-1] == first,
        "alone": backend.generate(PROMPTS[:1], SAMPLING, SEEDS[:1]) == first[:1],
        "bytes": backend.shard_bytes(),
        "planned bytes": sum(block.num_elements for block in layout.blocks) * getattr(torch, dtype).itemsize,
        "experts": next(tensor.shape[0] for name, tensor in backend.weights().items() if name.endswith("w13_weight")),
    }
    write(backend, _tensors(_changed(folder)), layout)
    backend.after_weight_update()
    second = backend.generate(PROMPTS, SAMPLING, SEEDS)
    if rank == 0:  # the others have the same completions
        old, new = (AutoModelForCausalLM.from_pretrained(f, dtype=getattr(torch, dtype)) for f in (folder, _changed(folder)))
        found["error"] = mean_error(old, PROMPTS, first, SAMPLING)
        found["new error"] = mean_error(new, PROMPTS, second, SAMPLING)
        found["distance of the old"] = mean_error(old, PROMPTS, second, SAMPLING)
    found["second"] = second
    found["faults"] = _faults(backend, range(1, 3))
    gone = [name for name in _tensors(folder) if ".experts.1." in name][-1]
    rest = [(name, tensor) for name, tensor in _tensors(folder).items() if name != gone]
    found["without an expert's tensor"] = refusal(RuntimeError, backend.load_hf_weights, rest)
    backend.close()
    return found


def _faults(backend: VLLMBackend, others: range) -> dict[str, str]:
    """What ``check_experts`` says of an engine that is sound, asked in the wrong way or spoilt afterwards."""
    model, routed = backend._model, [m for m in backend._model.modules() if type(m).__name__ == "RoutedExperts"]
    held = routed[0].expert_map
    own = range(routed[0].global_num_experts) if held is None else range(int((held >= 0).nonzero()[0]), int((held >= 0).nonzero()[-1]) + 1)
    found = {
        "sound": refusal(RuntimeError, lambda: check_experts(model, own, on_cpu=True)),
        "placement": refusal(RuntimeError, lambda: check_experts(model, others, on_cpu=True)),
        "kernel": refusal(RuntimeError, lambda: check_experts(model, own, on_cpu=False)),
    }
    method = routed[1].quant_method
    routed[1].quant_method = nn.Identity()
    found["quantised"] = refusal(RuntimeError, lambda: check_experts(model, own, on_cpu=True))
    routed[1].quant_method = method
    return found


def _observe_all(rank: int, size: int, cases: list[Case]) -> list[dict[str, Any]]:
    dist.init_process_group("gloo")
    found = [_observe(rank, size, case) for case in cases]
    dist.destroy_process_group()
    return found


def _observe_one(rank: int, size: int, cases: list[Case]) -> list[dict[str, Any]]:
    """One rank also sees the class for AMX, and vLLM's own experts."""
    dist.init_process_group("gloo")
    found = [_observe(rank, size, case) for case in cases]
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import X86CPUUnquantizedExperts

    folder, _, dtype = cases[-1]
    X86CPUUnquantizedExperts._supports_current_device = staticmethod(lambda: True)  # as on a CPU with AMX; its kernel never runs
    backend = _build(rank, size, (_changed(folder), False, dtype), load_weights=True)
    kinds = {type(m.quant_method.moe_kernel.fused_experts) for m in backend._model.modules() if type(m).__name__ == "RoutedExperts"}
    found[-1]["for AMX"] = kinds == {X86CPUUnquantizedExperts}
    loaded = backend.generate(PROMPTS, SAMPLING, SEEDS)
    backend.close()
    backend = _build(rank, size, cases[-1])
    layout = vllm_layout(network_shape(folder), tensor_parallel_size=1, tp_rank=0)
    for source in (folder, _changed(folder)):
        write(backend, _tensors(source), layout)
        backend.after_weight_update()
        written = backend.generate(PROMPTS, SAMPLING, SEEDS)
    found[-1]["written is loaded"] = written == loaded
    backend.close()
    X86CPUUnquantizedExperts._supports_current_device = staticmethod(lambda: False)
    vllm_backend.plain_cpu_experts = lambda linear: nullcontext()  # type: ignore[assignment]
    found[0]["vLLM's own experts"] = refusal(RuntimeError, _build, rank, size, cases[0])  # vLLM's end takes the default group along
    return found


# -- what is judged ---------------------------------------------------------------------------------------------------


def engine_test(function: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.slow(pytest.mark.timeout(600)(function))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Five experts do not divide by 2 or 4."""
    root = tmp_path_factory.mktemp("mixtures")
    found = {}
    for family in ("mixtral", "qwen3_moe"):
        folder = str(make_toy(root / family, family, num_experts=5, **SIZES))
        other = make_toy(root / _changed(family), family, num_experts=5, seed=1, **SIZES)
        mixed = {
            name: 8 * tensor if ".experts." in name or name.endswith("gate.weight") else _tensors(folder)[name]
            for name, tensor in _tensors(str(other)).items()
        }
        save_file(mixed, other / "model.safetensors", metadata={"format": "pt"})
        found[family] = folder
    return found


@pytest.fixture(scope="module")
def one(folders: dict[str, str]) -> list[dict[str, Any]]:
    cases = [(folders["mixtral"], False, "float32"), (folders["qwen3_moe"], True, "float32"), (folders["qwen3_moe"], False, "bfloat16")]
    return run_ranks(_observe_one, 1, cases, timeout_s=500)[0]


@pytest.fixture(scope="module")
def two(folders: dict[str, str]) -> list[list[dict[str, Any]]]:
    """[case][rank]"""
    cases = [
        (folders["mixtral"], False, "float32"),
        (folders["mixtral"], True, "float32"),
        (folders["qwen3_moe"], False, "float32"),
        (folders["qwen3_moe"], True, "bfloat16"),
    ]
    return [list(ranks) for ranks in zip(*run_ranks(_observe_all, 2, cases, timeout_s=500), strict=True)]


def _judge(ranks: list[dict[str, Any]], exact: bool) -> None:
    assert all(rank["layout is loader's"] and rank["loaded"] for rank in ranks)
    assert all(rank["first"] == ranks[0]["first"] and rank["second"] == ranks[0]["second"] for rank in ranks)
    assert all(rank["bytes"] == rank["planned bytes"] for rank in ranks)
    assert all(rank["backwards"] and rank["alone"] for rank in ranks)
    bound = 1e-5 if exact else 0.03
    assert max(ranks[0]["error"], ranks[0]["new error"]) < bound, (ranks[0]["error"], ranks[0]["new error"])
    assert ranks[0]["distance of the old"] > 10 * bound, "the change must be heard, or this proves nothing"


@engine_test
def test_b27_b31_experts_of_one_rank_lie_as_planned_and_stay_live(one: list[dict[str, Any]]) -> None:
    for number, case in enumerate(one):
        _judge([case], exact=number < 2)
    assert one[2]["for AMX"] and one[2]["written is loaded"]


@engine_test
def test_b27_b31_experts_of_two_ranks_lie_as_planned_and_stay_live(two: list[list[dict[str, Any]]]) -> None:
    for number, ranks in enumerate(two):
        _judge(ranks, exact=number < 3)
    assert [[rank["experts"] for rank in ranks] for ranks in two] == [[5, 5], [3, 2], [5, 5], [3, 2]]


@engine_test
def test_expert_parallel_samples_the_same(one: list[dict[str, Any]], two: list[list[dict[str, Any]]]) -> None:
    """Sums run in another order, so that log-probs may differ in the last bits; ids do not here."""
    whole, split, shared = one[0]["first"], two[0][0]["first"], two[1][0]["first"]
    for other in (split, shared):
        assert [c.token_ids for c in other] == [c.token_ids for c in whole]
        difference = torch.tensor([c.log_probs for c in other]) - torch.tensor([c.log_probs for c in whole])
        assert difference.abs().max() < 1e-5


@engine_test
def test_b28_an_expert_that_is_left_out_is_named(two: list[list[dict[str, Any]]]) -> None:
    """Rank 0 holds expert 1 under expert parallelism, rank 1 does not."""
    assert all("experts.routed_experts.w" in rank["without an expert's tensor"] for rank in two[0])
    assert (
        "experts.routed_experts.w" in two[1][0]["without an expert's tensor"] and two[1][1]["without an expert's tensor"] == "not refused"
    )


@engine_test
def test_experts_that_would_not_follow_a_write_are_refused(one: list[dict[str, Any]], two: list[list[dict[str, Any]]]) -> None:
    assert "CPUUnquantizedExperts has repacked them" in one[0]["vLLM's own experts"]
    for case in (one[0], two[1][0]):
        faults = case["faults"]
        assert faults["sound"] == "not refused"
        assert "kernel CPU may keep them in another order" in faults["kernel"]
        assert "layers.1" in faults["quantised"] and "Identity" in faults["quantised"]
    assert "placed them as [0, 1, 2, -1, -1], planned is [-1, 0, 1, -1, -1]" in two[1][0]["faults"]["placement"]


@pytest.mark.slow
def test_the_backend_for_gpus_keeps_rows_where_they_are() -> None:
    """vLLM's own conversion, run on CPU tensors; no kernel runs here."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
        UnquantizedMoeBackend,
        convert_to_unquantized_kernel_format,
        map_unquantized_backend,
    )

    assert map_unquantized_backend(GPU_BACKEND).name in LIVE_BACKENDS
    sizes: Any = SimpleNamespace(is_act_and_mul=True)
    w13, w2 = torch.randn(3, 8, 4), torch.randn(3, 4, 4)
    for name in LIVE_BACKENDS:
        kept = convert_to_unquantized_kernel_format(UnquantizedMoeBackend[name], sizes, w13, w2)
        assert all(one.data_ptr() == other.data_ptr() for one, other in zip(kept, (w13, w2), strict=True))
    swapped, _ = convert_to_unquantized_kernel_format(UnquantizedMoeBackend.FLASHINFER_CUTLASS, sizes, w13.clone(), w2)
    assert not torch.equal(swapped, w13), "the reason for the choice"


@pytest.mark.slow
def test_engine_options_are_vllms_and_arrive(folders: dict[str, str]) -> None:
    from vllm import EngineArgs

    options = expert_options(tiny("mixtral"), expert_parallel=True, on_cpu=False)
    assert options.keys() <= {field.name for field in dataclasses.fields(EngineArgs)}
    config = EngineArgs(model=folders["mixtral"], skip_tokenizer_init=True, **options).create_engine_config()
    assert config.kernel_config.moe_backend == GPU_BACKEND
    assert config.parallel_config.enable_expert_parallel and config.parallel_config.expert_placement_strategy == "linear"


def test_dense_networks_get_no_expert_options() -> None:
    assert expert_options(tiny("llama"), expert_parallel=False, on_cpu=False) == {}
    assert "moe_backend" not in expert_options(tiny("mixtral"), expert_parallel=False, on_cpu=True)


def test_a_mixture_is_the_weighted_sum_of_the_chosen_experts_and_splits_by_expert() -> None:
    """Written out token by token; a rank's share is the sum over its own experts."""
    w13, w2, hidden = torch.randn(4, 6, 5), torch.randn(4, 5, 3), torch.randn(7, 5)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(7)])
    weights = torch.rand(7, 2)
    expected = torch.zeros(7, 5)
    for token in range(7):
        for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
            gate, up = w13[expert, :3] @ hidden[token], w13[expert, 3:] @ hidden[token]
            expected[token] += weight * (w2[expert] @ (nn.functional.silu(gate) * up))
    whole = mixture(hidden, w13, w2, weights, chosen, nn.functional.linear)
    torch.testing.assert_close(whole, expected)
    shares = []
    for first, last in ((0, 3), (3, 4)):
        local = torch.where((chosen >= first) & (chosen < last), chosen - first, -1)
        shares.append(mixture(hidden, w13[first:last], w2[first:last], weights, local, nn.functional.linear))
    torch.testing.assert_close(sum(shares), whole)
    assert held_experts(tiny("mixtral", num_experts=4), 2, 1, True) == range(2, 4)
