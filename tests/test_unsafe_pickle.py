"""Pickles that would run code are refused unopened; what torch writes passes. Whole folders: test_unsafe_folder.py. B108."""

from __future__ import annotations

import _compat_pickle
import collections
import contextlib
import io
import pickle
import pickletools
import random
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from checkpoint_folder_support import in_child, limit_memory
from hypothesis import given, settings
from hypothesis import strategies as st
from pickle_attacks import PROTOCOLS, Touch, assert_live, load_unsafe, torch_bytes

from megatron_ppo.unsafe_pickle import (
    METADATA_GLOBALS,
    TORCH_FILE_GLOBALS,
    check_pickle,
    check_torch_file,
)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "MARKER"


# -- what is written here passes --------------------------------------------------------------------------------------


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
            # places in the memo are filled twice; by number, and by counting
            b"\x80\x04"
            + text("torch")
            + b"q\x070"
            + text("Size")
            + b"q\x090"
            + text("posix")
            + b"q\x070"
            + text("mkdir")
            + b"q\x090h\x07h\x09\x93"
            + arguments
            + b".",
            b"\x80\x04"
            + text("torch")
            + b"q\x000"
            + text("Size")
            + b"q\x020"
            + text("mkdir")
            + b"\x940"
            + text("posix")
            + b"q\x000h\x00h\x02\x93"
            + arguments
            + b".",
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
