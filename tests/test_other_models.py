"""Models outside the tables, on FSDP: described as their files are, trained as by plain PyTorch, exports that transformers reads.

Whole jobs and real vLLM are in ``test_other_model_jobs.py``.
"""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_parity_support import (
    ROWS,
    Case,
    cut,
    difference,
    fields,
    fixed_rows,
    hugging_face_log_probs,
    ppo_like_loss,
    run_case,
)
from other_models import COMMON, CONFIGS, make_other
from safetensors.torch import load_file, save_file
from spawn import run_ranks
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSequenceClassification

from megatron_ppo import families
from megatron_ppo.config import Config
from megatron_ppo.families import FamilySpec, GenericNetwork, NetworkShape, canonical_tensors, network_shape, register
from megatron_ppo.generic_network import describe_network
from megatron_ppo.resharding.hf_checkpoint import HFCheckpoint, load_hf_weights
from megatron_ppo.resharding.vllm_layout import hf_layout
from megatron_ppo.roles.actor_critic import ActorCritic, load_causal_lm
from megatron_ppo.roles.base import new_value_head
from megatron_ppo.roles.hf_heads import hidden_size
from megatron_ppo.weight_synchronizer import rollout_layouts

pytestmark = pytest.mark.timeout(600)

TRAINED = ("gpt2", "opt", "gemma2", "gpt_neox", "granite", "olmoe")
EXPORTED = ("gpt2", "opt", "gpt_neox")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {kind: str(make_other(root / kind, kind)) for kind in CONFIGS}


# -- descriptions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_what_is_described_is_what_the_files_hold(models: dict[str, str], kind: str) -> None:
    """Names, shapes and places: reading every tensor into its place gives the model that transformers reads."""
    network, folder = describe_network(models[kind]), Path(models[kind])
    assert isinstance(network, GenericNetwork) and network.vocab_size == 130 and network.max_position_embeddings == 256
    assert {tensor.name: tensor.shape for tensor in canonical_tensors(network)} == HFCheckpoint(folder).shapes
    layout, model = hf_layout(network), AutoModelForCausalLM.from_pretrained(folder)
    filled = {name: torch.full(shape, float("nan")) for name, shape in layout.shapes.items()}
    load_hf_weights(folder, layout, filled)
    own = dict(model.named_parameters())
    assert filled.keys() == own.keys() and all(torch.equal(filled[name], own[name]) for name in own)


def test_old_names_masks_and_tied_copies_are_read(models: dict[str, str], tmp_path: Path) -> None:
    """GPT-2 as it was published: without the first part of its names, and with masks; and a tied head that is stored, too."""
    folder = tmp_path / "gpt2"
    folder.mkdir()
    (folder / "config.json").write_text((Path(models["gpt2"]) / "config.json").read_text())
    stored = load_file(Path(models["gpt2"]) / "model.safetensors")
    plain = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    extra = {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "lm_head.weight": stored["transformer.wte.weight"].clone()}
    layout = hf_layout(describe_network(folder))
    for files, fault in ((plain | extra, ""), (plain | {"lm_head.weight": torch.ones(130, 64)}, "lm_head.weight differs from")):
        save_file(files, folder / "model.safetensors", metadata={"format": "pt"})
        filled = {name: torch.zeros(shape) for name, shape in layout.shapes.items()}
        if fault:
            with pytest.raises(ValueError, match=fault):
                load_hf_weights(folder, layout, filled)
        else:
            load_hf_weights(folder, layout, filled)
            assert all(torch.equal(filled[name], stored[name]) for name in stored)


REFUSED = {
    "bert": ({"hidden_size": 64}, "looks at both sides of a token"),
    "bart": ({}, "is an encoder and a decoder"),
    "vit": ({}, "is no causal language model that transformers knows"),
    "gpt2": ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
    "deepseek_v3": ({"num_hidden_layers": 1, "first_k_dense_replace": 0, "n_routed_experts": 8}, "holds weights in 1 buffers"),
}


@pytest.mark.parametrize("kind", list(REFUSED))
def test_what_cannot_be_trained_is_refused_with_the_reason(kind: str) -> None:
    changes, message = REFUSED[kind]
    with pytest.raises(ValueError, match=message):
        describe_network({**CONFIG_MAPPING[kind]().to_dict(), **changes})


def test_megatron_names_fsdp_and_lengths_are_checked(models: dict[str, str]) -> None:
    config = Config().replace(model_path=models["gpt2"], max_prompt_length=8, max_response_length=8)
    with pytest.raises(ValueError, match=r"model_type 'gpt2' is not supported; supported: .*; set backend to fsdp"):
        config.validate(2, needs_data=False)
    config.replace(backend="fsdp").validate(2, needs_data=False)
    with pytest.raises(ValueError, match=r"= 308 exceeds the model's max_position_embeddings = 256"):
        config.replace(backend="fsdp", max_prompt_length=300).validate(2, needs_data=False)
    with pytest.raises(ValueError, match=r"there is no plan shard by shard .* rollout_backend = hf, or add a table"):
        rollout_layouts(config)
    assert [set(layout.shapes) for layout in rollout_layouts(config.replace(rollout_backend="hf"))] == [
        set(dict(describe_network(models["gpt2"]).parameters))
    ]


