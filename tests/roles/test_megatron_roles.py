"""Megatron roles against Hugging Face: log-probs, entropy, values, scores and generation, on one rank and on many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_role_support import GREEDY, LENGTHS, PROMPTS, TEMPERATURE, build, fixed_batch, megatron, plain, run
from spawn import run_ranks
from torch import Tensor
from toy_models import make_toy
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megatron_ppo.config import Config
from megatron_ppo.types import MicroBatch, Sampling

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
TOYS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 16}},
    "llama_tied": {"family": "llama", "tied": True, "num_layers": 4, "num_heads": 8},
    "qwen2": {"family": "qwen2", "num_layers": 4},
    "qwen3_wide_heads": {"family": "qwen3", "head_dim": 32, "num_layers": 4},
    "qwen3_tied": {"family": "qwen3", "tied": True},
    "mistral": {"family": "mistral"},
    "reward": {"family": "llama", "score_head": True},
    "b15": {"family": "qwen3", "hidden_size": 1024, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "num_layers": 1},
    "qwen2_tied": {"family": "qwen2", "tied": True},
    "mixtral": {"family": "mixtral"},
    "qwen3_moe": {"family": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3},
}
LANGUAGE_MODELS = [name for name in TOYS if name != "reward"]
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "tp4_sp": {"tensor_model_parallel_size": 4, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "tp2_sp_pp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2},
    "pp2_vp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "tp2_sp_cp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2},
}
SPLIT_TOYS = ("llama_tied", "qwen2", "qwen3_wide_heads")
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The toys, all with dropout and router jitter in their config (B63): it must change nothing."""
    root = tmp_path_factory.mktemp("toys")
    made = {name: make_toy(root / name, seed=number, **options) for number, (name, options) in enumerate(TOYS.items())}
    for folder in made.values():
        if "reward" not in folder.name:
            path = folder / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_dropout": 0.1, "router_jitter_noise": 0.1}))
    return made


def hugging_face(folder: Path) -> dict[str, Any]:
    """Reference: log-probs and entropy at the temperature, greedy responses."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    batch = fixed_batch()
    with torch.no_grad():
        real = (torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]).long()
        table = (model(batch.tokens, attention_mask=real).logits / TEMPERATURE).log_softmax(-1)
        responses = []
        for prompt in PROMPTS:
            ids = model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False, max_new_tokens=6
            )
            responses.append(ids[0, len(prompt) :].tolist())
    return {
        "log_probs": table.gather(-1, batch.labels[..., None]).squeeze(-1),
        "entropy": -(table.exp() * table).sum(-1),
        "responses": responses,
    }


@pytest.fixture(scope="module")
def references(folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    return {name: hugging_face(folders[name]) for name in LANGUAGE_MODELS}


def difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference at positions that predict a real token."""
    mask = fixed_batch().loss_mask
    return float((found - expected)[mask].abs().max())


# -- one rank ---------------------------------------------------------------------------------------------------------


def single_rank(rank: int, world_size: int, folders: dict[str, Path]) -> dict[str, Any]:
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    with megatron(Config()):
        for name in LANGUAGE_MODELS:
            results[name] = one_language_model(folders[name])
        results["sampling"] = sampled_twice(folders["llama_tied"])
        results["reward"] = reward_scores(folders["reward"])
        results["b15_shapes"] = {
            name: tuple(p.shape) for name, p in build(folders["b15"], Config(), "lm")[0].named_parameters() if "self_attention" in name
        }
        results["shared"] = plain(run(build(folders["llama_tied"], Config(), "lm+value"), fixed_batch()))
        (critic,) = build(folders["llama_tied"], Config(), "value")
        results["critic"] = critic.compute_values(fixed_batch()).detach()
        results["critic_names"] = [name for name, _ in critic.named_parameters() if "layers" not in name]
        results["other_padding"] = plain(run(build(folders["llama"], Config(), "lm"), fixed_batch(padding=77)))
        results["bf16"] = bfloat16_dtypes(folders["qwen2"])
    dist.destroy_process_group()
    return results


