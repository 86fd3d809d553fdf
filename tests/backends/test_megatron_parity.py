"""However the Megatron backend spreads a role over ranks, it computes and learns the same as one process.

One launch a world size proves all its cases. Tolerances in fp32: 1e-5 for outputs, gradient norms and the weights after SGD steps.
Adam divides by the root of the squared gradient, so that a gradient near 0 whose last bits differ moves its weight by up to 2 * lr: 1e-4
there, at lr 1e-3.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_parity_support import Case, adam, assert_same, difference, fields, hugging_face_outputs, run_cases
from safetensors import safe_open
from spawn import run_ranks
from toy_models import make_toy

pytestmark = pytest.mark.timeout(600)  # a launch of many cases counts as the time of the test that asks first

Results = dict[str, dict[str, Any]]
FAMILIES = ("llama", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of toy models: the families (Qwen3's heads are wider than hidden / heads), a tied one, and one with a score head."""
    root = tmp_path_factory.mktemp("models")
    widths = {"llama": None, "qwen2": None, "qwen3": 32}
    paths = {family: make_toy(root / family, family, num_layers=4, head_dim=widths[family]) for family in FAMILIES}
    paths["tied"] = make_toy(root / "tied", "llama", tied=True, num_layers=4)
    paths["score"] = make_toy(root / "score", "llama", num_layers=4, score_head=True, seed=3)
    return {name: str(path) for name, path in paths.items()}


@pytest.fixture(scope="module")
def single(models: dict[str, str]) -> Results:
    """What one process gives: the truth of this file."""
    cases = {
        **{family: Case(fields(models, family), generate=True) for family in FAMILIES},
        "tied": Case(fields(models, "tied")),
        "tied critic": Case(tied_critic(models), roles=("actor", "critic")),
        **{f"separate {name}": Case(fields(models, name, critic="separate"), roles=("actor", "critic")) for name in ("qwen2", "qwen3")},
        "recompute": Case(fields(models, recompute_granularity="full")),
        "recompute attention": Case(fields(models, recompute_granularity="selective")),
        "one by one": Case(fields(models), micro_batch_size=1),
        "two by two": Case(fields(models), micro_batch_size=2),
        "all at once": Case(fields(models), micro_batch_size=8),
        "dummies": Case(fields(models), micro_batch_size=2, num_dummies=(3,)),
        "six tokens": Case(fields(models), rows=B60_ROWS, micro_batch_size=1),
        **{f"shared {family}": Case(fields(models, family, critic="shared")) for family in FAMILIES},
        "all roles": Case(all_roles(models), roles=("actor", "critic")),
        "adam": Case(adam(models)),
        "adam, not sharded": Case(adam(models, use_distributed_optimizer=False)),
        "bf16": Case(adam(models, params_dtype="bfloat16")),
        "bf16, not sharded": Case(adam(models, params_dtype="bfloat16", use_distributed_optimizer=False)),
        "one step": Case(fields(models, "qwen2"), num_steps=1),
        "one step with decay": Case(fields(models, "qwen2", weight_decay=0.5), num_steps=1),
        "no clipping": Case(fields(models, clip_grad=0.0)),
        "no tokens": Case(adam(models, lr_warmup_steps=4), poison="no_tokens", num_steps=3),
        "nan": Case(adam(models, lr_warmup_steps=4), poison="nan", num_steps=3),
    }
    return run_ranks(run_cases, 1, cases, timeout_s=200)[0]


B60_ROWS = (1, 3)
"""Rows of 5 response tokens and of 1; of two context ranks the first holds none of them."""


def all_roles(models: Mapping[str, str], **changes: object) -> dict[str, object]:
    """Actor, separate critic, reference and reward model at once."""
    more = {"critic": "separate", "critic_path": models["score"], "kl_coef": 0.1, "reward_model_path": models["score"]}
    return fields(models, **(more | changes))


