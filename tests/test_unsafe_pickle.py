"""Pickles that would run code are refused unopened; what megatron-core and torch write passes. B108."""

from __future__ import annotations

import _compat_pickle
import collections
import contextlib
import datetime
import io
import os
import pickle
import pickletools
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_folder_support import in_child, limit_memory
from hypothesis import given, settings
from hypothesis import strategies as st
from spawn import run_ranks
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from megatron_ppo.unsafe_pickle import (
    METADATA_GLOBALS,
    TORCH_FILE_GLOBALS,
    _bytes_entries,
    _read_metadata,
    check_pickle,
    check_torch_dist_folder,
    check_torch_file,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "MARKER"


def assert_live(data: bytes, marker: Path, load: Callable[[io.BytesIO], object] = pickle.load) -> None:
    """The attack works where nobody looks: otherwise its refusal would prove nothing."""
    load(io.BytesIO(data))
    marker.rmdir()


def torch_bytes(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load_unsafe(stream: io.BytesIO) -> object:
    return torch.load(stream, weights_only=False)


# -- what is written here passes --------------------------------------------------------------------------------------


def megatron_save(rank: int, world_size: int, folder: str) -> None:
    """A checkpoint of megatron-core's own writer: tensors, an object of each rank, and common state."""
    from megatron_ppo import device

    device.prepare_megatron()
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    state = {
        "weight": ShardedTensor.from_rank_offsets("weight", torch.full((2, 3), float(rank)), (0, rank, world_size)),
        "half": ShardedTensor.from_rank_offsets("half", torch.full((2,), float(rank), dtype=torch.bfloat16), (0, rank, world_size)),
        "object": ShardedObject("object", {"step": rank, "betas": (0.9, 0.95)}, (world_size,), (rank,)),
        "attention._extra_state": ShardedObject("attention._extra_state", torch.empty(0, dtype=torch.uint8), (world_size,), (rank,)),
        "common": {"iteration": 3, "groups": [collections.OrderedDict(lr=1e-3, name="a")], "moment": torch.ones(3)},
    }
    dist_checkpointing.save(state, folder, content_metadata={"kind": "test"})
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_a_checkpoint_of_megatron_core_passes(tmp_path: Path) -> None:
    """And every bytes entry of it was looked into."""
    run_ranks(megatron_save, 2, str(tmp_path))
    check_torch_dist_folder(tmp_path)
    entries = _bytes_entries(_read_metadata(tmp_path / ".metadata"), tmp_path)
    keys = sorted(key for found in entries.values() for key, _, _ in found)
    assert keys == [f"{name}/shard_{rank}_2" for name in ("attention._extra_state", "object") for rank in (0, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool])
def test_a_checkpoint_of_torch_passes(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {"a": torch.ones(3).to(dtype), "nested": {"steps": 3, "name": "x", "list": [1, 2.5, None]}, "dtype": dtype}
    dcp.save(state, checkpoint_id=str(tmp_path), no_dist=True)
    check_torch_dist_folder(tmp_path)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "path"), no_dist=True)  # its index holds a Path
    check_torch_dist_folder(tmp_path / "path")


def test_files_of_torch_save_pass(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.zeros(2).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)}
    value = {"tensors": tensors, "groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "size": torch.Size([3])}], 3: torch.device("cpu")}
    torch.save(value, tmp_path / "optimizer.pt")
    check_torch_file(tmp_path / "optimizer.pt")
    torch.save(torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]).state_dict(), tmp_path / "adam.pt")
    check_torch_file(tmp_path / "adam.pt")


def test_the_lists_hold_no_name_that_python_renames() -> None:
    """Unpickling protocols 0 to 2 renames what Python 2 called otherwise; a listed name must mean itself."""
    for listed in METADATA_GLOBALS | TORCH_FILE_GLOBALS:
        module, name = listed.split(" ")
        assert (module, name) not in _compat_pickle.NAME_MAPPING and module not in _compat_pickle.IMPORT_MAPPING


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner) | st.frozensets(st.integers()),
)


