"""TrainingEngine on real Megatron and FSDP backends: one call for every algorithm, and results that no split of a batch changes.

A launch of one rank gives Megatron's truth, those of two and four ranks the same by data, tensor and pipeline parallelism, and by FSDP's
shards. Each builds a backend a case (module fixtures), and each test judges some of the cases.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from spawn import run_ranks
from torch import Tensor
from toy_batches import make_trajectories
from toy_models import make_toy
from training_engine_support import Case, Results, make_batch, run_cases
from transformers import AutoModelForCausalLM, LlamaForSequenceClassification

from megatron_ppo.types import TrajectoryBatch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TEMPERATURE, LR = 0.7, 0.1


# -- cases ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A policy whose config asks for dropout, a tied policy, and a classifier with a score head of its own."""
    root = tmp_path_factory.mktemp("models")
    paths = {"llama": make_toy(root / "llama"), "tied": make_toy(root / "tied", tied=True)}
    paths["score"] = make_toy(root / "score", score_head=True, seed=3)
    file = paths["llama"] / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attention_dropout": 0.1}))
    return {name: str(path) for name, path in paths.items()}


def ppo(models: Mapping[str, str], **changes: object) -> dict[str, object]:
    """PPO by SGD: separate critic, reference in the reward, reward model; 2 epochs of 2 mini-batches."""
    fields: dict[str, object] = {
        "model_path": models["llama"],
        "critic": "separate",
        "critic_path": models["score"],
        "reward_model_path": models["score"],
        "kl_coef": 0.1,
        "optimizer": "sgd",
        "use_distributed_optimizer": False,
        "lr": LR,
        "critic_lr": LR,
        "global_batch_size": 4,
        "ppo_epochs": 2,
        "micro_batch_size": 8,
        "temperature": TEMPERATURE,
        "make_vocab_size_divisible_by": 4,
    }
    return fields | changes


def grpo(models: Mapping[str, str], **changes: object) -> dict[str, object]:
    """The same without critic, reference and reward model."""
    without = {"critic": "none", "critic_path": None, "reward_model_path": None, "kl_coef": 0.0, "advantage_estimator": "grpo"}
    return ppo(models, **(without | changes))


ONE_STEP = {"global_batch_size": 8, "ppo_epochs": 1, "clip_grad": 0.0}
FIVE, ONE = (0, 1, 2, 4, 7), (2,)
UNEVEN = {"micro_batch_size": 1}
TP2 = {"tensor_model_parallel_size": 2}
FSDP = {"backend": "fsdp"}


def b100(models: Mapping[str, str], **changes: object) -> dict[str, object]:
    counts = {"prompts_per_iteration": 16, "samples_per_prompt": 4, "global_batch_size": 16, "ppo_epochs": 2, "train_iters": 10}
    return grpo(models, lr_decay_style="linear", lr_warmup_steps=8, micro_batch_size=16, **(counts | changes))


@pytest.fixture(scope="module")
def single(models: dict[str, str]) -> Results:
    sequence = {"advantage_estimator": "grpo", "loss_aggregation": "sequence_mean"}
    cases = {
        "ppo": Case(ppo(models)),
        "micro 1": Case(ppo(models, micro_batch_size=1)),
        "micro 3": Case(ppo(models, micro_batch_size=3)),
        "max tokens": Case(ppo(models, max_tokens_per_micro_batch=20)),
        "padded": Case(ppo(models), length=40, pad_token=9),
        "one step ppo": Case(ppo(models, **ONE_STEP)),
        "two updates": Case(ppo(models), num_updates=2),
        "grpo": Case(grpo(models)),
        "one step grpo": Case(grpo(models, **ONE_STEP, loss_aggregation="sequence_mean")),
        "grpo by the call": Case(grpo(models, **ONE_STEP, advantage_estimator="gae"), algorithm=sequence),
        "rloo by the call": Case(grpo(models, **ONE_STEP), algorithm={"advantage_estimator": "rloo", "entropy_coef": 0.3}),
        "five rows": Case(ppo(models, global_batch_size=5, **UNEVEN), rows=FIVE),
        "one row": Case(ppo(models, global_batch_size=1, **UNEVEN), rows=ONE),
        "no response": Case(ppo(models, global_batch_size=1), rows=(6,)),
        "nan advantage": Case(ppo(models, **ONE_STEP), poison="advantage"),
        "nan weight": Case(ppo(models), poison="weight"),
        "fresh critic of a tied policy": Case(ppo(models, model_path=models["tied"], critic_path=None)),
        "reward model without a head": Case(ppo(models, reward_model_path=models["llama"])),
        "b100": Case(b100(models), rows=tuple(range(64)), num_updates=11),
    }
    return run_ranks(run_cases, 1, cases, timeout_s=280)[0]


