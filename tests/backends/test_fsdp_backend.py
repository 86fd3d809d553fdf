"""The FSDP backend on 1, 2 and 4 ranks, sharded and with copies, against the Megatron backend on one: outputs, steps, weights, exports.

The data, the loss and what is compared are those of ``test_megatron_parity.py``, and so are the tolerances: 1e-5 in fp32 with SGD, for
log-probs, entropy, values, losses, gradient norms and weights. Every launch proves all its cases.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from megatron_parity_support import (
    Case,
    adam,
    assert_same,
    difference,
    fields,
    hugging_face_log_probs,
    hugging_face_outputs,
    run_case,
    run_cases,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from spawn import run_ranks
from toy_models import LLAMA31, make_toy

from megatron_ppo.config import Config
from megatron_ppo.packing import make_micro_batch
from megatron_ppo.rollout_engine import make_trajectories
from megatron_ppo.types import Prompt, Sampling

pytestmark = pytest.mark.timeout(900)  # a launch of many cases counts as the time of the test that asks first

Results = dict[str, dict[str, Any]]
FAMILIES = ("llama", "qwen2", "qwen3")
SIX_TOKENS = (1, 3)
"""Rows of 5 response tokens and of 1."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of toy models: tied ones, a mixture, one whose heads are wider than hidden / heads under the ropes of Llama 3.1, one with a
    score head; and each family with both heads: Llama's config is silent about the width of its heads, Qwen3's are wider than that."""
    root = tmp_path_factory.mktemp("models")
    paths = {"plain": make_toy(root / "plain"), "tied": make_toy(root / "tied", tied=True)}
    paths["mixture"] = make_toy(root / "mixture", "qwen3_moe")
    paths["wide"] = make_toy(root / "wide", head_dim=128, rope_scaling=LLAMA31)
    paths["score"] = make_toy(root / "score", score_head=True, seed=3)
    head = load_file(paths["score"] / "model.safetensors")["score.weight"]
    for family in FAMILIES:
        paths[family] = make_toy(root / family, family, head_dim=32 if family == "qwen3" else None)
        add_tensors(paths[family], {"score.weight": head})
        paths[f"tied {family}"] = make_toy(root / f"tied {family}", family, tied=True)
    settings = json.loads((paths["llama"] / "config.json").read_text())
    (paths["llama"] / "config.json").write_text(json.dumps({**settings, "head_dim": None}))
    paths["extra"] = make_toy(root / "extra", "qwen2")
    add_tensors(paths["extra"], {"model.layers.1.self_attn.o_proj.bias": torch.zeros(64)})
    (paths["mixture"] / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    (paths["mixture"] / "tokenizer_config.json").write_text("{}")
    return {name: str(path) for name, path in paths.items()}


def add_tensors(folder: Path, more: Mapping[str, torch.Tensor]) -> None:
    """Write them into a model's file."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | dict(more), file, metadata={"format": "pt"})


def on_fsdp(settings: Mapping[str, object], **changes: object) -> dict[str, object]:
    """The same settings for the other backend."""
    return {**settings, "backend": "fsdp"} | changes


def all_roles(models: Mapping[str, str]) -> dict[str, object]:
    """Actor, separate critic, reference and reward model at once."""
    more = {"critic": "separate", "critic_path": models["score"], "kl_coef": 0.1, "reward_model_path": models["score"]}
    return fields(models, "tied", **more)