@settings(max_examples=200, deadline=None)
@given(value=plain, protocol=st.sampled_from([3, 4, 5]))
def test_plain_data_needs_no_names(value: object, protocol: int) -> None:
    check_pickle(pickle.dumps(value, protocol), () if b"builtins" not in pickle.dumps(value, protocol) else ("builtins frozenset",))


# -- attacks on one pickle --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_call_is_refused_in_every_protocol(marker: Path, protocol: int) -> None:
    for value in (Touch(marker), {"a": [collections.OrderedDict(b=(Touch(marker),))]}, [Touch(marker), Touch(marker)][:1] * 2):
        data = pickle.dumps(value, protocol)
        assert_live(data, marker)
        for allowed in (METADATA_GLOBALS, TORCH_FILE_GLOBALS | {"copy_reg _reconstructor", "builtins getattr"}):
            with pytest.raises(ValueError, match=r"names \w+.mkdir, which is not in the list|names collections.OrderedDict"):
                check_pickle(data, allowed)
            with pytest.raises(ValueError, match="can run code when it is opened, and is refused"):
                check_pickle(pickletools.optimize(data), allowed)
    assert not marker.exists()


def text(value: str) -> bytes:
    """SHORT_BINUNICODE."""
    return b"\x8c" + struct.pack("<B", len(value.encode())) + value.encode()


def call(marker: Path) -> bytes:
    """A tuple of the marker's path, and the call."""
    return b"X" + struct.pack("<I", len(str(marker))) + str(marker).encode() + b"\x85R"


def test_names_that_are_hidden(marker: Path) -> None:
    """Each does its work when it is opened; none is opened."""
    arguments = call(marker)
    tricks = {
        "names posix.mkdir": [
            b"\x80\x04" + text("posix") + text("mkdir") + b"\x93" + arguments + b".",
            b"cposix\nmkdir\n" + arguments + b".",
            # the strings come from the memo, in the other order, one of them under a decoy
            b"\x80\x04" + text("mkdir") + b"\x940" + text("posix") + b"\x940h\x01h\x00\x93" + arguments + b".",
            b"\x80\x04"
            + text("mkdir")
            + b"q\x07"
            + text("posix")
            + b"q\x09"
            + text("torch")
            + b"q\x070h\x09"
            + b"0" * 2
            + text("posix")
            + text("mkdir")
            + b"\x93"
            + arguments
            + b".",
            b"\x80\x04" + b"X\x05\x00\x00\x00posix" + b"\x8d" + struct.pack("<Q", 5) + b"mkdir" + b"\x93" + arguments + b".",
            b"\x80\x04U\x05posixU\x05mkdir\x93" + arguments + b".",
            b"\x80\x04T\x05\x00\x00\x00posixS'mkdir'\n\x93" + arguments + b".",
            b"\x80\x04Vpo\\u0073ix\nVmkdir\n\x93" + arguments + b".",
            # thrown away, and still called
            b"cposix\nmkdir\n" + arguments + b"0N.",
            b"(cposix\nmkdir\n" + arguments + b"1N.",
            # by INST and OBJ
            b"(X" + struct.pack("<I", len(str(marker))) + str(marker).encode() + b"iposix\nmkdir\n.",
            b"(cposix\nmkdir\nX" + struct.pack("<I", len(str(marker))) + str(marker).encode() + b"o.",
        ],
        "names torch.serialization.os.mkdir": [
            b"\x80\x04" + text("torch") + text("serialization.os.mkdir") + b"\x93" + arguments + b".",
        ],
        "names torch.serialization.os.mkdir,": [
            b"\x80\x04" + text("torch.serialization") + text("os.mkdir") + b"\x93" + arguments + b".",
        ],
        "names builtins.getattr": [
            b"cbuiltins\ngetattr\n(cbuiltins\n__import__\nX\x02\x00\x00\x00os\x85RX\x05\x00\x00\x00mkdirtR" + arguments + b".",
        ],
        "names __builtin__.getattr": [
            b"c__builtin__\ngetattr\n(c__builtin__\n__import__\nX\x02\x00\x00\x00os\x85RX\x05\x00\x00\x00mkdirtR" + arguments + b".",
        ],
    }
    for refusal, pickles in tricks.items():
        for data in pickles:
            assert_live(data, marker)
            for allowed in (METADATA_GLOBALS, TORCH_FILE_GLOBALS):
                with pytest.raises(ValueError, match=refusal):
                    check_pickle(data, allowed)
    assert not marker.exists()