def test_longrope_is_refused_where_a_row_would_depend_on_the_longest(models: dict[str, str], tmp_path: Path) -> None:
    """transformers takes other frequencies for a whole pass as soon as one row in it is longer than the original length."""
    shutil.copytree(models["smollm3"], tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    settings = json.loads(file.read_text())
    width = settings["hidden_size"] // settings["num_attention_heads"] // 2
    factors = {"short_factor": [1.0] * width, "long_factor": [2.0] * width}
    block = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 12, **factors}
    file.write_text(json.dumps({**settings, "rope_parameters": block}))
    config = Config().replace(model_path=str(tmp_path / "model"), backend="fsdp", max_prompt_length=8, max_response_length=8)
    with pytest.raises(ValueError, match=r"= 16 exceeds original_max_position_embeddings = 12 of its longrope"):
        config.validate(2, needs_data=False)
    config.replace(max_response_length=4).validate(2, needs_data=False)


def test_a_variant_that_its_table_does_not_know_is_described_by_transformers() -> None:
    """Biases that no layout has: transformers knows them."""
    config = CONFIG_MAPPING["llama"](**COMMON, attention_bias=True).to_dict()
    with pytest.raises(ValueError, match="attention_bias = true is not supported"):
        network_shape(config)
    network = describe_network(config)
    assert isinstance(network, GenericNetwork)
    assert "model.layers.0.self_attn.q_proj.bias" in {tensor.name for tensor in canonical_tensors(network)}


def test_a_registered_family_has_a_table(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process alone; built-in ones stay as they are; megatron-core does not train it."""
    monkeypatch.setattr(families, "_ADDED", {})
    register("smollm3", FamilySpec("SmolLM3ForSequenceClassification"))
    network = describe_network(models["smollm3"])
    assert isinstance(network, NetworkShape)
    assert {tensor.name: tensor.shape for tensor in canonical_tensors(network)} == HFCheckpoint(models["smollm3"]).shapes
    config = Config().replace(model_path=models["smollm3"], max_prompt_length=8, max_response_length=8)
    with pytest.raises(ValueError, match="of family smollm3 only the tensors are known; set backend to fsdp"):
        config.validate(2, needs_data=False)
    assert len(rollout_layouts(config.replace(rollout_tensor_parallel_size=2))) == 2
    with pytest.raises(ValueError, match="llama is built in"):
        register("llama", FamilySpec("LlamaForSequenceClassification"))


# -- training ---------------------------------------------------------------------------------------------------------


def run_fsdp(rank: int, world_size: int, cases: Mapping[str, Case]) -> dict[str, Any]:
    from megatron_ppo.backends.fsdp import FSDPBackend

    torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    found = {}
    try:
        for name, case in cases.items():
            found[name] = run_case(case, FSDPBackend)
            gc.collect()
        return found
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def two_ranks(models: dict[str, str], exports: Path) -> list[dict[str, Any]]:
    """Two shards; a shared value head."""
    chosen = {
        kind: Case(fields=fields(models, kind, backend="fsdp", critic="shared"), export=str(exports / kind) if kind in EXPORTED else None)
        for kind in TRAINED
    }
    return run_ranks(run_fsdp, 2, chosen, timeout_s=400)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAINED)
def test_two_shards_compute_and_learn_as_one_process_does(
    models: dict[str, str], two_ranks: list[dict[str, Any]], exports: Path, kind: str
) -> None:
    """Log-probs of transformers' own forward pass before; after two optimizer steps, those of plain PyTorch, and of the export."""
    model = load_causal_lm(models[kind], dtype=torch.float32)
    actor = ActorCritic(model, critic="shared", score_weight=new_value_head(hidden_size(model), Config().training.seed))
    before = hugging_face_log_probs(actor.model)
    optimizer = torch.optim.SGD(actor.parameters(), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        (batch,) = cut(range(ROWS), ROWS, 1)
        loss, count, _ = ppo_like_loss(actor(batch, temperature=0.7, with_entropy=True), batch)
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(actor.parameters(), 1.0)
        optimizer.step()
    after = hugging_face_log_probs(actor.model)
    assert difference({"x": before}, {"x": after}) > 1e-3
    for results in two_ranks:
        assert difference({"x": results[kind]["before"]["actor.log_probs"]}, {"x": before}) < 1e-5
        assert difference({"x": results[kind]["after"]["actor.log_probs"]}, {"x": after}) < 1e-5
    weights = two_ranks[0][kind]["weights"]["actor"]
    assert {name: tuple(tensor.shape) for name, tensor in weights.items() if name != "score.weight"} == HFCheckpoint(models[kind]).shapes
    assert actor.score is not None
    assert difference({"x": weights["score.weight"]}, {"x": actor.score.weight.detach()}) < 1e-5
    if kind in EXPORTED:
        exported = AutoModelForCausalLM.from_pretrained(exports / kind / "actor")
        assert difference({"x": hugging_face_log_probs(exported)}, {"x": after}) < 1e-5
        critic = AutoModelForSequenceClassification.from_pretrained(exports / kind / "critic")
        with torch.no_grad():
            hidden = torch.cat([critic.base_model(fixed_rows([row]).tokens).last_hidden_state[0, :-1] for row in range(ROWS)])
            values = critic.score(hidden)[:, 0]
        assert difference({"x": values}, {"x": two_ranks[0][kind]["after"]["actor.values"]}) < 1e-5