def cases(models: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Name -> settings and how the rows are cut, the same for both backends."""
    both: tuple[Any, ...] = ("actor", "critic")
    return {
        **{family: {"fields": fields(models, family, critic="shared"), "generate": True} for family in FAMILIES},
        "mixture": {"fields": fields(models, "mixture")},
        "wide": {"fields": fields(models, "wide")},
        "all roles": {"fields": all_roles(models), "roles": both},
        **{f"separate {name}": {"fields": fields(models, f"tied {name}", critic="separate"), "roles": both} for name in ("qwen2", "qwen3")},
        "six tokens": {"fields": fields(models, "plain"), "rows": SIX_TOKENS, "micro_batch_size": 1},
        "decay": {"fields": fields(models, "qwen2", critic="shared", weight_decay=0.5)},
        "no clipping": {"fields": fields(models, "plain", clip_grad=0.0)},
        "adam": {"fields": adam(models, model_path=models["plain"])},
        "bf16": {"fields": adam(models, model_path=models["wide"], params_dtype="bfloat16", kl_coef=0.1)},
        "nan": {"fields": adam(models, model_path=models["plain"], lr_warmup_steps=4), "poison": "nan", "num_steps": 3},
        "no tokens": {"fields": adam(models, model_path=models["plain"], lr_warmup_steps=4), "poison": "no_tokens", "num_steps": 3},
    }


EXPORTED = ("tied", "mixture", "wide", "qwen2", "qwen3")
"""Models that both backends write as they were read."""


def written(models: Mapping[str, str], root: Path, **changes: object) -> dict[str, Case]:
    """No step: what is exported is what was loaded. "apart": a critic from a tied policy; "scored": from a folder with a head."""
    settings = {name: fields(models, name, critic="shared") for name in EXPORTED}
    settings["apart"] = fields(models, "tied qwen2", critic="separate")
    settings["scored"] = fields(models, "tied", critic="separate", critic_path=models["score"])
    return {f"write {name}": Case({**chosen, **changes}, num_steps=0, export=str(root / name)) for name, chosen in settings.items()}


@pytest.fixture(scope="module")
def truth(models: dict[str, str], exports: Path) -> Results:
    """What the Megatron backend gives in one process."""
    chosen = {name: Case(**case) for name, case in cases(models).items()} | written(models, exports / "megatron")
    return run_ranks(run_cases, 1, chosen, timeout_s=400)[0]


def run_fsdp_cases(rank: int, world_size: int, cases: Mapping[str, Case], extras: Mapping[str, str] = MappingProxyType({})) -> Results:
    """``run_cases`` with the backend under test, and the rotary frequencies that each of its networks has.

    ``extras``: folder of a model to sample from ("sampled"), and of one that must be refused ("refused").
    """
    from megatron_ppo.backends.fsdp import FSDPBackend

    torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    found: Results = {}

    class Backend(FSDPBackend):
        """Shows its buffers, and how many passes FSDP still notes of a frozen network, which has no backward pass that would end them."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            ropes.extend(
                buffer.clone()
                for network in self._networks.values()
                for name, buffer in network.root.named_buffers()
                if name.endswith("rotary_emb.inv_freq")
            )

        def _evaluate(self, network: Any, micro_batches: Any, temperature: float) -> list[dict[str, torch.Tensor]]:
            outputs = super()._evaluate(network, micro_batches, temperature)
            if network.optimizer is None:
                noted.append(len(network.root._get_fsdp_state()._comm_ctx.post_forward_order))
            return outputs

    try:
        for name, case in cases.items():
            ropes: list[torch.Tensor] = []
            noted: list[int] = []
            found[name] = run_case(case, Backend) | {"ropes": ropes, "noted": noted}
            gc.collect()
        if "sampled" in extras:
            found["extras"] = {"sampled": sample_and_score(Config().replace(**on_fsdp(fields({"": extras["sampled"]}, ""))), rank)}
        if "refused" in extras:
            with pytest.raises(ValueError) as error:
                FSDPBackend(Config().replace(**on_fsdp(fields({"": extras["refused"]}, ""))), num_optimizer_steps=1)
            found["extras"] |= {"refused": str(error.value)}
        return found
    finally:
        torch.distributed.destroy_process_group()


