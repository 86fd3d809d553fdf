"""Checkpoints of the FSDP backend: weights, moments and random states of the trained networks, exactly, on any mesh.

    save   live shards --(one copy)--> files in memory --(this call, or a thread)--> fsdp/, ranks/
    load   fsdp/ -> shards in host memory -> checked on all ranks -> live shards

``fsdp/`` is torch's distributed format (``torch.distributed.checkpoint.load`` reads it), all of it in fp32:

    {role}.model.{transformers' name}                        whole shape as in the model; a layer's experts are one tensor
    {role}.optimizer.{exp_avg or exp_avg_sq}.{that name}
    {role}.optimizer.num_steps                               int64 [1]

A rank writes its rows, and copies along the axis ``replicate`` share the writing, so that any mesh can read what any other wrote.
``ranks/`` holds random states. The rules are those of ``megatron_checkpoint.py``: nothing live is touched before everything is read,
checked, and found good by all ranks; whoever calls ``load`` has checked digests and pickles before. Left out: the loop's own state, and
names of folders.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_ppo.backends.random_states import random_states, read_states, restore_random_states, states_bytes, states_file
from megatron_ppo.backends.staged_save import PendingSave, StagedFiles
from megatron_ppo.backends.stored_tensors import (
    NUM_STEPS,
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
from megatron_ppo.families import SCORE_HEAD
from megatron_ppo.resharding.fsdp_layout import shard_rows

if TYPE_CHECKING:
    from megatron_ppo.backends.fsdp import Network

logger = logging.getLogger(__name__)

FSDP_FOLDER = "fsdp"


@dataclass(frozen=True)
class Rows:
    """A tensor of this rank that is some rows of one checkpoint tensor."""

    tensor: Tensor
    first: int
    """Row of the whole tensor at which it starts."""
    num_rows: int
    """Of the whole tensor."""

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The rows as torch's format describes them."""
        return ChunkStorageMetadata(torch.Size([self.first, *[0] * (self.tensor.dim() - 1)]), self.tensor.shape)

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return (self.num_rows, *self.tensor.shape[1:])


def save(networks: Mapping[str, Network], folder: Path, mesh: Mapping[str, int], *, asynchronous: bool) -> PendingSave:
    """Write all trained networks and this rank's random states below the existing ``folder``. Collective over the training mesh.

    ``networks``: role -> network. ``mesh``: sizes of ``replicate`` and ``shard``. Returns when everything is copied, and without
    ``asynchronous`` when everything is on the disk of all ranks.

    Raises:
        OSError: a rank could not write; the same on all ranks. With ``asynchronous`` it is ``PendingSave.wait`` that raises, on that rank.
        RuntimeError: a rank could not copy its state; the same on all ranks.
    """
    staged = StagedFiles()
    rows = together("copying the state", lambda: _stage_own(networks, mesh, staged), RuntimeError)
    try:
        dcp.save(rows, storage_writer=_StagingWriter(staged), planner=_SavePlanner())
    except CheckpointException as error:  # no Exception of Python's: nobody above expects it
        raise RuntimeError(f"the state could not be copied for a checkpoint: {reasons(error) or 'another rank failed'}") from error
    pending = PendingSave(folder, staged.contents(), asynchronous=asynchronous)
    if not asynchronous:
        fault = first_fault(fault_of(pending.wait))
        if fault:
            raise OSError(f"the checkpoint {folder} could not be written: {fault}")
    return pending


def load(networks: Mapping[str, Network], folder: Path, mesh: Mapping[str, int]) -> None:
    """Take over what ``save`` wrote, on this or another mesh. Collective over the training mesh.

    Random states are taken over where ``mesh`` is the saved one; else a notice is logged and they stay as the start seeded them.

    Raises:
        ValueError: the checkpoint is of another model or optimizer, lacks or holds tensors that this run does not, or cannot be read.
            The same on all ranks, and nothing has changed.
    """
    rows = _own_rows(networks, mesh)
    saved = together(f"reading {folder}", lambda: _read_index(folder))
    refuse(folder, mismatches(everywhere(_described(rows)), saved))
    loaded = _read_tensors(folder, rows)
    states = together(f"reading {folder}", lambda: read_states(folder, mesh))
    _copy(rows, loaded)
    for role, network in networks.items():
        assert network.optimizer is not None
        network.optimizer.restore_num_steps(int(loaded[f"{role}.optimizer.{NUM_STEPS}"]))
    if states is not None:
        restore_random_states(states)