def tied_critic(models: Mapping[str, str], **changes: object) -> dict[str, object]:
    """A tied actor, and a critic that starts from it with a fresh head."""
    return fields(models, "tied", **({"critic": "separate"} | changes))


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders that cases export to."""
    root = tmp_path_factory.mktemp("exports")
    return {name: root / name for name in ("tied", "shared")}


@pytest.fixture(scope="module")
def two_ranks(models: dict[str, str], exports: dict[str, Path]) -> list[Results]:
    """Every topology of two ranks, in one launch."""
    pp2 = {"pipeline_model_parallel_size": 2}
    cases = {
        "tp2": Case(fields(models, "qwen2", tensor_model_parallel_size=2), generate=True),
        **{f"tp2 shared {family}": Case(fields(models, family, critic="shared", tensor_model_parallel_size=2)) for family in FAMILIES},
        "tp2 separate llama": Case(tied_critic(models, tensor_model_parallel_size=2), roles=("actor", "critic")),
        **{
            f"tp2 separate {name}": Case(fields(models, name, critic="separate", tensor_model_parallel_size=2), roles=("actor", "critic"))
            for name in ("qwen2", "qwen3")
        },
        "tp2 sequence parallel": Case(fields(models, "qwen3", tensor_model_parallel_size=2, sequence_parallel=True)),
        "pp2": Case(fields(models, **pp2), micro_batch_size=3, generate=True),
        "vpp2": Case(fields(models, virtual_pipeline_model_parallel_size=2, **pp2), micro_batch_size=2, generate=True),
        "tied pp2": Case(tied_critic(models, **pp2), roles=("actor", "critic"), micro_batch_size=3, export=str(exports["tied"])),
        "dp2": Case(fields(models), micro_batch_size=3),
        "dp2 six tokens": Case(fields(models), rows_by_replica=((1,), (3,)), micro_batch_size=1),
        "dp2 uneven": Case(fields(models), rows_by_replica=((0, 1, 2, 3, 4, 5), (6, 7)), micro_batch_size=2, num_dummies=(0, 2)),
        "dp2 adam": Case(adam(models, **OVERLAP), micro_batch_size=2),
        "pp2 shared": Case(fields(models, critic="shared", **pp2), micro_batch_size=2, export=str(exports["shared"])),
        "pp2 all roles": Case(all_roles(models, **pp2), roles=("actor", "critic"), micro_batch_size=2),
        "dp2 nan": Case(adam(models, lr_warmup_steps=4), poison="nan", num_steps=3),
        "cp2": Case(fields(models, context_parallel_size=2)),
        "cp2 six tokens": Case(fields(models, context_parallel_size=2), rows=B60_ROWS, micro_batch_size=1),
    }
    return run_ranks(run_cases, 2, cases, timeout_s=300)


@pytest.mark.parametrize("split", ["one by one", "two by two", "all at once", "dummies", "recompute", "recompute attention"])
def test_b60_b66_the_split_into_micro_batches_changes_nothing(single: Results, split: str) -> None:
    """B60, B66: 8x1, 4x2, 1x8 and 4x2 with dummies learn what 2x4 learns; so does recomputing activations."""
    assert_same(single[split], single["llama"])


OVERLAP = {"transformer_overrides": {"overlap_grad_reduce": "true"}}
TWO_RANKS = {
    "tp2": "qwen2",
    **{f"tp2 shared {family}": f"shared {family}" for family in FAMILIES},
    "tp2 separate llama": "tied critic",
    "tp2 separate qwen2": "separate qwen2",
    "tp2 separate qwen3": "separate qwen3",
    "tp2 sequence parallel": "qwen3",
    "pp2": "llama",
    "vpp2": "llama",
    "tied pp2": "tied critic",
    "dp2": "llama",
    "dp2 six tokens": "six tokens",
    "dp2 uneven": "llama",
    "pp2 shared": "shared llama",
    "pp2 all roles": "all roles",
    "cp2": "llama",
    "cp2 six tokens": "six tokens",
}
"""Case of two ranks -> what one process does."""


@pytest.mark.parametrize("case", list(TWO_RANKS))
def test_b09_b60_b66_two_ranks_equal_one(single: Results, two_ranks: list[Results], case: str) -> None:
    """B09 tied over PP; B60 replicas with 5 tokens and with 1; B64 a context rank without any; B66 replicas with 3 and with 1 passes."""
    for results in two_ranks:
        assert_same(results[case], single[TWO_RANKS[case]])


def test_steps_move_the_weights_far_more_than_the_tolerance(single: Results) -> None:
    moved = difference(single["llama"]["before"], single["llama"]["after"])
    assert moved > 1e-2, f"the outputs moved by {moved} only: the comparisons of this file would prove little"


def test_adam_with_and_without_the_distributed_optimizer(single: Results, two_ranks: list[Results]) -> None:
    assert_same(single["adam, not sharded"], single["adam"], weights=1e-6, outputs=1e-5)
    for results in two_ranks:
        assert_same(results["dp2 adam"], single["adam"], weights=1e-4, outputs=1e-3)


def test_bf16_runs_and_stays_near(single: Results) -> None:
    near, exact = single["bf16"], single["adam"]
    assert_same(single["bf16, not sharded"], near)
    assert difference(near["before"], exact["before"]) < 0.1
    for (report, changed), (truth, _) in zip(near["steps"]["actor"], exact["steps"]["actor"], strict=True):
        assert changed and report.grad_norm == pytest.approx(truth.grad_norm, rel=0.05)
    assert difference(near["weights"]["actor"], exact["weights"]["actor"]) < 1e-2


def test_gradient_norm_is_reported_without_clipping_too(single: Results) -> None:
    clipped, free = (single[name]["steps"]["actor"][0][0] for name in ("llama", "no clipping"))
    assert free.grad_norm == pytest.approx(clipped.grad_norm, rel=1e-6) and clipped.grad_norm > 1.0
    assert difference(single["llama"]["weights"]["actor"], single["no clipping"]["weights"]["actor"]) > 1e-3


def test_weight_decay_leaves_biases_and_norms_alone(models: dict[str, str], single: Results) -> None:
    plain, decayed = (single[name]["weights"]["actor"] for name in ("one step", "one step with decay"))
    with safe_open(Path(models["qwen2"]) / "model.safetensors", framework="pt") as stored:
        for name in plain:
            start = stored.get_tensor(name)
            expected = 0.05 * 0.5 * start if start.dim() > 1 else torch.zeros_like(start)
            assert difference({name: plain[name] - decayed[name]}, {name: expected}) < 1e-6
    assert any(name.endswith("bias") for name in plain)


@pytest.mark.parametrize("case", ["no tokens", "nan"])
def test_a_step_without_tokens_or_with_nan_changes_nothing(single: Results, case: str) -> None:
    assert_second_of_three_skipped(single[case])


def test_all_replicas_skip_where_one_alone_sees_a_nan(two_ranks: list[Results]) -> None:
    for results in two_ranks:
        assert_second_of_three_skipped(results["dp2 nan"])


def test_b63_reference_equals_the_actor_at_first_and_never_moves(single: Results, two_ranks: list[Results]) -> None:
    """B63: same numbers before the first step (ratio exactly 1), own storage after it."""
    for results in (single["all roles"], *(rank["pp2 all roles"] for rank in two_ranks)):
        before, after = results["before"], results["after"]
        assert torch.equal(before["actor.log_probs"], before["reference.log_probs"])
        assert torch.equal(after["reference.log_probs"], before["reference.log_probs"])
        assert torch.equal(after["scores"], before["scores"])
        assert difference({"x": after["actor.log_probs"]}, {"x": before["actor.log_probs"]}) > 1e-3
        assert difference({"x": after["critic.values"]}, {"x": before["critic.values"]}) > 1e-3


def test_generation_is_the_same_on_every_rank_and_topology(single: Results, two_ranks: list[Results]) -> None:
    for results in two_ranks:
        for case in ("tp2", "pp2", "vpp2"):
            assert results[case]["generated"] == single[TWO_RANKS[case]]["generated"]
    assert all(len(tokens) == 5 for tokens in single["llama"]["generated"])


@pytest.mark.parametrize("case", ["tied", "shared"])
def test_b09_export_is_what_hugging_face_computes_with(
    models: dict[str, str], two_ranks: list[Results], exports: dict[str, Path], case: str
) -> None:
    """B09: a tied export has no head of its own; transformers gets the log-probs and values of the trained pipeline from it."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    result = two_ranks[0]["tied pp2" if case == "tied" else "pp2 shared"]
    for rank in two_ranks:
        assert "already holds weights" in rank["tied pp2" if case == "tied" else "pp2 shared"]["export fault"]
    with safe_open(exports[case] / "actor" / "model.safetensors", framework="pt") as stored:
        assert ("lm_head.weight" in stored.keys()) == (case != "tied")  # noqa: SIM118  not a dict
    config = json.loads((exports[case] / "actor" / "config.json").read_text())
    assert config["tie_word_embeddings"] == (case == "tied")
    actor = AutoModelForCausalLM.from_pretrained(exports[case] / "actor")
    critic = AutoModelForSequenceClassification.from_pretrained(exports[case] / "critic")
    values = result["after"]["critic.values" if case == "tied" else "actor.values"]
    log_probs, found = hugging_face_outputs(actor, critic)
    assert difference({"x": log_probs}, {"x": result["after"]["actor.log_probs"]}) < 1e-5
    assert difference({"x": found}, {"x": values}) < 1e-5