@pytest.fixture(scope="module")
def two_ranks(models: dict[str, str]) -> list[Results]:
    pp2 = {"pipeline_model_parallel_size": 2}
    cases = {
        "dp2": Case(ppo(models, micro_batch_size=2)),
        "dp2 max tokens": Case(ppo(models, max_tokens_per_micro_batch=16)),
        "pp2": Case(ppo(models, micro_batch_size=2, **pp2)),
        "tp2": Case(ppo(models, **TP2), num_updates=2),
        "tp2 sequence parallel": Case(ppo(models, sequence_parallel=True, **TP2), num_updates=2),
        "dp2 five rows": Case(ppo(models, global_batch_size=5, **UNEVEN), rows=FIVE),
        "dp2 one row": Case(ppo(models, global_batch_size=1, **UNEVEN), rows=ONE),
        "dp2 grpo": Case(grpo(models)),
        "dp2 nan advantage": Case(ppo(models, **ONE_STEP), poison="advantage"),
        "pp2 nan advantage": Case(ppo(models, **ONE_STEP, **pp2), poison="advantage"),
        "dp2 nan weight": Case(ppo(models), poison="weight"),
        "fsdp": Case(ppo(models, **FSDP), num_updates=2),
        "fsdp padded": Case(ppo(models, **FSDP), length=40, pad_token=9),
        "fsdp max tokens": Case(ppo(models, max_tokens_per_micro_batch=16, **FSDP)),
        "fsdp five rows": Case(ppo(models, global_batch_size=5, **UNEVEN, **FSDP), rows=FIVE),
        "fsdp one row": Case(ppo(models, global_batch_size=1, **UNEVEN, **FSDP), rows=ONE),
        "fsdp no response": Case(ppo(models, global_batch_size=1, **FSDP), rows=(6,)),
        "fsdp nan advantage": Case(ppo(models, **ONE_STEP, **FSDP), poison="advantage"),
        "fsdp nan weight": Case(ppo(models, **FSDP), poison="weight"),
        "fsdp reward model without a head": Case(ppo(models, reward_model_path=models["llama"], **FSDP)),
    }
    return run_ranks(run_cases, 2, cases, timeout_s=280)


@pytest.fixture(scope="module")
def four_ranks(models: dict[str, str]) -> list[Results]:
    tp2_pp2 = Case(ppo(models, micro_batch_size=2, pipeline_model_parallel_size=2, **TP2), num_updates=2)
    return run_ranks(run_cases, 4, {"tp2 pp2": tp2_pp2}, timeout_s=280)


# -- judgement --------------------------------------------------------------------------------------------------------


def assert_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Tensors of the whole batch, statistics and weights of two cases, to 1e-5."""
    for name in ("log_probs", "ref", "values", "scores", "advantages", "returns"):
        assert (one[name] is None) == (other[name] is None)
        if one[name] is not None:
            width = min(one[name].shape[-1], other[name].shape[-1])
            torch.testing.assert_close(one[name][..., :width], other[name][..., :width], atol=1e-5, rtol=1e-4)
    assert one["experience"] == pytest.approx(other["experience"], abs=1e-5, rel=1e-4)
    for mine, theirs in zip(one["metrics"], other["metrics"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5, rel=1e-4)
    for role, weights in one["weights"].items():
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, other["weights"][role][name], atol=1e-5, rtol=0)
            assert not torch.equal(tensor, one["start"][role][name]), f"{name} has not been trained"


def changed(found: Mapping[str, Any]) -> list[str]:
    return [
        f"{role} {name}"
        for role, weights in found["weights"].items()
        if weights is not None
        for name, tensor in weights.items()
        if not torch.equal(tensor, found["start"][role][name])
    ]


@pytest.mark.parametrize("split", ["micro 1", "micro 3", "max tokens", "padded"])
def test_b59_no_split_or_padding_of_a_batch_changes_an_update(single: Results, split: str) -> None:
    assert_same(single["ppo"], single[split])
    if split in ("micro 1", "max tokens"):
        assert {n for _, _, n in single[split]["steps"]} != {1}


@pytest.mark.parametrize("name", ["dp2", "dp2 max tokens", "pp2", "fsdp max tokens", "fsdp padded"])
def test_b52_b96_data_parallel_and_pipeline_ranks_train_as_one(single: Results, two_ranks: list[Results], name: str) -> None:
    """Whitening is over the whole batch, not a rank's share of it, and the same bits on every rank; all stages finish."""
    first, second = two_ranks[0][name], two_ranks[1][name]
    assert_same(first, single["ppo"])
    for tensor in ("log_probs", "ref", "values", "scores", "advantages", "returns"):
        assert torch.equal(first[tensor], second[tensor])
    assert first["metrics"] == second["metrics"]
    assert first["experience"] == second["experience"]
    assert {n for _, _, n in first["steps"]} == {n for _, _, n in second["steps"]}


