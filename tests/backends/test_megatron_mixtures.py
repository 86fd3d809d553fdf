"""Mixtures of experts and uneven pipeline stages on the Megatron backend: as Hugging Face computes, and as one process learns.

One launch a world size proves all its cases; tolerances and comparisons are those of ``test_megatron_parity.py``. Routers and experts of
the toys are sharpened, so that a token that goes to the wrong expert, or with the wrong weight, shows far above the tolerance. That names
and shapes of the live parameters are the layout's is asserted in every case by ``gather_canonical``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_parity_support import (
    ROWS,
    Case,
    adam,
    assert_same,
    difference,
    fields,
    fixed_rows,
    hugging_face_log_probs,
    hugging_face_outputs,
    run_case,
    run_cases,
)
from safetensors.torch import load_file, save_file
from spawn import run_ranks
from toy_models import Family, make_toy

from megatron_ppo import device
from megatron_ppo.config import Config

pytestmark = pytest.mark.timeout(600)  # a launch of many cases counts as the time of the test that asks first

Results = dict[str, dict[str, Any]]
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
EXPERT_TP1 = {"transformer_overrides": {"expert_tensor_parallel_size": "1"}}
EXPERT_TP2 = {"transformer_overrides": {"expert_tensor_parallel_size": "2"}}
FIRST_ONE = {"transformer_overrides": {"num_layers_in_first_pipeline_stage": "1"}}
LOSS_STAGE = {"transformer_overrides": {"account_for_loss_in_pipeline_split": "true"}}
BOTH_STAGES = {"transformer_overrides": {"account_for_embedding_in_pipeline_split": "true", "account_for_loss_in_pipeline_split": "true"}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of toy mixtures: both families, weights of the chosen experts that are left as they are, one layer, a score head."""
    root = tmp_path_factory.mktemp("mixtures")

    def make(name: str, family: Family, **options: Any) -> Path:
        return sharpen(make_toy(root / name, family, **options))

    paths = {
        "mixtral": make("mixtral", "mixtral"),
        "qwen3_moe": make("qwen3_moe", "qwen3_moe", num_layers=3, num_experts=8, num_experts_per_tok=3, tied=True),
        "as they are": make("as they are", "qwen3_moe"),
        "one layer": make("one layer", "mixtral", num_layers=1),
        "score": make("score", "qwen3_moe", score_head=True, seed=3),
    }
    config = paths["as they are"] / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"norm_topk_prob": False}))
    return {name: str(path) for name, path in paths.items()}


def sharpen(folder: Path) -> Path:
    """Routers that prefer some experts clearly, and experts that count."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(".gate.weight"):
            tensor.mul_(15)
        elif ".experts." in name:
            tensor.mul_(4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def all_roles(models: Mapping[str, str], **changes: object) -> dict[str, object]:
    """Actor, separate critic, reference and reward model at once, all of them mixtures."""
    more = {"critic": "separate", "critic_path": models["score"], "kl_coef": 0.1, "reward_model_path": models["score"]}
    return fields(models, "as they are", **(more | changes))


@pytest.fixture(scope="module")
def single(models: dict[str, str]) -> Results:
    """What one process gives: the truth of this file."""
    balanced = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": "0.1"}
    cases = {
        "mixtral": Case(fields(models, "mixtral"), generate=True),
        "qwen3_moe": Case(fields(models, "qwen3_moe"), generate=True),
        "as they are": Case(fields(models, "as they are")),
        "one layer": Case(fields(models, "one layer")),
        "shared": Case(fields(models, "mixtral", critic="shared")),
        "all roles": Case(all_roles(models), roles=("actor", "critic")),
        "adam": Case(adam(models, model="mixtral")),
        "bf16": Case(adam(models, model="mixtral", params_dtype="bfloat16")),
        "recompute": Case(fields(models, "mixtral", recompute_granularity="full"), micro_batch_size=2),
        "balanced": Case(fields(models, "mixtral", transformer_overrides=balanced)),
    }
    return run_ranks(run_cases, 1, cases, timeout_s=300)[0]


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that a case exports to."""
    return tmp_path_factory.mktemp("exports") / "mixtral"


