"""Whole jobs through the command line: real torchrun, megatron-core and vLLM, every record read back; and each goes on bit for bit.

Two topologies run the same job of six iterations, which saves after three: what it leaves, whether both are equal, and whether a launch
that goes on from the first half ends with what the whole job has. What the command refuses: ``test_refusals.py``.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from toy_models import make_toy
from train_support import Job, make_inputs, run_job, stopped_after, warnings_in

from benchmarks.fault_judge import differences, saved_tensors
from megatron_ppo.config_io import parse_arguments, read_yaml
from megatron_ppo.prompts import load_prompts
from megatron_ppo.tokenizer import load_tokenizer

NUM_ITERATIONS = 6
NUM_SAVED = 3
NUM_ROWS = 32
"""Responses of an iteration; all are written to samples.jsonl, so that runs can be compared token by token."""
KEYS = (
    "iteration reward/mean loss/policy loss/value kl/mean entropy/mean clip_frac grad_norm response_length/mean logprob_diff/mean "
    "logprob_diff/max refit/received_bytes refit/shard_bytes time/sync_s time/rollout_s time/score_s time/update_s time/iteration_s "
    "tokens_per_s"
).split()
PPO: dict[str, object] = {
    "train_iters": NUM_ITERATIONS,
    "save_interval": NUM_SAVED,
    "kl_coef": 0.05,
    "kl_target": 0.5,
    "lr_warmup_steps": 5,
    "clip_grad": 0.5,
    "verify_weights": True,
    "num_logged_samples": NUM_ROWS,
}
"""What both topologies compute alike, with all that has state: an adaptive KL controller, a schedule, Adam's moments of two networks."""
JOBS: dict[str, tuple[int, dict[str, object]]] = {
    "TP2, TP1 x 2": (
        4,
        PPO | {"tensor_model_parallel_size": 2, "rollout_world_size": 2, "loggers": ["wandb", "tensorboard"], "save_hf_interval": 0},
    ),
    "PP2 x DP2, TP2": (
        6,
        PPO
        | {
            "pipeline_model_parallel_size": 2,
            "use_distributed_optimizer": True,
            "rollout_world_size": 2,
            "rollout_tensor_parallel_size": 2,
            "async_save": True,
        },
    ),
}
"""Name of a topology (training, vLLM) -> ranks and fields."""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, tokenizer and prompts."""
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def default_job(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Training TP 2 and two vLLM replicas."""
    return launch(inputs, tmp_path_factory.mktemp("default") / "run", "TP2, TP1 x 2")