def sample_and_score(config: Config, rank: int) -> dict[float, float]:
    """Temperature -> mean distance of the rollout's log-probs of its tokens from the trainer's, over this rank's own samples."""
    from megatron_ppo.backends.fsdp import FSDPBackend
    from megatron_ppo.backends.hf import HFBackend

    rollout = HFBackend(config.replace(max_prompt_length=8, max_response_length=8), seed=rank, load_weights=True)
    trainer = FSDPBackend(config, num_optimizer_steps=1)
    prompts, found = [[5, 6, 7], [8, 9], [10 + rank]], {}
    for temperature in (0.5, 1.0, 1.3):
        completions = rollout.generate(prompts, Sampling(max_response_length=8, temperature=temperature), [7, 8, 9])
        requests = [(Prompt(number, tuple(prompt), ""), 0) for number, prompt in enumerate(prompts)]
        batch = make_trajectories(requests, completions, [0.0] * len(prompts), version=0, metrics={})
        (output,) = trainer.forward("actor", [make_micro_batch(batch, torch.arange(len(prompts)))], temperature=temperature)
        assert output.log_probs is not None
        pairs = zip(prompts, completions, output.log_probs, strict=True)
        errors = [(row[len(p) - 1 :][: len(c.log_probs)] - torch.tensor(c.log_probs)).abs() for p, c, row in pairs]
        found[temperature] = float(torch.cat(errors).mean())
    return found


def fsdp_cases(models: Mapping[str, str], chosen: Mapping[str, str], **changes: object) -> dict[str, Case]:
    """Name of a case here -> the case it is held to, run with ``changes`` of its settings."""
    known = cases(models)
    return {
        name: Case(**{**known[truth], **SPLITS.get(name, {}), "fields": on_fsdp(known[truth]["fields"], **changes, **MORE.get(name, {}))})
        for name, truth in chosen.items()
    }


SPLITS: dict[str, dict[str, Any]] = {
    "one by one": {"micro_batch_size": 1},
    "uneven": {"rows_by_replica": ((0, 1, 2, 3, 4, 5), (6, 7)), "micro_batch_size": 2, "num_dummies": (0, 2)},
    "six tokens on two": {"rows_by_replica": ((1,), (3,))},
    "two of four have rows": {"rows_by_replica": ((0, 1, 2, 3, 4), (5, 6, 7), (), ()), "micro_batch_size": 2, "num_dummies": (0, 1, 3, 3)},
}
"""Other ways to cut the same rows into micro-batches."""
MORE = {"cpu offload": {"cpu_offload": "always"}}
CRITICS = ("all roles", "separate qwen2", "separate qwen3")
"""Critics of their own: Llama's from a folder with a score head, the others from the policy, whose embedding is tied."""
ONE_RANK = {name: name for name in (*FAMILIES, *CRITICS, "adam", "nan", "no tokens", "bf16")} | {"one by one": "llama"}
TWO_RANKS = {name: name for name in (*FAMILIES, *CRITICS, "mixture", "wide", "decay", "no clipping", "adam", "nan", "bf16")} | {
    "uneven": "llama",
    "six tokens on two": "six tokens",
    "cpu offload": "llama",
}
COPIES = {name: name for name in ("llama", "adam")} | {"uneven": "llama"}
FOUR_RANKS = {name: name for name in (*FAMILIES, *CRITICS, "mixture", "adam", "nan")} | {"two of four have rows": "llama"}
HYBRID = {name: name for name in (*FAMILIES, *CRITICS, "adam", "nan", "bf16")} | {"two of four have rows": "llama"}


