"""What a checkpoint's folder must hold, byte for byte: the manifest ``COMPLETE``.

``COMPLETE`` is written last, when everything else is on the disk, and lists size and digest of every other file::

    {"format": 1, "files": {"megatron/__0_0.distcp": [8412, "9f0c..."], "state.json": [411, "77ab..."]}}

A folder without it is not complete, and one that differs from it is not what was written. The digest (BLAKE2b, 256 bits) finds damage;
it is no signature: whoever can write the folder can write a manifest, which is why pickles are scanned before they are opened
(``unsafe_pickle.py``). Files only: no collectives, no tensors. What the files mean stands in ``checkpoint.py`` and in the backends.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Literal

FORMAT = 1
"""Raised when an older program could no longer read what is written."""
COMPLETE = "COMPLETE"
CHUNK_BYTES = 16 * 2**20
NUM_SHOWN = 8

Verify = Literal["full", "sizes"]
Digests = dict[str, tuple[int, str]]
"""Path relative to the checkpoint, with ``/`` -> (bytes, digest in hexadecimal)."""

REMEDY = "copy the checkpoint again from where it is whole, or name an older one by --resume FOLDER"


# -- writing ----------------------------------------------------------------------------------------------------------


def digest_files(folder: Path, paths: Iterable[str]) -> Digests:
    """Size and digest of files of ``folder``, read in pieces of 16 MiB.

    Every rank or node may do this for the files that it wrote, at the same time; ``CheckpointFolder.finish`` takes the results.
    """
    return {path: _digest(folder / path) for path in paths}


def sync_files(folder: Path, paths: Iterable[str]) -> None:
    """Put files of ``folder`` on the disk, with the folders that name them.

    By the node that wrote them: another node of a parallel file system cannot flush this one's cache.
    """
    folders = {folder}
    for path in paths:
        sync_path(folder / path)
        folders.update(folder / parent for parent in PurePosixPath(path).parents)
    for one in sorted(folders, reverse=True):
        sync_path(one)


def write_synced(path: Path, content: str) -> None:
    """Write a small file and wait until it is on the disk. The folder that names it is left to the caller."""
    with path.open("wb") as file:
        file.write(content.encode())
        file.flush()
        os.fsync(file.fileno())


def write_manifest(folder: Path, digests: Mapping[str, tuple[int, str]]) -> None:
    """Put everything in ``folder`` on the disk, then write ``COMPLETE``.

    ``digests``: what other ranks have digested; the rest is digested here.

    Raises:
        ValueError: a file of ``digests`` is not here, or has another size; or the folder holds something that is not a plain file.
    """
    paths = files_of(folder)
    for path, (size, _) in digests.items():
        seen = (folder / path).stat().st_size if path in paths else None
        if seen != size:
            raise ValueError(
                f"{folder}: a rank has written {size} bytes of {path}, but here "
                + ("there is no such file" if seen is None else f"it has {seen}")
                + "; the folder must lie in a file system that all nodes share"
            )
    files = dict(digests) | digest_files(folder, [path for path in paths if path not in digests])
    sync_files(folder, paths)
    text = json.dumps({"format": FORMAT, "files": {path: list(files[path]) for path in sorted(files)}}, indent=1)
    write_synced(folder / COMPLETE, text + "\n")
    sync_path(folder)


def files_of(folder: Path) -> list[str]:
    """Every file below ``folder`` but ``COMPLETE``, relative and sorted. ``ValueError`` for a link, a pipe or a device."""
    found = []
    for base, folders, files in os.walk(folder, onerror=_raise):
        for name in [*folders, *files]:
            path = Path(base) / name
            mode, relative = path.lstat().st_mode, path.relative_to(folder).as_posix()
            if stat.S_ISLNK(mode) or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                kind = "a symbolic link" if stat.S_ISLNK(mode) else "neither a file nor a folder"
                raise ValueError(f"{folder}: {relative} is {kind}, and a checkpoint holds plain files only; {REMEDY}")
            if stat.S_ISREG(mode) and relative != COMPLETE:
                found.append(relative)
    return sorted(found)


def _raise(error: OSError) -> None:
    raise error


def _digest(path: Path) -> tuple[int, str]:
    digest, size = hashlib.blake2b(digest_size=32), 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()


def sync_path(path: Path) -> None:
    """fsync of a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- reading ----------------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> Digests:
    """The files that a complete checkpoint holds.

    Raises:
        ValueError: ``COMPLETE`` is missing, damaged, of a newer format, or names a file outside the folder.
    """
    path = folder / COMPLETE
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; name one that holds a checkpoint by --resume FOLDER")
    if path.is_symlink() or not path.is_file():
        raise ValueError(f"{folder} holds no {COMPLETE}: it is no checkpoint, or its save or copy did not come to an end; {REMEDY}")
    try:
        manifest = json.loads(path.read_bytes())
    except ValueError:
        raise ValueError(f"{path} is damaged: it is not JSON; {REMEDY}") from None
    number = manifest.get("format") if isinstance(manifest, dict) else None
    if isinstance(number, int) and number > FORMAT:
        raise ValueError(f"{folder} has format {number}, and this program reads format {FORMAT}; use the newer version that wrote it")
    files = manifest.get("files") if isinstance(manifest, dict) and set(manifest) == {"format", "files"} else None
    if number != FORMAT or not isinstance(files, dict) or not files:
        raise ValueError(f"{path} is damaged: it must hold format {FORMAT} and the list of files; {REMEDY}")
    return {name: _entry(path, name, entry) for name, entry in files.items()}


