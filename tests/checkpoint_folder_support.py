"""Checkpoint folders without a trainer, and child processes that are killed, limited or traced while they write one. Test support only."""

from __future__ import annotations

import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import yaml

from megatron_ppo.checkpoint import CheckpointFolder, TrainerState
from megatron_ppo.checkpoint_manifest import digest_files, sync_files

MESH = {"tp": 2, "pp": 1, "dp": 1, "world": 3}
SHARD, RANK_FILE = "megatron/__0_0.distcp", "ranks/rank_00000.safetensors"
CONFIG_TEXT = yaml.safe_dump({"training": {"train_iters": 7}})
NOBODY = 65534


def state_of(iteration: int) -> TrainerState:
    return TrainerState(iteration, iteration, 0.1 + 0.2, {"actor": 4 * iteration}, {"actor": 0}, "run-1", "prompts", MESH)


def write_parts(folder: Path, content: str) -> None:
    """What the ranks of a backend would write."""
    for name in (SHARD, RANK_FILE):
        (folder / name).parent.mkdir()
        (folder / name).write_text(f"{name} of {content}\n")


def save(checkpoints: CheckpointFolder, iteration: int, content: str = "a run") -> Path:
    """A whole checkpoint; one of its two files is digested by the rank that wrote it."""
    folder = checkpoints.begin(iteration)
    write_parts(folder, content)
    sync_files(folder, [SHARD, RANK_FILE])
    return checkpoints.finish(iteration, state_of(iteration), CONFIG_TEXT, digest_files(folder, [SHARD]))


def names_in(root: Path) -> set[str]:
    """Names of all entries, hidden ones too."""
    return {path.name for path in root.iterdir()}


def in_child(action: Callable[[], object]) -> tuple[int, str]:
    """Run ``action`` in a forked process: (exit status as of ``os.waitpid``, the text that it returned or raised)."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text, code = str(action()), 0
        except OSError as error:
            text, code = f"OSError: {error}", 3
        except BaseException:
            text, code = traceback.format_exc(), 4
        os.write(writer, text.encode())
        os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        text = answers.read().decode()
    return os.waitpid(child, 0)[1], text


def watch_files(on_operation: Callable[[str, str], None]) -> None:
    """In a child: call ``on_operation(kind, path)`` before everything that changes the disk. Cannot be undone."""

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | Path) and isinstance(arguments[2], int):
            if arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                on_operation("write", str(arguments[0]))
        elif event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir"):
            on_operation(event, str(arguments[0]))

    def fsync(descriptor: int) -> None:
        on_operation("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
        real_fsync(descriptor)

    real_fsync, os.fsync = os.fsync, fsync
    sys.addaudithook(hook)


def killed_before(number: int, action: Callable[[], object]) -> bool:
    """Run ``action`` in a child that is killed by SIGKILL before its ``number``-th operation; whether it came to that.

    A file whose fsync it does not come to keeps only half its bytes, as after a power cut.
    """
    count = 0

    def on_operation(kind: str, path: str) -> None:
        nonlocal count
        count += 1
        if count == number:
            if kind == "fsync" and Path(path).is_file():
                os.truncate(path, Path(path).stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    def run() -> None:
        watch_files(on_operation)
        action()

    status, text = in_child(run)
    assert os.WIFSIGNALED(status) or status == 0, text
    return os.WIFSIGNALED(status)


def limit_file_size(num_bytes: int) -> None:
    """In a child: writing beyond this many bytes of a file fails, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def limit_memory() -> None:
    """In a child: no more than 1 GiB beyond what it has."""
    present = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (present + 2**30, resource.RLIM_INFINITY))