@pytest.fixture(scope="module")
def one_rank(models: dict[str, str]) -> list[Results]:
    """A single rank, which gathers from itself."""
    recomputed = {
        f"recompute {kind}": Case(on_fsdp(fields(models, critic="shared"), recompute_granularity=kind), micro_batch_size=2)
        for kind in ("full", "selective")
    }
    return run_ranks(run_fsdp_cases, 1, fsdp_cases(models, ONE_RANK) | recomputed, timeout_s=400)


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that cases export to."""
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def two_ranks(models: dict[str, str], exports: Path) -> list[Results]:
    """Sharded over both, and two whole copies (names that end in "copied")."""
    sharded = fsdp_cases(models, TWO_RANKS)
    copied = fsdp_cases(models, COPIES, fsdp_shard_size=1)
    exported = {
        "export": Case(fields=on_fsdp(fields(models, "tied", critic="separate")), roles=("actor", "critic"), export=str(exports / "tied")),
        "export mixture": Case(fields=on_fsdp(fields(models, "mixture", critic="shared")), export=str(exports / "mixture")),
        "export shared": Case(fields=on_fsdp(fields(models, "llama", critic="shared")), export=str(exports / "shared")),
    }
    chosen = sharded | {f"{name} copied": case for name, case in copied.items()} | exported
    return run_ranks(run_fsdp_cases, 2, chosen, {"sampled": models["tied qwen3"], "refused": models["extra"]}, timeout_s=600)


@pytest.mark.parametrize("case", list(ONE_RANK))
def test_one_rank_equals_megatron(truth: Results, one_rank: list[Results], case: str) -> None:
    compare(one_rank[0][case], truth[ONE_RANK[case]], ONE_RANK[case])


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recomputation_changes_nothing(truth: Results, one_rank: list[Results], kind: str) -> None:
    assert_same(one_rank[0][f"recompute {kind}"], truth["llama"])


@pytest.mark.parametrize("case", list(TWO_RANKS))
def test_two_shards_equal_one_process(truth: Results, two_ranks: list[Results], case: str) -> None:
    """B60, B64, B66: replicas with 5 tokens and with 1, with 3 passes and with 1; all skip where one alone sees a NaN."""
    for results in two_ranks:
        compare(results[case], truth[TWO_RANKS[case]], TWO_RANKS[case])


@pytest.mark.parametrize("case", list(COPIES))
def test_two_copies_equal_one_process(truth: Results, two_ranks: list[Results], case: str) -> None:
    for results in two_ranks:
        compare(results[f"{case} copied"], truth[COPIES[case]], COPIES[case])


def test_steps_move_the_weights_far_more_than_the_tolerance(truth: Results) -> None:
    assert difference(truth["llama"]["before"], truth["llama"]["after"]) > 1e-2


def test_b63_reference_equals_the_actor_at_first_and_never_moves(two_ranks: list[Results]) -> None:
    """B63: bit for bit, in bf16 too, where the actor's weights are rounded when they are gathered and the reference's when loaded."""
    for results in two_ranks:
        before, after = results["all roles"]["before"], results["all roles"]["after"]
        assert torch.equal(before["actor.log_probs"], before["reference.log_probs"])
        assert torch.equal(after["reference.log_probs"], before["reference.log_probs"])
        assert torch.equal(after["scores"], before["scores"])
        assert len(results["all roles"]["noted"]) >= 4 and not any(results["all roles"]["noted"])
        assert difference({"x": after["actor.log_probs"]}, {"x": before["actor.log_probs"]}) > 1e-3


def test_b09_export_is_what_hugging_face_computes_with(two_ranks: list[Results], exports: Path) -> None:
    """B09: a tied export has no head of its own; transformers gets the trained log-probs and values from it."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    mixture = AutoModelForCausalLM.from_pretrained(exports / "mixture" / "actor")
    trained = two_ranks[0]["export mixture"]["after"]["actor.log_probs"]
    assert difference({"x": hugging_face_log_probs(mixture)}, {"x": trained}) < 1e-5
    for case, folder, values in (("export", "tied", "critic.values"), ("export shared", "shared", "actor.values")):
        result = two_ranks[0][case]
        assert all("already holds weights" in rank[case]["export fault"] for rank in two_ranks)
        with safe_open(exports / folder / "actor" / "model.safetensors", framework="pt") as stored:
            assert ("lm_head.weight" in stored.keys()) == (folder != "tied")  # noqa: SIM118  not a dict
        actor = AutoModelForCausalLM.from_pretrained(exports / folder / "actor")
        critic = AutoModelForSequenceClassification.from_pretrained(exports / folder / "critic")
        log_probs, found = hugging_face_outputs(actor, critic)
        assert difference({"x": log_probs}, {"x": result["after"]["actor.log_probs"]}) < 1e-5
        assert difference({"x": found}, {"x": result["after"][values]}) < 1e-5


