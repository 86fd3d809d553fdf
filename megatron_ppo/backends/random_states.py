"""The random states of one process as tensors, for a checkpoint's ``ranks/``, and the file they stand in.

Each rank of the training mesh has a file of its own, ``ranks/rank_NNNNN.safetensors``, whose header says on which mesh it was written: on
another mesh the ranks do other work, and their states would mean nothing. What a framework keeps beside torch's own generators
(megatron-core's tracker) is added by its backend.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from megatron_ppo import device

logger = logging.getLogger(__name__)

RANKS_FOLDER = "ranks"


def random_states() -> dict[str, Tensor]:
    """The states of torch, numpy and Python in this process, as uint8 tensors on the CPU."""
    kind, keys, position, has_gauss, gauss = numpy.random.get_state()
    version, internal, next_gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "numpy": _json_tensor([str(kind), numpy.asarray(keys).tolist(), position, has_gauss, gauss]),
        "python": _json_tensor([version, internal, next_gauss]),
    }
    if device.has_cuda():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: Mapping[str, Tensor]) -> None:
    """Inverse of ``random_states``; other names are left to whoever put them there."""
    torch.set_rng_state(states["torch"])
    kind, keys, position, has_gauss, gauss = _json_value(states["numpy"])
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss))
    version, internal, next_gauss = _json_value(states["python"])
    random.setstate((version, tuple(internal), next_gauss))
    if device.has_cuda() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def states_file(rank: int) -> str:
    """Path of a rank's file, relative to the checkpoint folder."""
    return f"{RANKS_FOLDER}/rank_{rank:05d}.safetensors"


def states_bytes(states: Mapping[str, Tensor], mesh: Mapping[str, int]) -> bytes:
    """Content of a rank's file. ``mesh``: axis -> size of the training mesh."""
    return safetensors_bytes(dict(states), {"mesh": json.dumps(dict(mesh))})


def read_states(folder: Path, mesh: Mapping[str, int]) -> dict[str, Tensor] | None:
    """This rank's states, where ``mesh`` is the one they were saved on; None, with a notice from rank 0, where it is another.

    ``ValueError`` where the file cannot be read.
    """
    saved = json.loads(_open(folder, 0).metadata().get("mesh", "{}"))
    if saved != dict(mesh):
        if dist.get_rank() == 0:
            logger.warning("random states are seeded anew: saved with %s, now %s", mesh_text(saved), mesh_text(mesh))
        return None
    states = _open(folder, dist.get_rank())
    return {name: states.get_tensor(name) for name in states.keys()}  # noqa: SIM118  not a dict


def mesh_text(mesh: Mapping[str, int]) -> str:
    """``TP2 PP1 DP4``: sizes by the names of their axes."""
    return " ".join(f"{name.upper()}{size}" for name, size in mesh.items())


def _open(folder: Path, rank: int) -> Any:
    path = folder / states_file(rank)
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _json_tensor(value: object) -> Tensor:
    """JSON keeps integers and, by shortest digits, floats exactly."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _json_value(tensor: Tensor) -> Any:
    return json.loads(tensor.numpy().tobytes())
