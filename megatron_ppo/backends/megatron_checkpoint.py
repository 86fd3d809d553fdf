"""Checkpoints of the Megatron backend: weights, optimizer and random states of the trained networks, exactly, on any mesh.

    save   live tensors --(one copy)--> files in memory --(this call, or a thread)--> megatron/, ranks/
    load   megatron/ -> tensors in host memory -> checked on all ranks -> live tensors

``megatron/`` is megatron-core's distributed format (torch_dist): what ``megatron.core.dist_checkpointing.load`` reads. Its planner runs
here as it does there; the writer is torch's own, into memory. megatron-core's writer forks processes and needs collectives after the
data are written; here all collectives are over when ``save`` returns, and there is no process that could be orphaned.
``ranks/rank_NNNNN.safetensors`` holds the random states of one rank of the training mesh.

Nothing live is touched before everything is read, checked, and found good by all ranks. Whoever calls ``load`` has checked the folder's
digests and pickles before (``checkpoint.py``, ``unsafe_pickle.py``). Left out: the loop's own state, and names of folders.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from megatron_ppo.backends.megatron_optimizer import MASTER
from megatron_ppo.backends.megatron_shards import Entry, is_written, network_entries, num_steps_entry, sharded_tensor
from megatron_ppo.backends.random_states import random_states as process_states
from megatron_ppo.backends.random_states import read_states, states_bytes, states_file
from megatron_ppo.backends.random_states import restore_random_states as restore_process_states
from megatron_ppo.backends.staged_save import PendingSave, StagedFiles
from megatron_ppo.backends.stored_tensors import (
    Saved,
    everywhere,
    fault_of,
    first_fault,
    mismatches,
    present_roles,
    reasons,
    refuse,
    stored_tensors,
    together,
)
from megatron_ppo.families import network_shape
from megatron_ppo.unsafe_pickle import DISTRIBUTED_FORMAT

if TYPE_CHECKING:
    from megatron_ppo.backends.megatron import Network

logger = logging.getLogger(__name__)

MEGATRON_FOLDER = "megatron"
HF_FOLDER = "hf"

SECOND_NAMES = (".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
"""The norm before a mixture has one name with Transformer Engine's layers and another without: ``convert`` stores it under both."""


# -- save -------------------------------------------------------------------------------------------------------------


def save(networks: Mapping[str, Network], folder: Path, mesh: Mapping[str, int], *, asynchronous: bool) -> PendingSave:
    """Write all trained networks and this rank's random states below the existing ``folder``. Collective over the training mesh.

    ``networks``: role -> network. ``mesh``: sizes that decide whether random states fit. Returns when everything is copied, and without
    ``asynchronous`` when everything is on the disk of all ranks.

    Raises:
        OSError: a rank could not write; the same on all ranks. With ``asynchronous`` it is ``PendingSave.wait`` that raises, on that rank.
        RuntimeError: a rank could not copy its state; the same on all ranks.
    """
    staged = StagedFiles()
    entries = together("copying the state", lambda: _stage_own(networks, mesh, staged), RuntimeError)
    _stage_tensors(entries, staged)
    pending = PendingSave(folder, staged.contents(), asynchronous=asynchronous)
    if not asynchronous:
        fault = first_fault(fault_of(pending.wait))
        if fault:
            raise OSError(f"the checkpoint {folder} could not be written: {fault}")
    return pending


def _stage_own(networks: Mapping[str, Network], mesh: Mapping[str, int], staged: StagedFiles) -> list[Entry]:
    """What needs no other rank: random states, rank 0's small files, and the list of tensors."""
    rank = dist.get_rank()
    staged.add(states_file(rank), states_bytes(random_states(), mesh))
    if rank == 0:
        common = io.BytesIO()
        torch.save({}, common)  # megatron-core wants this file; all state is in tensors
        staged.add(f"{MEGATRON_FOLDER}/common.pt", common.getvalue())
        staged.add(f"{MEGATRON_FOLDER}/metadata.json", json.dumps(DISTRIBUTED_FORMAT).encode())
    entries: list[Entry] = []
    for role, network in networks.items():
        entries += network_entries(role, network)
        assert network.optimizer is not None
        entries.append(num_steps_entry(role, torch.tensor([network.optimizer.num_steps]), rank))
    return [entry for entry in entries if is_written(entry)]


def _stage_tensors(entries: Sequence[Entry], staged: StagedFiles) -> None:
    """Copy tensors into files, and agree on the index of all files. Collective; a fault of any rank is raised on all."""
    from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_finalize, save_state_dict_async_plan
    from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict

    def own_state() -> Any:
        by_key: dict[str, list[Any]] = {}
        for entry in entries:
            by_key.setdefault(entry.key, []).append(sharded_tensor(entry, entry.tensor))
        return mcore_to_pyt_state_dict(by_key)

    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    state = together("copying the state", own_state, RuntimeError)
    try:
        plan, *_ = save_state_dict_async_plan(state, _StagingWriter(staged), None, 0, planner=planner)
        save_state_dict_async_finalize(*plan)
    except CheckpointException as error:  # no Exception of Python's: nobody above expects it
        raise RuntimeError(f"the state could not be copied for a checkpoint: {reasons(error) or 'another rank failed'}") from error