def test_b16_ropes_of_llama31_are_scaled_and_in_fp32(two_ranks: list[Results]) -> None:
    """B16: of the actor and of a frozen reference, in fp32 and in bf16."""
    unscaled = 500000.0 ** (-torch.arange(64).double() / 64)
    for results in two_ranks:
        ropes = [*results["wide"]["ropes"], *results["bf16"]["ropes"]]
        assert len(ropes) == 3 and all(rope.dtype == torch.float32 and rope.shape == (64,) for rope in ropes)
        for rope in ropes:
            assert float(rope[28]) == pytest.approx(3.21145e-3, rel=1e-5)
            assert float(rope[30] / unscaled[30]) == pytest.approx(0.64374, rel=1e-4)
            assert float(rope[63]) == pytest.approx(3.06893e-7, rel=1e-5)


def test_b32_the_trainer_gives_tokens_the_log_probs_that_a_rollout_gave(two_ranks: list[Results]) -> None:
    for results in two_ranks:
        assert set(results["extras"]["sampled"]) == {0.5, 1.0, 1.3}
        assert max(results["extras"]["sampled"].values()) < 1e-5


def test_b05_a_tensor_that_the_model_has_no_place_for_is_refused_by_all(two_ranks: list[Results]) -> None:
    assert two_ranks[0]["extras"]["refused"] == two_ranks[1]["extras"]["refused"]
    assert "model.layers.1.self_attn.o_proj.bias" in two_ranks[0]["extras"]["refused"]


@pytest.fixture(scope="module")
def four_ranks(models: dict[str, str], exports: Path) -> list[Results]:
    """Four shards (130 rows are 33, 33, 33 and 31), and (names that end in "hybrid") two copies of two shards."""
    hybrid = fsdp_cases(models, HYBRID, fsdp_shard_size=2)
    chosen = fsdp_cases(models, FOUR_RANKS) | {f"{name} hybrid": case for name, case in hybrid.items()}
    return run_ranks(run_fsdp_cases, 4, chosen | written(models, exports / "fsdp", backend="fsdp"), timeout_s=800)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(FOUR_RANKS))
