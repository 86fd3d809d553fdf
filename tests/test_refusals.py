"""What the command refuses, at once and in words: names, equations, data, ranks that are set up unlike.

Every command is a process of its own. All but the one that is timed are forked from one that has imported what each would import, which
is nearly all of their time. Run as a script this file is that one: ``python test_refusals.py FOLDER``.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from spawn import free_port
from train_support import PROGRAM, Processes, make_inputs, tiny_flags

from megatron_ppo.config import Config
from megatron_ppo.config_io import parse_arguments

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, tokenizer and prompts."""
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@dataclass(frozen=True)
class Refusal:
    """How one process of a refused launch ended."""

    code: int
    stdout: str
    stderr: str
    seconds: float


@dataclass(frozen=True)
class Command:
    """``python -m megatron_ppo train ARGUMENTS`` with variables of a launch."""

    name: str
    arguments: list[str]
    environment: dict[str, str]


def rank_of(name: str, arguments: list[str], rank: int, world_size: int, port: int) -> Command:
    """One rank of a launch."""
    launch = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    return Command(name, arguments, launch | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})


def run_timed(processes: Processes, command: Command) -> Refusal:
    """The command as a user calls it, and the processor time that it took."""
    before, number = resource.getrusage(resource.RUSAGE_CHILDREN), len(processes.started)
    processes.start([*PROGRAM, *command.arguments], **command.environment)
    code = processes.wait(200.0, number)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Refusal(code, processes.stdout(number), processes.stderr(number), seconds)


def run_forked(processes: Processes, commands: list[Command], folder: Path) -> dict[str, Refusal]:
    """All side by side, each a child of one process."""
    (folder / "commands.json").write_text(json.dumps([asdict(command) for command in commands]), encoding="utf-8")
    number = len(processes.started)
    processes.start([__file__, str(folder)])
    assert processes.wait(300.0, number) == 0, processes.output(number)
    codes = json.loads((folder / "codes.json").read_text(encoding="utf-8"))
    return {name: Refusal(code, *((folder / f"{name}.{end}").read_text() for end in ("out", "err")), 0.0) for name, code in codes.items()}


def fork_commands(folder: Path) -> None:
    """In a process of its own: import, fork, wait. Returns in the parent only."""
    import transformers.models.llama.tokenization_llama  # noqa: F401  with what it imports, as the data's loading does

    import megatron_ppo.run  # noqa: F401
    from megatron_ppo.__main__ import main

    names: dict[int, str] = {}
    for command in json.loads((folder / "commands.json").read_text(encoding="utf-8")):
        pid = os.fork()
        if pid == 0:
            os.environ.update(command["environment"])
            for descriptor, end in ((1, "out"), (2, "err")):
                os.dup2(os.open(folder / f"{command['name']}.{end}", os.O_WRONLY | os.O_CREAT), descriptor)
            sys.exit(main(["train", *command["arguments"]]))
        names[pid] = command["name"]
    codes = {}
    while names:
        pid, status = os.wait()
        codes[names.pop(pid)] = os.waitstatus_to_exitcode(status)
    (folder / "codes.json").write_text(json.dumps(codes), encoding="utf-8")


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
    commands = [
        Command("flag", ["--tensor-model-paralel-size", "2"], {}),
        Command("yaml", ["--config", str(typo)], {}),
    ]

    def single(name: str, world_size: int, rank: int = 0, **fields: object) -> Command:
        flags = tiny_flags(inputs, run_dir, **{"model_path": unreadable, **fields})
        return rank_of(name, flags, rank, world_size, free_port())

    uneven: dict[str, object] = {"prompts_per_iteration": 10, "samples_per_prompt": 1, "global_batch_size": 10}
    commands += [
        single("batch, rank 1", 5, 1, **uneven),
        single("world", 4, tensor_model_parallel_size=2),
        single("training heads", 4, tensor_model_parallel_size=3),
        single("rollout heads", 4, rollout_world_size=3, rollout_tensor_parallel_size=3),
    ]
    data: dict[str, dict[str, object]] = {
        "jsonl": {"prompt_data": broken},
        "template": {"prompt_data": chat},
        "overflow": {"max_prompt_length": 3},
    }
    for name, fields in data.items():
        port = free_port()
        flags = tiny_flags(inputs, run_dir, **{"model_path": unreadable, **fields})
        commands += [rank_of(f"{name} {rank}", flags, rank, 2, port) for rank in range(2)]
    other = folder / "other.jsonl"
    other.write_text((inputs / "prompts.jsonl").read_text() + '{"prompt": "1 2", "answer": "2"}\n')
    small: dict[str, object] = {"rollout_backend": "hf", "critic": "none", "advantage_estimator": "grpo"}
    for name, field, value in (("unlike prompts", "prompt_data", other), ("unlike dtypes", "rollout_dtype", "bfloat16")):
        port = free_port()
        for rank, changed in enumerate((small, small | {field: value})):
            commands.append(rank_of(f"{name} {rank}", tiny_flags(inputs, folder / name, **changed), rank, 2, port))
    with Processes(folder / "log") as processes:
        timed = run_timed(processes, single("batch", 5, **uneven))  # alone
        yield {"batch": timed} | run_forked(processes, commands, folder)
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
    """B70: within 10 s of a processor, of which nearly all is importing torch; it waits for nobody, as no other rank is there."""
    assert 0.5 < refused["batch"].seconds < 10.0


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


if __name__ == "__main__":
    fork_commands(Path(sys.argv[1]))