def test_names_that_are_computed(marker: Path) -> None:
    """A text that only running the pickle would give is not guessed at."""
    joined = b"cbuiltins\nstr\n" + text("mkdir") + b"\x85R"
    data = b"\x80\x04" + text("posix") + joined + b"\x93" + call(marker) + b"."
    assert_live(data, marker)
    with pytest.raises(ValueError, match="names a function or class by a text that it computes"):
        check_pickle(data, {"builtins str"})


def test_only_what_is_named_is_called_and_nothing_named_is_changed(marker: Path) -> None:
    """With one careless name in the list the rest would follow; these two rules hold beside the list."""
    got = b"cbuiltins\ngetattr\n(cbuiltins\n__import__\nX\x02\x00\x00\x00os\x85RX\x05\x00\x00\x00mkdirtR" + call(marker) + b"."
    assert_live(got, marker)
    with pytest.raises(ValueError, match="calls something that it does not name"):
        check_pickle(got, {"builtins getattr", "builtins __import__"})
    changed = b"ccollections\nOrderedDict\n}X\x01\x00\x00\x00xK\x01sb."
    with pytest.raises(ValueError, match=r"changes collections OrderedDict \(BUILD\)"):
        check_pickle(changed, {"collections OrderedDict"})


@pytest.mark.parametrize("data", [b"\x82\x01.", b"\x83\x01\x00.", b"\x84\x01\x00\x00\x00.", b"\x97.", b"Pname\n.", b"NQ."])
def test_codes_and_references_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="which a checkpoint has no need of"):
        check_pickle(data, METADATA_GLOBALS)


NO_PICKLES = [b"", b".", b"N", b"(.", b"0.", b"h\x05.", b"\x80\x04\x93.", b"(N\x93.", b"R.", b"1N.", b"(2.", b"\xff.", b"I\xe9\n."]


@pytest.mark.parametrize("data", NO_PICKLES)
def test_what_is_no_pickle_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="is no whole pickle"):
        check_pickle(data, METADATA_GLOBALS)


def test_bytes_after_the_end_are_refused(marker: Path) -> None:
    with pytest.raises(ValueError, match=r"goes on for \d+ bytes after its pickle has ended"):
        check_pickle(pickle.dumps(3) + pickle.dumps(Touch(marker)), METADATA_GLOBALS)


def test_damaged_pickles_never_do_more_than_the_scan_allows(marker: Path) -> None:
    """Random edits of an attack: whatever still works when it is opened is refused. In a child with little memory, for a wild index."""
    generator = random.Random(0)
    attacks = [pickle.dumps([Touch(marker), "torch", "Size", torch.Size([1])], protocol) for protocol in PROTOCOLS]

    def edit_and_open() -> int:
        limit_memory()
        worked = 0
        for _ in range(3000):
            data = bytearray(generator.choice(attacks))
            for _ in range(generator.randrange(3)):
                data[generator.randrange(len(data))] = generator.choice(b".0(th\x00\x93\x94R\x85]q\x8c")
            with contextlib.suppress(Exception):
                pickle.loads(bytes(data))
            if marker.exists():
                worked += 1
                marker.rmdir()
                with pytest.raises(ValueError):
                    check_pickle(bytes(data), METADATA_GLOBALS)
        return worked

    status, answer = in_child(edit_and_open)
    assert status == 0, answer
    assert int(answer) > 300