@pytest.fixture(scope="module")
def two_ranks(models: dict[str, str], export: Path) -> list[Results]:
    """Every topology of two ranks, in one launch."""
    uneven_rows = ((0, 1, 2, 3, 4, 5), (6, 7))
    cases = {
        "ep2": Case(fields(models, "mixtral", **EP2), generate=True),
        "ep2 as they are": Case(fields(models, "as they are", **EP2), rows_by_replica=uneven_rows, micro_batch_size=2, num_dummies=(0, 2)),
        "ep2 tp2 expert tp1": Case(fields(models, "qwen3_moe", **EP2, **TP2, **EXPERT_TP1), generate=True),
        "tp2 expert tp2": Case(fields(models, "mixtral", **TP2)),
        "ep2 cp2": Case(fields(models, "mixtral", **EP2, context_parallel_size=2)),
        "ep2 all roles": Case(all_roles(models, **EP2), roles=("actor", "critic"), micro_batch_size=2),
        "ep2 adam": Case(adam(models, model="mixtral", transformer_overrides={"overlap_grad_reduce": "true"}, **EP2), micro_batch_size=2),
        "ep2 export": Case(fields(models, "mixtral", critic="shared", **EP2), num_steps=0, export=str(export)),
        "pp2 first stage of one": Case(fields(models, "qwen3_moe", **PP2, **FIRST_ONE), micro_batch_size=2, generate=True),
        "vpp2 empty chunks": Case(
            fields(models, "mixtral", virtual_pipeline_model_parallel_size=2, **PP2, **BOTH_STAGES), micro_batch_size=2, generate=True
        ),
    }
    return run_ranks(run_cases, 2, cases, timeout_s=400)


@pytest.fixture(scope="module")
def four_ranks(models: dict[str, str]) -> list[Results]:
    """Two axes and more, in one launch."""
    cases = {
        "ep2 tp2 expert tp2": Case(fields(models, "qwen3_moe", **EP2, **TP2), micro_batch_size=2, generate=True),
        "ep2 tp2 expert tp1": Case(fields(models, "mixtral", **EP2, **TP2, **EXPERT_TP1)),
        "ep2 expert tp2": Case(fields(models, "mixtral", **EP2, **EXPERT_TP2), micro_batch_size=1),
        "ep2 pp2 shared": Case(fields(models, "mixtral", critic="shared", recompute_granularity="full", **EP2, **PP2), micro_batch_size=2),
        "ep2 dp4": Case(fields(models, "qwen3_moe", **EP2), micro_batch_size=1),
        "ep4": Case(fields(models, "mixtral", expert_model_parallel_size=4), micro_batch_size=1),
        "ep2 cp2": Case(fields(models, "as they are", context_parallel_size=2, **EP2), micro_batch_size=2),
        "ep2 pp2 loss stage": Case(fields(models, "one layer", **EP2, **PP2, **LOSS_STAGE), micro_batch_size=2),
        "pp4 embedding and loss stage": Case(
            fields(models, "mixtral", pipeline_model_parallel_size=4, **BOTH_STAGES), micro_batch_size=2, generate=True
        ),
        "ep2 all roles": Case(all_roles(models, **EP2, **TP2), roles=("actor", "critic"), micro_batch_size=2),
        "ep2 dp4 adam": Case(adam(models, model="mixtral", **EP2), micro_batch_size=1),
        "ep2 pp2 adam": Case(adam(models, model="mixtral", use_distributed_optimizer=False, **EP2, **PP2), micro_batch_size=2),
        "ep2 pp2 bf16": Case(adam(models, model="mixtral", params_dtype="bfloat16", **EP2, **PP2), micro_batch_size=2),
    }
    return run_ranks(run_cases, 4, cases, timeout_s=550)