@pytest.fixture(scope="module")
def other_job(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Training PP 2 x DP 2 and one vLLM engine of TP 2; checkpoints are written in the background."""
    return launch(inputs, tmp_path_factory.mktemp("other") / "run", "PP2 x DP2, TP2")


def launch(inputs: Path, run_dir: Path, name: str) -> Job:
    """That topology's job to its end, or from where the folder's checkpoint stands."""
    num_ranks, fields = JOBS[name]
    return run_job(inputs, run_dir, num_ranks, **fields)


def test_a_job_leaves_complete_records(default_job: Job) -> None:
    """One record an iteration, the resolved configuration, pictures, and responses that say how they were sampled. B104: of four
    ranks one writes an offline run of Weights & Biases."""
    assert [record["iteration"] for record in default_job.metrics] == list(range(NUM_ITERATIONS))
    for record in default_job.metrics:
        assert set(KEYS) <= set(record)
        assert all(isinstance(record[key], int | float) for key in KEYS)
        assert record["time/iteration_s"] >= record["time/rollout_s"] > 0
    assert read_yaml(default_job.folder / "config.yaml") == parse_arguments(default_job.flags, program="test")
    assert (default_job.folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((default_job.folder / "tensorboard").glob("events*"))
    (wandb_run,) = default_job.folder.glob("**/offline-run-*")
    assert list(wandb_run.glob("run-*.wandb"))
    assert not (default_job.folder / "PREEMPTED").exists()
    for iteration in range(NUM_ITERATIONS):
        sampled = [row for row in default_job.samples if row["iteration"] == iteration and not row["greedy"]]
        assert len(sampled) == NUM_ROWS
        assert sum(row["reward"] for row in sampled) / NUM_ROWS == pytest.approx(default_job.metrics[iteration]["reward/mean"])
    # B105: greedy answers, the one kind of evaluation, carry the iteration of the record of the same weights.
    assert sorted({row["iteration"] for row in default_job.samples if row["greedy"]}) == [0, NUM_ITERATIONS - 1]


def test_rollout_ranks_receive_their_shard_and_agree_with_the_trainer(default_job: Job) -> None:
    """Every byte of the engines' parameters is received once a sync; vLLM and Megatron give tokens the same log-prob."""
    network = json.loads((Path(default_job.flags[1]) / "config.json").read_text())
    for record in default_job.metrics:
        assert record["refit/received_bytes"] == record["refit/shard_bytes"] == 2 * num_weights(network) * 4
        assert record["logprob_diff/max"] < 1e-4
    assert default_job.metrics[0]["kl/mean"] == pytest.approx(0.0, abs=1e-6)  # actor and reference start alike
    assert default_job.metrics[2]["kl/mean"] != 0.0
    assert default_job.metrics[2]["grad_norm"] > 0


def num_weights(network: dict[str, int]) -> int:
    """Weights of an untied Llama, counted by hand."""
    hidden, ffn, vocab = network["hidden_size"], network["intermediate_size"], network["vocab_size"]
    key_value = hidden * network["num_key_value_heads"] // network["num_attention_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * key_value + 3 * hidden * ffn + 2 * hidden
    return network["num_hidden_layers"] * layer + 2 * vocab * hidden + hidden


def test_greedy_answers_are_those_of_hugging_face(default_job: Job) -> None:
    """Before any update the engine, whose weights all came over the wire, answers as transformers does with the folder's weights."""
    from transformers import AutoModelForCausalLM

    config = parse_arguments(default_job.flags, program="test")
    tokenizer = load_tokenizer(config)
    network = AutoModelForCausalLM.from_pretrained(config.model.model_path)
    rows = [row for row in default_job.samples if row["greedy"] and row["iteration"] == 0]
    assert len(rows) == config.rollout.prompts_per_iteration
    prompts = {prompt.prompt_id: prompt for prompt in load_prompts(config, tokenizer).prompts}
    for row in rows:
        ids = list(prompts[row["prompt_id"]].token_ids)
        assert tokenizer.decode(ids, skip_special_tokens=False) == row["prompt"]
        answer = network.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=8, pad_token_id=2)[0, len(ids) :].tolist()
        assert tokenizer.decode(answer, skip_special_tokens=False) == row["response"]


def test_the_trained_actor_loads_in_transformers(default_job: Job, inputs: Path) -> None:
    """``save_hf_interval`` 0: every weight is there, and training has moved it."""
    from transformers import AutoModelForCausalLM

    folder = default_job.folder / "hf"
    trained, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    started = AutoModelForCausalLM.from_pretrained(inputs / "model").state_dict()
    for name, tensor in trained.state_dict().items():
        assert tensor.isfinite().all() and not torch.equal(tensor, started[name]), name
    assert (folder / "tokenizer.model").read_bytes() == (inputs / "model" / "tokenizer.model").read_bytes()


def test_the_terminal_shows_nothing_that_nobody_can_act_on(default_job: Job) -> None:
    """No warning of a library reaches the user of a job that is in order, and progress is said once, not once a rank."""
    assert warnings_in(default_job.output) == []
    lines = default_job.output.splitlines()
    saved = [line for line in lines if line.startswith("saved the checkpoint")]
    assert saved == [f"saved the checkpoint of iteration {number}" for number in (NUM_SAVED, NUM_ITERATIONS)]
    assert len(lines) == NUM_ITERATIONS + len(saved) + 4, default_job.output
    progress = [line.split()[1] for line in lines if line.startswith("iteration")]
    assert progress == [f"{number}/{NUM_ITERATIONS}" for number in range(1, NUM_ITERATIONS + 1)]


