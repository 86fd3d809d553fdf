"""What can happen to a run that saves checkpoints, short of a kill: signals, requests, a full disk, a read-only folder, damage.

Whole jobs on real torchruns: two training ranks (TP 2) and a rollout rank. Kills are ``test_fault_drill.py``'s.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from train_support import PROGRAM, Processes, make_inputs, promised, read_lines, stopped_after, tiny_flags

from benchmarks.fault_judge import checkpoint_faults, differences, newest_iteration
from megatron_ppo.checkpoint import check_checkpoint

LAUNCH_TIMEOUT_S = 400.0
ENDLESS = 100_000
NOT_WRITTEN = "the checkpoint of iteration {} cannot be written"
LIMITED = '''
"""Runs the program under a limit that the shell has, too: the size of a file, or of what root may do."""
import ctypes, os, resource, sys
limit = sys.argv[1]
if limit == "small files":
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
else:  # modes of files bind root as well, once it has lost CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    for capability in (1, 2) if os.geteuid() == 0 else ():
        assert ctypes.CDLL(None, use_errno=True).prctl(24, capability, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
'''

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, tokenizer and prompts."""
    folder = make_inputs(tmp_path_factory.mktemp("inputs"))
    (folder / "limited.py").write_text(LIMITED, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def undisturbed(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folder of three iterations that nobody touched, with the checkpoints of all of them."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert launch(inputs, folder, train_iters=3, save_interval=1, keep_checkpoints=3)[0] == 0
    return folder / "run"


def flags(inputs: Path, folder: Path, **fields: object) -> list[str]:
    """Without a critic and with the engine that starts soonest; the run is in ``folder / "run"``."""
    job = {"tensor_model_parallel_size": 2, "rollout_backend": "hf", "advantage_estimator": "grpo", "critic": "none"}
    return tiny_flags(inputs, folder / "run", **(job | fields))


def launch(inputs: Path, folder: Path, limit: str | None = None, num_ranks: int = 3, **fields: object) -> tuple[int, str]:
    """One torchrun to its end: its exit code and what was printed. Nothing of it is left then."""
    log = folder / f"log{len(list(folder.glob('log*')))}"
    with Processes(log) as processes:
        start(processes, [*PROGRAM, *flags(inputs, folder, **fields)], None if limit is None else (inputs, limit), num_ranks)
        code = processes.wait(LAUNCH_TIMEOUT_S)
        assert processes.alive() == []
        return code, processes.output()


def start(processes: Processes, program: list[str], limited: tuple[Path, str] | None, num_ranks: int = 3) -> None:
    """Two training ranks and a rollout rank. ``limited``: each of them by way of the script in that folder."""
    if limited is not None:
        program = [str(limited[0] / "limited.py"), limited[1], *program]
    processes.torchrun(num_ranks, program)


def start_endless(processes: Processes, inputs: Path, folder: Path, limited: str | None = None) -> None:
    """A job that goes on until it is told to stop, and saves only when it is asked; returns in the midst of it."""
    program = [*PROGRAM, *flags(inputs, folder, train_iters=ENDLESS)]
    start(processes, program, None if limited is None else (inputs, limited))
    wait_for_an_iteration(processes)


def wait_for_an_iteration(processes: Processes) -> None:
    """Until one more is finished than are now."""
    before = processes.output().count(f"/{ENDLESS}  reward")
    processes.wait_until(lambda: processes.output().count(f"/{ENDLESS}  reward") > before, "an iteration", LAUNCH_TIMEOUT_S)


def wait_for_checkpoint(processes: Processes, run_dir: Path, after: int) -> int:
    """Until a checkpoint of a later iteration than ``after`` is the latest; its iteration."""
    processes.wait_until(lambda: latest_iteration(run_dir) > after, f"a checkpoint after {after}", 60.0)
    return latest_iteration(run_dir)


def latest_iteration(run_dir: Path) -> int:
    """What ``latest`` says, also while the run goes on; 0 where there is none."""
    latest = run_dir / "checkpoints" / "latest"
    return int(latest.read_text(encoding="utf-8").strip().removeprefix("iter_")) if latest.exists() else 0


def preempted_after(run_dir: Path) -> int:
    """Iterations that were finished when the run was stopped by a signal; all of them are in the newest checkpoint, and nothing else."""
    found = re.fullmatch(rf"stopped by a signal after (\d+) of {ENDLESS} iterations\n", (run_dir / "PREEMPTED").read_text())
    assert found
    iteration = int(found[1])
    assert newest_iteration(run_dir) == iteration and checkpoint_faults(run_dir) == []
    assert [record["iteration"] for record in read_lines(run_dir / "metrics.jsonl")] == list(range(iteration))
    return iteration


# -- signals, requests, and a folder that cannot be written -----------------------------------------------------------


def test_b90_signals_save_at_a_boundary_and_the_run_goes_on_from_there(inputs: Path, tmp_path: Path) -> None:
    """B90: SAVE_NOW and SIGUSR1 save and go on; SIGTERM to torchrun, or to a rank, saves, marks and ends; a second one does no harm.

    Where the folder cannot be written a request is a warning and the run goes on, also to the next one; the save that a SIGTERM asks for
    must succeed. Three launches of one run: each goes on where the one before was stopped.
    """
    run_dir, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    with Processes(tmp_path / "first") as processes:
        start_endless(processes, inputs, tmp_path, "no override of modes")
        asked = assert_requests_are_met(processes, run_dir)
        processes.started[0].send_signal(signal.SIGTERM)
        assert processes.wait(promised(30.0)) == 1, "torchrun's own code, whatever its ranks' were"
        first = assert_stopped_at_a_boundary(processes, run_dir)
    assert first > asked
    with Processes(tmp_path / "second") as processes:
        start_endless(processes, inputs, tmp_path)
        assert f"resuming after iteration {first} from" in processes.output()
        assert not (run_dir / "PREEMPTED").exists()
        os.kill(processes.rank(2), signal.SIGTERM)
        signal_in_the_save(processes, run_dir)
        assert processes.wait(promised(30.0)) == 0, processes.output()
        second = assert_stopped_at_a_boundary(processes, run_dir)
    assert second > first
    with Processes(tmp_path / "third") as processes:
        start_endless(processes, inputs, tmp_path, "no override of modes")
        assert f"resuming after iteration {second} from" in processes.output()
        checkpoints.chmod(0o555)
        os.kill(processes.rank(1), signal.SIGTERM)
        code, output = processes.wait(promised(30.0)), processes.output()
        assert processes.alive() == []
        checkpoints.chmod(0o755)
    assert code == 1
    assert re.search(rf" failed in phase save of iteration [0-9]+: .*{NOT_WRITTEN.format('[0-9]+')}.*Permission denied", output), output
    assert not (run_dir / "PREEMPTED").exists(), "what was done after the newest checkpoint is not saved"
    assert newest_iteration(run_dir) == second and checkpoint_faults(run_dir) == []


def assert_requests_are_met(processes: Processes, run_dir: Path) -> int:
    """A file, then one while nothing can be written, then a signal; the iteration of the last checkpoint."""
    assert latest_iteration(run_dir) == 0
    (run_dir / "SAVE_NOW").touch()
    touched = wait_for_checkpoint(processes, run_dir, after=0)
    wait_until_taken_back(processes, run_dir)
    (run_dir / "checkpoints").chmod(0o555)
    (run_dir / "SAVE_NOW").touch()
    wait_until_taken_back(processes, run_dir)
    wait_for_an_iteration(processes)
    assert latest_iteration(run_dir) == touched, processes.output()
    (run_dir / "checkpoints").chmod(0o755)
    os.kill(processes.rank(1), signal.SIGUSR1)
    asked = wait_for_checkpoint(processes, run_dir, after=touched)
    wait_for_an_iteration(processes)
    assert latest_iteration(run_dir) == asked, "one request, one checkpoint"
    warnings = re.findall(rf"^warning: {NOT_WRITTEN.format('([0-9]+)')}.*Permission denied.*goes on$", processes.output(), re.M)
    assert len(warnings) == 1 and touched < int(warnings[0]) < asked, processes.output()
    return asked


def wait_until_taken_back(processes: Processes, run_dir: Path) -> None:
    """Until the run has removed the file that asks for a checkpoint."""
    processes.wait_until(lambda: not (run_dir / "SAVE_NOW").exists(), "the request to be taken back", 60.0)


def assert_stopped_at_a_boundary(processes: Processes, run_dir: Path) -> int:
    """All have ended, none was missed, failed or had to be killed, and everything is on the disk; finished iterations."""
    assert processes.alive() == []
    output = processes.output()
    assert " lost in phase " not in output and " failed in phase " not in output, output
    assert "forcefully exiting via" not in output, output
    assert (run_dir / "learning_curve.png").exists()
    return preempted_after(run_dir)


def signal_in_the_save(processes: Processes, run_dir: Path) -> None:
    """A second SIGTERM, to all ranks, while the checkpoint is being written."""
    ranks = [processes.rank(rank) for rank in range(3)]
    until = time.monotonic() + 60.0
    while not list((run_dir / "checkpoints").glob(".iter_*.tmp")):
        assert time.monotonic() < until, processes.output()
        time.sleep(0.001)
    for pid in ranks:
        os.kill(pid, signal.SIGTERM)


# -- a full disk, and damage ------------------------------------------------------------------------------------------


def test_b82_a_full_disk_costs_a_checkpoint_and_a_damaged_one_is_passed_over(inputs: Path, tmp_path: Path, undisturbed: Path) -> None:
    """No file may be as large as a checkpoint's: training goes on to the last one, which must succeed; older ones stay.

    B82: then one bit of the newest is wrong; the run warns, goes on from the older one, and ends as if nothing had been. Then all are.
    """
    run_dir = stopped_after(undisturbed, 1, tmp_path / "run")
    code, output = launch(inputs, tmp_path, "small files", train_iters=3, save_interval=1)
    assert code == 1
    assert re.search(rf"^warning: {NOT_WRITTEN.format(2)}.*File too large.*training goes on$", output, re.M), output
    assert re.search(rf" failed in phase save of iteration 3: .*{NOT_WRITTEN.format(3)}.*File too large", output), output
    assert [record["iteration"] for record in read_lines(run_dir / "metrics.jsonl")] == [0, 1, 2]
    assert newest_iteration(run_dir) == 1 and checkpoint_faults(run_dir) == []
    checkpoints = run_dir / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["iter_0000001", "latest"]

    damaged = checkpoints / "iter_0000002"
    shutil.copytree(undisturbed / "checkpoints" / damaged.name, damaged)
    (checkpoints / "latest").write_text(f"{damaged.name}\n", encoding="utf-8")
    file = flip_a_bit(damaged)
    code, output = launch(inputs, tmp_path, train_iters=3)
    assert code == 0, output
    assert re.search(rf"^WARNING: the checkpoint \S*{damaged.name} cannot .*\n?.*{re.escape(file.name)} is damaged", output, re.M), output
    assert "resuming after iteration 1 from" in output
    assert newest_iteration(run_dir) == 3, "the end of a run that has checkpoints is one of them"
    assert differences(undisturbed, run_dir, 3) == []

    for folder in checkpoints.glob("iter_*"):
        if folder != damaged:
            flip_a_bit(folder)
    code, output = launch(inputs, tmp_path, num_ranks=2, tensor_model_parallel_size=1, train_iters=4, save_interval=1)
    assert code == 1
    assert "no checkpoint in" in output and "--resume never" in output and "megatron_ppo/run.py" not in output, output
    assert len(read_lines(run_dir / "metrics.jsonl")) == 3, "nothing was touched"


def flip_a_bit(checkpoint: Path) -> Path:
    """In the middle of the largest file, whose size stays; returns the file."""
    file = max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(file.name)):
        check_checkpoint(checkpoint)
    return file
