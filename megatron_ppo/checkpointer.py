"""Checkpointer: one training rank's part in writing a checkpoint, from an agreed boundary to a folder that can be trusted.

Between two iterations of the loop. All training ranks call the same methods in the same order:

    rank 0            begin: a folder under a temporary name
    all ranks         the backend writes its part; the digest of each file is taken where it was written
    all ranks         agree whether every part is on the disk
    rank 0            finish: state, configuration, manifest, the final name, ``latest``; older ones go (``checkpoint.py``)

With ``async_save`` the second line goes on in a thread while training does, and the rest follows at a later boundary.

A checkpoint that cannot be written (disk full) costs the checkpoint, not the run: it is said, older ones stay, and training goes on to the
next one; only the last one of a run must succeed.
"""

from __future__ import annotations

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron_ppo.backends.base import PendingSave
from megatron_ppo.checkpoint import CheckpointFolder, TrainerState
from megatron_ppo.checkpoint_manifest import Digests, digest_files
from megatron_ppo.config import Config
from megatron_ppo.config_io import config_text
from megatron_ppo.training_engine import TrainingEngine
from megatron_ppo.world import World


@dataclass(frozen=True)
class _Writing:
    """A checkpoint under way."""

    state: TrainerState
    folder: Path
    digests: Future[Digests]


class Checkpointer:
    """Writes this run's checkpoints. Collective over the training mesh, all methods but ``is_writing``."""

    def __init__(self, config: Config, world: World, engine: TrainingEngine, *, newest: int | None) -> None:
        """``newest``: finished iterations of the checkpoint of this run folder that the run goes on from; None: it has none."""
        self.newest = newest
        """Finished iterations of the newest checkpoint that was asked for."""
        self._config = config
        self._world = world
        self._engine = engine
        self._writing: _Writing | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        root = Path(config.logging.run_dir) / "checkpoints"
        self._folder = CheckpointFolder(root, config.checkpoint.keep_checkpoints) if world.global_rank == 0 else None

    @property
    def is_writing(self) -> bool:
        """Whether this rank's part of a checkpoint is still on its way to the disk."""
        return self._writing is not None and not self._writing.digests.done()

    def save(self, iteration: int, *, kl_coef: float, wandb_run_id: str | None, must: bool) -> None:
        """Write, or with ``async_save`` begin to write, the checkpoint of ``iteration`` finished iterations.

        Raises:
            FloatingPointError: a weight is not finite: such a state is never saved.
            RuntimeError: it could not be written, and ``must`` is set.
        """
        self.conclude()
        self.newest = iteration
        broken = self._engine.non_finite()
        if broken:
            raise FloatingPointError(f"the weights after iteration {iteration} are not finite and are not saved: {', '.join(broken[:8])}")
        state = TrainerState(
            iteration=iteration,
            version=self._engine.version,
            kl_coef=kl_coef,
            num_optimizer_steps=dict(self._engine.num_optimizer_steps),
            consecutive_skipped=dict(self._engine.consecutive_skipped),
            wandb_run_id=wandb_run_id,
            mesh=self._config.mesh_sizes(self._world.world_size),
        )
        folder, fault = self._begin(iteration)
        if folder is not None:
            digests, fault = self._start(folder)
            self._writing = None if digests is None else _Writing(state, folder, digests)
        fault = self._agree(fault)
        if fault:
            self._give_up(iteration, folder, fault, must=must)
        elif must or not self._config.checkpoint.async_save:
            self.conclude(must=must)

    def conclude(self, *, must: bool = False) -> None:
        """Wait until the checkpoint under way is on the disk, and give it its name. Does nothing where none is under way."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        found, fault = _outcome(writing.digests)
        everyone: list[tuple[str, Digests]] = [("", {})] * dist.get_world_size()
        dist.all_gather_object(everyone, (fault, found))
        fault = next((text for text, _ in everyone if text), "")
        if self._folder is not None and not fault:
            try:
                digests = {name: digest for _, part in everyone for name, digest in part.items()}
                self._folder.finish(writing.state.iteration, writing.state, config_text(self._config), digests)
            except (OSError, ValueError) as error:
                fault = str(error)
        fault = self._agree(fault)
        if fault:
            self._give_up(writing.state.iteration, writing.folder, fault, must=must)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _begin(self, iteration: int) -> tuple[Path | None, str]:
        """The folder to write into, or why there is none: the same on all training ranks."""
        answer: list[tuple[str | None, str]] = [(None, "")]
        if self._folder is not None:
            try:
                answer[0] = (str(self._folder.begin(iteration)), "")
            except (OSError, ValueError) as error:
                answer[0] = (None, str(error))
        dist.broadcast_object_list(answer, src=0)
        path, fault = answer[0]
        return (None if path is None else Path(path)), fault

    def _start(self, folder: Path) -> tuple[Future[Digests] | None, str]:
        """Hand this rank's part to the backend, and what follows on the disk to the thread."""
        try:
            pending = self._engine.save_checkpoint(folder, asynchronous=self._config.checkpoint.async_save)
        except (OSError, ValueError, RuntimeError) as error:
            return None, str(error)
        return self._thread.submit(_complete, pending, folder), ""

    def _agree(self, fault: str) -> str:
        """The first fault of any training rank; empty where there is none."""
        everyone = [""] * dist.get_world_size()
        dist.all_gather_object(everyone, fault)
        return next((text for text in everyone if text), "")

    def _give_up(self, iteration: int, folder: Path | None, fault: str, *, must: bool) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.digests.exception()  # the disk may be full: let this rank's part come to its end before it is removed
        dist.barrier()
        if self._folder is not None:
            self._folder.abandon(iteration)
        what = f"the checkpoint of iteration {iteration}"
        text = fault if fault.startswith(what) else f"{what} cannot be written: {fault}"
        if must:
            raise RuntimeError(f"{text}; older checkpoints are as they were")
        if self._folder is not None:
            print(f"warning: {text}. Older checkpoints are as they were, and training goes on", file=sys.stderr, flush=True)


def _complete(pending: PendingSave, folder: Path) -> Digests:
    """Runs in the thread: wait until the files of this rank are on the disk, and take their digests."""
    pending.wait()
    return digest_files(folder, pending.files)


def _outcome(digests: Future[Digests]) -> tuple[Digests, str]:
    try:
        return digests.result(), ""
    except (OSError, ValueError, RuntimeError) as error:
        return {}, str(error)
