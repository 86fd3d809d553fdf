"""What the fault drill asks of a killed job: pure functions from evidence to faults, in words. No fault: the cell is good.

Of the stop (``stop_faults``): all other processes have ended within ten seconds and by themselves, each survivor has named the lost rank
and its phase, no process is left, and what lies in the checkpoint folder is whole or refused. Of the end (``differences``): the job that
was killed and resumed has the weights, moments, random states, metrics and samples of a job that nobody touched, bit for bit.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_ppo.checkpoint import CheckpointFolder, check_checkpoint
from megatron_ppo.resume import TENSOR_FOLDERS

END_S = 10.0
"""The promise: so soon after a process was killed all others of the job have ended."""
SIGKILLED = -9
TORCHRUN_KILLS = "forcefully exiting via"
"""torchrun's words (2.13) where a rank did not end within 30 s of being asked to."""
IGNORED_METRICS = re.compile(r"time/.*|tokens_per_s")
IGNORED_STATE = ("wandb_run_id",)
MAX_SHOWN = 8


@dataclass(frozen=True)
class Stop:
    """What was seen of one kill, up to the end of all other processes."""

    victim: int | None
    """Global rank; None: the launcher's agent."""
    victim_phases: Sequence[str]
    """Where the victim was, by itself, and may still have been taken to be by others; none of an agent."""
    num_ranks: int
    num_training: int
    seconds: float | None
    """From the signal until no other process of the attempt was left; None: some had to be killed by the drill."""
    output: str
    """Standard output and error of all ranks of the attempt."""
    exit_codes: Mapping[int, int] = field(default_factory=dict)
    """Rank -> code, where the ranks have no launcher; of a launcher that does not restart, -1 -> its own. Empty where it restarts."""
    survivors: Sequence[str] = ()
    """Command lines that were still there when time was up."""
    checkpoint_faults: Sequence[str] = ()


def stop_faults(stop: Stop, *, end_s: float = END_S) -> list[str]:
    """Everything that is wrong with how a job ended."""
    faults = list(stop.checkpoint_faults)
    if stop.seconds is None:
        faults.append(f"still alive and killed by the drill: {'; '.join(stop.survivors)}")
    elif stop.seconds > end_s:
        faults.append(f"the others ended after {stop.seconds:.1f} s, allowed are {end_s:.0f} s")
    if TORCHRUN_KILLS in stop.output:
        faults.append("torchrun had to end a survivor with SIGKILL")
    faults += _code_faults(stop)
    missing = [rank for rank in range(stop.num_ranks) if rank != stop.victim and not _names_the_loss(stop, rank)]
    if missing:
        phases = " or ".join(stop.victim_phases)
        what = "the lost launcher" if stop.victim is None else f"that {_name(stop, stop.victim)} was lost in phase {phases}"
        faults.append(f"ranks {missing} did not say {what}")
    return faults


def _code_faults(stop: Stop) -> list[str]:
    faults = []
    for rank, code in stop.exit_codes.items():
        is_victim = rank == (-1 if stop.victim is None else stop.victim)
        name = "torchrun" if rank == -1 else f"rank {rank}"
        if is_victim and code != SIGKILLED:
            faults.append(f"{name} was to be killed, but ended with code {code}")
        if not is_victim and code in (0, SIGKILLED):
            faults.append(f"{name} survived the kill and ended with code {code}")
    return faults


def _name(stop: Stop, rank: int) -> str:
    """As the program's messages name a rank."""
    if rank < stop.num_training:
        return f"rank {rank} (training rank {rank})"
    return f"rank {rank} (rollout rank {rank - stop.num_training})"


def _names_the_loss(stop: Stop, rank: int) -> bool:
    here = rf"this is rank {rank} in phase .+; ending"
    if stop.victim is not None:
        lost = re.escape(f"{_name(stop, stop.victim)} lost in phase ")
        phases = "|".join(map(re.escape, stop.victim_phases))
        return re.search(f"^{lost}(?:{phases}); {here}", stop.output, re.M) is not None
    gone = r" failed in phase .+: its launcher \(process \d+\) is gone; "
    own = re.escape(_name(stop, rank)) + gone + "ending"
    return re.search(rf"^(?:{own}|rank \d+ \(.+\){gone}{here})", stop.output, re.M) is not None


# -- checkpoints that a kill left -------------------------------------------------------------------------------------


def newest_iteration(run_dir: Path) -> int:
    """Finished iterations of the checkpoint that a resume takes, by the program's own answer; 0 where it begins anew."""
    newest = CheckpointFolder(run_dir / "checkpoints", None).newest_complete()
    # One that was killed just before it got its name is complete, too: .iter_0000002.tmp
    return 0 if newest is None else int(newest.name.removeprefix(".").removeprefix("iter_").removesuffix(".tmp"))


