"""The configuration: one place for defaults, YAML and flags, equations with numbers and remedies."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ppo.config import SECTION_OF, Config
from megatron_ppo.config_io import parse_arguments, read_yaml, write_config

FIELDS = set(
    """
    model_path tokenizer_path critic critic_path reward_model_path params_dtype make_vocab_size_divisible_by
    recompute_granularity transformer_overrides trust_remote_code backend fsdp_shard_size cpu_offload
    tensor_model_parallel_size pipeline_model_parallel_size
    virtual_pipeline_model_parallel_size context_parallel_size expert_model_parallel_size sequence_parallel
    use_distributed_optimizer rollout_world_size rollout_tensor_parallel_size
    distributed_timeout_minutes heartbeat_timeout_s bucket_bytes optimizer lr critic_lr min_lr lr_decay_style lr_warmup_steps
    weight_decay adam_betas adam_eps clip_grad train_iters global_batch_size micro_batch_size
    max_tokens_per_micro_batch ppo_epochs seed advantage_estimator gamma gae_lambda whiten_advantages bootstrap_truncated
    clip_ratio dual_clip_ratio value_clip value_loss_coef entropy_coef loss_aggregation kl_coef kl_target
    kl_loss_coef kl_loss_type importance_weight_cap rollout_backend compute_on prompts_per_iteration samples_per_prompt
    max_prompt_length max_response_length prompt_overflow temperature top_p top_k stop_token_ids rollout_dtype
    vllm_overrides prompt_data data_columns chat_template add_bos strict_data reward
    reward_timeout_s reward_num_workers run_dir num_logged_samples verify_weights loggers max_skipped_steps
    save_interval keep_checkpoints async_save resume allow_changed load_hf save_hf_interval
    """.split()
)

WHOLE_EXPERTS = {"vllm_overrides": {"enable_expert_parallel": "true"}}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, object]:
    """A model folder and a prompt file that the checks accept: 8 heads, 4 key/value heads, 8 layers."""
    network = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 8, "max_position_embeddings": 4096}
    network |= {"model_type": "llama", "vocab_size": 1000, "intermediate_size": 96, "hidden_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(network))
    (tmp_path / "other").mkdir()
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    (tmp_path / "other" / "config.json").write_text(json.dumps(network | heads | {"vocab_size": 1001}))
    (tmp_path / "mixture").mkdir()
    experts = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "mixture" / "config.json").write_text(json.dumps(network | experts))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    return {"model_path": str(tmp_path), "prompt_data": str(tmp_path / "prompts.jsonl"), "reward": "exact_match"}


def test_the_list_of_fields_is_frozen_and_short() -> None:
    """A new field is a decision: at most 90, each with a help text and a unique name."""
    assert set(SECTION_OF) == FIELDS
    assert len(SECTION_OF) == sum(len(dataclasses.fields(f.default)) for f in dataclasses.fields(Config)) <= 90  # type: ignore[arg-type]


def test_help_is_grouped_and_explains_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_arguments(["--help"], program="megatron_ppo train")
    text = capsys.readouterr().out
    assert end.value.code == 0
    for section in dataclasses.fields(Config):
        assert f"{section.name} options" in text
    for name in FIELDS:
        assert f"--{name.replace('_', '-')}" in text


def test_command_line_stands_above_yaml_above_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("parallel:\n  tensor_model_parallel_size: 4\nlr: 1e-5\nrollout: {stop_token_ids: [3, 4]}\n")
    config = parse_arguments(["--lr", "0.5", f"--config={file}"], program="p")
    assert config.parallel.tensor_model_parallel_size == 4
    assert config.optimizer.lr == 0.5
    assert config.rollout.stop_token_ids == [3, 4]
    assert config.training == Config().training


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("parallel:\n  tensor_model_paralel_size: 2\n", [":2:", "tensor_model_paralel_size", "did you mean tensor_model_parallel_size"]),
        ("\nlearning_rate: 1\n", [":2:", "learning_rate"]),
        ("optimizer:\n  gamma: 1.0\n", [":2:", "belongs to section algorithm"]),
        ("lr: 1e-6\noptimizer: {lr: 2e-6}\n", [":2:", "lr was already set on line 1"]),
        ("rollout_world_size: two\n", [":1:", "rollout_world_size", "int", "'two'"]),
        ("rollout_world_size: true\n", [":1:", "int"]),
        ("critic: shard\n", [":1:", "critic", "shared"]),
        ("- 1\n", [":1:", "mapping"]),
        ("parallel: 3\n", [":1:", "section parallel"]),
    ],
)
def test_b99_a_wrong_yaml_key_or_value_names_file_line_and_remedy(tmp_path: Path, text: str, parts: list[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ValueError) as error:
        read_yaml(file)
    assert str(file) in str(error.value)
    for part in parts:
        assert part in str(error.value)


def test_b99_a_wrong_flag_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_arguments(["--tensor-model-paralel-size", "2"], program="p")
    assert end.value.code == 2
    assert "--tensor-model-parallel-size" in capsys.readouterr().err


@settings(deadline=None)  # files on a busy machine
@given(
    lr=st.floats(1e-9, 1.0),
    top_p=st.floats(0.01, 1.0),
    limit=st.none() | st.integers(1, 10**6),
    stops=st.lists(st.integers(0, 10**5), max_size=3),
    reward=st.none() | st.sampled_from(["math", "my.module:score"]),
)
def test_what_is_written_reads_back_the_same(
    tmp_path_factory: pytest.TempPathFactory, lr: float, top_p: float, limit: int | None, stops: list[int], reward: str | None
) -> None:
    config = Config().replace(lr=lr, top_p=top_p, max_tokens_per_micro_batch=limit, stop_token_ids=stops, reward=reward)
    file = tmp_path_factory.mktemp("config") / "config.yaml"
    write_config(config, file)
    assert read_yaml(file) == config


def test_a_fitting_configuration_has_no_fault(files: dict[str, object]) -> None:
    config = Config().replace(
        **files, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, rollout_world_size=4, rollout_tensor_parallel_size=2
    )
    config.validate(12)
    assert config.data_parallel_size(12) == 2
    assert config.num_replicas(12) == 2


@pytest.mark.parametrize(
    ("fields", "world_size", "parts"),
    [
        # B70: batch and mesh equations
        (
            {"prompts_per_iteration": 10, "samples_per_prompt": 1, "global_batch_size": 10},
            5,
            ["global_batch_size = 10", "data-parallel size 4", "nearest multiple is 8"],
        ),
        ({"global_batch_size": 100}, 2, ["256", "100", "128"]),
        ({"tensor_model_parallel_size": 2}, 4, ["world size 4", "TP 2 x PP 1 x CP 1 = 2", "Launch 5 ranks"]),
        ({"rollout_world_size": 3, "rollout_tensor_parallel_size": 2}, 4, ["3", "2", "replicas x TP", "nearest are 2 and 4"]),
        # B99: heads, for both meshes
        ({"tensor_model_parallel_size": 3}, 4, ["8 attention heads", "tensor_model_parallel_size = 3", "[1, 2, 4, 8]"]),
        ({"rollout_world_size": 3, "rollout_tensor_parallel_size": 3}, 4, ["8 attention heads", "rollout_tensor_parallel_size = 3"]),
        # B13: layers
        ({"pipeline_model_parallel_size": 3}, 4, ["8 layers", "3"]),
        ({"pipeline_model_parallel_size": 16}, 17, ["8 layers", "16"]),
        # B39: lengths
        ({"max_prompt_length": 4000}, 2, ["4512", "max_position_embeddings = 4096"]),
        # the rest
        ({"temperature": 0.0}, 2, ["temperature = 0.0"]),
        ({"critic": "none"}, 2, ["gae needs a critic"]),
        ({"advantage_estimator": "grpo"}, 2, ["grpo uses no critic"]),
        (
            {"advantage_estimator": "grpo", "critic": "none", "samples_per_prompt": 1, "prompts_per_iteration": 128},
            2,
            ["at least 2"],
        ),
        ({"optimizer": "sgd"}, 2, ["sgd", "use_distributed_optimizer"]),
        ({"reward": None}, 2, ["there is no reward"]),
        ({"prompt_data": "/nowhere.jsonl"}, 2, ["/nowhere.jsonl"]),
        ({"model_path": "/nowhere"}, 2, ["/nowhere", "config.json"]),
        ({"rollout_world_size": -1}, 2, ["rollout_world_size = -1", "or 0"]),
        ({"rollout_world_size": 0, "rollout_tensor_parallel_size": 4}, 6, ["6 ranks sample", "= 4", "nearest are 4 and 8"]),
        ({"cpu_offload": "sampling"}, 2, ["cpu_offload = sampling", "set rollout_world_size to 0"]),
        ({"compute_on": "rollout", "critic": "shared"}, 2, ["needs rollout_backend = hf", "it is vllm"]),
        ({"compute_on": "rollout", "rollout_backend": "hf"}, 2, ["shared critic", "critic = separate"]),
        ({"transformer_overrides": {"overlap_grad_reduce": "maybe"}}, 2, ["overlap_grad_reduce = 'maybe'", "true or false"]),
        ({"expert_model_parallel_size": 0}, 2, ["expert_model_parallel_size = 0 must be at least 1"]),
        ({"rollout_backend": "hf", "rollout_world_size": 2, "rollout_tensor_parallel_size": 2}, 4, ["hf", "= 2; set it to 1"]),
        ({"sequence_parallel": True}, 2, ["sequence_parallel", "tensor_model_parallel_size"]),
        ({"virtual_pipeline_model_parallel_size": 2}, 2, ["pipeline_model_parallel_size"]),
        ({"kl_target": 6.0}, 2, ["kl_target is set, but kl_coef is 0"]),
        ({"max_tokens_per_micro_batch": 100}, 2, ["100", "1024"]),
        (
            {
                "max_tokens_per_micro_batch": 1023,
                "max_response_length": 511,
                "sequence_parallel": True,
                "tensor_model_parallel_size": 2,
            },
            3,
            ["1023 tokens, 1024 with padding to a multiple of 2"],
        ),
        (
            {
                "max_tokens_per_micro_batch": 2048,
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 2,
            },
            3,
            ["max_tokens_per_micro_batch", "interleaved"],
        ),
        ({"kl_target": 0.0}, 2, ["kl_target = 0.0"]),
        ({"reward_timeout_s": 0.0}, 2, ["reward_timeout_s = 0.0"]),
        ({"value_clip": -0.1}, 2, ["value_clip = -0.1"]),
        ({"importance_weight_cap": 0.0}, 2, ["importance_weight_cap = 0.0"]),
        ({"adam_betas": (0.9, 1.0)}, 2, ["adam_betas = (0.9, 1.0)"]),
        ({"entropy_coef": float("nan")}, 2, ["entropy_coef = nan"]),
        ({"kl_coef": -1.0}, 2, ["kl_coef = -1.0"]),
        ({"temperature": float("nan")}, 2, ["temperature = nan"]),
        ({"heartbeat_timeout_s": float("inf")}, 2, ["heartbeat_timeout_s = inf"]),
        ({"clip_ratio": (1.5, 0.2)}, 2, ["clip_ratio[0] = 1.5"]),
        ({"dual_clip_ratio": 1.0}, 2, ["dual_clip_ratio = 1.0"]),
        ({"min_lr": 1.0, "lr_decay_style": "linear"}, 2, ["min_lr = 1.0"]),
        ({"save_interval": 0}, 2, ["save_interval = 0"]),
        ({"allow_changed": ["learning_rate"]}, 2, ["allow_changed names learning_rate"]),
        ({"resume": "runs/nowhere"}, 2, ["resume = runs/nowhere", "no such folder"]),
    ],
)
def test_b70_b99_b39_each_fault_gives_fact_numbers_and_remedy(
    files: dict[str, object], fields: dict[str, object], world_size: int, parts: list[str]
) -> None:
    with pytest.raises(ValueError) as error:
        Config().replace(**(files | fields)).validate(world_size)
    for part in parts:
        assert part in str(error.value), str(error.value)


def test_an_unknown_field_name_is_a_programming_error() -> None:
    with pytest.raises(TypeError, match="clip_gradd"):
        Config().replace(clip_gradd=1.0)


def test_the_configuration_page_says_what_the_program_says() -> None:
    script = Path(__file__).parent.parent / "scripts" / "configuration_page.py"
    result = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", ["critic_path", "reward_model_path"])
def test_b78_a_critic_or_reward_model_of_another_vocabulary_is_refused(files: dict[str, object], name: str) -> None:
    """And its own heads are held to the training mesh."""
    other = str(Path(str(files["model_path"])) / "other")
    with pytest.raises(ValueError) as error:
        Config().replace(**(files | {name: other, "tensor_model_parallel_size": 4})).validate(5)
    assert f"{name} has a vocabulary of 1001 tokens, model_path one of 1000" in str(error.value)
    assert f"{name}: 6 attention heads are not a multiple of tensor_model_parallel_size = 4" in str(error.value)


def test_without_need_of_data_only_model_and_meshes_are_checked(files: dict[str, object]) -> None:
    config = Config().replace(model_path=files["model_path"], critic="none", prompts_per_iteration=1, rollout_world_size=2)
    config.validate(3, needs_data=False)
    with pytest.raises(ValueError, match="prompt_data is not set"):
        config.validate(3)
    with pytest.raises(ValueError, match="tensor_model_parallel_size = 3"):
        config.replace(tensor_model_parallel_size=3).validate(5, needs_data=False)


@pytest.mark.parametrize(
    ("model", "fields", "world_size", "parts"),
    [
        ("mixture", {"expert_model_parallel_size": 3}, 4, ["model_path: 8 experts", "expert_model_parallel_size = 3"]),
        (
            "mixture",
            {"expert_model_parallel_size": 2},
            4,
            ["3 training ranks cannot be cut into copies of the experts: expert tensor 1 x expert 2 x pipeline 1 = 2"],
        ),
        (
            "mixture",
            {"rollout_world_size": 8, "rollout_tensor_parallel_size": 8, "tensor_model_parallel_size": 4, "expert_model_parallel_size": 2},
            12,
            ["4 training ranks cannot be cut into copies of the experts: expert tensor 4 x expert 2 x pipeline 1 = 8"],
        ),
        ("mixture", {"transformer_overrides": {"expert_tensor_parallel_size": "two"}}, 2, ["'two' must be a whole number"]),
        ("mixture", {"rollout_backend": "hf", **WHOLE_EXPERTS}, 2, ["enable_expert_parallel", "rollout_backend = hf"]),
        ("", {"expert_model_parallel_size": 2}, 3, ["model_path: expert_model_parallel_size = 2, but llama is a dense family"]),
        ("", WHOLE_EXPERTS, 2, ["model_path: enable_expert_parallel is set, but llama is a dense family"]),
        ("", {"rollout_tensor_parallel_size": 16, "rollout_world_size": 16}, 17, ["model_path: 8 attention heads", "= 16"]),
        # B13: stages of their own sizes, in strings
        (
            "",
            {"pipeline_model_parallel_size": 4, "transformer_overrides": {"num_layers_in_first_pipeline_stage": "3"}},
            5,
            ["model_path: 8 layers", "num_layers_in_first_pipeline_stage = 3", "leave 5 for the other 3 of 4 stages"],
        ),
        ("", {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 3}, 3, ["stage 0 has 4 layers", "size 3"]),
    ],
)
def test_b13_b18_rules_of_the_layouts_are_among_the_faults(
    files: dict[str, object], model: str, fields: dict[str, object], world_size: int, parts: list[str]
) -> None:
    folder = str(Path(str(files["model_path"])) / model)
    with pytest.raises(ValueError) as error:
        Config().replace(**(files | {"model_path": folder} | fields)).validate(world_size)
    for part in parts:
        assert part in str(error.value), str(error.value)


def test_meshes_of_experts_and_uneven_stages_that_fit_have_no_fault(files: dict[str, object]) -> None:
    """EP 2 with expert TP 1 on TP 2 x PP 3 x DP 1; layers 3 + 3 + 2; 8 whole experts on 4 rollout ranks; the critic is the same model."""
    overrides = {"expert_tensor_parallel_size": "1", "num_layers_in_last_pipeline_stage": "2"}
    config = Config().replace(
        **(files | {"model_path": str(Path(str(files["model_path"])) / "mixture")}),
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        pipeline_model_parallel_size=3,
        expert_model_parallel_size=2,
        transformer_overrides=overrides,
        rollout_world_size=4,
        rollout_tensor_parallel_size=4,
        **WHOLE_EXPERTS,
    )
    config.validate(10)
    with pytest.raises(ValueError, match=r"mixtral.* with tensor_model_parallel_size = 2 needs sequence_parallel: set it to true"):
        config.replace(sequence_parallel=False).validate(10)


def test_a_critic_is_held_to_the_training_mesh_only(files: dict[str, object]) -> None:
    """Six heads do not divide by the rollout TP 4, which the critic never meets."""
    other = Path(str(files["model_path"])) / "other"
    config = json.loads((other / "config.json").read_text()) | {"vocab_size": 1000}
    (other / "config.json").write_text(json.dumps(config))
    fields = {"critic_path": str(other), "rollout_world_size": 4, "rollout_tensor_parallel_size": 4}
    Config().replace(**(files | fields)).validate(5)
