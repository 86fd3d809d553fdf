"""Whole jobs through the command line: real torchrun, megatron-core and vLLM, every record read back; and what the command refuses."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from spawn import free_port
from toy_models import make_toy
from train_support import PROGRAM, Processes, make_inputs, promised, read_lines, tiny_flags, warnings_in

from megatron_ppo.config import Config
from megatron_ppo.config_io import parse_arguments, read_yaml
from megatron_ppo.prompts import load_prompts
from megatron_ppo.tokenizer import load_tokenizer

LAUNCH_TIMEOUT_S = 400.0
"""A launch takes 20 s on two idle cores; the machine may be busy."""
NUM_ROWS = 32
"""Responses of an iteration; all are written to samples.jsonl, so that runs can be compared token by token."""
KEYS = (
    "iteration reward/mean loss/policy loss/value kl/mean entropy/mean clip_frac grad_norm response_length/mean logprob_diff/mean "
    "logprob_diff/max refit/received_bytes refit/shard_bytes time/sync_s time/rollout_s time/score_s time/update_s time/iteration_s "
    "tokens_per_s"
).split()

pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Job:
    """A finished launch."""

    flags: list[str]
    folder: Path
    code: int
    output: str

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Records of metrics.jsonl."""
        return read_lines(self.folder / "metrics.jsonl")

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Records of samples.jsonl."""
        return read_lines(self.folder / "samples.jsonl")


def run_job(inputs: Path, folder: Path, num_ranks: int, **fields: object) -> Job:
    """One torchrun of the tiny job; nothing of it may outlive it."""
    flags = tiny_flags(inputs, folder / "run", num_logged_samples=NUM_ROWS, **fields)
    with Processes(folder / "log", {"WANDB_MODE": "offline"}) as processes:
        processes.torchrun(num_ranks, [*PROGRAM, *flags])
        code = processes.wait(LAUNCH_TIMEOUT_S)
        output = processes.output()
        assert code == 0, output
        assert processes.alive() == []
    return Job(flags, folder / "run", code, output)


# What both topologies of the property compute alike: PPO with its own critic and a reference.
PPO = {"train_iters": 3, "kl_coef": 0.05, "verify_weights": True}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, tokenizer and prompts."""
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def default_job(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Training TP 2 and two vLLM replicas."""
    folder = tmp_path_factory.mktemp("default")
    written = {"loggers": ["wandb", "tensorboard"], "save_hf_interval": 0}
    return run_job(inputs, folder, 4, tensor_model_parallel_size=2, rollout_world_size=2, **written, **PPO)


def test_a_job_leaves_complete_records(default_job: Job) -> None:
    """One record an iteration, the resolved configuration, pictures, and responses that say how they were sampled. B104: of four
    ranks one writes an offline run of Weights & Biases."""
    assert [record["iteration"] for record in default_job.metrics] == [0, 1, 2]
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
    for iteration in range(3):
        sampled = [row for row in default_job.samples if row["iteration"] == iteration and not row["greedy"]]
        assert len(sampled) == NUM_ROWS
        assert sum(row["reward"] for row in sampled) / NUM_ROWS == pytest.approx(default_job.metrics[iteration]["reward/mean"])


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
    assert len(lines) == 7, default_job.output
    assert [line.split()[1] for line in lines if line.startswith("iteration")] == ["1/3", "2/3", "3/3"]


@pytest.mark.slow
def test_a_result_does_not_depend_on_topology(default_job: Job, inputs: Path, tmp_path: Path) -> None:
    """PP 2 x DP 2 with one vLLM engine of TP 2 against TP 2 with two engines: the same tokens and rewards, then the same training."""
    other = run_job(inputs, tmp_path, 6, pipeline_model_parallel_size=2, rollout_world_size=2, rollout_tensor_parallel_size=2, **PPO)
    first = [row for row in default_job.samples if row["iteration"] == 0]
    assert first == [row for row in other.samples if row["iteration"] == 0]
    assert warnings_in(other.output) == []
    exact = ("reward/mean", "reward/std", "response_length/mean", "truncated_frac")
    assert {key: default_job.metrics[0][key] for key in exact} == {key: other.metrics[0][key] for key in exact}
    for mine, theirs in zip(default_job.metrics[:2], other.metrics[:2], strict=True):
        for key, value in mine.items():
            if not key.startswith(("time/", "logprob_diff/", "refit/")) and key != "tokens_per_s":
                assert theirs[key] == pytest.approx(value, rel=2e-3, abs=2e-5), f"{key} at iteration {mine['iteration']}"


@pytest.mark.slow
def test_a_shared_critic_under_pipeline_parallelism(inputs: Path, tmp_path: Path) -> None:
    """PP 2, value head on the actor's trunk, one vLLM engine of TP 2; log-probs and weights are proved as in any other shape."""
    job = run_job(
        inputs,
        tmp_path,
        4,
        critic="shared",
        pipeline_model_parallel_size=2,
        rollout_world_size=2,
        rollout_tensor_parallel_size=2,
        verify_weights=True,
    )
    assert [record["iteration"] for record in job.metrics] == [0, 1]
    for record in job.metrics:
        assert record["refit/received_bytes"] == record["refit/shard_bytes"] > 0
        assert record["logprob_diff/max"] < 1e-4
        assert record["loss/value"] > 0
    assert warnings_in(job.output) == []


@pytest.mark.slow
def test_grpo_without_a_critic_on_the_hugging_face_backend(inputs: Path, tmp_path: Path) -> None:
    """Two ranks, no vLLM, no critic: the other algorithm and the other engine through the same loop."""
    job = run_job(inputs, tmp_path, 2, advantage_estimator="grpo", critic="none", rollout_backend="hf", verify_weights=True)
    assert len(job.metrics) == 2
    for record in job.metrics:
        assert record["refit/received_bytes"] == record["refit/shard_bytes"] > 0
        assert record["logprob_diff/max"] < 1e-4
        assert "loss/value" not in record and "values/mean" not in record
    assert warnings_in(job.output) == []


@pytest.mark.slow
def test_a_mixture_whose_experts_are_spread_over_replicas(inputs: Path, tmp_path: Path) -> None:
    """Two replicas that share the experts of a Qwen3-MoE, a separate critic with experts of its own, and a vLLM engine that holds all."""
    model = make_toy(tmp_path / "model", "qwen3_moe", vocab_size=13, head_dim=32)
    shutil.copy(inputs / "model" / "tokenizer.model", model)
    job = run_job(
        inputs, tmp_path, 3, model_path=model, expert_model_parallel_size=2, rollout_world_size=1, kl_coef=0.05, verify_weights=True
    )
    assert [record["iteration"] for record in job.metrics] == [0, 1]
    for record in job.metrics:
        assert record["refit/received_bytes"] == record["refit/shard_bytes"] > 0
        assert record["logprob_diff/max"] < 1e-4
        assert record["grad_norm"] > 0 and record["loss/value"] > 0
    assert job.metrics[0]["kl/mean"] == pytest.approx(0.0, abs=1e-6) and job.metrics[1]["kl/mean"] != 0.0
    assert warnings_in(job.output) == []


# -- what the command refuses -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """How one process of a refused launch ended."""

    code: int
    stdout: str
    stderr: str
    seconds: float


class Refused:
    """Refused commands by name. They run side by side, as most of their time is importing torch."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._numbers: dict[str, int] = {}
        self._started: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def start(self, name: str, arguments: list[str], **environment: str) -> None:
        """Start ``python -m megatron_ppo train ARGUMENTS``."""
        self._numbers[name] = len(self._processes.started)
        self._started[name] = time.monotonic()
        self._processes.start([*PROGRAM, *arguments], **environment)

    def start_rank(self, name: str, arguments: list[str], rank: int, world_size: int, port: int) -> None:
        """As ``start``, as one rank of a launch."""
        launch = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        self.start(name, arguments, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **launch)

    def end(self) -> dict[str, Refusal]:
        """Wait for all that have been started, and tell how each ended."""
        until = time.monotonic() + 200.0
        while len(self._seconds) < len(self._numbers) and time.monotonic() < until:
            for name, number in self._numbers.items():
                if name not in self._seconds and self._processes.started[number].poll() is not None:
                    self._seconds[name] = time.monotonic() - self._started[name]
            time.sleep(0.05)
        of = self._processes
        return {
            name: Refusal(of.wait(0.1, number), of.stdout(number), of.stderr(number), self._seconds[name])
            for name, number in self._numbers.items()
        }


@pytest.fixture(scope="module")
def refused(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Refusal]]:
    """Every refused command of this file, run side by side."""
    folder = tmp_path_factory.mktemp("refused")
    run_dir = folder / "run"
    typo = folder / "typo.yaml"
    typo.write_text("parallel:\n  tensor_model_paralel_size: 2\n", encoding="utf-8")
    broken = folder / "broken.jsonl"
    broken.write_text('{"prompt": "1 2", "answer": "2"}\n{"prompt": "3 4", "ans\n', encoding="utf-8")
    chat = folder / "chat.jsonl"
    chat.write_text('{"prompt": [{"role": "user", "content": "1 2"}], "answer": "2"}\n' * 8, encoding="utf-8")
    # A model whose weights cannot be read: whoever opened them would say something else.
    unreadable = folder / "model"
    shutil.copytree(inputs / "model", unreadable)
    (unreadable / "model.safetensors").write_bytes(b"not weights")
    with Processes(folder / "log") as processes:
        commands = Refused(processes)
        commands.start("flag", ["--tensor-model-paralel-size", "2"])
        commands.start("yaml", ["--config", str(typo)])

        def single(name: str, world_size: int, rank: int = 0, **fields: object) -> None:
            flags = tiny_flags(inputs, run_dir, **{"model_path": unreadable, **fields})
            commands.start_rank(name, flags, rank, world_size, free_port())

        # This one is timed, so it runs alone.
        single("batch", 5, prompts_per_iteration=10, samples_per_prompt=1, global_batch_size=10)
        commands.end()
        single("batch, rank 1", 5, 1, prompts_per_iteration=10, samples_per_prompt=1, global_batch_size=10)
        single("world", 4, tensor_model_parallel_size=2)
        single("training heads", 4, tensor_model_parallel_size=3)
        single("rollout heads", 4, rollout_world_size=3, rollout_tensor_parallel_size=3)
        for name, fields in {
            "jsonl": {"prompt_data": broken},
            "template": {"prompt_data": chat},
            "overflow": {"max_prompt_length": 3},
        }.items():
            port = free_port()
            for rank in range(2):
                flags = tiny_flags(inputs, run_dir, **{"model_path": unreadable, **fields})
                commands.start_rank(f"{name} {rank}", flags, rank, 2, port)
        other = folder / "other.jsonl"
        other.write_text((inputs / "prompts.jsonl").read_text() + '{"prompt": "1 2", "answer": "2"}\n')
        small: dict[str, object] = {"rollout_backend": "hf", "critic": "none", "advantage_estimator": "grpo"}
        for name, field, value in (("unlike prompts", "prompt_data", other), ("unlike dtypes", "rollout_dtype", "bfloat16")):
            port = free_port()
            for rank in range(2):
                flags = tiny_flags(inputs, folder / name, **(small | {field: value} if rank == 1 else small))
                commands.start_rank(f"{name} {rank}", flags, rank, 2, port)
        yield commands.end()
        assert not (run_dir / "metrics.jsonl").exists()


def test_b99_unknown_names_are_refused_with_the_nearest(refused: dict[str, Refusal]) -> None:
    """B99: a flag or YAML key with a typo."""
    assert refused["flag"].code == 2
    assert "--tensor-model-parallel-size" in refused["flag"].stderr
    assert refused["yaml"].code != 0
    assert "typo.yaml:2: unknown key 'tensor_model_paralel_size'" in refused["yaml"].stderr
    assert "did you mean tensor_model_parallel_size?" in refused["yaml"].stderr


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("batch", ["global_batch_size = 10 is not a multiple of the data-parallel size 4", "nearest multiple is"]),
        ("world", ["world size 4", "3 ranks are left to train", "TP 2 x PP 1 x CP 1 = 2", "Launch"]),
        ("training heads", ["4 attention heads are not a multiple of tensor_model_parallel_size = 3", "[1, 2, 4]"]),
        ("rollout heads", ["4 attention heads are not a multiple of rollout_tensor_parallel_size = 3", "[1, 2, 4]"]),
    ],
)
def test_b70_b99_b39_equations_are_checked_before_anything_is_loaded(refused: dict[str, Refusal], name: str, parts: list[str]) -> None:
    """B70, B99, B39: one rank alone ends by itself, so no group was waited for; its weights cannot be read, so none were."""
    refusal = refused[name]
    assert refusal.code != 0
    for part in parts:
        assert part in refusal.stderr
    assert refusal.stdout == ""


def test_b70_a_launch_that_does_not_fit_ends_soon(refused: dict[str, Refusal]) -> None:
    """B70: within 10 s, of which nearly all is importing torch."""
    assert refused["batch"].seconds < promised(10.0)


def test_b70_only_rank_0_prints(refused: dict[str, Refusal]) -> None:
    """B70: a launch that does not fit shows one message, not one a rank."""
    assert refused["batch, rank 1"].code == 1
    assert refused["batch, rank 1"].stdout + refused["batch, rank 1"].stderr == ""


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("jsonl", ["broken.jsonl:2"]),
        ("template", ["chat template", "chat_template"]),
        ("overflow", ["max_prompt_length"]),
    ],
)
def test_b75_b73_b38_bad_data_is_refused_before_the_model(refused: dict[str, Refusal], name: str, parts: list[str]) -> None:
    """B75, B73, B38: every rank ends before any weight is read; the first to fail names file or prompt and remedy, the other names it."""
    both = [refused[f"{name} {rank}"] for rank in range(2)]
    for refusal in both:
        assert refusal.code != 0
        assert "failed in phase start-up: data" in refusal.stderr
        assert "safetensors" not in refusal.stderr and "Traceback" not in refusal.stderr
    for part in parts:
        assert any(part in refusal.stderr for refusal in both)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("unlike prompts", "rank 1 (rollout rank 0) read other prompts from "),
        ("unlike dtypes", "dtype on the wire differs: torch.float32 on ranks [0], torch.bfloat16 on ranks [1]"),
    ],
)
def test_b75_b31_ranks_that_are_set_up_unlike_are_refused_on_both_sides(refused: dict[str, Refusal], name: str, text: str) -> None:
    """B75, B31: rows and what the wire carries are compared before the first transfer; both sides end and name the rank."""
    for rank in range(2):
        refusal = refused[f"{name} {rank}"]
        assert refusal.code != 0
        assert text in refusal.stderr
        assert "iteration" not in refusal.stdout


def test_the_configuration_that_fits_is_not_refused(inputs: Path, tmp_path: Path) -> None:
    """The refusals above are of what they change, not of the rest."""
    config = parse_arguments(tiny_flags(inputs, tmp_path), program="test")
    assert isinstance(config, Config)
    config.validate(2)
