"""Checkpointer: one training rank's part in writing a checkpoint, from an agreed boundary to a folder that can be trusted.

Between two iterations of the loop. All training ranks call the same methods in the same order:

    rank 0            begin: a folder under a temporary name
    all ranks         the backend copies its part; all agree that this went well
    a thread of each  the files reach the disk, their digests are taken and handed to rank 0 through the launch's store
    rank 0's thread   finish: state, configuration, manifest, the final name, ``latest``; older ones go (``checkpoint.py``)

With ``async_save`` training goes on after the second line; otherwise all wait for the end. A failure in a thread is learned by all ranks
when they come to ``conclude``.

A checkpoint that cannot be written (disk full) costs the checkpoint, not the run: it is said, older ones stay, and training goes on to the
next one; only the last one of a run must succeed.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron_ppo.backends.base import PendingSave
from megatron_ppo.checkpoint import CheckpointFolder, TrainerState
from megatron_ppo.checkpoint_manifest import digest_files
from megatron_ppo.config import Config
from megatron_ppo.config_io import config_text
from megatron_ppo.run_folder import CHECKPOINTS, replace_folder
from megatron_ppo.training_engine import TrainingEngine
from megatron_ppo.world import World


@dataclass(frozen=True)
class _Writing:
    """A checkpoint under way."""

    iteration: int
    fault: Future[str]
    """Why it could not be written, the same on all ranks; empty: it is whole, and has its name."""


class Checkpointer:
    """Writes this run's checkpoints. Collective over the training mesh, all methods but ``is_writing``."""

    def __init__(self, config: Config, world: World, engine: TrainingEngine, *, newest: int | None, prompts: str) -> None:
        """``newest``: finished iterations of the checkpoint of this run folder that the run goes on from; None: it has none.

        ``prompts``: fingerprint of the prompts that iterations are drawn from.
        """
        self.newest = newest
        """Finished iterations of the newest checkpoint that was asked for."""
        self._config = config
        self._world = world
        self._engine = engine
        self._prompts = prompts
        self._writing: _Writing | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._store = world.connect(60.0 * config.parallel.distributed_timeout_minutes)  # the thread's own: a wait blocks a connection
        root = Path(config.logging.run_dir) / CHECKPOINTS
        self._folder = CheckpointFolder(root, config.checkpoint.keep_checkpoints) if world.global_rank == 0 else None

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is still on its way to the disk."""
        return self._writing is not None and not self._writing.fault.done()

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
            prompts=self._prompts,
            mesh=self._config.mesh_sizes(self._world.world_size),
        )
        folder, fault = self._begin(iteration)
        pending: PendingSave | None = None
        if folder is not None:
            try:
                pending = self._engine.save_checkpoint(folder, asynchronous=self._config.checkpoint.async_save)
            except (OSError, ValueError, RuntimeError) as error:
                fault = _words(error)
        fault = self._agree(fault)
        if fault or folder is None or pending is None:
            if pending is not None:
                with contextlib.suppress(OSError):  # what other ranks met is what is said
                    pending.wait()
            self._give_up(iteration, fault, must=must)
            return
        self._writing = _Writing(iteration, self._thread.submit(self._complete, pending, folder, state))
        if must or not self._config.checkpoint.async_save:
            self.conclude(must=must)

    def conclude(self, *, must: bool = False) -> None:
        """Wait for the end of the checkpoint under way. Does nothing where none is under way; ``must`` as in ``save``."""
        writing, self._writing = self._writing, None
        if writing is not None and (fault := writing.fault.result()):
            self._give_up(writing.iteration, fault, must=must)

    def export_hf(self, name: str, *, must: bool) -> None:
        """Write the actor in Hugging Face format to ``RUN_DIR/NAME``, in place of an export of that name.

        A failure is said, and with ``must`` raised (``RuntimeError``).
        """
        target = Path(self._config.logging.run_dir) / name
        partial = target.with_name(f".{name}.tmp")
        fault = ""
        if self._folder is not None:
            shutil.rmtree(partial, ignore_errors=True)
        try:
            self._engine.export_hf(partial)
            if self._folder is not None:
                replace_folder(partial, target)
        except (OSError, ValueError) as error:
            fault = _words(error)
        fault = self._agree(fault)
        if fault and must:
            raise RuntimeError(f"the export to {target} failed: {fault}")
        if fault and self._folder is not None:
            print(f"warning: the export to {target} failed, and training goes on: {fault}", file=sys.stderr, flush=True)

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
                answer[0] = (None, _words(error))
        dist.broadcast_object_list(answer, src=0)
        path, fault = answer[0]
        return (None if path is None else Path(path)), fault

    def _agree(self, fault: str) -> str:
        """The first fault of any training rank; empty where there is none."""
        everyone = [""] * dist.get_world_size()
        dist.all_gather_object(everyone, fault)
        return next((text for text in everyone if text), "")

    def _complete(self, pending: PendingSave, folder: Path, state: TrainerState) -> str:
        """Runs in the thread, without collectives: wait until this rank's files are on the disk; rank 0 then makes a checkpoint of all."""
        own, key = self._world.rank, f"checkpoint/{state.iteration}"
        try:
            pending.wait()
            part = json.dumps(["", digest_files(folder, pending.files)])
        except (OSError, ValueError, RuntimeError) as error:
            part = json.dumps([f"rank {own}: {_words(error)}", {}])
        self._store.set(f"{key}/{own}", part)
        if self._folder is not None:
            self._store.set(f"{key}/end", self._finish(self._folder, key, state))
        return self._store.get(f"{key}/end").decode()

    def _finish(self, checkpoints: CheckpointFolder, key: str, state: TrainerState) -> str:
        parts = [json.loads(self._store.get(f"{key}/{rank}")) for rank in range(self._world.mesh_size)]
        fault = next((text for text, _ in parts if text), "")
        if fault:
            return str(fault)
        digests = {name: (int(size), str(digest)) for _, files in parts for name, (size, digest) in files.items()}
        try:
            checkpoints.finish(state.iteration, state, config_text(self._config), digests)
        except (OSError, ValueError) as error:
            return _words(error)
        print(f"saved the checkpoint of iteration {state.iteration}", flush=True)
        return ""

    def _give_up(self, iteration: int, fault: str, *, must: bool) -> None:
        dist.barrier()  # no rank writes any more
        if self._folder is not None:
            self._folder.abandon(iteration)
        what = f"the checkpoint of iteration {iteration}"
        text = fault if fault.startswith(what) else f"{what} cannot be written: {fault}"
        if must:
            raise RuntimeError(f"{text}; older checkpoints are as they were")
        if self._folder is not None:
            print(f"warning: {text}. Older checkpoints are as they were, and training goes on", file=sys.stderr, flush=True)


def _words(error: Exception) -> str:
    """Without the number that Python puts in front of an ``OSError``."""
    return re.sub(r"^\[Errno \d+\] ", "", str(error))