@pytest.mark.parametrize("name", ["tp2", "tp2 sequence parallel", "tp2 pp2", "fsdp"])
def test_ranks_that_share_the_weights_train_as_one(single: Results, name: str, request: pytest.FixtureRequest) -> None:
    """Two updates by the product's own losses: grad norms (in ``metrics``), weights, and what both networks say afterwards, to 1e-5."""
    ranks: list[Results] = request.getfixturevalue("four_ranks" if name == "tp2 pp2" else "two_ranks")
    truth = single["two updates"]
    assert_same(ranks[0][name], truth)
    assert len(truth["metrics"]) == 2 and all(step["grad_norm"] > 0 and step["critic/grad_norm"] > 0 for step in truth["metrics"])
    for one in ranks:
        assert one[name]["metrics"] == ranks[0][name]["metrics"]
        for tensor in ("log_probs after", "values after"):
            torch.testing.assert_close(one[name][tensor], truth[tensor], atol=1e-5, rtol=0)
            assert not torch.allclose(one[name][tensor], truth[tensor.removesuffix(" after")], atol=1e-3)


def test_one_call_serves_ppo_and_grpo(single: Results, two_ranks: list[Results]) -> None:
    ours, theirs = single["ppo"]["metrics"][0], single["grpo"]["metrics"][0]
    assert {"loss/policy", "loss/value", "critic/grad_norm", "critic/lr"} <= set(ours)
    assert "loss/policy" in theirs and not any(name.startswith(("critic/", "loss/value", "value/")) for name in theirs)
    assert [role for role, _, _ in single["ppo"]["steps"]] == ["critic", "actor"] * 4
    assert [role for role, _, _ in single["grpo"]["steps"]] == ["actor"] * 4
    assert single["grpo"]["values"] is None and single["grpo"]["returns"] is None
    assert_same(two_ranks[0]["dp2 grpo"], single["grpo"])


def test_algorithm_config_selects_loss_and_estimator(single: Results) -> None:
    """What the call says counts, not what the engine was configured with; and it makes a difference."""
    by_config, by_call, other = (single[name] for name in ("one step grpo", "grpo by the call", "rloo by the call"))
    assert torch.equal(by_config["advantages"], by_call["advantages"])
    assert by_config["metrics"] == by_call["metrics"]
    for name, tensor in by_config["weights"]["actor"].items():
        assert torch.equal(tensor, by_call["weights"]["actor"][name])
        assert not torch.equal(tensor, other["weights"]["actor"][name])