def checkpoint_faults(run_dir: Path) -> list[str]:
    """Whether everything under a final name is whole, and every half checkpoint is refused and has a name that is never loaded."""
    root = run_dir / "checkpoints"
    faults = []
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        if not folder.is_dir():
            continue
        is_final = folder.name.startswith("iter_")
        refusal = _refusal(folder)
        if is_final and refusal:
            faults.append(f"{folder.name} has a final name, but: {refusal}")
        if not is_final and not folder.name.startswith("."):
            faults.append(f"{folder.name} is neither a checkpoint nor hidden")
        if not is_final and not (folder / "COMPLETE").exists() and not refusal:
            faults.append(f"{folder.name} is half a checkpoint, and would load")
    latest = root / "latest"
    if latest.exists() and _refusal(root / latest.read_text(encoding="utf-8").strip()):
        faults.append(f"latest names {latest.read_text(encoding='utf-8').strip()}, which does not load")
    return faults


def _refusal(folder: Path) -> str:
    try:
        check_checkpoint(folder)
    except (ValueError, OSError) as error:
        return str(error)
    return ""


# -- equal to an undisturbed job --------------------------------------------------------------------------------------


def differences(expected: Path, found: Path, num_iterations: int) -> list[str]:
    """What differs between two run folders after ``num_iterations``, at most ``MAX_SHOWN`` lines and a count. Empty: equal."""
    lines = []
    for run_dir in (expected, found):
        if not (run_dir / "checkpoints" / f"iter_{num_iterations:07d}").is_dir():
            lines.append(f"{run_dir} has no checkpoint of iteration {num_iterations}")
    if not lines:
        pair = [run_dir / "checkpoints" / f"iter_{num_iterations:07d}" for run_dir in (expected, found)]
        stored = next(name for name in TENSOR_FOLDERS if (pair[0] / name).is_dir())
        lines += _different("", *(saved_tensors(folder / stored) for folder in pair))
        lines += _different("ranks/", *(_rank_tensors(folder / "ranks") for folder in pair))
        lines += _different("state.json ", *(_state(folder / "state.json") for folder in pair))
    for name in ("metrics.jsonl", "samples.jsonl"):
        lines += _different(f"{name} record ", *(dict(enumerate(_records(run_dir / name))) for run_dir in (expected, found)))
    return lines[:MAX_SHOWN] + ([f"and {len(lines) - MAX_SHOWN} more"] if len(lines) > MAX_SHOWN else [])


def saved_tensors(folder: Path) -> dict[str, Any]:
    """All of a ``megatron/`` or ``fsdp/`` folder by name: whole tensors, the objects of ``common.pt``. Needs no process group."""
    reader = dcp.FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        for name, entry in entries.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # on purpose: one process reads everything
        dcp.load(state, storage_reader=reader, no_dist=True)
    if (folder / "common.pt").exists():
        state["common.pt"] = torch.load(folder / "common.pt")
    return state


def _rank_tensors(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {f"{path.name}:{name}": file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
    return found


def _state(file: Path) -> dict[str, Any]:
    return {name: value for name, value in json.loads(file.read_text(encoding="utf-8")).items() if name not in IGNORED_STATE}


def _records(file: Path) -> list[Any]:
    """Records without what a clock has measured."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [{name: value for name, value in json.loads(line).items() if not IGNORED_METRICS.fullmatch(name)} for line in lines]


def _different(prefix: str, expected: Mapping[Any, Any], found: Mapping[Any, Any]) -> list[str]:
    """A line for each name that only one side has, or under which the two hold something else."""
    lines = [f"{prefix}{name} is missing" for name in expected if name not in found]
    lines += [f"{prefix}{name} should not be there" for name in found if name not in expected]
    return lines + [
        f"{prefix}{name} differs{_distance(expected[name], found[name])}"
        for name in expected
        if name in found and not same(expected[name], found[name])
    ]


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same bit for bit, tensors inside of containers too."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, io.BytesIO) and isinstance(other, io.BytesIO):
        return one.getvalue() == other.getvalue()
    return type(one) is type(other) and pickle.dumps(one) == pickle.dumps(other)  # NaN is NaN


def _distance(one: Any, other: Any) -> str:
    if isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape and one.is_floating_point():
        return f" by up to {float((one.double() - other.double()).abs().max()):.3g}"
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        names = [name for name in one if name not in other or not same(one[name], other[name])]
        return f" in {', '.join(map(str, names[:3]))}"
    return ""