# -- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "as they are"])
def test_log_probs_of_a_mixture_equal_hugging_face(models: dict[str, str], single: Results, name: str) -> None:
    """Renormalised and not; the same weights with the other rule give something else by far."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(models[name])
    expected = hugging_face_log_probs(network)
    assert difference({"x": single[name]["before"]["actor.log_probs"]}, {"x": expected}) < 1e-5
    if name != "mixtral":
        for layer in network.model.layers:
            layer.mlp.gate.norm_topk_prob = not layer.mlp.gate.norm_topk_prob
        assert difference({"x": hugging_face_log_probs(network)}, {"x": expected}) > 1e-2


@pytest.mark.slow
def test_values_and_scores_of_a_mixture_equal_hugging_face(models: dict[str, str], single: Results) -> None:
    """Critic and reward model start from the same classifier; a score is the value of the last real token."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    before = single["all roles"]["before"]
    classifier = AutoModelForSequenceClassification.from_pretrained(models["score"])
    log_probs, values = hugging_face_outputs(AutoModelForCausalLM.from_pretrained(models["as they are"]), classifier)
    with torch.no_grad():
        scores = torch.cat([classifier(fixed_rows([row]).tokens).logits[:, 0] for row in range(ROWS)])
    found = {"log_probs": before["reference.log_probs"], "values": before["critic.values"], "scores": before["scores"]}
    assert difference(found, {"log_probs": log_probs, "values": values, "scores": scores}) < 1e-5


@pytest.mark.slow
def test_steps_move_every_router_and_expert_and_the_outputs(models: dict[str, str], single: Results) -> None:
    for name in ("mixtral", "as they are"):
        start, end = load_file(Path(models[name]) / "model.safetensors"), single[name]["weights"]["actor"]
        moved = {tensor: float((start[tensor] - end[tensor]).abs().max()) for tensor in end if ".experts." in tensor or ".gate." in tensor}
        assert min(moved.values()) > 1e-4, moved
        assert difference(single[name]["before"], single[name]["after"]) > 1e-2
        assert single[name]["steps"]["actor"][0][0].grad_norm > 1.0, "clipping, at 1.0, must have something to do"


@pytest.mark.slow
def test_recomputing_a_mixture_changes_nothing(single: Results) -> None:
    assert_same(single["recompute"], single["mixtral"])


@pytest.mark.slow
def test_the_auxiliary_loss_is_learnt_from_where_it_is_asked_for(single: Results) -> None:
    asked, plain = single["balanced"], single["mixtral"]
    assert difference(asked["before"], plain["before"]) == 0
    router = "model.layers.0.block_sparse_moe.gate.weight"
    assert float((asked["weights"]["actor"][router] - plain["weights"]["actor"][router]).abs().max()) > 1e-4


# -- many -------------------------------------------------------------------------------------------------------------

TWO_RANKS = {
    "ep2": "mixtral",
    "ep2 as they are": "as they are",
    "ep2 tp2 expert tp1": "qwen3_moe",
    "tp2 expert tp2": "mixtral",
    "ep2 cp2": "mixtral",
    "ep2 all roles": "all roles",
    "pp2 first stage of one": "qwen3_moe",
    "vpp2 empty chunks": "mixtral",
}
FOUR_RANKS = {
    "ep2 tp2 expert tp2": "qwen3_moe",
    "ep2 tp2 expert tp1": "mixtral",
    "ep2 expert tp2": "mixtral",
    "ep2 pp2 shared": "shared",
    "ep2 dp4": "qwen3_moe",
    "ep4": "mixtral",
    "ep2 cp2": "as they are",
    "ep2 pp2 loss stage": "one layer",
    "pp4 embedding and loss stage": "mixtral",
    "ep2 all roles": "all roles",
}
"""Case -> what one process does."""


@pytest.mark.slow
@pytest.mark.parametrize("case", list(TWO_RANKS))
def test_b13_b18_two_ranks_equal_one(single: Results, two_ranks: list[Results], case: str) -> None:
    """B13: uneven stages, chunks without a layer. B18: experts spread over replicas, over tensor- and over context-parallel ranks."""
    for results in two_ranks:
        assert_same(results[case], single[TWO_RANKS[case]])


@pytest.mark.slow
@pytest.mark.parametrize("case", list(FOUR_RANKS))
def test_b13_b18_four_ranks_equal_one(single: Results, four_ranks: list[Results], case: str) -> None:
    """B13: stages of nothing but the embedding or the heads. B18: experts whole, and cut by tensor parallelism."""
    for results in four_ranks:
        assert_same(results[case], single[FOUR_RANKS[case]])