# -- attacks by files of torch.save -----------------------------------------------------------------------------------


def zip_bytes(records: dict[str, bytes]) -> bytes:
    """A zip file as torch.save writes it, with any content."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    return buffer.getvalue()


@pytest.mark.parametrize("name", ["optimizer.pt", "dataloader_state.pt", "rollouts.pt", "pytorch_model.bin"])
def test_torch_files_that_run_code(tmp_path: Path, marker: Path, name: str) -> None:
    """The state of an optimizer or of a data loader, cached rollouts, weights: nested anywhere, in the new and in the old format."""
    state = {"state": {0: {"exp_avg": torch.ones(2), "step": Touch(marker)}}, "param_groups": [{"lr": 1e-3}]}
    path = tmp_path / name
    torch.save(state, path)
    assert_live(path.read_bytes(), marker, load_unsafe)
    with pytest.raises(ValueError, match=rf"{name} \(data.pkl\) names posix.mkdir"):
        check_torch_file(path)
    torch.save(state, path, _use_new_zipfile_serialization=False)
    assert_live(path.read_bytes(), marker, load_unsafe)
    with pytest.raises(ValueError, match=f"{name} is no zip file of torch.save"):
        check_torch_file(path)
    path.write_bytes(pickle.dumps(state["param_groups"]))
    with pytest.raises(ValueError, match="is no zip file"):
        check_torch_file(path)
    assert not marker.exists()


def test_archives_that_python_and_torch_read_differently(tmp_path: Path, marker: Path) -> None:
    """The pickle that torch will open is the one that is scanned, whatever else the zip file says."""
    good, bad = pickle.dumps({"a": 1}, 2), pickle.dumps(Touch(marker), 2)
    version = {"a/version": b"3\n", "a/byteorder": b"little"}
    refused = 0
    for records in (
        version | {"a/data.pkl": bad},
        version | {"a/data.pkl": good, "b/data.pkl": bad},
        version | {"b/data.pkl": bad, "a/data.pkl": good},
        version | {"a/DATA.PKL": bad, "a/data.pkl": good},
        version | {"a/data.pkl": good, "a/DATA.PKL": bad},
        version | {"a/data.pkl": bad, "data.pkl": good},
        {"data.pkl": good} | version | {"a/data.pkl": bad},
        version | {"a/data.pkl": good, "a/sub/data.pkl": bad},
    ):
        data = zip_bytes(records)
        (tmp_path / "x.pt").write_bytes(data)
        try:
            check_torch_file(tmp_path / "x.pt")
        except ValueError:
            refused += 1
            continue
        with contextlib.suppress(RuntimeError):
            load_unsafe(io.BytesIO(data))
        assert not marker.exists(), records.keys()
    assert 4 <= refused <= 7
    assert_live(zip_bytes(version | {"a/data.pkl": bad}), marker, load_unsafe)
    with pytest.raises(ValueError, match="is a TorchScript program"):
        check_torch_file(zip_bytes(version | {"a/data.pkl": good, "a/constants.pkl": good, "a/code/x.py": b""}))
    with pytest.raises(ValueError, match=r"holds no data\.pkl"):
        check_torch_file(zip_bytes(version | {"a/x": good}))
    whole = torch_bytes({"a": torch.ones(100)})
    for data in (whole[:-30], whole[:40], b"PK\x03\x04" + bytes(60)):
        with pytest.raises(ValueError, match="a torch file is damaged"):
            check_torch_file(data)


# -- attacks by folders of torch_dist ---------------------------------------------------------------------------------


def write_folder(folder: Path, objects: dict[str, object]) -> Path:
    """A distributed checkpoint with a tensor and some objects, as torch.save writes them."""
    dcp.save({"weight": torch.ones(4), **objects}, checkpoint_id=str(folder), no_dist=True)
    torch.save({"iteration": 1}, folder / "common.pt")
    (folder / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}'
    )
    check_torch_dist_folder(folder)
    return folder


def edit_index(folder: Path, change: Callable[[Metadata], object]) -> None:
    metadata = _read_metadata(folder / ".metadata")
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_objects_in_a_shard_that_run_code(tmp_path: Path, marker: Path) -> None:
    """torch's planner unpickles bytes entries without a list; a tensor entry it opens with its own."""
    dcp.save({"weight": torch.ones(4), "good": [1], "rng": {"state": Touch(marker)}}, checkpoint_id=str(tmp_path / "c"), no_dist=True)
    state = {"weight": torch.zeros(4), "good": None, "rng.state": None}
    dcp.load(state, checkpoint_id=str(tmp_path / "c"), no_dist=True)
    marker.rmdir()  # it is live
    with pytest.raises(ValueError, match=r"__0_0.distcp \(entry rng.state\) \(data.pkl\) names posix.mkdir"):
        check_torch_dist_folder(tmp_path / "c")
    assert not marker.exists()
    # the same bytes under the name of a tensor: torch refuses them itself
    edit_index(tmp_path / "c", lambda m: disguise(m, "rng.state"))
    check_torch_dist_folder(tmp_path / "c")
    with pytest.raises(BaseException, match=r"posix\.mkdir|weights_only"):
        dcp.load({"rng.state": torch.zeros(4)}, checkpoint_id=str(tmp_path / "c"), no_dist=True)
    assert not marker.exists()