def one_language_model(folder: Path) -> dict[str, Any]:
    (role,) = build(folder, Config(), "lm")
    role.eval()
    with torch.no_grad():
        scored = plain(run([role], fixed_batch()))
        responses = role.generate(PROMPTS, GREEDY, seeds=[1, 2, 3])
    role.train()
    updated = run([role], fixed_batch())
    assert updated is not None and updated.log_probs is not None
    updated.log_probs.sum().backward()
    without_gradient = [name for name, p in role.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    return {"eval": scored, "train": plain(updated), "responses": responses, "without_gradient": without_gradient}


def sampled_twice(folder: Path) -> dict[str, Any]:
    (role,) = build(folder, Config(), "lm")
    role.eval()
    sampling = Sampling(max_response_length=8, temperature=1.3, top_k=50, top_p=0.9)
    together = role.generate(PROMPTS, sampling, seeds=[11, 12, 13])
    apart = [role.generate([prompt], sampling, [seed])[0] for prompt, seed in zip(reversed(PROMPTS), (13, 12, 11), strict=True)]
    other = role.generate(PROMPTS, sampling, seeds=[21, 22, 23])
    tokens = torch.tensor([PROMPTS[0] + together[0].token_ids])
    batch = MicroBatch(
        tokens[:, :-1], tokens[:, 1:], tokens[:, 1:] > -1, rows=torch.tensor([0]), lengths=torch.tensor([tokens.shape[1] - 1])
    )
    scored = role(batch, temperature=1.3).log_probs[0, len(PROMPTS[0]) - 1 :].detach()
    return {"together": together, "apart": apart[::-1], "other": other, "scored": scored}


def reward_scores(folder: Path) -> dict[str, Tensor]:
    (role,) = build(folder, Config(), "score")
    batch = fixed_batch()
    with torch.no_grad():
        alone = []
        for row, length in enumerate(LENGTHS):
            tokens = batch.tokens[row : row + 1, :length]
            one = MicroBatch(tokens, tokens, tokens > 0, rows=torch.tensor([0]), lengths=torch.tensor([length]))
            alone.append(role.compute_scores(one))
        return {"alone": torch.cat(alone), "zeros": role.compute_scores(batch), "other": role.compute_scores(fixed_batch(padding=77))}


def bfloat16_dtypes(folder: Path) -> dict[str, Any]:
    config = Config().replace(params_dtype="bfloat16")
    (role,) = build(folder, config, "lm+value")
    output = run([role], fixed_batch())
    assert output is not None
    return {"parameters": {p.dtype for p in role.parameters()}, "output": {t.dtype for t in plain(output).values()}, **plain(output)}


@pytest.fixture(scope="module")
def single(folders: dict[str, Path]) -> dict[str, Any]:
    return run_ranks(single_rank, 1, folders, timeout_s=150)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_log_probs_and_entropy_equal_hugging_face(name: str, single: dict[str, Any], references: dict[str, dict[str, Any]]) -> None:
    assert difference(single[name]["eval"]["log_probs"], references[name]["log_probs"]) < TOLERANCE
    assert difference(single[name]["eval"]["entropy"], references[name]["entropy"]) < TOLERANCE
    assert single[name]["without_gradient"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_b63_scoring_and_updating_are_the_same_function(name: str, single: dict[str, Any]) -> None:
    """The config asks for dropout and router jitter 0.1; the ratio before any step is 1 to the last bit all the same."""
    assert torch.equal(single[name]["eval"]["log_probs"], single[name]["train"]["log_probs"])


@pytest.mark.slow
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_greedy_generation_equals_hugging_face(name: str, single: dict[str, Any], references: dict[str, dict[str, Any]]) -> None:
    for completion, expected in zip(single[name]["responses"], references[name]["responses"], strict=True):
        assert completion.token_ids == expected
        assert completion.truncated == (expected[-1] != 2)
        assert len(completion.log_probs) == len(expected)


@pytest.mark.slow
def test_sampling_depends_on_the_seed_alone(single: dict[str, Any]) -> None:
    sampling = single["sampling"]
    assert [c.token_ids for c in sampling["together"]] == [c.token_ids for c in sampling["apart"]]
    assert [c.token_ids for c in sampling["together"]] != [c.token_ids for c in sampling["other"]]


@pytest.mark.slow
def test_sampled_log_probs_are_the_trainers(single: dict[str, Any]) -> None:
    sampling = single["sampling"]
    assert (torch.tensor(sampling["together"][0].log_probs) - sampling["scored"]).abs().max() < TOLERANCE


@pytest.mark.slow
def test_b15_head_dim_is_read_not_derived(single: dict[str, Any]) -> None:
    shapes = single["b15_shapes"]
    assert shapes["decoder.layers.0.self_attention.linear_qkv.weight"] == (4096, 1024)
    assert shapes["decoder.layers.0.self_attention.linear_proj.weight"] == (1024, 2048)


@pytest.mark.slow
def test_b78_score_is_read_at_the_last_real_token(single: dict[str, Any], folders: dict[str, Path]) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(folders["reward"], dtype=torch.float32).eval()
    batch = fixed_batch()
    with torch.no_grad():
        expected = torch.cat([model(batch.tokens[i : i + 1, :length]).logits[:, 0] for i, length in enumerate(LENGTHS)])
    for scores in single["reward"].values():
        assert (scores - expected).abs().max() < TOLERANCE


@pytest.mark.slow
def test_padding_ids_do_not_matter(single: dict[str, Any]) -> None:
    assert difference(single["other_padding"]["log_probs"], single["llama"]["eval"]["log_probs"]) == 0


@pytest.mark.slow
def test_shared_critic_has_both_heads_and_the_separate_one_its_trunk_alone(
    single: dict[str, Any], references: dict[str, dict[str, Any]]
) -> None:
    assert difference(single["shared"]["log_probs"], references["llama_tied"]["log_probs"]) < TOLERANCE
    assert single["shared"]["values"].abs().sum() > 0
    assert torch.equal(single["shared"]["values"], single["critic"])  # same trunk, and the new head depends on the seed alone
    assert single["critic_names"] == ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "value_head.weight"]


@pytest.mark.slow
def test_bf16_role_gives_fp32(single: dict[str, Any], references: dict[str, dict[str, Any]]) -> None:
    assert single["bf16"]["parameters"] == {torch.bfloat16}
    assert single["bf16"]["output"] == {torch.float32}
    assert 0 < difference(single["bf16"]["log_probs"], references["qwen2"]["log_probs"]) < 0.1


# -- four ranks -------------------------------------------------------------------------------------------------------


def many_ranks(rank: int, world_size: int, folders: dict[str, Path]) -> dict[str, Any]:
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for topology, sizes in TOPOLOGIES.items():
        config = Config().replace(**sizes)
        with megatron(config):
            for name in SPLIT_TOYS:
                chunks = [chunk.eval() for chunk in build(folders[name], config, "lm")]
                with torch.no_grad():
                    results[topology, name] = plain(run(chunks, fixed_batch()))
                    if name == "llama_tied":
                        results[topology, "responses"] = greedy(chunks)
    results["gradients"] = gradients(folders["qwen3_wide_heads"])
    dist.destroy_process_group()
    return results


def greedy(chunks: list[Any]) -> list[Any]:
    from megatron_ppo.roles.megatron_generate import generate

    return [c.token_ids for c in generate(chunks, PROMPTS, GREEDY, seeds=[1, 2, 3])]


def gradients(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Gradients of parameters that every rank holds whole, added up as megatron does, with the TP, CP and plain meshes."""
    found: dict[str, dict[str, Tensor]] = {}
    for topology in ("plain", "tp2_sp", "cp2"):
        config = Config().replace(**TOPOLOGIES.get(topology, {}))
        with megatron(config):
            (role,) = build(folder, config, "lm+value")
            loss_of(role).backward()
            groups = role.pg_collection
            found[topology] = {}
            for name, parameter in role.named_parameters():
                if not ("norm" in name or name == "value_head.weight"):
                    continue
                assert parameter.grad is not None, name
                gradient = parameter.grad.clone()
                if getattr(parameter, "sequence_parallel", False) or "q_layernorm" in name or "k_layernorm" in name:
                    dist.all_reduce(gradient, group=groups.tp)
                dist.all_reduce(gradient, group=groups.cp)
                found[topology][name] = gradient
    return found


def loss_of(role: Any) -> Tensor:
    """A loss of log-probs, entropy and values of this rank's positions, with a coefficient of its own for each position."""
    from megatron_ppo.roles.megatron_spec import context_parallel_part

    batch, cp = fixed_batch(), role.pg_collection.cp
    coefficients = torch.where(batch.loss_mask, torch.randn(batch.tokens.shape, generator=torch.Generator().manual_seed(4)), 0.0)
    tokens, labels, mask, weights = (
        context_parallel_part(t, 1, cp.rank(), cp.size()) for t in (batch.tokens, batch.labels, batch.loss_mask, coefficients)
    )
    part = MicroBatch(tokens, labels, mask, rows=batch.rows, lengths=batch.lengths)
    output = role(part, temperature=TEMPERATURE, with_entropy=True)
    return (weights * (output.log_probs + 0.3 * output.entropy + output.values)).sum()


@pytest.fixture(scope="module")
def many(folders: dict[str, Path]) -> list[dict[str, Any]]:
    return run_ranks(many_ranks, 4, folders, timeout_s=280)


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_split_roles_equal_hugging_face(topology: str, many: list[dict[str, Any]], references: dict[str, dict[str, Any]]) -> None:
    """TP (fewer KV heads than ranks too), PP, virtual PP, sequence and context parallelism (B64); tied and untied, wide heads."""
    for name in SPLIT_TOYS:
        outputs = [rank[topology, name] for rank in many if rank[topology, name] is not None]
        assert len(outputs) == 4 // TOPOLOGIES[topology].get("pipeline_model_parallel_size", 1)
        for output in outputs:
            assert difference(output["log_probs"], references[name]["log_probs"]) < TOLERANCE
            assert difference(output["entropy"], references[name]["entropy"]) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_split_generation_equals_hugging_face_on_every_rank(
    topology: str, many: list[dict[str, Any]], references: dict[str, dict[str, Any]]
) -> None:
    for rank in many:
        assert rank[topology, "responses"] == references["llama_tied"]["responses"]


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["tp2_sp", "cp2"])
def test_b64_gradients_of_whole_parameters_do_not_depend_on_the_split(topology: str, many: list[dict[str, Any]]) -> None:
    """No factor of TP or CP on any of them, the value head included."""
    for rank in many:
        expected, found = rank["gradients"]["plain"], rank["gradients"][topology]
        assert found.keys() == expected.keys() and "value_head.weight" in found
        for name, gradient in expected.items():
            assert (found[name] - gradient).abs().max() < 1e-5 * max(1.0, float(gradient.abs().max())), name
