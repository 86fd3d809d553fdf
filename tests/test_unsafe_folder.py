"""Folders of distributed checkpoints: what megatron-core and torch write passes; what would run code, or leads elsewhere, is refused."""

from __future__ import annotations

import collections
import datetime
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from pickle_attacks import PROTOCOLS, Touch, assert_live, torch_bytes
from spawn import run_ranks
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from megatron_ppo.unsafe_pickle import _bytes_entries, _read_metadata, check_torch_dist_folder

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "MARKER"


# -- what is written passes ------------------------------------------------------------------------------------------


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