def disguise(metadata: Metadata, key: str) -> None:
    """Call an object a tensor like ``weight``."""
    metadata.state_dict_metadata[key] = metadata.state_dict_metadata["weight"]
    place = metadata.storage_data.pop(MetadataIndex(key))
    metadata.storage_data[MetadataIndex(key, [0])] = place


def test_index_and_common_state_that_run_code(tmp_path: Path, marker: Path) -> None:
    folder = write_folder(tmp_path / "c", {"a": 1})
    kept = (folder / ".metadata").read_bytes()
    for protocol in PROTOCOLS:
        metadata = _read_metadata(folder / ".metadata")
        metadata.planner_data = {"a": collections.OrderedDict(b=Touch(marker))}
        (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol))
        assert_live((folder / ".metadata").read_bytes(), marker)
        with pytest.raises(ValueError, match=r"\.metadata names"):
            check_torch_dist_folder(folder)
        (folder / ".metadata").write_bytes(kept)
    torch.save({"args": Touch(marker)}, folder / "common.pt")
    with pytest.raises(ValueError, match=r"common.pt \(data.pkl\) names posix.mkdir"):
        check_torch_dist_folder(folder)
    assert not marker.exists()


def replace_place(metadata: Metadata, **changes: object) -> None:
    """Move the bytes entry ``a``."""
    place = metadata.storage_data[MetadataIndex("a")]
    metadata.storage_data[MetadataIndex("a")] = _StorageInfo(**({"relative_path": "__0_0.distcp"} | vars(place) | changes))


INDEX_FAULTS: dict[str, tuple[Callable[[Metadata], object], str]] = {
    "up": (lambda m: replace_place(m, relative_path="../evil.distcp"), r"places a in '../evil.distcp', which is no file of the folder"),
    "absolute": (lambda m: replace_place(m, relative_path="/etc/passwd"), "which is no file of the folder"),
    "other file": (lambda m: replace_place(m, relative_path="common.pt"), "which is no file of the folder"),
    "missing file": (lambda m: replace_place(m, relative_path="__9_0.distcp"), "__9_0.distcp is missing: a should be in it"),
    "beyond": (lambda m: replace_place(m, length=10**9), r"\(entry a\) ends before its 1000000000 bytes"),
    "negative": (lambda m: replace_place(m, offset=-1), "where it cannot be read as it stands"),
    "compressed": (lambda m: replace_place(m, transform_descriptors=["stream.zstd/1"]), "where it cannot be read as it stands"),
    "wrong bytes": (lambda m: replace_place(m, offset=1), "is no zip file of torch.save"),
    "no place": (lambda m: m.storage_data.pop(MetadataIndex("a")), "does not say where a is"),
    "class as kind": (lambda m: m.state_dict_metadata.update(a=BytesStorageMetadata), "gives 'a' the kind type"),
    "stray place": (lambda m: m.storage_data.update({"b": 1}), r"places something that is no entry \('b'\)"),
    "no list": (lambda m: setattr(m, "storage_data", [1]), "has no list of entries"),
}