@pytest.mark.parametrize(("name", "how"), [("one step ppo", "token_mean"), ("one step grpo", "sequence_mean")])
def test_an_actor_step_is_that_of_plain_pytorch(single: Results, models: dict[str, str], name: str, how: str) -> None:
    """At ratio 1 the gradient of the surrogate is that of advantage x log-prob: one SGD step on the Hugging Face model, written out."""
    batch, mask, found = make_batch(Case({})), make_batch(Case({})).response_mask, single[name]
    model = AutoModelForCausalLM.from_pretrained(models["llama"])
    logits = model.eval()(batch.tokens).logits[:, :-1] / TEMPERATURE
    log_probs = logits.log_softmax(-1).gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
    log_probs = torch.where(mask, torch.nn.functional.pad(log_probs, (1, 0)), 0.0)
    torch.testing.assert_close(found["log_probs"], log_probs.detach(), atol=1e-5, rtol=0)
    if how == "token_mean":
        loss = -(found["advantages"] * log_probs).sum() / mask.sum()
    else:
        per_response = (found["advantages"] * log_probs).sum(1) / mask.sum(1).clamp(min=1)
        loss = -per_response.sum() / mask.any(1).sum()
    loss.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found["weights"]["actor"][key], parameter.detach() - LR * parameter.grad, atol=1e-5, rtol=0)
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert found["metrics"][0]["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_grpo_advantages_are_deviations_within_the_group(single: Results) -> None:
    batch = make_batch(Case({}))
    groups = batch.scores.view(2, 4)
    expected = ((groups - groups.mean(1, keepdim=True)) / groups.std(1, keepdim=True)).flatten()[:, None]
    expected = torch.where(batch.response_mask, expected, 0.0)
    torch.testing.assert_close(single["one step grpo"]["advantages"], expected, atol=1e-4, rtol=1e-4)


def test_a_critic_step_is_that_of_plain_pytorch(single: Results, models: dict[str, str]) -> None:
    """B25 too: the critic starts from the score head that its folder has."""
    batch, found = make_batch(Case({})), single["one step ppo"]
    mask, critic = batch.response_mask, LlamaForSequenceClassification.from_pretrained(models["score"])
    values = critic.score(critic.model(batch.tokens).last_hidden_state).squeeze(-1)
    values = torch.where(mask, torch.nn.functional.pad(values[:, :-1], (1, 0)), 0.0)
    torch.testing.assert_close(found["values"], values.detach(), atol=1e-5, rtol=0)
    loss = 0.5 * torch.where(mask, values - found["returns"], 0.0).square().sum() / mask.sum()
    loss.backward()
    assert found["metrics"][0]["loss/value"] == pytest.approx(loss.item(), rel=1e-4)
    for key, parameter in critic.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found["weights"]["critic"][key], parameter.detach() - LR * parameter.grad, atol=1e-5, rtol=0)


def test_b63_the_ratio_of_the_first_step_is_exactly_one(single: Results) -> None:
    """Although the model's config asks for dropout: the same passes give the same bits."""
    (metrics,) = single["one step ppo"]["metrics"]
    assert metrics["ratio/mean"] == 1.0 and metrics["kl/approx"] == 0.0 and metrics["clip_frac"] == 0.0
    for name in ("ppo", "micro 3", "max tokens"):  # other passes than those of the old log-probs
        first = next(result for role, result, _ in single[name]["steps"] if role == "actor")
        assert abs(first.metrics["ratio/mean"] - 1) < 1e-6 and abs(first.metrics["kl/approx"]) < 1e-9 and first.metrics["clip_frac"] == 0
    assert single["two updates"]["metrics"][-1]["kl/approx"] > 1e-6


def test_b63_the_reference_stays(single: Results, two_ranks: list[Results]) -> None:
    for found in (single["two updates"], *(ranks[name] for ranks in two_ranks for name in ("pp2", "fsdp"))):
        assert found["reference kept"] and found["reference shares"] == []
        assert torch.equal(found["ref"], found["ref after"])
    assert torch.equal(single["two updates"]["ref"], single["two updates"]["log_probs"])
    assert single["two updates"]["version"] == 2


@pytest.mark.parametrize("backend", ["dp2", "fsdp"])
@pytest.mark.parametrize("rows", ["five rows", "one row"])
def test_b66_b67_rows_that_do_not_fill_the_replicas(single: Results, two_ranks: list[Results], rows: str, backend: str) -> None:
    """Both replicas take the same number of passes; dummies count for nothing in losses, gradients, statistics."""
    first, second = two_ranks[0][f"{backend} {rows}"], two_ranks[1][f"{backend} {rows}"]
    assert_same(first, single[rows])
    expected = 3 if rows == "five rows" else 1
    assert [n for _, _, n in first["steps"]] == [n for _, _, n in second["steps"]] == [expected] * 4
    assert first["log_probs"].shape[0] == (5 if rows == "five rows" else 1)
    assert torch.equal(first["log_probs"], second["log_probs"])


def test_b40_a_batch_without_a_response_token_changes_nothing(single: Results, two_ranks: list[Results]) -> None:
    """All statistics are finite; the gradient norm of no step at all is left out."""
    for found in (single["no response"], *(ranks["fsdp no response"] for ranks in two_ranks)):
        assert found["metrics"][0]["skipped_steps"] == 2 and found["metrics"][0]["critic/skipped_steps"] == 2
        assert changed(found) == []
        statistics = found["metrics"][0] | found["experience"]
        assert all(math.isfinite(value) for value in statistics.values())
        assert not {"grad_norm", "critic/grad_norm"} & set(statistics)  # no step was taken: there is none
        assert all(result.grad_norm == 0.0 for _, result, _ in found["steps"])