@pytest.fixture(scope="module")
def four_ranks(models: dict[str, str]) -> list[Results]:
    """TP x PP, DP x TP, DP x PP, deeper pipelines, in one launch."""
    tp2, pp2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
    both = {**tp2, **pp2, "sequence_parallel": True}
    cases = {
        **{f"tp2 pp2 {family}": Case(fields(models, family, **tp2, **pp2), micro_batch_size=2) for family in FAMILIES},
        "tp2 pp2 sequence parallel": Case(fields(models, "qwen3", **both), micro_batch_size=3),
        "tp2 pp2 tied": Case(fields(models, "tied", **both), micro_batch_size=2),
        "tp2 vpp2": Case(fields(models, virtual_pipeline_model_parallel_size=2, **both), micro_batch_size=1),
        "tp2 pp2 shared": Case(fields(models, critic="shared", recompute_granularity="full", **both), micro_batch_size=2, generate=True),
        "tp4": Case(fields(models, "qwen2", tensor_model_parallel_size=4)),
        "pp4": Case(fields(models, "qwen2", pipeline_model_parallel_size=4), micro_batch_size=1),
        "pp4 tied": Case(fields(models, "tied", pipeline_model_parallel_size=4), micro_batch_size=3),
        "dp2 pp2": Case(fields(models, **pp2), micro_batch_size=2),
        "dp2 tp2": Case(all_roles(models, **tp2, sequence_parallel=True), roles=("actor", "critic"), micro_batch_size=2),
        "dp2 pp2 all roles": Case(all_roles(models, **pp2), roles=("actor", "critic"), micro_batch_size=2),
        "dp2 pp2 uneven": Case(
            fields(models, "tied", **pp2), rows_by_replica=((0, 1, 2, 3, 4, 5), (6, 7)), micro_batch_size=2, num_dummies=(0, 2)
        ),
        "dp2 tp2 adam": Case(adam(models, **tp2), micro_batch_size=2),
        "dp2 pp2 adam": Case(adam(models, **pp2, **OVERLAP), micro_batch_size=2),
        "cp2 tp2": Case(fields(models, context_parallel_size=2, **tp2, sequence_parallel=True)),
        "cp2 pp2": Case(all_roles(models, context_parallel_size=2, **pp2), roles=("actor", "critic"), micro_batch_size=2),
        "cp2 vpp2": Case(
            fields(models, "qwen3", context_parallel_size=2, virtual_pipeline_model_parallel_size=2, **pp2), micro_batch_size=2
        ),
        "dp2 vpp2 adam": Case(adam(models, virtual_pipeline_model_parallel_size=2, **OVERLAP, **pp2), micro_batch_size=2),
        "cp2 dp2": Case(fields(models, context_parallel_size=2)),
        "dp2 pp2 bf16": Case(adam(models, params_dtype="bfloat16", **pp2), micro_batch_size=2),
    }
    return run_ranks(run_cases, 4, cases, timeout_s=550)


