"""HFBackend: the same meanings as vLLM's, with a cache that changes nothing and seeds that belong to the request."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_batches
from safetensors.torch import load_file
from toy_models import make_toy
from transformers import AutoModelForCausalLM
from vllm_support import mean_error, worst_difference, write

from megatron_ppo.backends.hf import HFBackend
from megatron_ppo.backends.inference_checks import check_layout
from megatron_ppo.config import Config
from megatron_ppo.families import network_shape
from megatron_ppo.packing import make_micro_batch, scatter_back
from megatron_ppo.resharding.layout import RankLayout
from megatron_ppo.resharding.vllm_layout import hf_layout
from megatron_ppo.roles.actor_critic import ActorCritic
from megatron_ppo.roles.reward import RewardRole
from megatron_ppo.types import Sampling, TrajectoryBatch

PROMPTS = [[1, 5, 7], [3, 2, 5, 6, 7, 8], [9], list(range(11, 21))]
SEEDS = [101, 102, 103, 104]
SAMPLING = Sampling(max_response_length=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", tied=True)


def config(folder: Path, **fields: object) -> Config:
    return Config().replace(**{"model_path": str(folder), "max_prompt_length": 32, "max_response_length": 8, **fields})


@pytest.fixture(scope="module")
def backend(folder: Path) -> HFBackend:
    return HFBackend(config(folder), seed=1, load_weights=True)


@pytest.mark.parametrize(
    "changes", [{"temperature": 0.5}, {"temperature": 1.3}, {"top_k": 5}, {"top_p": 0.5}, {"greedy": True, "temperature": 0.5}]
)
def test_b32_log_probs_are_of_the_distribution_drawn_from(backend: HFBackend, folder: Path, changes: dict[str, Any]) -> None:
    """Against whole forward passes without cache or padding, and a cut of the distribution written out here."""
    sampling = replace(SAMPLING, **changes)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for prompt, response in zip(PROMPTS, backend.generate(PROMPTS, sampling, SEEDS), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response.token_ids])).logits[0, len(prompt) - 1 : -1].double()
        for row, token, log_prob in zip(logits, response.token_ids, response.log_probs, strict=True):
            probabilities = (row / (1.0 if sampling.greedy else sampling.temperature)).softmax(-1)
            ranked = probabilities.sort(descending=True)
            before = ranked.values.cumsum(-1) - ranked.values
            kept = ranked.indices[(before < sampling.top_p) & (torch.arange(130) < (sampling.top_k if sampling.top_k > 0 else 130))]
            assert token in kept.tolist()
            assert abs(log_prob - float((probabilities[token] / probabilities[kept].sum()).log())) < 1e-5
            assert not sampling.greedy or token == int(ranked.indices[0])


def test_b42_a_response_depends_on_its_seed_and_not_on_its_company(backend: HFBackend) -> None:
    first = backend.generate(PROMPTS, SAMPLING, SEEDS)
    for prompt, seed, response in zip(PROMPTS, SEEDS, first, strict=True):
        (alone,) = backend.generate([prompt], SAMPLING, [seed])
        assert alone.token_ids == response.token_ids
        assert torch.allclose(torch.tensor(alone.log_probs), torch.tensor(response.log_probs), atol=1e-5)
    assert backend.generate(PROMPTS[::-1], SAMPLING, SEEDS[::-1])[::-1][0].token_ids == first[0].token_ids
    assert len({tuple(c.token_ids) for c in backend.generate([PROMPTS[0]] * 8, SAMPLING, list(range(8)))}) == 8
    assert backend.generate([], SAMPLING, []) == []


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8])
def test_rows_leave_and_join_without_changing_a_response(folder: Path, max_num_seqs: int) -> None:
    """40 requests of 7 prompts of 1 to 20 tokens; responses of 1 to 30 tokens. Against one request at a time, token by token; no more rows
    at a time than allowed, a prompt that waits with its like is read once, and rows that have ended are not carried along for long."""
    prompts = [[(3 * row + 7 * place) % 120 + 3 for place in range(1 + 19 * row // 6)] for row in (0, 6, 3, 1, 5, 2, 4)]
    requests = [prompts[number // 6] for number in range(40)]
    sampling = Sampling(max_response_length=30, stop_token_ids=frozenset(range(10)))
    fields = {"max_response_length": 30, "vllm_overrides": {"max_num_seqs": str(max_num_seqs)}}
    backend = HFBackend(config(folder, **fields), seed=1, load_weights=True)
    alone = [backend.generate([prompt], sampling, [seed])[0] for seed, prompt in enumerate(requests)]
    shapes: list[tuple[int, ...]] = []
    trunk = backend._live_actor.model.base_model
    hook = trunk.register_forward_pre_hook(lambda module, args, named: shapes.append(tuple(named["input_ids"].shape)), with_kwargs=True)
    together = backend.generate(requests, sampling, list(range(40)))
    hook.remove()
    assert [(c.token_ids, c.truncated) for c in together] == [(c.token_ids, c.truncated) for c in alone]
    for one, other in zip(together, alone, strict=True):
        assert torch.allclose(torch.tensor(one.log_probs), torch.tensor(other.log_probs), atol=1e-5, rtol=0)
    lengths = [len(c.token_ids) for c in together]
    assert min(lengths) == 1 and max(lengths) == 30, "responses of one length would not show rows that leave"
    assert worst_difference(str(folder), requests, together, 1.0) < 1e-5
    assert max(rows for rows, _ in shapes) <= max_num_seqs
    steps = [rows for rows, width in shapes if width == 1]
    assert sum(steps) <= 1.3 * sum(lengths)
    if max_num_seqs == 8:
        assert shapes[0] == (2, 20), "eight requests of two prompts are read in one pass of two rows"


def test_a_window_slides_over_rows_of_any_length(tmp_path: Path) -> None:
    """Attention over the last 5 tokens, while rows are moved in the cache; against whole passes without one."""
    folder = make_toy(tmp_path / "mistral", "mistral")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"sliding_window": 5}))
    sampling = Sampling(max_response_length=12, stop_token_ids=frozenset(range(12)))
    fields = {"max_response_length": 12, "vllm_overrides": {"max_num_seqs": "5"}}
    requests = [PROMPTS[number % 4] for number in range(12)]
    responses = HFBackend(config(folder, **fields), seed=1, load_weights=True).generate(requests, sampling, list(range(12)))
    assert len({len(response.token_ids) for response in responses}) > 3
    assert worst_difference(str(folder), requests, responses, 1.0) < 1e-5
    assert worst_difference(str(make_toy(tmp_path / "wide", "mistral")), requests, responses, 1.0) > 1e-3, "the window has no effect"


def test_values_reference_and_scores_of_own_rows(folder: Path, tmp_path: Path) -> None:
    """A synced value head is among the weights; what the engine adds to a batch, against each role's own pass over whole rows."""
    scorer = make_toy(tmp_path / "scorer", score_head=True, seed=3)
    fields = {"critic": "shared", "compute_on": "rollout", "kl_coef": 0.1, "temperature": 0.7, "micro_batch_size": 3}
    backend = HFBackend(config(folder, reward_model_path=str(scorer), **fields), seed=1, load_weights=True)
    live = backend.weights()
    assert backend.shard_bytes() == sum(4 * tensor.numel() for tensor in live.values()) and live["score.weight"].shape == (1, 64)
    live["score.weight"].normal_()
    live["model.norm.weight"].mul_(1.1)  # the actor has gone on learning; the reference has not
    batch = toy_batches.make_trajectories((3, 4, 2, 5), (4, 0, 7, 1))
    found = backend.evaluate(batch)
    micro_batch = make_micro_batch(batch, torch.arange(4))
    reference = ActorCritic.from_folder(folder, dtype=torch.float32)
    with torch.no_grad():
        outcomes = [backend._live_actor.compute_values(micro_batch), reference.forward(micro_batch, temperature=0.7).log_probs]
    expected = [scatter_back([outcome], [micro_batch], 4, batch.tokens.shape[1]) for outcome in outcomes]
    torch.testing.assert_close(found.values, expected[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(found.ref_log_probs, expected[1], atol=1e-5, rtol=0)
    scores = RewardRole.from_folder(scorer, dtype=torch.float32).compute_scores(micro_batch)
    torch.testing.assert_close(found.model_scores, scores, atol=1e-5, rtol=0)
    assert found.values.abs().max() > 0.1 and not found.values[1].any(), "an empty response has no values"
    with pytest.raises(RuntimeError, match="samples alone"):
        HFBackend(config(folder), seed=1).evaluate(batch)


def test_what_a_rollout_adds_to_a_batch_travels_with_it() -> None:
    """Bytes, selection and padding of the optional tensors; parts that disagree on them are not joined."""
    plain = [toy_batches.make_trajectories((2, 3), lengths, seed=number) for number, lengths in enumerate([(1, 2), (6, 4)])]
    added = [
        replace(one, values=torch.rand_like(one.rollout_log_probs), ref_log_probs=-one.rollout_log_probs, model_scores=one.scores + 1)
        for one in plain
    ]
    joined = TrajectoryBatch.concatenate([TrajectoryBatch.from_bytes(one.to_bytes()) for one in added])
    width = added[0].tokens.shape[1]
    assert joined.values.shape == joined.ref_log_probs.shape == joined.tokens.shape == (4, 8)
    assert torch.equal(joined.values[:2, :width], added[0].values) and not joined.values[:2, width:].any()
    assert torch.equal(joined.select(torch.tensor([3, 0])).model_scores, torch.stack([added[1].model_scores[1], added[0].model_scores[0]]))
    assert TrajectoryBatch.from_bytes(plain[0].to_bytes()).values is None
    with pytest.raises(ValueError, match="tensors that others lack"):
        TrajectoryBatch.concatenate([added[0], plain[1]])


def test_b34_b40_any_stop_id_ends_a_response_and_belongs_to_it(backend: HFBackend) -> None:
    free = [c.token_ids for c in backend.generate(PROMPTS, SAMPLING, SEEDS)]
    stops = {free[0][0], free[1][3]}
    stopped = backend.generate(PROMPTS, replace(SAMPLING, stop_token_ids=frozenset(stops)), SEEDS)
    for response, ids in zip(stopped, free, strict=True):
        end = next((i + 1 for i, token in enumerate(ids) if token in stops), None)
        assert response.token_ids == ids[:end] and len(response.log_probs) == len(response.token_ids)
        assert response.truncated == (end is None)
    assert len(stopped[0].token_ids) == 1


def test_b28_no_sampling_before_all_weights_came(folder: Path) -> None:
    backend = HFBackend(config(folder), seed=1)
    with pytest.raises(RuntimeError, match="no weights yet"):
        backend.generate(PROMPTS, SAMPLING, SEEDS)
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, tensor in backend.weights().items():
        if name != "model.norm.weight":
            tensor.copy_(state[name])
    with pytest.raises(RuntimeError, match=r"1 parameter\(s\).*model\.norm\.weight"):
        backend.after_weight_update()
    backend.weights()["model.norm.weight"].copy_(state["model.norm.weight"])
    backend.after_weight_update()
    loaded = HFBackend(config(folder), seed=1, load_weights=True)
    synced, read = (b.generate(PROMPTS, SAMPLING, SEEDS) for b in (backend, loaded))
    assert [c.token_ids for c in synced] == [c.token_ids for c in read]


def test_writing_into_the_weights_takes_effect_at_once(folder: Path) -> None:
    backend = HFBackend(config(folder), seed=1, load_weights=True)
    head = backend.weights()["lm_head.weight"]
    head.zero_()
    responses = backend.generate(PROMPTS, SAMPLING, SEEDS)
    uniform = -float(torch.tensor(130.0).log())
    assert all(abs(log_prob - uniform) < 1e-6 for response in responses for log_prob in response.log_probs)


def test_tied_weights_appear_once_and_load_by_either_list(tied_folder: Path) -> None:
    backend = HFBackend(config(tied_folder), seed=1)
    model = AutoModelForCausalLM.from_pretrained(tied_folder)
    assert "lm_head.weight" not in backend.weights()
    assert backend.shard_bytes() == sum(4 * p.numel() for p in model.parameters())
    backend.load_hf_weights(list(model.state_dict().items()))  # lists lm_head.weight too
    backend.load_hf_weights(list(model.named_parameters()))
    assert all(torch.equal(tensor, model.get_parameter(name)) for name, tensor in backend.weights().items())


def test_the_loader_refuses_what_it_cannot_place(folder: Path) -> None:
    backend = HFBackend(config(folder), seed=1)
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    with pytest.raises(ValueError, match=r"no weight called 'model\.extra'"):
        backend.load_hf_weights([*state.items(), ("model.extra", torch.zeros(1))])
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \[64\].*\[65\]"):
        backend.load_hf_weights(list((state | {"model.norm.weight": torch.zeros(65)}).items()))
    with pytest.raises(RuntimeError, match="lm_head"):
        backend.load_hf_weights([(name, tensor) for name, tensor in state.items() if name != "lm_head.weight"])


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_are_stacked_as_transformers_does_and_stay_live(family: str, tmp_path: Path) -> None:
    """From a checkpoint's tensors, one an expert; then another model's, in place and by the planned layout."""
    folder, other = (make_toy(tmp_path / str(seed), family, num_experts=5, seed=seed) for seed in (0, 1))
    backend, tensors = HFBackend(config(folder), seed=1), load_file(folder / "model.safetensors")
    backend.load_hf_weights(tensors.items())
    backend.after_weight_update()
    model = AutoModelForCausalLM.from_pretrained(folder)
    live = backend.weights()
    assert live["model.layers.0.mlp.experts.gate_up_proj"].shape == (5, 192, 64) and len(live) == len(dict(model.named_parameters()))
    assert all(torch.equal(tensor, model.get_parameter(name)) for name, tensor in live.items())
    assert backend.shard_bytes() == sum(4 * tensor.numel() for tensor in tensors.values())
    changed = load_file(other / "model.safetensors")
    write(backend, changed, hf_layout(network_shape(folder)))
    model = AutoModelForCausalLM.from_pretrained(other)
    responses = backend.generate(PROMPTS, SAMPLING, SEEDS)
    assert mean_error(model, PROMPTS, responses, SAMPLING) < 1e-5
    for prompt, seed, response in zip(PROMPTS, SEEDS, responses, strict=True):
        assert backend.generate([prompt], SAMPLING, [seed])[0].token_ids == response.token_ids


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_loader_names_what_lacks_of_an_expert(family: str, tmp_path: Path) -> None:
    folder = make_toy(tmp_path / "whole", family, num_layers=1)
    backend, tensors = HFBackend(config(folder), seed=1), load_file(folder / "model.safetensors")
    gone = next(name for name in tensors if ".experts.3." in name)
    with pytest.raises(RuntimeError, match=r"1 parameter.*layers\.0\.mlp\.experts\."):
        backend.load_hf_weights([(name, tensor) for name, tensor in tensors.items() if name != gone])
    with pytest.raises(ValueError, match=r"experts\.3.*has shape \[\d+, \d+\].*\[1\]"):
        backend.load_hf_weights((tensors | {gone: torch.zeros(1)}).items())
    with pytest.raises(ValueError, match=r"no weight called 'model\.layers\.0\.mlp\.experts\.gate_up_proj'"):
        backend.load_hf_weights([("model.layers.0.mlp.experts.gate_up_proj", torch.zeros(4, 192, 64))])
    with pytest.raises(ValueError, match="enable_expert_parallel"):
        HFBackend(config(folder, vllm_overrides={"enable_expert_parallel": "true"}), seed=1)


def test_bf16_weights_are_rounded_once(folder: Path) -> None:
    """B31: an fp32 tensor arrives as its bf16 rounding, bit for bit."""
    backend = HFBackend(config(folder, rollout_dtype="bfloat16"), seed=1)
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    backend.load_hf_weights(list(state.items()))
    assert all(torch.equal(tensor, state[name].to(torch.bfloat16)) for name, tensor in backend.weights().items())


def test_bad_requests_and_sizes_are_refused(backend: HFBackend, folder: Path, tmp_path: Path) -> None:
    for arguments, message in [
        (([[]], SAMPLING, [1]), "prompt 0 has no tokens"),
        (([[1] * 33], SAMPLING, [1]), "33 tokens.*8.*40"),
        (([[1], [2]], SAMPLING, [1]), "2 prompts came with 1 seeds"),
        (([[1]], SAMPLING, [-1]), "-1"),
        (([[1]], replace(SAMPLING, temperature=0.0), [1]), "greedy=True"),
    ]:
        with pytest.raises(ValueError, match=message):
            backend.generate(*arguments)
    with pytest.raises(ValueError, match="rollout_tensor_parallel_size is 2"):
        HFBackend(config(folder, rollout_tensor_parallel_size=2, rollout_world_size=2), seed=1)
    with pytest.raises(ValueError, match="max_num_seqs = '0' must be"):
        HFBackend(config(folder, vllm_overrides={"max_num_seqs": "0"}), seed=1)
    with pytest.raises(ValueError, match=r"config\.json"):
        HFBackend(config(tmp_path), seed=1)
    closed = HFBackend(config(folder), seed=1)
    closed.close()
    with pytest.raises(RuntimeError, match="closed"):
        closed.weights()


def test_parameters_that_do_not_lie_as_planned_are_named() -> None:
    layout = RankLayout(blocks=(), shapes={"absent": (2,), "shape": (2, 3), "dtype": (2,), "strides": (2, 3), "good": (1,)})
    live = {
        "shape": torch.zeros(3, 2),
        "dtype": torch.zeros(2, dtype=torch.int8),
        "strides": torch.zeros(3, 2).t(),
        "unplanned": torch.zeros(1),
        "good": torch.zeros(1),
    }
    with pytest.raises(RuntimeError) as caught:
        check_layout(live, layout, torch.float32)
    text = str(caught.value)
    assert text.startswith("5 parameter(s)") and "good" not in text
    assert all(name in text for name in ("absent", "shape [3, 2]", "torch.int8", "strides (1, 2)", "unplanned"))
