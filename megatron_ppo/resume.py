"""What a run goes on from: found and checked at its start, before any model is built, by all ranks alike.

    rank 0            names the candidates, newest first: those of the run folder, or the one that ``resume`` names
    training ranks    each reads its share of a candidate's files and takes their digests; one that is damaged is left for the next
    rank 0            holds the configuration to the one in the checkpoint, and publishes the answer in the launch's store

The backend loads it later (``TrainingEngine.load_checkpoint``); what a checkpoint looks like on the disk is ``checkpoint.py``'s.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from megatron_ppo.checkpoint import STATE_FILE, CheckpointFolder, TrainerState, mesh_difference, read_state
from megatron_ppo.checkpoint_config import config_difference, read_config
from megatron_ppo.checkpoint_manifest import check_checkpoint
from megatron_ppo.config import Config
from megatron_ppo.unsafe_pickle import check_torch_dist_folder
from megatron_ppo.watchdog import InputError
from megatron_ppo.world import World

logger = logging.getLogger(__name__)

TENSOR_FOLDERS = ("megatron", "fsdp")
"""What a backend keeps its tensors in, named after it; a checkpoint has one of them, which the backend asks for."""


@dataclass(frozen=True)
class ResumePoint:
    """Where a run begins."""

    folder: Path | None = None
    """The checkpoint to load; None: the model's own weights."""
    state: TrainerState | None = None
    """None where there is no checkpoint, or one of weights alone."""
    is_own: bool = False
    """The checkpoint stands in this run's folder, whose records go on."""

    @property
    def iteration(self) -> int:
        """Iterations that are finished."""
        return 0 if self.state is None else self.state.iteration


def find_resume_point(config: Config, world: World) -> ResumePoint:
    """Collective over the launch.

    Raises:
        InputError: the checkpoint that ``resume`` names cannot be used, every one of the run folder is damaged, or the configuration
            means something else than the checkpoint's.
    """
    answer = _agreed_candidate(config, world) if world.is_training else None
    if world.global_rank == 0:
        assert answer is not None
        point = _point(config, world, answer)
        text = {"folder": answer.folder, "own": answer.is_own, "state": None if point.state is None else point.state.to_json()}
        world.store.set("resume", json.dumps(text))
        return point
    found = json.loads(world.store.get("resume"))
    folder = None if found["folder"] is None else Path(found["folder"])
    state = None if found["state"] is None else TrainerState.from_json(found["state"])
    return ResumePoint(folder, state, bool(found["own"]))


@dataclass(frozen=True)
class _Candidate:
    folder: str | None
    is_own: bool = False


def _agreed_candidate(config: Config, world: World) -> _Candidate:
    """The first candidate without a fault, the same on all training ranks."""
    store, number = world.store, 0
    faults: list[str] = []
    candidates = _candidates(config) if world.global_rank == 0 else []
    while True:
        if world.global_rank == 0:
            offered = candidates[number] if number < len(candidates) else None
            store.set(f"resume/offer/{number}", json.dumps(None if offered is None else [offered.folder, offered.is_own]))
        offer = json.loads(store.get(f"resume/offer/{number}"))
        if offer is None:
            raise InputError(_nothing_usable(config, faults))
        candidate = _Candidate(offer[0], bool(offer[1]))
        if candidate.folder is None:
            return candidate
        store.set(f"resume/fault/{number}/{world.rank}", _fault(Path(candidate.folder), world))
        shares = [store.get(f"resume/fault/{number}/{rank}").decode() for rank in range(world.mesh_size)]
        fault = next((text for text in shares if text), "")
        if not fault:
            return candidate
        faults.append(fault)
        if world.global_rank == 0:
            logger.warning("the checkpoint %s cannot be used and is passed over: %s", candidate.folder, fault)
        number += 1


def _candidates(config: Config) -> list[_Candidate]:
    """In the order in which they are tried; an entry without a folder is the beginning."""
    resume = config.checkpoint.resume
    if resume == "never":
        return [_Candidate(None)]
    own = [_Candidate(str(folder), True) for folder in CheckpointFolder(_root(config), None).candidates()]
    if own:
        return own
    return [_Candidate(None)] if resume == "auto" else [_Candidate(str(_within(Path(resume))))]


def _root(config: Config) -> Path:
    return Path(config.logging.run_dir) / "checkpoints"


def _within(folder: Path) -> Path:
    """A run folder, or its ``checkpoints``, stands for the newest complete checkpoint in it."""
    for root in (folder / "checkpoints", folder):
        found = CheckpointFolder(root, None).candidates()
        if found:
            return found[0]
    return folder


def _fault(folder: Path, world: World) -> str:
    """Why the checkpoint cannot be used, as far as this rank has looked; empty: nothing found. Rank 0 looks before anybody opens a file."""
    try:
        if world.rank == 0:
            check_checkpoint(folder, verify="sizes")
            stored = [folder / name for name in TENSOR_FOLDERS if (folder / name).is_dir()]
            if not stored:
                raise ValueError(f"{folder} holds none of {', '.join(TENSOR_FOLDERS)}: there are no weights in it")
            for path in stored:
                check_torch_dist_folder(path)
        check_checkpoint(folder, share=(world.rank, world.mesh_size))
    except (ValueError, OSError) as error:
        return str(error)
    return ""


def _nothing_usable(config: Config, faults: list[str]) -> str:
    listed = "".join(f"\n  - {fault}" for fault in faults)
    if config.checkpoint.resume in ("auto", "never"):
        remedy = "repair or restore one of them, or say --resume never to begin anew (they are set aside, not deleted)"
        return f"no checkpoint in {_root(config)} can be used:{listed}\n{remedy}"
    return f"resume = {config.checkpoint.resume} cannot be used:{listed}"


def _point(config: Config, world: World, candidate: _Candidate) -> ResumePoint:
    """Rank 0: read the state, and refuse a configuration that means something else."""
    if candidate.folder is None:
        return ResumePoint()
    folder = Path(candidate.folder)
    try:
        if not (folder / STATE_FILE).is_file():
            return ResumePoint(folder, None, candidate.is_own)
        state, accepted = read_state(folder), config.checkpoint.allow_changed
        difference = config_difference(read_config(folder, accepted), config, accepted)
    except (ValueError, OSError) as error:
        raise InputError(str(error)) from None
    if difference:
        raise InputError(f"the configuration is not that of the checkpoint {folder}:\n{difference}")
    if state.iteration > config.training.train_iters:
        raise InputError(f"{folder} has finished {state.iteration} iterations, but train_iters = {config.training.train_iters}")
    if state.iteration == config.training.train_iters:
        print("nothing is left to do: raise --train-iters to go on, or say --resume never to begin anew", flush=True)
    notice = mesh_difference(state.mesh, config.mesh_sizes(world.world_size))
    print(f"resuming after iteration {state.iteration} from {folder}" + (f"\n{notice}" if notice else ""), flush=True)
    return ResumePoint(folder, state, candidate.is_own)
