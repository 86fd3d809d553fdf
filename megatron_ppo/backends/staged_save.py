"""What stands between a training state and the disk: files of a checkpoint, complete in memory, and the thread that writes them.

A backend copies its state into ``StagedFiles`` in one go, collectives included; from then on training may change every tensor, since a
file's bytes are its own. ``PendingSave`` writes them with fsync, in this call or in a thread, and speaks to no other rank.

Left out: the folder's manifest and final name (``checkpoint.py``), and what is in the files (``megatron_checkpoint.py``).
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from torch.distributed.checkpoint.filesystem import FileSystemBase

from megatron_ppo.checkpoint_manifest import sync_path

_WRITE_BYTES = 64 * 2**20
"""Bytes handed to the operating system in one call."""

PathLike = str | os.PathLike


class _Buffer(io.BytesIO):
    """Outlives the ``close`` with which torch ends a file."""

    def close(self) -> None:
        """Keep the bytes: they are freed with the object."""


class StagedFiles(FileSystemBase):
    """Files in memory, as a file system that ``torch.distributed.checkpoint`` writes to. Paths are relative to the checkpoint folder."""

    def __init__(self) -> None:
        self._files: dict[str, io.BytesIO] = {}

    def add(self, path: str, content: bytes) -> None:
        """Stage a file that is made already."""
        self._files[path] = _Buffer(content)

    def contents(self) -> dict[str, io.BytesIO]:
        """Path -> bytes of all files that hold any: a rank that saves nothing writes no file."""
        return {path: buffer for path, buffer in self._files.items() if buffer.getbuffer().nbytes}

    @contextmanager
    def create_stream(self, path: PathLike, mode: str) -> Generator[io.IOBase, None, None]:
        """A new, empty file, open for writing."""
        assert mode == "wb", f"a staged file is written once, not opened with mode {mode!r}"
        buffer = self._files[str(path)] = _Buffer()
        yield cast(io.IOBase, buffer)

    def concat_path(self, path: PathLike, suffix: str) -> str:
        return f"{path}/{suffix}"

    def rename(self, path: PathLike, new_path: PathLike) -> None:
        self._files[str(new_path)] = self._files.pop(str(path))

    def init_path(self, path: PathLike) -> str:
        return str(path)

    def mkdir(self, path: PathLike) -> None:
        """Folders are made when the files are written."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        return True

    def exists(self, path: PathLike) -> bool:
        return str(path) in self._files

    def rm_file(self, path: PathLike) -> None:
        del self._files[str(path)]


class PendingSave:
    """Files of one rank on their way to the disk. No method is collective."""

    def __init__(self, folder: Path, staged: Mapping[str, io.BytesIO], *, asynchronous: bool) -> None:
        """Write ``staged`` (path relative to ``folder`` -> content) below the existing ``folder``.

        Without ``asynchronous`` everything is on the disk, or has failed, when this returns; ``wait`` tells which.
        """
        self.files: tuple[str, ...] = tuple(sorted(staged))
        """Paths of this rank's files relative to the checkpoint folder."""
        self._folder = folder
        self._staged = dict(staged)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if asynchronous:
            # A daemon: a run that fails elsewhere ends at once, and leaves a folder that was never marked complete.
            self._thread = threading.Thread(target=self._write_all, name="checkpoint writer", daemon=True)
            self._thread.start()
        else:
            self._write_all()

    def done(self) -> bool:
        """Whether writing has come to an end, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Return when all files of this rank are on the disk, fsynced. Raises what writing them raised (``OSError``)."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _write_all(self) -> None:
        try:
            for path in self.files:
                # Popped: the memory of a file is free as soon as it is written.
                _write(self._folder / path, self._staged.pop(path))
            for parent in sorted({(self._folder / path).parent for path in self.files} | {self._folder}):
                sync_path(parent)
        except BaseException as error:  # raised again by wait(): in a thread nobody else would see it
            self._error = error
            self._staged.clear()


def _write(path: Path, content: io.BytesIO) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb", buffering=0) as file:  # exclusive: nothing that another process wrote is ever mixed in
        view = content.getbuffer()
        start = 0
        while start < len(view):
            start += file.write(view[start : start + _WRITE_BYTES])
        os.fsync(file.fileno())