def load_weights(networks: Mapping[str, Network], folder: Path, mesh: Mapping[str, int]) -> None:
    """Take over the weights of a training checkpoint alone; optimizers stay as they are.

    A role that it lacks keeps its weights, and so does a scalar head. Collective over the training mesh; errors are those of ``load``.
    """
    saved = together(f"reading {folder}", lambda: _read_index(folder))
    present = present_roles(list(networks), saved, folder)
    absent = sorted(set(networks) - set(present))
    if absent and dist.get_rank() == 0:
        logger.warning("%s holds no weights of the %s, which starts from the Hugging Face folder of the configuration", folder, absent[0])
    rows = {key: own for key, own in _own_rows(networks, mesh).items() if key.startswith(tuple(f"{role}.model." for role in present))}
    wanted = everywhere(_described(rows))
    offered = {key: value for key, value in saved.items() if key.startswith(tuple(f"{role}.model." for role in present))}
    optional = {key for key in set(wanted) ^ set(offered) if key.endswith(f".model.{SCORE_HEAD}")}
    wanted, offered = ({key: value for key, value in one.items() if key not in optional} for one in (wanted, offered))
    refuse(folder, mismatches(wanted, offered))
    rows = {key: own for key, own in rows.items() if key in wanted}
    _copy(rows, _read_tensors(folder, rows))


# -- what lies where --------------------------------------------------------------------------------------------------


def _own_rows(networks: Mapping[str, Network], mesh: Mapping[str, int]) -> dict[str, Rows]:
    """Checkpoint key -> this rank's live rows; parameters of which it has none are left out."""
    shard_size, found = mesh["shard"], {}
    for role, network in networks.items():
        assert network.optimizer is not None
        kinds = {"model": network.shards()} | {f"optimizer.{kind}": named for kind, named in network.optimizer.moments().items()}
        for kind, named in kinds.items():
            for name, tensor in named.items():
                num_rows = network.parameters[name].shape[0]
                if tensor.numel():
                    first, _ = shard_rows(num_rows, shard_size, dist.get_rank() % shard_size)
                    found[f"{role}.{kind}.{name}"] = Rows(tensor, first, num_rows)
        found[f"{role}.optimizer.{NUM_STEPS}"] = Rows(torch.tensor([network.optimizer.num_steps]), 0, 1)
    return found


def _described(rows: Mapping[str, Rows]) -> Saved:
    return {key: (own.whole, own.tensor.dtype) for key, own in rows.items()}


def _stage_own(networks: Mapping[str, Network], mesh: Mapping[str, int], staged: StagedFiles) -> dict[str, Rows]:
    """What needs no other rank: random states, and the list of tensors."""
    staged.add(states_file(dist.get_rank()), states_bytes(random_states(), mesh))
    return _own_rows(networks, mesh)


def _read_index(folder: Path) -> Saved:
    path = folder / FSDP_FOLDER
    if not (path / ".metadata").is_file():
        raise ValueError(f"{path / '.metadata'} is missing: this is no checkpoint of backend fsdp")
    return stored_tensors(path)


@torch.no_grad()
def _copy(rows: Mapping[str, Rows], loaded: Mapping[str, Tensor]) -> None:
    for key, own in rows.items():
        own.tensor.copy_(loaded[key])


def _read_tensors(folder: Path, rows: Mapping[str, Rows]) -> dict[str, Tensor]:
    """The same rows in host memory. Collective; a fault of any rank is a ``ValueError`` on all."""
    targets = {key: Rows(torch.empty_like(own.tensor, device="cpu"), own.first, own.num_rows) for key, own in rows.items()}
    try:
        dcp.load(dict(targets), storage_reader=FileSystemReader(folder / FSDP_FOLDER), planner=_LoadPlanner())
    except CheckpointException as error:
        raise ValueError(f"{folder} cannot be read: {reasons(error)}") from error
    return {key: own.tensor for key, own in targets.items()}


# -- torch's checkpoint format ----------------------------------------------------------------------------------------


class _StagingWriter(FileSystemWriter):
    """torch's writer of checkpoint files, into memory."""

    def __init__(self, staged: StagedFiles) -> None:
        super().__init__(FSDP_FOLDER, sync_files=False)
        self.fs: Any = staged
        self.path = FSDP_FOLDER


class _SavePlanner(DefaultSavePlanner):
    """Saves ``Rows``; of ranks that hold the same rows one writes them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """One item a tensor."""
        items = []
        for key, own in self.state_dict.items():
            data = TensorWriteData(own.chunk, TensorProperties.create_from_tensor(own.tensor), torch.Size(own.whole))
            items.append(WriteItem(MetadataIndex(key, own.chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The tensor of an item."""
        return self.state_dict[index.fqn].tensor


class _LoadPlanner(DefaultLoadPlanner):
    """Fills ``Rows``, from whatever rows the files hold."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Take over what is to be read; torch's own would look for tensors in it."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """What of the files goes into which rows."""
        assert self.metadata is not None
        stored: Any = self.metadata.state_dict_metadata
        return LoadPlan(
            [item for key, own in self.state_dict.items() for item in create_read_items_for_chunk_list(key, stored[key], [own.chunk])]
        )

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The tensor of an item."""
        return self.state_dict[index.fqn].tensor