def _entry(manifest: Path, name: str, entry: object) -> tuple[int, str]:
    pure = PurePosixPath(name)
    if not pure.parts or pure.is_absolute() or ".." in pure.parts or str(pure) != name or "\0" in name or "\\" in name:
        raise ValueError(f"{manifest} names {name!r}, which does not lie in its folder; the checkpoint cannot be trusted: do not use it")
    match entry:
        case [int(size), str(digest)] if size >= 0 and type(size) is int and re.fullmatch("[0-9a-f]{64}", digest):
            return size, digest
    raise ValueError(f"{manifest} is damaged: {name} must have its size and digest, not {entry!r}; {REMEDY}")


def check_checkpoint(folder: Path, *, verify: Verify = "full", share: tuple[int, int] = (0, 1)) -> None:
    """Whether ``folder`` holds exactly the files of its manifest. Nothing is unpickled.

    ``verify``: ``"full"`` compares digests, which reads every byte; ``"sizes"`` does not read the files. ``share``: (i, n) reads the i-th
    of n parts of about equal bytes, so that n ranks together read everything once; each of them compares all names and sizes.

    Raises:
        ValueError: naming each file and its fault (missing, not in the manifest, of another size or content, a symbolic link), or the
            fault of the manifest.
    """
    manifest = read_manifest(folder)
    present = set(files_of(folder))
    faults = [f"{path} is missing" for path in manifest if path not in present]
    faults += [f"{path} is not in {COMPLETE}: it is not of this checkpoint" for path in sorted(present - set(manifest))]
    for path, (size, _) in manifest.items():
        if path in present and (seen := (folder / path).stat().st_size) != size:
            faults.append(f"{path} has {seen} bytes, not {size}")
    if not faults and verify == "full":
        for path in _share(manifest, *share):
            if _digest(folder / path) != manifest[path]:
                faults.append(f"{path} is damaged: its content is not what was written (BLAKE2b differs)")
    if faults:
        more = f"\n  - and {len(faults) - NUM_SHOWN} more" if len(faults) > NUM_SHOWN else ""
        raise ValueError(f"{folder} is not whole; {REMEDY}:\n  - " + "\n  - ".join(faults[:NUM_SHOWN]) + more)


def _share(manifest: Digests, index: int, count: int) -> list[str]:
    """The files of one of ``count`` readers: the largest first, each to the reader that has least."""
    loads, mine = [0] * count, []
    for path, (size, _) in sorted(manifest.items(), key=lambda item: (-item[1][0], item[0])):
        reader = loads.index(min(loads))
        loads[reader] += size + 1
        if reader == index:
            mine.append(path)
    return mine