@pytest.mark.slow
def test_adam_and_bf16_of_a_mixture_stay_near_one_process(single: Results, two_ranks: list[Results], four_ranks: list[Results]) -> None:
    for results in two_ranks:
        assert_same(results["ep2 adam"], single["adam"], weights=1e-4, outputs=1e-3)
    for results in four_ranks:
        for case in ("ep2 dp4 adam", "ep2 pp2 adam"):
            assert_same(results[case], single["adam"], weights=1e-4, outputs=1e-3)
        assert difference(results["ep2 pp2 bf16"]["before"], single["bf16"]["before"]) < 0.05
        assert [step.skipped for step, _ in results["ep2 pp2 bf16"]["steps"]["actor"]] == [False, False]


@pytest.mark.slow
def test_replicas_that_share_experts_generate_in_step(single: Results, two_ranks: list[Results], four_ranks: list[Results]) -> None:
    """The second replica has one prompt and stops after one token, the first goes on: both compute the other's tokens till the end."""
    two = ("ep2", "ep2 tp2 expert tp1", "pp2 first stage of one", "vpp2 empty chunks")
    found = [(case, rank[case], TWO_RANKS[case]) for rank in two_ranks for case in two]
    found += [
        (case, rank[case], FOUR_RANKS[case]) for rank in four_ranks for case in ("ep2 tp2 expert tp2", "pp4 embedding and loss stage")
    ]
    for case, result, truth in found:
        whole = single[truth]["generated"]
        assert result["generated"] == (whole if result["dp_rank"] == 0 else [whole[0][:1]]), case


@pytest.mark.slow
def test_b63_the_reference_of_a_mixture_is_the_actor_at_first(single: Results, two_ranks: list[Results]) -> None:
    for results in (single["all roles"], *(rank["ep2 all roles"] for rank in two_ranks)):
        before, after = results["before"], results["after"]
        assert torch.equal(before["actor.log_probs"], before["reference.log_probs"])
        assert torch.equal(after["reference.log_probs"], before["reference.log_probs"]) and torch.equal(after["scores"], before["scores"])
        assert difference({"x": after["critic.values"]}, {"x": before["critic.values"]}) > 1e-3


@pytest.mark.slow
def test_an_export_from_spread_experts_is_the_source_bit_for_bit(models: dict[str, str], two_ranks: list[Results], export: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    source, written = (load_file(Path(folder) / "model.safetensors") for folder in (models["mixtral"], export / "actor"))
    assert set(written) == set(source) and all(torch.equal(written[name], source[name]) for name in source)
    actor = AutoModelForCausalLM.from_pretrained(export / "actor")
    critic = AutoModelForSequenceClassification.from_pretrained(export / "critic")
    log_probs, values = hugging_face_outputs(actor, critic)
    before = two_ranks[0]["ep2 export"]["before"]
    assert difference({"x": log_probs}, {"x": before["actor.log_probs"]}) < 1e-5
    assert difference({"x": values}, {"x": before["actor.values"]}) < 1e-5


# -- Transformer Engine -----------------------------------------------------------------------------------------------


def one_rank_with_transformer_engine(rank: int, world_size: int, case: Case) -> dict[str, Any]:
    """``run_case`` on a GPU: the experts of a layer are one module there, with names of its own."""
    from megatron_ppo.backends.megatron import MegatronBackend
    from megatron_ppo.backends.megatron_setup import destroy_megatron

    torch.distributed.init_process_group(device.process_group_backend(), device_id=device.bind_device())
    try:
        result = run_case(case)
        backend = MegatronBackend(Config().replace(**dict(case.fields)), num_optimizer_steps=8)
        result["names"] = sorted(backend.weights())
        destroy_megatron()
        return result
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(not device.has_transformer_engine(), reason="needs Transformer Engine")
def test_transformer_engines_experts_compute_what_hugging_face_does(models: dict[str, str]) -> None:
    from transformers import AutoModelForCausalLM

    case = Case(fields(models, "qwen3_moe", transformer_overrides={"transformer_impl": "transformer_engine"}))
    (result,) = run_ranks(one_rank_with_transformer_engine, 1, case, timeout_s=300)
    expected = hugging_face_log_probs(AutoModelForCausalLM.from_pretrained(models["qwen3_moe"]))
    assert difference({"x": result["before"]["actor.log_probs"]}, {"x": expected}) < 1e-2
    assert "decoder.layers.2.mlp.experts.linear_fc1.weight7" in result["names"]
    assert [step.skipped for step, _ in result["steps"]["actor"]] == [False, False]