class _StagingWriter(FileSystemWriter):
    """torch's writer of checkpoint files, with the methods that megatron-core's plan calls, into memory."""

    can_run_decentralized_global_plan = False
    """The central plan carries an exception of any rank to all of them."""

    def __init__(self, staged: StagedFiles) -> None:
        super().__init__(MEGATRON_FOLDER, sync_files=False)
        self.fs = staged  # type: ignore[assignment]
        self.path = MEGATRON_FOLDER
        self._results: Any = None

    def prepare_write_data(self, plan: Any, planner: Any) -> None:
        """Copy this rank's tensors. A fault is kept for ``retrieve_write_results``, where the other ranks wait."""
        try:
            self._results = self.write_data(plan, planner).wait()
        except Exception as error:
            self._results = _wrap_exception(error)

    def retrieve_write_results(self) -> Any:
        """Where in which file each tensor lies, for the index."""
        return self._results


# -- load -------------------------------------------------------------------------------------------------------------


def load(networks: Mapping[str, Network], folder: Path, mesh: Mapping[str, int]) -> None:
    """Take over what ``save`` wrote, on this or another mesh. Collective over the training mesh.

    Random states are taken over where ``mesh`` is the saved one; else a notice is logged and they stay as the start seeded them.

    Raises:
        ValueError: the checkpoint is of another model, optimizer or precision, lacks or holds tensors that this run does not, or cannot
            be read. The same on all ranks, and nothing has changed.
    """
    entries, steps = _own_entries(networks)
    saved = together(f"reading {folder}", lambda: _read_index(folder))
    refuse(folder, mismatches(everywhere(_described(entries)), saved))
    loaded = _read_tensors(folder, entries)
    states = together(f"reading {folder}", lambda: read_states(folder, mesh))
    refuse(folder, first_fault(_master_fault(entries, loaded)))
    _copy(entries, loaded)
    for role, network in networks.items():
        assert network.optimizer is not None
        network.optimizer.restore_num_steps(int(steps[role]))
    if states is not None:
        restore_random_states(states)


def load_weights(networks: Mapping[str, Network], folder: Path) -> None:
    """Take over weights alone, cast to this run's precision; optimizers stay as they are, with fp32 masters taken from the weights.

    ``folder`` is what ``convert`` made, or a training checkpoint. A role that it lacks keeps its weights, and so does a scalar head.
    Collective over the training mesh; errors are those of ``load``.
    """
    saved = together(f"reading {folder}", lambda: _read_index(folder))
    present = {role: networks[role] for role in present_roles(list(networks), saved, folder)}
    absent = sorted(set(networks) - set(present))
    if absent and dist.get_rank() == 0:
        logger.warning("%s holds no weights of the %s, which starts from the Hugging Face folder of the configuration", folder, absent[0])
    entries = [entry for entry in _own_entries(present)[0] if ".model." in entry.key]
    wanted = everywhere(_described(entries))
    roles = tuple(f"{role}.model." for role in present)
    offered = {key: value for key, value in saved.items() if key.startswith(roles)}
    optional = {key for key in set(wanted) ^ set(offered) if key.split(".model.")[1].startswith("value_head.")}
    optional |= {key for key in set(offered) - set(wanted) if key.endswith(SECOND_NAMES)}
    wanted = {key: value for key, value in wanted.items() if key not in optional}
    offered = {key: value for key, value in offered.items() if key not in optional}
    vocabulary = together(f"reading {folder}", lambda: _converted_vocabulary(folder))
    refuse(folder, mismatches(_any_padding(wanted, offered, vocabulary), offered, any_dtype=True))
    entries = [entry for entry in entries if entry.key in wanted]
    _copy(entries, _read_tensors(folder, entries))
    for network in present.values():
        assert network.optimizer is not None
        network.optimizer.reload_masters()


def _own_entries(networks: Mapping[str, Network]) -> tuple[list[Entry], dict[str, Tensor]]:
    """This rank's entries of all roles, and the tensors that the step counts of the roles are read into."""
    entries: list[Entry] = []
    steps: dict[str, Tensor] = {}
    for role, network in networks.items():
        entries += network_entries(role, network)
        steps[role] = torch.zeros(1, dtype=torch.int64)
        entries.append(num_steps_entry(role, steps[role], dist.get_rank()))
    return entries, steps


