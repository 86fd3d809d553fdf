"""What a run goes on from: found and checked at its start, before any model is built, by all ranks alike.

    rank 0            names the candidates, newest first: those of the run folder, or those that ``resume`` names
    training ranks    each reads its share of a candidate's files and takes their digests; one that is damaged is left for the next
    rank 0            holds the configuration to the one in the checkpoint, and publishes the answer in the launch's store

The backend loads it later (``TrainingEngine.load_checkpoint``); what a checkpoint looks like on the disk is ``checkpoint.py``'s.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from dataclasses import dataclass
from pathlib import Path

from megatron_ppo.checkpoint import STATE_FILE, CheckpointFolder, TrainerState, fault_of, mesh_difference, read_state
from megatron_ppo.checkpoint_config import config_difference, read_config
from megatron_ppo.config import Config
from megatron_ppo.run_folder import CHECKPOINTS, read_launch
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


def find_resume_point(config: Config, world: World, prompts: str) -> ResumePoint:
    """Collective over the launch. ``prompts``: fingerprint of those that this launch has read.

    Raises:
        InputError: the checkpoint that ``resume`` names cannot be used, every one of the run folder is damaged, or the configuration
            means something else than the checkpoint's.
    """
    answer = _agreed_candidate(config, world) if world.is_training else None
    if world.global_rank == 0:
        assert answer is not None
        point = _point(config, world, answer, prompts)
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
    candidates = _candidates(config, world) if world.global_rank == 0 else []
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


def _candidates(config: Config, world: World) -> list[_Candidate]:
    """In the order in which they are tried; an entry without a folder is the beginning.

    The order that a launch was given holds once: when its launcher starts it again it goes on from the checkpoints that it has made.
    """
    resume, run_dir = config.checkpoint.resume, Path(config.logging.run_dir)
    own = [_Candidate(str(folder), True) for folder in CheckpointFolder(run_dir / CHECKPOINTS, None).candidates()]
    if resume == "auto":
        return own or [_Candidate(None)]
    before = read_launch(run_dir)
    is_again = before is not None and before.resume == resume
    is_restart = before is not None and is_again and before.run_id == world.run_id != "local"
    if resume == "never":
        return own if own and is_restart else [_Candidate(None)]
    named = [_Candidate(str(folder), _is_in(folder, run_dir)) for folder in _named(Path(resume))]
    # A folder of this run itself is an order to go back; the same order given anew goes back once more.
    goes_on = is_restart if named[0].is_own else is_again
    return [*own, *named] if goes_on else named


def _named(folder: Path) -> list[Path]:
    """A run folder, or its ``checkpoints``, stands for the checkpoints in it, the newest first."""
    for root in (folder / CHECKPOINTS, folder):
        found = CheckpointFolder(root, None).candidates()
        if found:
            return found
    return [folder]


def _is_in(folder: Path, run_dir: Path) -> bool:
    return folder.resolve().is_relative_to((run_dir / CHECKPOINTS).resolve())


def _fault(folder: Path, world: World) -> str:
    """Why the checkpoint cannot be used, as far as this rank has looked; empty: nothing found. Nothing is unpickled before all agree."""
    try:
        if world.rank == 0:
            stored = [folder / name for name in TENSOR_FOLDERS if (folder / name).is_dir()]
            if not stored:
                raise ValueError(f"{folder} holds none of {', '.join(TENSOR_FOLDERS)}: there are no weights in it")
            for path in stored:
                check_torch_dist_folder(path)
    except (ValueError, OSError) as error:
        return str(error)
    return fault_of(folder, share=(world.rank, world.mesh_size))


def _nothing_usable(config: Config, faults: list[str]) -> str:
    listed = "".join(f"\n  - {fault}" for fault in faults)
    if config.checkpoint.resume in ("auto", "never"):
        remedy = "repair one, name another by --resume FOLDER, or say --resume never to begin anew (they are set aside, not deleted)"
        return f"no checkpoint in {Path(config.logging.run_dir) / CHECKPOINTS} can be used:{listed}\n{remedy}"
    return f"resume = {config.checkpoint.resume} cannot be used:{listed}"


def _check_backend(folder: Path, backend: str) -> None:
    """``InputError`` where the tensors are another backend's."""
    stored = [name for name in TENSOR_FOLDERS if (folder / name).is_dir()]
    if backend not in stored:
        raise InputError(
            f"{folder} was written with backend {stored[0]} and cannot be read with backend {backend}: resume with --backend {stored[0]}, "
            "or begin a run of its own from the weights: export them (--save-hf-interval 0 leaves hf in the run folder) and give "
            "--load-hf RUN/hf --resume never or another --run-dir"
        )


def _point(config: Config, world: World, candidate: _Candidate, prompts: str) -> ResumePoint:
    """Rank 0: read the state, and refuse a configuration that means something else."""
    if candidate.folder is None:
        return ResumePoint()
    folder = Path(candidate.folder)
    _check_backend(folder, config.parallel.backend)
    try:
        if not (folder / STATE_FILE).is_file():
            return ResumePoint(folder, None, candidate.is_own)
        state, accepted = read_state(folder), config.checkpoint.allow_changed
        saved = read_config(folder, accepted)
        difference = config_difference(saved, config, accepted)
    except (ValueError, OSError) as error:
        raise InputError(str(error)) from None
    if difference:
        raise InputError(f"the configuration is not that of the checkpoint {folder}:\n{difference}")
    if state.prompts != prompts and "prompt_data" not in accepted:
        raise InputError(
            f"the prompts are not those that {folder} was made with: {config.data.prompt_data} has changed, so that iterations would take "
            "others; restore the file, or go on with the new one: --allow-changed prompt_data"
        )
    if saved.algorithm.kl_coef != config.algorithm.kl_coef:  # allowed: an order, not where a controller has come to
        state = dataclasses.replace(state, kl_coef=config.algorithm.kl_coef)
    if state.iteration > config.training.train_iters:
        raise InputError(f"{folder} has finished {state.iteration} iterations, but train_iters = {config.training.train_iters}")
    notice = mesh_difference(state.mesh, config.mesh_sizes(world.world_size))
    print(f"resuming after iteration {state.iteration} from {folder}" + (f"\n{notice}" if notice else ""), flush=True)
    if state.iteration == config.training.train_iters:
        print(
            "nothing is left to do: raise --train-iters to go on (with a rate that decays also --allow-changed train_iters), or say "
            "--resume never to begin anew",
            flush=True,
        )
    return ResumePoint(folder, state, candidate.is_own)
