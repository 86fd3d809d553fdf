"""The folder of stored tensors, without megatron-core: names and boxes, bounded pieces, refusals. Real ranks: test_conversion.py."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from checkpoint_support import same_bits
from conversion_support import tensors_of
from toy_models import CLASSES, Family, make_toy

from megatron_ppo import megatron_store
from megatron_ppo.families import canonical_tensors, network_shape
from megatron_ppo.megatron_store import MegatronStore, cut_box, open_slabs, stored_bytes, stored_slabs, write_store
from megatron_ppo.resharding.boxes import intersect, volume
from megatron_ppo.resharding.hf_checkpoint import HFCheckpoint

PREFIX = "actor.model."


def store_of(folder: Path, source: Path) -> None:
    checkpoint = HFCheckpoint(source)
    slabs = stored_slabs(network_shape(source))
    names = {block.name for slab in slabs for block in slab.blocks}
    write_store(folder, slabs, checkpoint.read, {name: checkpoint.read(name).dtype for name in names}, prefix=PREFIX)


def read_back(folder: Path, source: Path) -> dict[str, torch.Tensor]:
    network = open_slabs(MegatronStore(folder), stored_slabs(network_shape(source)), PREFIX)
    return {name: tensor.clone() for name, tensor in network.tensors()}


@pytest.mark.parametrize("family", CLASSES)
def test_every_canonical_tensor_lies_in_one_slab_and_fills_its_part(tmp_path: Path, family: Family) -> None:
    network = network_shape(make_toy(tmp_path, family))
    slabs = stored_slabs(network, "lm+value")
    holders: dict[str, set[int]] = {}
    held: dict[str, int] = {}
    for number, slab in enumerate(slabs):
        assert sum(volume(block.local) for block in slab.blocks) == volume(slab.box), "no hole, no overlap"
        for block in slab.blocks:
            assert intersect(block.local, slab.box) == block.local
            holders.setdefault(block.name, set()).add(number)
            held[block.name] = held.get(block.name, 0) + volume(block.canonical)
    assert all(len(numbers) == 1 for numbers in holders.values())
    assert held == {tensor.name: torch.Size(tensor.shape).numel() for tensor in canonical_tensors(network, "lm+value")}


def test_parts_of_a_box_are_bounded_whole_in_the_last_dim_and_fill_it() -> None:
    for box, limit in ((((2, 3), (0, 7), (0, 5), (0, 4)), 17), (((0, 10), (0, 4)), 4), (((0, 10), (0, 4)), 3), (((0, 9),), 2)):
        parts = list(cut_box(box, limit))
        assert sum(volume(part) for part in parts) == volume(box)
        assert not any(intersect(one, other) for number, one in enumerate(parts) for other in parts[:number])
        assert all(volume(part) <= max(limit, box[-1][1] - box[-1][0]) for part in parts)
        assert all(part[-1] == box[-1] for part in parts)
    assert list(cut_box(((0, 2), (0, 3)), 100)) == [((0, 2), (0, 3))]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_small_chunks_and_files_hold_the_same_bits(tmp_path: Path, family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_toy(tmp_path / "source", family, dtype="bfloat16")
    monkeypatch.setattr(megatron_store, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(megatron_store, "FILE_BYTES", 50_000)
    store_of(tmp_path / "store", source)
    files = sorted((tmp_path / "store").glob("*.distcp"))
    assert len(files) > 3 and files[0].name == "__0_0.distcp"
    assert same_bits(read_back(tmp_path / "store", source), tensors_of(source))
    rows = MegatronStore(tmp_path / "store").read(f"{PREFIX}embedding.word_embeddings.weight", ((5, 97), (3, 60)))
    assert torch.equal(rows, tensors_of(source)["model.embed_tokens.weight"][5:97, 3:60]), "a box that no chunk's border fits"


def test_a_chunk_is_made_when_it_is_written_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_toy(tmp_path / "source")
    monkeypatch.setattr(megatron_store, "CHUNK_BYTES", 4000)
    checkpoint, slabs = HFCheckpoint(source), stored_slabs(network_shape(source))
    dtypes = dict.fromkeys(checkpoint.shapes, torch.float32)
    counted: list[int] = []
    reads: list[int] = []

    def read(name: str, box: tuple[tuple[int, int], ...]) -> torch.Tensor:
        reads.append(sum(counted))
        return checkpoint.read(name, box)

    write_store(tmp_path / "store", slabs, read, dtypes, prefix=PREFIX, on_bytes=counted.append)
    assert sum(counted) == stored_bytes(slabs, dtypes) == sum(tensor.nbytes for tensor in tensors_of(source).values())
    assert max(counted) <= 4000 and len(set(reads)) == len(counted), "nothing is read ahead"


def test_tensors_of_two_dtypes_in_one_stored_tensor_are_refused(tmp_path: Path) -> None:
    slabs = stored_slabs(network_shape(make_toy(tmp_path)))
    dtypes = {block.name: torch.bfloat16 for slab in slabs for block in slab.blocks} | {
        "model.layers.1.input_layernorm.weight": torch.float32
    }
    with pytest.raises(ValueError, match=r"model.layers.1.input_layernorm.weight is torch.float32.*layer_norm_weight.*--dtype"):
        stored_bytes(slabs, dtypes)


def test_a_store_that_is_not_the_networks_is_refused_with_every_fault(tmp_path: Path) -> None:
    source = make_toy(tmp_path / "source")
    store_of(tmp_path / "store", source)
    network = network_shape(make_toy(tmp_path / "other", "qwen2", ffn=128, vocab_size=140))
    with pytest.raises(ValueError, match=r"does not hold the network that config\.json describes") as refused:
        open_slabs(MegatronStore(tmp_path / "store"), stored_slabs(network), PREFIX)
    text = str(refused.value)
    assert f"missing: {PREFIX}decoder.layers.self_attention.linear_qkv.bias (2, 128)" in text
    assert f"shape of {PREFIX}decoder.layers.mlp.linear_fc1.weight: (2, 192, 64), but the config says (2, 256, 64)" in text
    assert f"shape of {PREFIX}embedding.word_embeddings.weight: (130, 64), but the config says (140, 64)" in text
    with pytest.raises(ValueError, match=r"missing: critic.model.embedding"):
        open_slabs(MegatronStore(tmp_path / "store"), stored_slabs(network_shape(source)), "critic.model.")


def test_damaged_and_foreign_folders_are_refused(tmp_path: Path) -> None:
    source = make_toy(tmp_path / "source")
    folder = tmp_path / "store"
    store_of(folder, source)
    data = folder / "__0_0.distcp"
    content = data.read_bytes()
    opened = MegatronStore(folder)
    data.unlink()
    with pytest.raises(ValueError, match=r"__0_0.distcp is gone: a running job deletes"):
        opened.read(f"{PREFIX}decoder.final_layernorm.weight", ((0, 64),))
    with pytest.raises(ValueError, match=r"__0_0.distcp does not exist"):
        MegatronStore(folder)
    data.write_bytes(content[:-100])
    with pytest.raises(ValueError, match=rf"has {len(content) - 100} bytes, but should have at least"):
        MegatronStore(folder)
    data.write_bytes(bytes(len(content)))
    with pytest.raises(ValueError, match=r"final_layernorm.weight \[0:64\] in .* cannot be read"):
        MegatronStore(folder).read(f"{PREFIX}decoder.final_layernorm.weight", ((0, 64),))
    data.write_bytes(content)
    metadata = (folder / ".metadata").read_bytes()
    found = pickle.loads(metadata)
    next(iter(found.storage_data.values())).relative_path = "../elsewhere.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(ValueError, match=r"names '../elsewhere.distcp', which is no plain file in the same folder"):
        MegatronStore(folder)
    (folder / ".metadata").unlink()
    with pytest.raises(ValueError, match=r"\.metadata does not exist; this is no distributed checkpoint"):
        MegatronStore(folder)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(ValueError, match=r"says 'zarr', and only format torch_dist can be read"):
        MegatronStore(folder)
    (folder / "metadata.json").unlink()
    with pytest.raises(ValueError, match=r"metadata.json cannot be read"):
        MegatronStore(folder)


def test_a_tensor_with_a_hole_is_refused(tmp_path: Path) -> None:
    source = make_toy(tmp_path / "source")
    folder = tmp_path / "store"
    store_of(folder, source)
    found = pickle.loads((folder / ".metadata").read_bytes())
    key = f"{PREFIX}decoder.layers.mlp.linear_fc2.weight"
    del found.state_dict_metadata[key].chunks[1]
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(
        ValueError, match=r"holds 0 of 6144 elements of .*linear_fc2.weight \[1:2, 0:64, 0:96\]: the checkpoint is not whole"
    ):
        read_back(folder, source)