def _read_index(folder: Path) -> Saved:
    """What the checkpoint holds, with a check that its boxes fill each tensor."""
    path = folder / MEGATRON_FOLDER
    for name in ("metadata.json", "common.pt", ".metadata"):
        if not (path / name).is_file():
            raise ValueError(f"{path / name} is missing: this is no checkpoint in megatron-core's distributed format")
    return stored_tensors(path)


def _described(entries: Sequence[Entry]) -> Saved:
    return {entry.key: (entry.global_shape, entry.tensor.dtype) for entry in entries}


def _any_padding(wanted: Saved, offered: Saved, vocabulary: int | None) -> Saved:
    """``wanted`` with as many rows of a vocabulary as are there, if these are this model's rows and some that only pad it.

    Writers other than ``save`` may keep padding. ``vocabulary``: rows without padding where the folder tells.
    """
    padded = dict(wanted)
    for key, (shape, dtype) in wanted.items():
        there = offered.get(key, (shape, dtype))[0]
        is_vocabulary = key.endswith(("embedding.word_embeddings.weight", "output_layer.weight"))
        if is_vocabulary and there[1:] == shape[1:] and there[0] > shape[0] and vocabulary in (None, shape[0]):
            padded[key] = (there, dtype)
    return padded


def _converted_vocabulary(folder: Path) -> int | None:
    config = folder / HF_FOLDER / "config.json"
    return network_shape(config.parent).vocab_size if config.is_file() else None


def _read_tensors(folder: Path, entries: Sequence[Entry]) -> list[Tensor]:
    """Flat tensors in host memory, one an entry. Collective; a fault of any rank is a ``ValueError`` on all."""
    from megatron.core.dist_checkpointing import load as megatron_load
    from megatron.core.dist_checkpointing.core import CheckpointingException

    # megatron-core's mark of a shape that may differ fills a tensor with zeros first; what is saved has been held to be all of it.
    targets = [torch.zeros(entry.tensor.shape, dtype=entry.tensor.dtype) for entry in entries]
    state = {str(number): sharded_tensor(entry, data) for number, (entry, data) in enumerate(zip(entries, targets, strict=True))}
    for sharded in state.values():
        sharded.allow_shape_mismatch = True  # shapes are compared before, with all keys, in one message
    try:
        loaded = megatron_load(state, str(folder / MEGATRON_FOLDER), validate_access_integrity=False)
    except (CheckpointException, CheckpointingException) as error:
        raise ValueError(f"{folder} cannot be read: {reasons(error)}") from error
    return [loaded[str(number)].reshape(-1) for number in range(len(entries))]


def _master_fault(entries: Sequence[Entry], loaded: Sequence[Tensor]) -> str:
    """A weight is the rounded value of its fp32 master: where it is not, the two were saved at different moments."""
    weights: dict[str, list[tuple[Entry, Tensor]]] = {}
    for entry, tensor in zip(entries, loaded, strict=True):
        weights.setdefault(entry.key, []).append((entry, tensor))
    marker = f".optimizer.{MASTER}."
    for entry, master in zip(entries, loaded, strict=True):
        if marker not in entry.key:
            continue
        key = entry.key.replace(marker, ".model.")
        for weight, values in weights[key]:
            box = _inside(entry, weight)
            if box is not None and not torch.equal(values.view(weight.shape)[box].reshape(-1), master.to(values.dtype)):
                return f"{entry.key} does not round to the weight {key}: they are not of one step"
    return ""


def _inside(inner: Entry, outer: Entry) -> tuple[slice, ...] | None:
    """Where the box of ``inner`` lies in that of ``outer``; None: not in it."""
    starts = [a - b for a, b in zip(inner.offset, outer.offset, strict=True)]
    fits = all(start >= 0 and start + size <= whole for start, size, whole in zip(starts, inner.shape, outer.shape, strict=True))
    return tuple(slice(start, start + size) for start, size in zip(starts, inner.shape, strict=True)) if fits else None


@torch.no_grad()
def _copy(entries: Sequence[Entry], loaded: Sequence[Tensor]) -> None:
    for entry, tensor in zip(entries, loaded, strict=True):
        entry.tensor.copy_(tensor)


# -- random states ----------------------------------------------------------------------------------------------------


def random_states() -> dict[str, Tensor]:
    """All random states of this process, megatron-core's tracker included, as uint8 tensors on the CPU."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracked = get_cuda_rng_tracker().get_states().items()
    return process_states() | {f"tracker.{name}": state.cpu().clone() for name, state in tracked}


def restore_random_states(states: Mapping[str, Tensor]) -> None:
    """Inverse of ``random_states``."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    restore_process_states(states)
    prefix = "tracker."
    tracker = get_cuda_rng_tracker()
    tracker.set_states({name.removeprefix(prefix): state for name, state in states.items() if name.startswith(prefix)})