@pytest.mark.slow
def test_a_result_does_not_depend_on_topology(default_job: Job, other_job: Job) -> None:
    """PP 2 x DP 2 with one vLLM engine of TP 2 against TP 2 with two engines: the same tokens and rewards, then the same training."""
    first = [row for row in default_job.samples if row["iteration"] == 0]
    assert first == [row for row in other_job.samples if row["iteration"] == 0]
    assert warnings_in(other_job.output) == []
    exact = ("reward/mean", "reward/std", "response_length/mean", "truncated_frac")
    assert {key: default_job.metrics[0][key] for key in exact} == {key: other_job.metrics[0][key] for key in exact}
    for mine, theirs in zip(default_job.metrics[:2], other_job.metrics[:2], strict=True):
        for key, value in mine.items():
            if not key.startswith(("time/", "logprob_diff/", "refit/")) and key != "tokens_per_s":
                assert theirs[key] == pytest.approx(value, rel=2e-3, abs=2e-5), f"{key} at iteration {mine['iteration']}"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fixture"), zip(JOBS, ("default_job", "other_job"), strict=True), ids=list(JOBS))
def test_b84_b86_the_second_half_after_a_resume_is_the_whole_jobs(
    request: pytest.FixtureRequest, inputs: Path, tmp_path: Path, name: str, fixture: str
) -> None:
    """B84, B86: weights, masters, moments, random states, controller, counters; every metric but times; every sample, bit for bit.

    (``test_resume.py`` has a job that really stops after the half.)
    """
    whole: Job = request.getfixturevalue(fixture)
    resumed = launch(inputs, stopped_after(whole.folder, NUM_SAVED, tmp_path / "run"), name)
    assert f"resuming after iteration {NUM_SAVED} from" in resumed.output
    assert differences(whole.folder, resumed.folder, NUM_ITERATIONS) == []
    newest = resumed.folder / "checkpoints" / f"iter_{NUM_ITERATIONS:07d}"
    assert len(saved_tensors(newest / "megatron")) > 20
    assert [record["iteration"] for record in resumed.metrics] == list(range(NUM_ITERATIONS))
    state = json.loads((newest / "state.json").read_text())
    assert state["iteration"] == state["version"] == NUM_ITERATIONS and state["kl_coef"] != PPO["kl_coef"]
    if "loggers" in JOBS[name][1]:
        runs = [path.name.rpartition("-")[2] for path in (resumed.folder / "wandb").glob("offline-run-*")]
        assert runs == 2 * [state["wandb_run_id"]], "both launches are one run of Weights & Biases"


@pytest.mark.slow
def test_a_mixture_whose_experts_are_spread_over_replicas(inputs: Path, tmp_path: Path) -> None:
    """Two replicas that share the experts of a Qwen3-MoE, a separate critic with experts of its own, and a vLLM engine that holds all."""
    model = make_toy(tmp_path / "model", "qwen3_moe", vocab_size=13, head_dim=32)
    shutil.copy(inputs / "model" / "tokenizer.model", model)
    job = run_job(
        inputs, tmp_path / "run", 3, model_path=model, expert_model_parallel_size=2, rollout_world_size=1, kl_coef=0.05, verify_weights=True
    )
    assert [record["iteration"] for record in job.metrics] == [0, 1]
    for record in job.metrics:
        assert record["refit/received_bytes"] == record["refit/shard_bytes"] > 0
        assert record["logprob_diff/max"] < 1e-4
        assert record["grad_norm"] > 0 and record["loss/value"] > 0
    assert job.metrics[0]["kl/mean"] == pytest.approx(0.0, abs=1e-6) and job.metrics[1]["kl/mean"] != 0.0
    assert warnings_in(job.output) == []
