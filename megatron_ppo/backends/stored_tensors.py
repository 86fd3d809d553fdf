"""What every backend's checkpoint code shares: the index of a folder of ``torch.distributed.checkpoint``, its comparison with what a run
wants, and faults that all ranks raise alike.

An exception on one rank alone would leave the others waiting in their next collective: work that can fail is run by ``together``, and what
differs is told by ``mismatches`` before anything is changed.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

NUM_STEPS = "num_steps"
"""Last part of the key of an optimizer's count of finished steps, int64 [1]. A converted checkpoint has none."""

Result = TypeVar("Result")
Saved = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Key -> whole shape and dtype of the tensors of a checkpoint."""


def stored_tensors(path: Path) -> Saved:
    """What the folder holds, with a check that its boxes fill each tensor (``ValueError``)."""
    saved: Saved = {}
    for key, value in FileSystemReader(path).read_metadata().state_dict_metadata.items():
        if not isinstance(value, TensorStorageMetadata):
            continue  # a pickled object of another writer: never opened
        held = sum(math.prod(chunk.sizes) for chunk in value.chunks)
        if held != math.prod(value.size):
            raise ValueError(f"{key} of shape {tuple(value.size)} has {math.prod(value.size)} elements, but {path} holds {held} of them")
        saved[key] = (tuple(value.size), value.properties.dtype)
    return saved


def everywhere(own: Saved) -> Saved:
    """What all ranks together want. Collective."""
    wanted: list[Saved] = [{}] * dist.get_world_size()
    dist.all_gather_object(wanted, own)
    return {key: value for part in wanted for key, value in part.items()}


def mismatches(wanted: Saved, saved: Saved, *, any_dtype: bool = False) -> str:
    """Names and numbers of everything that does not fit; empty: nothing."""
    faults = []
    for text, keys in (("lacks", sorted(wanted.keys() - saved.keys())), ("also holds", sorted(saved.keys() - wanted.keys()))):
        if keys:
            faults.append(f"it {text} {_listed(keys)}{_hint(keys)}")
    for key in sorted(wanted.keys() & saved.keys()):
        (shape, dtype), (saved_shape, saved_dtype) = wanted[key], saved[key]
        if shape != saved_shape:
            faults.append(f"{key} is {saved_shape} there and {shape} here")
        elif dtype != saved_dtype and not any_dtype:
            faults.append(f"{key} is {saved_dtype} there and {dtype} here (params_dtype)")
    more = f"\n  - and {len(faults) - 8} more" if len(faults) > 8 else ""
    return "".join(f"\n  - {fault}" for fault in faults[:8]) + more


def present_roles(roles: Sequence[str], saved: Saved, folder: Path) -> list[str]:
    """Those of ``roles`` that a checkpoint has weights of; ``ValueError`` for none of them."""
    found = [role for role in roles if any(key.startswith(f"{role}.model.") for key in saved)]
    if not found:
        there = sorted({key.split(".")[0] for key in saved})
        raise ValueError(f"{folder} holds no weights of {' or '.join(roles)}, but of: {', '.join(there) or 'nothing'}")
    return found


def refuse(folder: Path, faults: str) -> None:
    """``ValueError`` where there are ``faults``, which are the same on all ranks."""
    if faults:
        raise ValueError(f"the checkpoint {folder} does not fit this run, and nothing of it was loaded: {faults}")


def together(doing: str, work: Callable[[], Result], error: type[Exception] = ValueError) -> Result:
    """The result of ``work``, or the first rank's fault as an ``error`` on all ranks. Collective; ``work`` is not."""
    result: list[Result] = []
    fault = first_fault(fault_of(lambda: result.append(work())))
    if fault:
        raise error(f"{doing} failed: {fault}")
    return result[0]


def fault_of(work: Callable[[], None]) -> str:
    """What ``work`` raised, in words; empty: nothing."""
    try:
        work()
    except (OSError, ValueError, RuntimeError, KeyError, EOFError, MemoryError, pickle.UnpicklingError) as error:
        return str(error) or repr(error)
    return ""


def first_fault(fault: str) -> str:
    """The fault of the lowest rank that has one, with its number; empty: none has. Collective."""
    faults = [""] * dist.get_world_size()
    dist.all_gather_object(faults, fault)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(faults) if text), "")


def reasons(error: BaseException) -> str:
    """The ranks' own words in torch's exception of a distributed save or load."""
    failures: Mapping[int, object] | None = getattr(error, "failures", None)
    if not failures:
        return str(error)
    return "; ".join(f"rank {rank}: {failure[0] if isinstance(failure, tuple) else failure}" for rank, failure in sorted(failures.items()))


def _listed(keys: Sequence[str]) -> str:
    return ", ".join(keys[:4]) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")


def _hint(keys: Sequence[str]) -> str:
    """The setting that decides about these tensors, where there is one."""
    if any(key.endswith(f".optimizer.{NUM_STEPS}") for key in keys):
        return " (weights without an optimizer, or a role that only one of the two trains: model.critic)"
    if any(".optimizer." in key for key in keys):
        return " (optimizer, params_dtype)"
    return ""
