"""Pickles are looked through before they are opened: one that could run code is refused, and nothing of it is executed.

A pickle is a program: it names functions and calls them. What megatron-core and ``torch.distributed.checkpoint`` write needs a short list
of names, and a pickle that names anything else is refused. Of a ``torch_dist`` folder these are unpickled by them when it is loaded:

    .metadata      pickle.load: everything goes                                     scanned here
    common.pt      torch.load, weights_only only by its default                     scanned here
    __R_N.distcp   bytes entries: torch.load(weights_only=False), see DefaultLoadPlanner.load_bytes     scanned here
                   tensor entries: torch.load(weights_only=True), see FileSystemReader.read_data        torch's own list holds

All else that this project writes is JSON, YAML or safetensors. A scan judges the bytes that it reads: it is no help against someone who
changes the files between scan and load. It keeps code from running; it does not keep a file from asking for too much memory.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NoReturn

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

DTYPES = frozenset(
    f"torch {name}"
    for name in (
        "float32 float64 float16 bfloat16 float8_e4m3fn float8_e5m2 uint8 int8 int16 int32 int64 bool complex64 complex128".split()
    )
)

METADATA_GLOBALS = DTYPES | frozenset(
    (
        "torch Size",
        "torch.serialization _get_layout",
        "torch.distributed.checkpoint.metadata Metadata",
        "torch.distributed.checkpoint.metadata MetadataIndex",
        "torch.distributed.checkpoint.metadata StorageMeta",
        "torch.distributed.checkpoint.metadata TensorStorageMetadata",
        "torch.distributed.checkpoint.metadata TensorProperties",
        "torch.distributed.checkpoint.metadata ChunkStorageMetadata",
        "torch.distributed.checkpoint.metadata BytesStorageMetadata",
        "torch.distributed.checkpoint.metadata _MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.filesystem _StorageInfo",
        "torch.distributed.checkpoint.planner SavePlan",  # megatron-core keeps the plans of all ranks for its next save
        "torch.distributed.checkpoint.planner WriteItem",
        "torch.distributed.checkpoint.planner WriteItemType",
        "torch.distributed.checkpoint.planner TensorWriteData",
        "pathlib PosixPath",  # torch's own writer keeps the folder's path
    )
)
"""What the ``.metadata`` of a checkpoint names: "module name"."""

STORAGES = frozenset(
    f"torch {name}Storage" for name in "Float Double Half BFloat16 Byte Char Short Int Long Bool ComplexFloat ComplexDouble".split()
)

TORCH_FILE_GLOBALS = (
    DTYPES
    | STORAGES
    | frozenset(
        (
            "collections OrderedDict",
            "torch Size",
            "torch device",
            "torch._utils _rebuild_tensor_v2",
        )
    )
)
"""What a file of ``torch.save`` names that holds tensors, numbers, strings and containers of them."""

STRINGS = frozenset("STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8".split())
REFUSED_OPCODES = frozenset("EXT1 EXT2 EXT4 NEXT_BUFFER READONLY_BUFFER".split())
CHANGING_OPCODES = frozenset("APPEND APPENDS SETITEM SETITEMS ADDITEMS BUILD".split())
CALLING_OPCODES = frozenset("REDUCE NEWOBJ NEWOBJ_EX OBJ".split())

DISTRIBUTED_FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
COPY_AGAIN = "copy the checkpoint again from where it is whole"
ADVICE = "such a file can run code when it is opened, and is refused; take the checkpoint from a source that you trust"


@dataclass(frozen=True)
class _Global:
    """On the stack of a pickle: a function or class that was named, and was found in the list."""

    name: str


_MARK, _OTHER = object(), object()


# -- one pickle -------------------------------------------------------------------------------------------------------


def check_pickle(source: Path | bytes, allowed: Collection[str], *, where: str = "", persistent_ids: bool = False) -> None:
    """Read a pickle without executing it.

    ``allowed``: the functions and classes that it may name, as ``"module name"``. ``where``: the file, in messages; default: ``source``.
    ``persistent_ids``: whether it may refer to objects outside, as ``data.pkl`` of ``torch.save`` refers to its tensors' bytes.

    Raises:
        ValueError: it names anything else, or in a way that cannot be followed; or calls or changes what it has computed; or is damaged.
    """
    data = source if isinstance(source, bytes) else source.read_bytes()
    where = where or ("a pickle" if isinstance(source, bytes) else str(source))
    scan, end = _Scan(frozenset(allowed), persistent_ids), 0
    try:
        for opcode, argument, position in pickletools.genops(data):
            scan.step(opcode, argument)
            end = (position or 0) + 1
    except _Refused as refused:
        raise ValueError(f"{where} {refused}; {ADVICE}") from None
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ValueError(f"{where} is no whole pickle ({error or type(error).__name__}); {COPY_AGAIN}") from None
    if end != len(data):
        raise ValueError(f"{where} goes on for {len(data) - end} bytes after its pickle has ended; {ADVICE}")


class _Refused(Exception):
    """Why a pickle is refused."""


class _Scan:
    """The pickle machine, with the values left out: only strings and named globals are told apart from everything else."""

    def __init__(self, allowed: frozenset[str], persistent_ids: bool) -> None:
        self._allowed = allowed
        self._persistent_ids = persistent_ids
        self._stack: list[object] = []
        self._memo: dict[object, object] = {}

    def step(self, opcode: pickletools.OpcodeInfo, argument: object) -> None:
        """One instruction."""
        name = opcode.name
        if name in REFUSED_OPCODES or (name in ("PERSID", "BINPERSID") and not self._persistent_ids):
            raise _Refused(f"uses {name}, which a checkpoint has no need of")
        if name in STRINGS:
            self._stack.append(str(argument))
        elif name == "GLOBAL":
            self._stack.append(self._named(str(argument)))
        elif name == "STACK_GLOBAL":
            attribute, module = self._pop(), self._pop()
            if not isinstance(attribute, str) or not isinstance(module, str):
                raise _Refused("names a function or class by a text that it computes")
            self._stack.append(self._named(f"{module} {attribute}"))
        elif name == "INST":
            self._named(str(argument))
            self._pop_to_mark()
            self._stack.append(_OTHER)
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if name == "MEMOIZE" else argument] = self._top()
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            self._stack.append(self._memo[argument])
        elif name == "MARK":
            self._stack.append(_MARK)
        elif name == "DUP":
            self._stack.append(self._top())
        elif name == "POP":
            self._stack.pop()
        elif name == "POP_MARK":
            self._pop_to_mark()
        else:
            self._compute(opcode)

    def _compute(self, opcode: pickletools.OpcodeInfo) -> None:
        """Any other instruction: takes values, leaves values. Only what is named may be called, and it may not be changed."""
        before = opcode.stack_before
        taken: list[object] = []
        if pickletools.markobject in before:
            taken = self._pop_to_mark()
            before = before[: before.index(pickletools.markobject)]
        taken = [self._pop() for _ in before][::-1] + taken
        if opcode.name in CALLING_OPCODES and not (taken and isinstance(taken[0], _Global)):
            raise _Refused(f"calls something that it does not name ({opcode.name})")
        if opcode.name in CHANGING_OPCODES and isinstance(taken[0], _Global):
            raise _Refused(f"changes {taken[0].name} ({opcode.name})")
        self._stack += [_OTHER] * len(opcode.stack_after)

    def _named(self, name: str) -> _Global:
        if name not in self._allowed:
            raise _Refused(f"names {name.replace(' ', '.')}, which is not in the list of what a checkpoint may name")
        return _Global(name)

    def _top(self) -> object:
        return self._not_mark(self._stack[-1])

    def _pop(self) -> object:
        return self._not_mark(self._stack.pop())

    def _pop_to_mark(self) -> list[object]:
        taken = []
        while (value := self._stack.pop()) is not _MARK:
            taken.append(value)
        return taken[::-1]

    def _not_mark(self, value: object) -> object:
        if value is _MARK:
            raise ValueError("a mark where a value must be")
        return value


# -- files of torch.save ----------------------------------------------------------------------------------------------


def check_torch_file(source: Path | bytes, *, where: str = "") -> None:
    """Look through a file of ``torch.save``: every pickle in it, as torch's own reader finds it.

    Raises:
        ValueError: it could run code (``check_pickle``), or is no file of ``torch.save`` of version 1.6 or later, or is damaged.
    """
    import torch

    where = where or ("a torch file" if isinstance(source, bytes) else str(source))
    stream: BinaryIO = io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")
    with stream:
        magic = stream.read(4)
        stream.seek(0)
        if magic != b"PK\x03\x04":  # what torch.load goes by
            raise ValueError(f"{where} is no zip file of torch.save: pickles and files of before torch 1.6 are refused; save it again")
        try:
            reader = torch._C.PyTorchFileReader(stream)
            records = reader.get_all_records()
            pickles = {name: reader.get_record(name) for name in records if name.lower().endswith((".pkl", ".pickle"))}
        except RuntimeError as error:
            raise ValueError(f"{where} is damaged ({str(error).splitlines()[0]}); {COPY_AGAIN}") from None
    if "constants.pkl" in records or "data.pkl" not in records:
        raise ValueError(f"{where} holds no data.pkl of torch.save, or is a TorchScript program; {ADVICE}")
    for name, data in pickles.items():
        check_pickle(data, TORCH_FILE_GLOBALS, where=f"{where} ({name})", persistent_ids=True)


# -- folders of torch_dist --------------------------------------------------------------------------------------------


def check_torch_dist_folder(folder: Path) -> None:
    """Look through a folder of ``megatron.core.dist_checkpointing`` (``torch_dist``) or of ``torch.distributed.checkpoint``.

    Every file must be of a kind that belongs there, and everything that loading it unpickles is scanned.

    Raises:
        ValueError: naming the file, and the entry in it.
    """
    for path in sorted(folder.iterdir()):
        if (
            path.is_symlink()
            or not path.is_file()
            or not re.fullmatch(r"\.metadata|common\.pt|metadata\.json|\w+\.distcp", path.name, re.ASCII)
        ):
            raise ValueError(f"{path} does not belong in a distributed checkpoint of format torch_dist; {ADVICE}")
    if (folder / "metadata.json").exists():
        _check_format(folder / "metadata.json")
    if (folder / "common.pt").exists():
        check_torch_file(folder / "common.pt")
    for file, entries in _bytes_entries(_read_metadata(folder / ".metadata"), folder).items():
        with (folder / file).open("rb") as stream:
            for key, offset, length in entries:
                stream.seek(offset)
                data = stream.read(length)
                where = f"{folder / file} (entry {key})"
                if len(data) != length:
                    raise ValueError(f"{where} ends before its {length} bytes; {COPY_AGAIN}")
                check_torch_file(data, where=where)
                if "_extra_state" in key:
                    _check_empty(data, where)


def _check_format(path: Path) -> None:
    """The format decides which loader megatron-core takes; the others unpickle more files."""
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        raise ValueError(f"{path} is damaged: it is not JSON; {COPY_AGAIN}") from None
    if found != DISTRIBUTED_FORMAT:
        raise ValueError(f"{path} asks for the format {found}; only {DISTRIBUTED_FORMAT} is read")


class _ListedOnly(pickle.Unpickler):
    """A second lock: should the scan have missed a name, it is not found here either."""

    def find_class(self, module: str, name: str) -> object:
        """Called for each name of the pickle."""
        if f"{module} {name}" not in METADATA_GLOBALS:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return super().find_class(module, name)


def _read_metadata(path: Path) -> Metadata:
    """``.metadata``, after its scan."""
    from torch.distributed.checkpoint.metadata import Metadata

    if not path.is_file():
        raise ValueError(f"{path} does not exist: the folder is no distributed checkpoint, or not whole; {COPY_AGAIN}")
    data = path.read_bytes()
    check_pickle(data, METADATA_GLOBALS, where=str(path))
    try:
        metadata = _ListedOnly(io.BytesIO(data)).load()
    except Exception as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}); {COPY_AGAIN}") from error
    if type(metadata) is not Metadata:
        _wrong(path, f"holds {type(metadata).__name__}, not the metadata of a checkpoint")
    return metadata


def _bytes_entries(metadata: Metadata, folder: Path) -> dict[str, list[tuple[str, int, int]]]:
    """File -> (key, offset, bytes) of every entry that loading would unpickle; all others are tensors."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata

    path = folder / ".metadata"
    kinds, places = metadata.state_dict_metadata, metadata.storage_data
    if type(kinds) is not dict or type(places) is not dict:
        _wrong(path, "has no list of entries")
    for key, kind in kinds.items():
        if type(key) is not str or type(kind) not in (BytesStorageMetadata, TensorStorageMetadata):
            _wrong(path, f"gives {key!r} the kind {type(kind).__name__}")
    found: dict[str, list[tuple[str, int, int]]] = {}
    files, stored = {entry.name for entry in folder.iterdir()}, set()
    for index, place in places.items():
        if type(index) is not MetadataIndex or type(place) is not _StorageInfo or index.fqn not in kinds:
            _wrong(path, f"places something that is no entry ({index!r})")
        name, numbers = place.relative_path, (place.offset, place.length)
        if type(name) is not str or not re.fullmatch(r"\w+\.distcp", name, re.ASCII):
            _wrong(path, f"places {index.fqn} in {name!r}, which is no file of the folder")
        if name not in files:
            raise ValueError(f"{folder / name} is missing: {index.fqn} should be in it; {COPY_AGAIN}")
        if any(type(number) is not int or number < 0 for number in numbers) or place.transform_descriptors:
            _wrong(path, f"places {index.fqn} where it cannot be read as it stands ({place})")
        if type(kinds[index.fqn]) is BytesStorageMetadata:
            found.setdefault(name, []).append((index.fqn, *numbers))
        stored.add(index.fqn)
    lost = sorted(set(kinds) - stored)
    if lost:
        raise ValueError(f"{path} does not say where {', '.join(lost[:8])} is; {COPY_AGAIN}")
    return found


def _check_empty(data: bytes, where: str) -> None:
    """Transformer Engine's extra state is a pickle inside of a tensor, which no list guards when the module opens it.

    It is empty unless the model computes in FP8, which this project does not offer.
    """
    import torch

    reader = torch._C.PyTorchFileReader(io.BytesIO(data))
    full = [record for record in reader.get_all_records() if record.startswith("data/") and len(reader.get_record(record))]
    if full:
        raise ValueError(f"{where} is an extra state with content (FP8 of Transformer Engine); {ADVICE}")


def _wrong(path: Path, fact: str) -> NoReturn:
    raise ValueError(f"{path} {fact}; {ADVICE}")