SKIPPING = ("dp2 nan advantage", "pp2 nan advantage", "fsdp nan advantage")


def test_b91_a_nan_advantage_is_skipped_by_all_ranks(single: Results, two_ranks: list[Results]) -> None:
    """The actor's step alone: the critic does not learn from advantages."""
    for found in (single["nan advantage"], *(ranks[name] for ranks in two_ranks for name in SKIPPING)):
        assert found["metrics"][0]["skipped_steps"] == 1 and found["metrics"][0]["critic/skipped_steps"] == 0
        assert not [name for name in changed(found) if name.startswith("actor")]
    assert [name for name in changed(single["nan advantage"]) if name.startswith("critic")]


def test_b91_nan_log_probs_are_an_error_on_all_ranks(single: Results, two_ranks: list[Results]) -> None:
    """One rank's weight is NaN: all ranks hold the whole batch, so that all see it."""
    assert "old_log_probs is nan" in single["nan weight"]["not finite"]
    for name in ("dp2 nan weight", "fsdp nan weight"):
        first, second = (ranks[name]["not finite"] for ranks in two_ranks)
        assert first == second and "old_log_probs is nan" in first


def test_b25_critic_and_reward_model_heads(single: Results, two_ranks: list[Results], models: dict[str, str]) -> None:
    critic, policy = single["fresh critic of a tied policy"]["start"]["critic"], AutoModelForCausalLM.from_pretrained(models["tied"])
    assert tuple(critic["score.weight"].shape) == (1, 64)
    trunk = {name: tensor for name, tensor in policy.state_dict().items() if name.startswith("model.")}
    assert set(critic) == {"score.weight", *trunk}
    assert all(torch.equal(critic[name], tensor) for name, tensor in trunk.items())
    for found in (single["reward model without a head"], *(ranks["fsdp reward model without a head"] for ranks in two_ranks)):
        assert "score.weight" in found["refused"]


def test_b78_scores_are_read_at_the_last_real_token(single: Results, two_ranks: list[Results], models: dict[str, str]) -> None:
    model = LlamaForSequenceClassification.from_pretrained(models["score"]).eval()
    batch = make_batch(Case({}))
    with torch.no_grad():
        rows = [row[: int(n)][None] for row, n in zip(batch.tokens, batch.lengths, strict=True)]
        expected = torch.stack([model.score(model.model(row).last_hidden_state)[0, -1, 0] for row in rows])
    for found in (single["ppo"], single["micro 1"], single["padded"], two_ranks[1]["dp2"], two_ranks[0]["pp2"], two_ranks[1]["fsdp"]):
        torch.testing.assert_close(found["scores"], expected, atol=1e-5, rtol=1e-5)
    assert single["ppo"]["experience"]["reward/model"] == pytest.approx(float(expected.mean()), abs=1e-5)


def test_b100_the_schedule_counts_optimizer_steps(single: Results) -> None:
    """16 x 4 responses, mini-batches of 16, 2 epochs, 10 iterations: 80 steps. An eleventh update trains at rate 0."""
    rates = [result.lr for _, result, _ in single["b100"]["steps"]]
    assert len(rates) == 88 and not any(result.skipped for _, result, _ in single["b100"]["steps"])
    assert max(rates) == LR and rates[7] == rates[8] == LR and rates[6] < LR and rates[9] < LR
    assert all(rate > 0 for rate in rates[:80])
    assert rates[80:] == [0.0] * 8
    assert rates[79] == pytest.approx(LR / 72)
    assert single["b100"]["metrics"][9]["lr"] == rates[79]


def test_b43_fetch_gives_the_same_batch_on_all_ranks(two_ranks: list[Results]) -> None:
    expected = TrajectoryBatch.concatenate([make_trajectories((2, 3), (1 + 4 * index, 2), seed=index) for index in range(3)])
    for ranks in two_ranks:
        batch: TrajectoryBatch = ranks["fetch"]["batch"]
        for field in dataclasses.fields(batch):
            mine, theirs = getattr(batch, field.name), getattr(expected, field.name)
            if isinstance(mine, Tensor):
                assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), field.name
        assert batch.metrics == {"time": [0.0, 1.0, 2.0]}


def test_weights_of_a_folder_are_where_training_starts(single: Results, models: dict[str, str]) -> None:
    policy = AutoModelForCausalLM.from_pretrained(models["llama"]).state_dict()
    assert all(torch.equal(tensor, policy[name]) for name, tensor in single["ppo"]["start"]["actor"].items())
