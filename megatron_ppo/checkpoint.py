"""The folder of a run's checkpoints: written so that a crash at any moment leaves the last good one.

::

    RUN_DIR/checkpoints/
      latest                    "iter_0000010": the checkpoint that a resume takes
      iter_0000010/             10 = finished iterations
        megatron/  ranks/       written by the backend, all ranks
        state.json              TrainerState
        config.yaml             the resolved configuration
        COMPLETE                manifest, written last (checkpoint_manifest.py)
      .iter_0000012.tmp/        being written: not read, unless it is complete and only its rename was cut off
      .iter_0000008.deleting/   being deleted: never read

Order of a save: everything into ``.iter_N.tmp`` and onto the disk, ``COMPLETE`` onto the disk, rename to ``iter_N``, rename of
``latest``, and only then are older checkpoints deleted. So a folder called ``iter_N`` is always whole, whatever was killed when.

One process, global rank 0, holds a ``CheckpointFolder`` for writing (the run folder's lock keeps other runs away); any process may read.
Files only: which ranks write what, and when all of them have, is the caller's. No archive is unpacked anywhere: a checkpoint is plain
files, and their names are compared with the manifest's, which may not leave the folder.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_ppo.checkpoint_config import CONFIG_FILE, config_difference, read_config, two_columns
from megatron_ppo.checkpoint_manifest import (
    Digests,
    Verify,
    check_checkpoint,
    digest_files,
    read_manifest,
    sync_files,
    sync_path,
    write_manifest,
    write_synced,
)

__all__ = [
    "CheckpointFolder",
    "Digests",
    "TrainerState",
    "Verify",
    "check_checkpoint",
    "config_difference",
    "digest_files",
    "mesh_difference",
    "read_config",
    "read_state",
    "sync_files",
]

logger = logging.getLogger(__name__)

STATE_FILE = "state.json"
LATEST = "latest"


# -- the state of the loop --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainerState:
    """What the loop itself must know to go on; weights, moments and random states are in the backend's files."""

    iteration: int
    """Finished iterations; the next one has this number."""
    version: int
    """Version of the actor's weights."""
    kl_coef: float
    """The KL controller's present value."""
    num_optimizer_steps: dict[str, int]
    """Role -> optimizer steps taken."""
    consecutive_skipped: dict[str, int]
    """Role -> optimizer steps skipped in a row so far, as ``max_skipped_steps`` counts them."""
    wandb_run_id: str | None
    """The wandb run to go on with."""
    prompts: str
    """Fingerprint of the prompts that iterations are drawn from (``PromptSet.fingerprint``)."""
    mesh: dict[str, int]
    """Axis -> size of both meshes, as ``mesh_difference`` shows them."""

    def to_json(self) -> str:
        """One JSON object. Floats come back bit-equal."""
        return json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str) -> TrainerState:
        """The state that ``to_json`` wrote. ``ValueError`` for unknown, missing or ill-typed entries."""
        found = json.loads(text)
        names = {f.name for f in dataclasses.fields(TrainerState)}
        if not isinstance(found, dict) or set(found) != names:
            keys = set(found) if isinstance(found, dict) else set()
            raise ValueError(
                f"the entries are not those of this version (missing: {', '.join(sorted(names - keys)) or 'none'}; unknown: "
                f"{', '.join(sorted(keys - names)) or 'none'})"
            )
        counts = [found["iteration"], found["version"]]
        tables = [found["num_optimizer_steps"], found["consecutive_skipped"], found["mesh"]]
        counts += [count for table in tables if isinstance(table, dict) for count in table.values()]
        kl_coef, run = found["kl_coef"], found["wandb_run_id"]
        if (
            not all(isinstance(table, dict) for table in tables)
            or not all(type(count) is int and count >= 0 for count in counts)
            or type(kl_coef) not in (int, float)
            or not math.isfinite(kl_coef)
            or not (run is None or isinstance(run, str))
            or not isinstance(found["prompts"], str)
        ):
            raise ValueError("an entry has the wrong type, or a count is below 0")
        return TrainerState(**found | {"kl_coef": float(kl_coef)})


def read_state(folder: Path) -> TrainerState:
    """The state of the loop in a training checkpoint. ``ValueError`` where there is none, or where another version wrote it."""
    path = folder / STATE_FILE
    if not path.is_file():
        raise ValueError(f"{folder} holds no {STATE_FILE}: it is no training checkpoint (a converted one holds weights alone)")
    try:
        return TrainerState.from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} cannot be used: {error}; resume with the version that wrote it, or from another checkpoint") from None


def mesh_difference(saved: Mapping[str, int], present: Mapping[str, int]) -> str:
    """Both layouts in two columns, every axis, for a notice or a refusal; ``""`` where they are the same."""
    if dict(saved) == dict(present):
        return ""
    axes = list(dict.fromkeys([*saved, *present]))
    return two_columns("axis", [(axis, str(saved.get(axis, "-")), str(present.get(axis, "-"))) for axis in axes])