def test_four_shards_equal_one_process(truth: Results, four_ranks: list[Results], case: str) -> None:
    for results in four_ranks:
        compare(results[case], truth[FOUR_RANKS[case]], FOUR_RANKS[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", list(HYBRID))
def test_two_copies_of_two_shards_equal_one_process(truth: Results, four_ranks: list[Results], case: str) -> None:
    for results in four_ranks:
        compare(results[f"{case} hybrid"], truth[HYBRID[case]], HYBRID[case])


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTED)
def test_b01_b05_b18_b24_b26_both_backends_write_what_they_read(
    truth: Results, four_ranks: list[Results], models: dict[str, str], exports: Path, name: str
) -> None:
    """Uneven shards give the files that Megatron gives, byte for byte: biases, key/query norms, experts by number, ropes, sidecars; no name
    of a wrapper. The actor has each tensor of its source but the value head, which is the critic's, with the same trunk; a new one is the
    same on both."""
    source = load_file(Path(models[name]) / "model.safetensors")
    for kind in ("actor", "critic"):
        one, other = exports / "fsdp" / name / kind, exports / "megatron" / name / kind
        assert {file.name for file in one.iterdir()} == {file.name for file in other.iterdir()}
        assert all(file.read_bytes() == (other / file.name).read_bytes() for file in one.iterdir())
        tensors = load_file(one / "model.safetensors")
        kept = {key: tensor for key, tensor in source.items() if key != ("score.weight" if kind == "actor" else "lm_head.weight")}
        assert set(tensors) == set(kept) | ({"score.weight"} if kind == "critic" else set())
        assert all(torch.equal(tensors[key], tensor) for key, tensor in kept.items())
    actor = exports / "fsdp" / name / "actor"
    settings = [json.loads((folder / "config.json").read_text()) for folder in (actor, Path(models[name]))]
    assert settings[0] == settings[1]
    for file in Path(models[name]).glob("*_config.json"):
        assert (actor / file.name).read_bytes() == file.read_bytes()
    with safe_open(actor / "model.safetensors", framework="pt") as stored:
        assert stored.metadata()["format"] == "pt"


@pytest.mark.slow
def test_b25_critics_start_from_a_policys_trunk_or_a_folders_own_head(
    truth: Results, four_ranks: list[Results], models: dict[str, str], exports: Path
) -> None:
    """B25: from a tied policy the trunk and a new head of one row, which is no copy of an embedding; from a folder with a head that one.
    The same files as Megatron's, byte for byte."""
    for name, source in (("apart", "tied qwen2"), ("scored", "score")):
        ours, theirs = (load_file(exports / backend / name / "critic" / "model.safetensors") for backend in ("fsdp", "megatron"))
        stored = load_file(Path(models[source]) / "model.safetensors")
        assert ours.keys() == theirs.keys() == stored.keys() | {"score.weight"}
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
        assert all(torch.equal(ours[key], tensor) for key, tensor in stored.items())
        assert ours["score.weight"].shape == (1, 64)
        config = json.loads((exports / "fsdp" / name / "critic" / "config.json").read_text())
        assert config["num_labels"] == 1 if "num_labels" in config else len(config["id2label"]) == 1


def compare(got: dict[str, Any], expected: dict[str, Any], kind: str) -> None:
    """Within rounding: 1e-5; Adam divides by a root, and moves a weight whose gradient is near 0 by up to 2 * lr (1e-3); bf16 is near."""
    assert got["generated"] == expected["generated"] if "generated" in got and got["dp_rank"] == 0 else True
    if kind in ("nan", "no tokens"):
        steps = got["steps"]["actor"]
        assert [report.lr for report, _ in steps] == pytest.approx([0.25e-3, 0.5e-3, 0.5e-3])
        assert [report.skipped for report, _ in steps] == [False, True, False]
        assert [changed for _, changed in steps] == [True, False, True]
    elif kind == "bf16":
        assert difference(got["before"], expected["before"]) < 0.1
        for (report, changed), (other, _) in zip(got["steps"]["actor"], expected["steps"]["actor"], strict=True):
            assert changed and report.grad_norm == pytest.approx(other.grad_norm, rel=0.05)
        if got["weights"]["actor"] is not None:
            assert difference(got["weights"]["actor"], expected["weights"]["actor"]) < 1e-2
    elif kind == "adam":
        assert_same(got, expected, weights=1e-3, outputs=1e-2)
    else:
        assert_same(got, expected)


SHORT = {"max_prompt_length": 8, "max_response_length": 8}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tensor_model_parallel_size": 2}, "tensor_model_parallel_size = 2 is megatron-core's, but backend = fsdp shares weights only"),
        ({"pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size = 2 is megatron-core's"),
        ({"context_parallel_size": 2}, "context_parallel_size = 2 is megatron-core's"),
        ({"expert_model_parallel_size": 2}, "expert_model_parallel_size = 2 is megatron-core's"),
        ({"sequence_parallel": True}, "sequence_parallel = True is megatron-core's"),
        ({"transformer_overrides": {"transformer_impl": "local"}}, "transformer_overrides = .* is megatron-core's"),
        ({"fsdp_shard_size": 3}, r"fsdp_shard_size = 3: replicas x shards = 4 training ranks, so it may be one of \[1, 2, 4\]"),
        ({"backend": "megatron", "fsdp_shard_size": 2}, "fsdp_shard_size = 2 is FSDP's, but backend = megatron"),
        ({"backend": "megatron", "cpu_offload": "always"}, "cpu_offload = always is FSDP's, but backend = megatron"),
    ],
)
def test_settings_of_the_other_backend_are_refused(models: dict[str, str], fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config().replace(**({"model_path": models["llama"], "backend": "fsdp"} | SHORT | fields)).validate(5, needs_data=False)


def test_plain_sgd_and_any_sharding_are_fine_with_fsdp(models: dict[str, str]) -> None:
    for size in (None, 1, 2, 4):
        config = Config().replace(model_path=models["llama"], backend="fsdp", optimizer="sgd", fsdp_shard_size=size, **SHORT)
        config.validate(5, needs_data=False)
        assert config.mesh_sizes(5) == {"replicate": 4 // (size or 4), "shard": size or 4, "rollout_tp": 1, "replicas": 1}