FOUR_RANKS = {
    **{f"tp2 pp2 {family}": family for family in FAMILIES},
    "tp2 pp2 sequence parallel": "qwen3",
    "tp2 pp2 tied": "tied",
    "tp2 vpp2": "llama",
    "tp2 pp2 shared": "shared llama",
    "tp4": "qwen2",
    "pp4": "qwen2",
    "pp4 tied": "tied",
    "dp2 pp2": "llama",
    "dp2 tp2": "all roles",
    "dp2 pp2 all roles": "all roles",
    "dp2 pp2 uneven": "tied",
    "cp2 tp2": "llama",
    "cp2 pp2": "all roles",
    "cp2 vpp2": "qwen3",
    "cp2 dp2": "llama",
}
"""Case of four ranks -> what one process does."""


@pytest.mark.slow
@pytest.mark.parametrize("case", list(FOUR_RANKS))
def test_four_ranks_equal_one(single: Results, four_ranks: list[Results], case: str) -> None:
    for results in four_ranks:
        assert_same(results[case], single[FOUR_RANKS[case]])


@pytest.mark.slow
def test_adam_and_bf16_on_four_ranks_stay_near_one(single: Results, four_ranks: list[Results]) -> None:
    for results in four_ranks:
        assert_same(results["dp2 tp2 adam"], single["adam"], weights=1e-3, outputs=1e-2)
        for case in ("dp2 pp2 adam", "dp2 vpp2 adam"):
            assert_same(results[case], single["adam"], weights=1e-4, outputs=1e-3)
        assert difference(results["dp2 pp2 bf16"]["before"], single["bf16"]["before"]) < 0.05


def assert_second_of_three_skipped(result: dict[str, Any]) -> None:
    """The first and last step changed weights, the second did not and the learning-rate counter did not count it."""
    steps = result["steps"]["actor"]
    assert [report.lr for report, _ in steps] == pytest.approx([0.25e-3, 0.5e-3, 0.5e-3])
    assert [report.skipped for report, _ in steps] == [False, True, False]
    assert [changed for _, changed in steps] == [True, False, True]
