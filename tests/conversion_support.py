"""What the ranks of the conversion tests do with real megatron-core, and files that the tests compare. Test support only."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron_role_support import build, megatron
from safetensors import safe_open
from torch import Tensor

from megatron_ppo.checkpoint import CheckpointFolder, TrainerState
from megatron_ppo.config import Config
from megatron_ppo.config_io import config_text


@dataclass(frozen=True)
class Crossing:
    """A converted checkpoint that megatron-core loads on a mesh and saves again."""

    source: Path
    """Hugging Face folder that was converted."""
    other: Path
    """The same network with other weights, which the load must replace."""
    converted: Path
    saved: Path
    """Where megatron-core writes its torch_dist folder."""
    fields: dict[str, Any] = field(default_factory=dict)
    head: str = "lm"
    role: str = "actor"
    stacked: bool = True
    """False: megatron-core saves each layer under its own name."""


def cross(rank: int, world_size: int, crossings: list[Crossing]) -> list[list[str]]:
    """Parameters of this rank, a crossing each, that differ from what the source's own loader gives."""
    from megatron_ppo import device

    device.prepare_megatron()
    dist.init_process_group("gloo")
    found = []
    for crossing in crossings:
        config = Config().replace(model_path=str(crossing.source), **crossing.fields)
        with megatron(config):
            found.append(_cross_one(crossing, config))
    dist.destroy_process_group()
    return found


def _cross_one(crossing: Crossing, config: Config) -> list[str]:
    from megatron.core import dist_checkpointing

    expected = build(crossing.source, config, crossing.head)
    chunks = build(crossing.other, config, crossing.head)
    loaded = dist_checkpointing.load(_sharded(chunks, crossing, stacked=True), str(crossing.converted / "megatron"))
    differing = []
    for number, (chunk, wanted) in enumerate(zip(chunks, expected, strict=True)):
        prefix = f"{crossing.role}.model."
        chunk.load_state_dict({name.removeprefix(prefix): value for name, value in loaded[f"model{number}"].items()})
        pairs = zip(chunk.named_parameters(), wanted.parameters(), strict=True)
        differing += [name for (name, one), other in pairs if not torch.equal(one, other)]
    if dist.get_rank() == 0:
        (crossing.saved / "megatron").mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(_sharded(chunks, crossing, stacked=crossing.stacked), str(crossing.saved / "megatron"))
    return differing


def _sharded(chunks: list[Any], crossing: Crossing, *, stacked: bool) -> dict[str, Any]:
    metadata = None if stacked else {"non_homogeneous_layers": True}
    prefix = f"{crossing.role}.model."
    return {f"model{number}": chunk.sharded_state_dict(prefix=prefix, metadata=metadata) for number, chunk in enumerate(chunks)}


@dataclass(frozen=True)
class Run:
    """A run of the product's backend that starts from converted weights, saves a checkpoint and exports it by itself."""

    model: Path
    """Hugging Face folder with other weights than the converted ones."""
    converted: tuple[Path, ...]
    folder: Path
    fields: dict[str, Any] = field(default_factory=dict)


def run_backend(rank: int, world_size: int, runs: list[Run]) -> None:
    """``run.folder`` gets a checkpoint, and ``by_backend/`` what the backend itself writes of each role it trains."""
    from megatron_ppo.backends.megatron import MegatronBackend
    from megatron_ppo.backends.megatron_setup import destroy_megatron

    dist.init_process_group("gloo")
    for run in runs:
        config = Config().replace(model_path=str(run.model), **run.fields)
        backend = MegatronBackend(config, num_optimizer_steps=8)
        for folder in run.converted:
            backend.load_weights(folder)
        checkpoints = CheckpointFolder(run.folder / "checkpoints", None)
        if rank == 0:
            checkpoints.begin(3)
        dist.barrier()
        backend.save_checkpoint(checkpoints.temporary(3))
        if rank == 0:
            checkpoints.finish(3, TrainerState(3, 3, 0.1, {"actor": 0}, {"actor": 0}, None, "", {"world": 2}), config_text(config))
        for role in ("actor",) if config.model.critic == "none" else ("actor", "critic"):
            backend.export_hf(run.folder / "by_backend" / role, role)
        destroy_megatron()
    dist.destroy_process_group()


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a Hugging Face folder, by name."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
    return found


def files_below(folder: Path) -> set[str]:
    """Relative paths of all files."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