def fault_of(folder: Path, *, verify: Verify = "full", share: tuple[int, int] = (0, 1)) -> str:
    """Why a checkpoint cannot be gone on from, as ``check_checkpoint`` sees it from ``share``; empty: it is whole. No pickle is opened."""
    try:
        if folder.is_symlink():
            raise ValueError(f"{folder} is a symbolic link; name its target by --resume {folder.readlink()}")
        check_checkpoint(folder, verify=verify, share=share)
        if (folder / STATE_FILE).exists():  # what convert makes has none
            read_state(folder)
    except (ValueError, OSError) as error:
        return str(error)
    return ""


# -- the folder -------------------------------------------------------------------------------------------------------


class CheckpointFolder:
    """``RUN_DIR/checkpoints``: begins, finishes, finds and deletes the checkpoints of one run."""

    def __init__(self, root: Path, keep: int | None) -> None:
        """``keep``: complete checkpoints that stay; None: all. Nothing is made or changed before ``begin``."""
        if keep is not None and keep < 1:
            raise ValueError(f"keep_checkpoints = {keep} must be at least 1 (the newest one is never deleted), or None to keep all")
        self.root = root
        self._keep = keep
        self._begun: set[int] = set()

    def path(self, iteration: int) -> Path:
        """The folder of a complete checkpoint."""
        return self.root / _name(iteration)

    def temporary(self, iteration: int) -> Path:
        """The folder that ranks write into between ``begin`` and ``finish``."""
        return self.root / f".{_name(iteration)}.tmp"

    # -- writing ------------------------------------------------------------------------------------------------------

    def begin(self, iteration: int) -> Path:
        """Make the folder that all ranks write the checkpoint of ``iteration`` into, after removing what a crash has left.

        Raises:
            OSError: it cannot be made (disk full, no permission); nothing else has changed.
        """
        if iteration in self._begun:
            raise RuntimeError(f"the checkpoint of iteration {iteration} was begun before and has not ended")
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            self.temporary(iteration).mkdir()
            sync_path(self.root)
        except OSError as error:
            raise self._not_saved(iteration, error) from error
        self._begun.add(iteration)
        return self.temporary(iteration)

    def finish(self, iteration: int, state: TrainerState, config_text: str, digests: Mapping[str, tuple[int, str]] | None = None) -> Path:
        """Complete the checkpoint that all ranks have written, name it in ``latest``, and delete the ones that are too old.

        ``digests``: what ranks have digested themselves (``digest_files``); the rest is read and digested here. Each node must have called
        ``sync_files`` for its own files before. Returns the checkpoint's folder.

        Raises:
            OSError: it cannot be written; older checkpoints and ``latest`` are as they were, and what was written is removed.
            ValueError: a file of ``digests`` is not here: the nodes do not share a file system.
        """
        assert state.iteration == iteration, f"the state is of iteration {state.iteration}, not {iteration}"
        if iteration not in self._begun:
            raise RuntimeError(f"the checkpoint of iteration {iteration} was not begun")
        folder = self.temporary(iteration)
        try:
            write_synced(folder / STATE_FILE, state.to_json())
            write_synced(folder / CONFIG_FILE, config_text)
            write_manifest(folder, digests or {})
            self._publish(iteration)
        except OSError as error:
            self.abandon(iteration)
            raise self._not_saved(iteration, error) from error
        except ValueError:
            self.abandon(iteration)
            raise
        self._begun.discard(iteration)
        self._delete_older_than(iteration)
        return self.path(iteration)

    def abandon(self, iteration: int) -> None:
        """Give up a checkpoint that was begun, on the error of any rank: remove what was written."""
        self._begun.discard(iteration)
        if self.temporary(iteration).exists():
            self._remove(self.temporary(iteration))

    def _publish(self, iteration: int) -> None:
        """The renames. ``latest`` is prepared before the first of them, so that a full disk is noticed in time."""
        target, prepared = self.path(iteration), self.root / f".{LATEST}.tmp"
        write_synced(prepared, f"{target.name}\n")
        if target.exists() or target.is_symlink():  # saved before: this run has gone back to an older one
            self._set_aside(target)
        try:
            self.temporary(iteration).rename(target)
        except OSError:
            if _deleting(target).is_dir():  # the older one keeps its name
                _deleting(target).rename(target)
            raise
        sync_path(self.root)
        prepared.replace(self.root / LATEST)
        sync_path(self.root)

    def _set_aside(self, target: Path) -> None:
        """Make room for a checkpoint of the same iteration. What is not known to be a checkpoint of ours is kept under another name."""
        if _is_complete(target):
            target.rename(_deleting(target))
            return
        number = 1
        while (aside := target.with_name(f"{target.name}.old{number}")).exists() or aside.is_symlink():
            number += 1
        logger.warning("%s is not a complete checkpoint: renamed to %s, to make room for a new one", target, aside.name)
        target.rename(aside)

    def _delete_older_than(self, iteration: int) -> None:
        """Delete complete checkpoints before ``iteration`` but the ``keep - 1`` newest; and the one that it has replaced.

        A failure is a warning: the new checkpoint is safe, and training need not end for a full trash can.
        """
        doomed = [_deleting(self.path(iteration))]
        if self._keep is not None:
            older = [number for number in self._numbers() if number < iteration and _is_complete(self.path(number))]
            doomed += [self.path(number) for number in sorted(older, reverse=True)[self._keep - 1 :]]
        for path in doomed:
            if path.is_dir():
                self._remove(path)

    def _remove(self, folder: Path) -> None:
        """Delete a folder so that a crash in between leaves nothing that looks like a checkpoint."""
        try:
            if not folder.name.startswith("."):
                folder = folder.rename(_deleting(folder))
                sync_path(self.root)
            shutil.rmtree(folder)
        except OSError as error:
            logger.warning("%s cannot be deleted: %s", folder, error)

    def _remove_leftovers(self) -> None:
        """What a crash has left of this run's own: saves and deletions that did not end. A save that lacks only its rename gets it."""
        for path in sorted(self.root.iterdir()):
            match = re.fullmatch(r"\.(iter_\d{7,})\.(tmp|deleting)", path.name)
            number = _number(match[1]) if match else None
            if match is None or number is None or path.is_symlink() or not path.is_dir():
                continue
            if match[2] == "tmp" and number in self._begun:
                continue
            if match[2] == "tmp" and not self.path(number).exists() and _is_complete(path):
                path.rename(self.path(number))
                logger.warning("%s was complete when its run was killed: renamed to %s", path, _name(number))
            else:
                self._remove(path)

    def _not_saved(self, iteration: int, error: OSError) -> OSError:
        """The user's text for a save that failed."""
        latest = self.root / LATEST
        left = f"{LATEST} names {latest.read_text().strip()} as before" if latest.is_file() else "there is no older one"
        reason = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
        text = f"the checkpoint of iteration {iteration} cannot be written below {self.root} ({reason}); {left}"
        return OSError(error.errno, f"{text}; free some space, or make the folder writable, or choose another --run-dir")

    # -- finding ------------------------------------------------------------------------------------------------------

    def candidates(self) -> list[Path]:
        """Checkpoints to resume from, the best first: the one that ``latest`` names, older ones, then newer ones.

        Newer ones are of a line that this run has left: it has gone back to an older checkpoint and has saved since. They may be damaged.
        Nothing is changed: a process may look at the folder of a run that is going on.
        """
        found = {number: self.path(number) for number in self._numbers()}
        for path in self.root.glob(".iter_*.tmp"):
            number = _number(path.name.removeprefix(".").removesuffix(".tmp"))
            if number is not None and number not in found and _is_complete(path):  # killed just before the rename
                found[number] = path
        numbers = sorted(found, reverse=True)
        latest = self._latest()
        if latest is not None:
            found.setdefault(latest, self.path(latest))
            newer = [number for number in numbers if number > latest]
            numbers = [latest, *(number for number in numbers if number < latest), *newer]
        return [found[number] for number in numbers]

    def newest_complete(self, *, verify: Verify = "full") -> Path | None:
        """The checkpoint to resume from: the first of ``candidates`` that is whole. A warning tells why another was passed over.

        None: the run has none yet. Ranks that verify together go through ``candidates`` with ``check_checkpoint`` themselves.

        Raises:
            ValueError: there are checkpoints, and none is whole.
        """
        faults = []
        for folder in self.candidates():
            fault = fault_of(folder, verify=verify)
            if fault:
                faults.append(fault)
                logger.warning("passed over a checkpoint: %s", fault)
                continue
            if faults:
                logger.warning("resuming from %s instead", folder)
            return folder
        if faults:
            raise ValueError(
                f"{self.root} holds checkpoints, and none of them is whole:\n" + "\n".join(faults) + "\nNothing was changed or deleted: "
                "repair one, or name another by --resume FOLDER; --resume never begins anew"
            )
        return None

    def _latest(self) -> int | None:
        """The iteration that ``latest`` names; None, with a warning where it names nothing that can be."""
        path = self.root / LATEST
        if not path.exists() and not path.is_symlink():
            return None
        text = path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else "(no file)"
        number = _number(text)
        if number is None:
            logger.warning("%s names %r, which is no checkpoint of this folder; taking the newest one that is here", path, text[:80])
        return number

    def _numbers(self) -> list[int]:
        """Iterations of all entries that are called like a checkpoint."""
        if not self.root.is_dir():
            return []
        return [number for path in self.root.iterdir() if (number := _number(path.name)) is not None]


def _name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def _number(name: str) -> int | None:
    """``iter_0000010`` -> 10; None for any other name."""
    match = re.fullmatch(r"iter_(\d{7,})", name, flags=re.ASCII)
    return int(match[1]) if match and _name(int(match[1])) == name else None


def _deleting(target: Path) -> Path:
    return target.with_name(f".{target.name}.deleting")


def _is_complete(folder: Path) -> bool:
    """Whether a real folder, no link, holds a training checkpoint with all files in their sizes."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    try:
        check_checkpoint(folder, verify="sizes")
        return {STATE_FILE, CONFIG_FILE} <= set(read_manifest(folder))
    except ValueError:
        return False
