"""Which differences of the configuration a resume refuses, and what it says."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import pytest
import yaml

from megatron_ppo.checkpoint_config import DOES_NOT_ALTER, NEUTRAL_FIELDS, config_difference, read_config
from megatron_ppo.config import SECTION_OF, Config
from megatron_ppo.config_io import SECTIONS, write_config

ALTERS = set(
    """
    model_path tokenizer_path critic critic_path reward_model_path params_dtype backend transformer_overrides optimizer lr
    critic_lr min_lr lr_decay_style lr_warmup_steps weight_decay adam_betas adam_eps clip_grad global_batch_size ppo_epochs seed
    advantage_estimator gamma gae_lambda whiten_advantages bootstrap_truncated clip_ratio dual_clip_ratio value_clip value_loss_coef
    entropy_coef loss_aggregation kl_coef kl_target kl_loss_coef kl_loss_type importance_weight_cap rollout_backend compute_on
    prompts_per_iteration
    samples_per_prompt max_prompt_length max_response_length prompt_overflow temperature top_p top_k stop_token_ids rollout_dtype
    vllm_overrides prompt_data data_columns chat_template add_bos strict_data reward reward_timeout_s load_hf
    """.split()
)

EXAMPLES: dict[object, object] = {str: "other", int: 41, float: 0.41, bool: True, None: None}


def other_value(name: str) -> object:
    """A value of the field's type that is not its default."""
    default = getattr(getattr(Config(), SECTION_OF[name]), name)
    annotation = typing.get_type_hints(SECTIONS[SECTION_OF[name]])[name]
    if isinstance(default, bool):
        return not default
    if isinstance(default, tuple):
        return tuple(f"{value}_" if isinstance(value, str) else value + 0.01 for value in default)
    if isinstance(default, list):
        return [7] if name == "stop_token_ids" else ["tensorboard"]
    if isinstance(default, dict):
        return {"key": "value"}
    kinds = [kind for kind in typing.get_args(annotation) or [annotation] if kind is not type(None) and kind != default]
    return EXAMPLES.get(kinds[0], kinds[0])


def test_every_field_was_decided_on() -> None:
    """A new field is a decision: does a resumed run with another value of it compute something else?"""
    assert set(SECTION_OF) == ALTERS | NEUTRAL_FIELDS
    assert not ALTERS & NEUTRAL_FIELDS
    assert len(NEUTRAL_FIELDS) == sum(len(names) for names in DOES_NOT_ALTER.values())


@pytest.mark.parametrize("name", SECTION_OF)
def test_one_changed_field(name: str) -> None:
    present = Config().replace(**{name: other_value(name)})
    assert present != Config()
    table = config_difference(Config(), present, [])
    if name in NEUTRAL_FIELDS:
        assert table == ""
        return
    head, row, remedy = table.split("\n")
    assert head.split() == ["field", "in", "the", "checkpoint", "now"]
    assert row.split()[0] == name and repr(other_value(name)) in row
    assert head.index("now") == row.index(repr(other_value(name)))
    assert f"--allow-changed {name}, or begin anew" in remedy
    assert config_difference(Config(), present, [name]) == ""
    assert config_difference(Config(), present, ["seed" if name != "seed" else "lr"]) == table


def test_several_fields_share_a_table() -> None:
    saved = Config().replace(lr=1e-6, seed=1, clip_ratio=(0.2, 0.28))
    table = config_difference(saved, saved.replace(lr=2e-6, seed=2, run_dir="elsewhere"), ["seed"])
    assert table.split("\n")[1].split() == ["lr", "1e-06", "2e-06"] and len(table.split("\n")) == 3


def test_the_length_of_a_run_matters_where_the_learning_rate_decays() -> None:
    for style, matters in (("constant", False), ("linear", True), ("cosine", True)):
        saved = Config().replace(lr_decay_style=style, train_iters=10)
        assert ("train_iters" in config_difference(saved, saved.replace(train_iters=20), [])) is matters


def test_paths_and_engine_arguments_are_compared_by_meaning() -> None:
    saved = Config().replace(model_path="models/llama", vllm_overrides={"max_num_seqs": "8"})
    assert config_difference(saved, saved.replace(model_path="models//llama/", vllm_overrides={"enable_expert_parallel": "true"}), []) == ""
    assert "model_path" in config_difference(saved, saved.replace(model_path="other/llama"), [])
    assert "kv_cache_dtype" in config_difference(saved, saved.replace(vllm_overrides={"kv_cache_dtype": "fp8"}), [])


def test_the_configuration_comes_back(tmp_path: Path) -> None:
    config = Config()
    for name in SECTION_OF:
        config = config.replace(**{name: other_value(name)})
    write_config(config, tmp_path / "config.yaml")
    assert read_config(tmp_path) == config
    assert config_difference(read_config(tmp_path), config, []) == ""


def test_a_configuration_of_another_version(tmp_path: Path) -> None:
    """Fields that were not there yet can be taken from the present; what they were then, or what is gone now, cannot be guessed."""
    older = dataclasses.asdict(Config())
    del older["training"]["seed"], older["optimizer"]["lr"], older["logging"]["loggers"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(older))
    with pytest.raises(ValueError, match=r"config.yaml does not set lr, seed: .*--allow-changed lr seed"):
        read_config(tmp_path)
    assert read_config(tmp_path, ["seed", "lr"]) == Config()
    older["training"] |= {"seed": 3, "curriculum": "x"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(older | {"plugins": {}}))
    with pytest.raises(ValueError, match=r"sets curriculum, plugins, which this version does not know; resume with the version that wrote"):
        read_config(tmp_path, list(SECTION_OF))


@pytest.mark.parametrize("text", ["a: [", "[]", "model: 3", "3", "\x00"])
def test_a_damaged_configuration(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"config.yaml is damaged.*--resume FOLDER"):
        read_config(tmp_path)


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="was not written by a training run"):
        read_config(tmp_path)