@pytest.mark.parametrize("kind", INDEX_FAULTS)
def test_an_index_that_leads_elsewhere(tmp_path: Path, kind: str) -> None:
    folder = write_folder(tmp_path / "c", {"a": 1})
    (tmp_path / "evil.distcp").write_bytes((folder / "__0_0.distcp").read_bytes())
    change, fault = INDEX_FAULTS[kind]
    edit_index(folder, change)
    with pytest.raises(ValueError, match=fault):
        check_torch_dist_folder(folder)


def test_files_that_do_not_belong_in_a_folder(tmp_path: Path, marker: Path) -> None:
    """Other formats of megatron-core unpickle other files: no such folder, no such file."""
    folder = write_folder(tmp_path / "c", {"a": 1})
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    with pytest.raises(ValueError, match=r"asks for the format .*'zarr'"):
        check_torch_dist_folder(folder)
    (folder / "metadata.json").write_text("{")
    with pytest.raises(ValueError, match=r"metadata.json is damaged"):
        check_torch_dist_folder(folder)
    (folder / "metadata.json").unlink()
    for name in ("shard_0_2.pt", "__0_0.distcp.pkl", "evil.py"):
        (folder / name).write_bytes(pickle.dumps(Touch(marker)))
        with pytest.raises(ValueError, match=f"{name} does not belong"):
            check_torch_dist_folder(folder)
        (folder / name).unlink()
    (folder / "objects").mkdir()
    with pytest.raises(ValueError, match="objects does not belong"):
        check_torch_dist_folder(folder)
    (folder / "objects").rmdir()
    (folder / ".metadata").rename(tmp_path / "kept")
    with pytest.raises(ValueError, match=r".metadata does not exist"):
        check_torch_dist_folder(folder)
    (folder / ".metadata").symlink_to(tmp_path / "kept")
    with pytest.raises(ValueError, match=r".metadata does not belong"):
        check_torch_dist_folder(folder)
    (folder / ".metadata").unlink()
    for data, fault in ((pickle.dumps([1]), "holds list, not the metadata"), (b"\x80\x04]K\x01b.", "is damaged")):
        (folder / ".metadata").write_bytes(data)
        with pytest.raises(ValueError, match=fault):
            check_torch_dist_folder(folder)


def test_a_pickle_inside_of_a_tensor(tmp_path: Path, marker: Path) -> None:
    """Transformer Engine's extra state: its module unpickles the bytes of the tensor."""
    content = torch.frombuffer(bytearray(pickle.dumps(Touch(marker))), dtype=torch.uint8)
    key = "layers.0._extra_state"
    index = Metadata({key: BytesStorageMetadata()})
    for tensor, is_good in ((torch.empty(0, dtype=torch.uint8), True), (content, False)):
        data = torch_bytes([tensor])
        index.storage_data = {MetadataIndex(key): _StorageInfo("__0_0.distcp", 0, len(data))}
        (tmp_path / "c").mkdir(exist_ok=True)
        (tmp_path / "c" / "__0_0.distcp").write_bytes(data)
        (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(index))
        if is_good:
            check_torch_dist_folder(tmp_path / "c")
            continue
        with pytest.raises(ValueError, match="is an extra state with content"):
            check_torch_dist_folder(tmp_path / "c")
