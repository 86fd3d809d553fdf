"""Reading and writing of Hugging Face checkpoints, through the layouts, against transformers and safetensors themselves."""

from __future__ import annotations

import json
import pickle
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from toy_models import make_toy
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from megatron_ppo.families import EMBEDDING, LM_HEAD, SCORE_HEAD, Head, NetworkShape, network_shape
from megatron_ppo.resharding.hf_checkpoint import INDEX_FILE, HFCheckpoint, load_hf_weights, write_hf_checkpoint
from megatron_ppo.resharding.layout import RankLayout, view
from megatron_ppo.resharding.megatron_layout import megatron_layout
from megatron_ppo.resharding.megatron_mesh import MegatronParallel, RankCoordinates
from megatron_ppo.resharding.vllm_layout import hf_layout, vllm_layout

WEIGHTS = "model.safetensors"


def empty(layout: RankLayout, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: torch.full(shape, 7.0, dtype=dtype) for name, shape in layout.shapes.items()}


def megatron_ranks(network: NetworkShape, parallel: MegatronParallel, head: Head = "lm") -> list[RankLayout]:
    ranks = product(range(parallel.pipeline_model_parallel_size), range(parallel.tensor_model_parallel_size))
    return [megatron_layout(network, parallel, RankCoordinates(0, pp, tp), head=head) for pp, tp in ranks]


def collect(ranks: list[tuple[RankLayout, dict[str, Tensor]]], shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Full tensors out of the ranks' parameters; NaN where nobody holds an element."""
    full = {name: torch.full(shape, float("nan")) for name, shape in shapes.items()}
    for layout, parameters in ranks:
        for block in layout.blocks:
            view(full[block.name], block.canonical).copy_(view(parameters[block.parameter], block.local))
    return full


def reshard(folder: Path, edit: dict[str, Tensor] | None = None, drop: str | None = None, num_files: int = 1) -> None:
    """Write the weights of a folder anew: other tensors, or several files with an index."""
    tensors = load_file(folder / WEIGHTS) | (edit or {})
    tensors.pop(drop, None)
    (folder / WEIGHTS).unlink()
    if num_files == 1:
        save_file(tensors, folder / WEIGHTS)
        return
    weight_map = {name: f"part-{i % num_files}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


# -- through the layouts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "tied", "tp", "pp", "vpp"),
    [
        ("llama", False, 1, 1, None),
        ("llama", True, 2, 2, None),
        ("qwen2", False, 2, 1, None),
        ("qwen2", True, 4, 1, None),
        ("qwen3", False, 2, 2, 2),
        ("mistral", False, 4, 4, None),
    ],
)
def test_b05_round_trip_through_megatron_is_bit_equal(
    tmp_path: Path, *, family: str, tied: bool, tp: int, pp: int, vpp: int | None
) -> None:
    """HF -> megatron ranks -> HF: same keys, same bits; padding is zero; head_dim is not hidden / heads (B15)."""
    source = make_toy(tmp_path / "in", family, tied=tied, num_layers=4, head_dim=24)
    network = network_shape(source)
    ranks = []
    for layout in megatron_ranks(network, MegatronParallel(tp, pp, vpp)):
        parameters = empty(layout)
        assert load_hf_weights(source, layout, parameters) == ()
        for name, tensor in parameters.items():
            if name.endswith(("word_embeddings.weight", "output_layer.weight")):
                covered = [b.local[0] for b in layout.blocks if b.parameter == name]
                assert not tensor[covered[0][1] if covered else 0 :].any()
        ranks.append((layout, parameters))
    original = load_file(source / WEIGHTS)
    full = collect(ranks, {name: tuple(t.shape) for name, t in original.items()})
    write_hf_checkpoint(tmp_path / "out", source, full.items())
    written = load_file(tmp_path / "out" / WEIGHTS)
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], original[name]) for name in original)
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_b09_tied_export_stays_tied(tmp_path: Path) -> None:
    source = make_toy(tmp_path / "in", tied=True)
    write_hf_checkpoint(tmp_path / "out", source, load_file(source / WEIGHTS).items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True
    assert LM_HEAD not in HFCheckpoint(tmp_path / "out").shapes
    tokens = torch.arange(8)[None]
    logits = [AutoModelForCausalLM.from_pretrained(folder)(tokens).logits for folder in (source, tmp_path / "out")]
    assert torch.equal(*logits)


def test_loading_casts_and_fills_live_parameters_in_place(tmp_path: Path) -> None:
    source = make_toy(tmp_path, "qwen3", dtype="bfloat16")
    layout = vllm_layout(network_shape(source), tensor_parallel_size=2, tp_rank=1)
    parameters: dict[str, Tensor] = {n: torch.nn.Parameter(t) for n, t in empty(layout, torch.float32).items()}
    addresses = {name: t.data_ptr() for name, t in parameters.items()}
    load_hf_weights(source, layout, parameters)
    assert addresses == {name: t.data_ptr() for name, t in parameters.items()}
    stored = load_file(source / WEIGHTS)
    assert torch.equal(parameters["model.norm.weight"], stored["model.norm.weight"].float())
    q_rows = parameters["model.layers.0.self_attn.qkv_proj.weight"][:32]
    assert torch.equal(q_rows, stored["model.layers.0.self_attn.q_proj.weight"][32:].float())


def test_hf_layout_equals_transformers_parameters(tmp_path: Path) -> None:
    for tied in (False, True):
        source = make_toy(tmp_path / str(tied), "qwen2", tied=tied)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
        load_hf_weights(source, hf_layout(network_shape(source)), dict(model.named_parameters()))
        reference = AutoModelForCausalLM.from_pretrained(source)
        tokens = torch.arange(9)[None]
        with torch.no_grad():
            assert torch.equal(model(tokens).logits, reference(tokens).logits)


# -- faults of a checkpoint ------------------------------------------------------------------------------------------------


def load_whole(folder: Path, head: Head = "lm", **options: bool) -> dict[str, Tensor]:
    layout = hf_layout(network_shape(folder), head)
    parameters = empty(layout)
    load_hf_weights(folder, layout, parameters, head=head, **options)
    return parameters


def test_b05_tensors_that_are_missing_or_not_consumed_are_listed_on_every_rank(tmp_path: Path) -> None:
    source = make_toy(tmp_path, num_layers=2)
    reshard(source, edit={"model.layers.0.self_attn.o_proj.bias": torch.zeros(64)}, drop="model.layers.1.mlp.up_proj.weight")
    for layout in megatron_ranks(network_shape(source), MegatronParallel(1, 2)):
        parameters = empty(layout)
        with pytest.raises(ValueError) as error:
            load_hf_weights(source, layout, parameters)
        assert "not consumed: model.layers.0.self_attn.o_proj.bias (64,)" in str(error.value)
        assert "missing: model.layers.1.mlp.up_proj.weight (96, 64)" in str(error.value)
        assert all((tensor == 7).all() for tensor in parameters.values()), "refused, yet something was written"


def test_vocabulary_smaller_than_the_config_says(tmp_path: Path) -> None:
    source = make_toy(tmp_path)
    reshard(source, edit={EMBEDDING: torch.zeros(120, 64)})
    with pytest.raises(ValueError, match=r"embed_tokens.weight: \(120, 64\), but the config says \(130, 64\)"):
        load_whole(source)


def test_a_folder_with_other_numbers_than_the_network_is_refused(tmp_path: Path) -> None:
    network = network_shape(make_toy(tmp_path / "actor"))
    other = make_toy(tmp_path / "critic", vocab_size=192)
    layout = megatron_layout(network, MegatronParallel(), RankCoordinates(0, 0, 0), head="value")
    with pytest.raises(ValueError, match=r"embed_tokens.weight is \(192, 64\), but the network to be filled has \(130, 64\)"):
        load_hf_weights(other, layout, empty(layout), head="value", network=network)


def test_live_parameters_that_are_not_the_layouts_are_refused(tmp_path: Path) -> None:
    source = make_toy(tmp_path)
    layout = hf_layout(network_shape(source))
    parameters = empty(layout)
    parameters["model.norm.weight"] = torch.zeros(63)
    parameters["lora.weight"] = parameters.pop(LM_HEAD)
    with pytest.raises(ValueError) as error:
        load_hf_weights(source, layout, parameters)
    for part in ("not in the model: lm_head.weight", "not in the layout: lora.weight", "the model has (63,), the layout (64,)"):
        assert part in str(error.value)


def test_old_rotary_buffers_and_equal_tied_copies_are_harmless(tmp_path: Path) -> None:
    source = make_toy(tmp_path, tied=True)
    embedding = load_file(source / WEIGHTS)[EMBEDDING]
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8), LM_HEAD: embedding.clone()}
    reshard(source, edit=extra)
    assert torch.equal(load_whole(source)[EMBEDDING], embedding)
    reshard(source, edit={LM_HEAD: embedding + 1})
    with pytest.raises(ValueError, match=r"ties the head .*lm_head.weight differs"):
        load_whole(source)


def test_b26_wrapped_names_load_and_collisions_are_refused(tmp_path: Path) -> None:
    source = make_toy(tmp_path)
    plain = load_file(source / WEIGHTS)
    save_file({f"_orig_mod.module.{name}": tensor for name, tensor in plain.items()}, source / WEIGHTS)
    loaded = load_whole(source)
    assert all(torch.equal(loaded[name], plain[name]) for name in plain)
    save_file(plain | {"module.model.norm.weight": torch.zeros(64)}, source / WEIGHTS)
    with pytest.raises(ValueError, match=r"are both model\.norm\.weight"):
        HFCheckpoint(source)


def test_b21_deleted_shard_names_the_file(tmp_path: Path) -> None:
    source = make_toy(tmp_path)
    reshard(source, num_files=2)
    assert load_whole(source)
    (source / "part-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"do not exist: .*part-1\.safetensors"):
        HFCheckpoint(source)


def test_b21_tensor_missing_from_its_shard_is_named(tmp_path: Path) -> None:
    source = make_toy(tmp_path)
    reshard(source, num_files=2)
    shard = load_file(source / "part-0.safetensors")
    name = sorted(shard)[0]
    del shard[name]
    save_file(shard, source / "part-0.safetensors")
    with pytest.raises(ValueError, match=rf"part-0.safetensors holds {name}, but it does not"):
        HFCheckpoint(source)


def test_b21_index_and_single_file_contradict(tmp_path: Path) -> None:
    source = make_toy(tmp_path)
    (source / INDEX_FILE).write_text("{}")
    with pytest.raises(ValueError, match="holds both"):
        HFCheckpoint(source)
    (source / WEIGHTS).unlink()
    with pytest.raises(ValueError, match="no weight_map"):
        HFCheckpoint(source)
    (source / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(ValueError, match="no file name in the same folder"):
        HFCheckpoint(source)
    (source / INDEX_FILE).unlink()
    with pytest.raises(ValueError, match="holds neither"):
        HFCheckpoint(source)


def test_b21_truncated_file_is_named(tmp_path: Path) -> None:
    source = make_toy(tmp_path)
    content = (source / WEIGHTS).read_bytes()
    (source / WEIGHTS).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        HFCheckpoint(source)


def test_b23_files_without_metadata_load(tmp_path: Path) -> None:
    source = make_toy(tmp_path)
    save_file(load_file(source / WEIGHTS), source / WEIGHTS)
    with safe_open(source / WEIGHTS, "pt") as file:
        assert not file.metadata()
    assert load_whole(source)


class Marker:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.touch, (self.path,))


def test_b108_pickled_weights_are_refused_unopened(tmp_path: Path) -> None:
    source = make_toy(tmp_path / "in")
    (source / WEIGHTS).unlink()
    (source / "pytorch_model.bin").write_bytes(pickle.dumps(Marker(tmp_path / "marker")))
    with pytest.raises(ValueError, match=r"pickle \(pytorch_model\.bin\).*safetensors"):
        load_whole(source)
    assert not (tmp_path / "marker").exists()
    pickle.loads((source / "pytorch_model.bin").read_bytes())
    assert (tmp_path / "marker").exists(), "the trap itself must work"


def test_boxes_outside_a_tensor_are_refused(tmp_path: Path) -> None:
    checkpoint = HFCheckpoint(make_toy(tmp_path))
    full = checkpoint.read(EMBEDDING)
    assert torch.equal(checkpoint.read(EMBEDDING, ((3, 9), (10, 20))), full[3:9, 10:20])
    for box in (((0, 131), (0, 64)), ((0, 1),), ((-1, 2), (0, 64))):
        with pytest.raises(ValueError, match="does not lie in"):
            checkpoint.read(EMBEDDING, box)
    with pytest.raises(ValueError, match="holds no tensor nonsense"):
        checkpoint.read("nonsense")


# -- heads -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pp", [1, 2])
def test_b25_critic_from_a_policy_keeps_its_own_head(tmp_path: Path, tied: bool, pp: int) -> None:
    source = make_toy(tmp_path, tied=tied)
    stored = load_file(source / WEIGHTS)
    ranks = []
    for layout in megatron_ranks(network_shape(source), MegatronParallel(1, pp), "value"):
        parameters = empty(layout)
        last = "value_head.weight" in parameters
        assert load_hf_weights(source, layout, parameters, head="value") == (("value_head.weight",) if last else ())
        if last:
            assert parameters["value_head.weight"].shape == (1, 64) and (parameters["value_head.weight"] == 7).all()
        ranks.append((layout, parameters))
    trunk = {name: tuple(t.shape) for name, t in stored.items() if name != LM_HEAD}
    full = collect(ranks, trunk | {SCORE_HEAD: (1, 64)})
    assert all(torch.equal(full[name], stored[name]) for name in trunk)


@pytest.mark.parametrize("head", ["value", "score"])
def test_b25_score_head_of_a_reward_model_is_used_exactly(tmp_path: Path, head: Head) -> None:
    source = make_toy(tmp_path, "qwen2", score_head=True)
    layout = megatron_layout(network_shape(source), MegatronParallel(), RankCoordinates(0, 0, 0), head=head)
    parameters = empty(layout)
    assert load_hf_weights(source, layout, parameters, head=head, head_required=True) == ()
    assert torch.equal(parameters["value_head.weight"], load_file(source / WEIGHTS)[SCORE_HEAD])


def test_b25_reward_model_without_a_head_is_refused_on_every_stage(tmp_path: Path) -> None:
    source = make_toy(tmp_path)
    for head, required in (("score", False), ("value", True)):
        for layout in megatron_ranks(network_shape(source), MegatronParallel(1, 2), head):
            with pytest.raises(ValueError, match=r"holds no score\.weight"):
                load_hf_weights(source, layout, empty(layout), head=head, head_required=required)


def test_b25_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    reward = make_toy(tmp_path / "rm", score_head=True)
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight") as error:
        load_whole(reward)
    assert "not consumed: score.weight" in str(error.value)
    reshard(reward, edit={SCORE_HEAD: torch.zeros(2, 64)})
    with pytest.raises(ValueError, match=r"score\.weight: \(2, 64\), but the config says \(1, 64\)"):
        load_whole(reward, "score")
    policy = make_toy(tmp_path / "policy")
    layout = hf_layout(network_shape(policy), "value")
    with pytest.raises(ValueError, match="another head than 'lm'"):
        load_hf_weights(policy, layout, empty(layout))


def test_b25_exported_critic_loads_as_a_classifier(tmp_path: Path) -> None:
    """From a tied policy: one label, untied, and transformers finds every weight."""
    source = make_toy(tmp_path / "in", "qwen3", tied=True)
    parameters = load_whole(source, "value")
    parameters[SCORE_HEAD] = torch.randn(1, 64)
    write_hf_checkpoint(tmp_path / "out", source, parameters.items(), head="value")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.num_labels == 1 and config.tie_word_embeddings is False
    model, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(model.score.weight, parameters[SCORE_HEAD])
    back = load_whole(tmp_path / "out", "value", head_required=True)
    assert all(torch.equal(back[name], parameters[name]) for name in parameters)


# -- writing ---------------------------------------------------------------------------------------------------------------


def test_b21_b23_many_shards_agree_with_their_index(tmp_path: Path) -> None:
    source = make_toy(tmp_path / "in")
    original = load_file(source / WEIGHTS)
    limit = sum(t.numel() * 4 for t in original.values()) // 4
    out = tmp_path / "out"
    write_hf_checkpoint(out, source, iter(original.items()), limit)
    index = json.loads((out / INDEX_FILE).read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) >= 3 and set(index["weight_map"].values()) == set(files) and not list(out.glob("*.partial"))
    seen: dict[str, str] = {}
    for file in files:
        assert sum(t.numel() * 4 for t in load_file(out / file).values()) <= limit
        with safe_open(out / file, "pt") as handle:
            assert handle.metadata()["format"] == "pt"
            for name in handle.keys():  # noqa: SIM118 (safe_open is no dict)
                assert name not in seen
                seen[name] = file
    assert seen == index["weight_map"] and seen.keys() == original.keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in original.values())
    checkpoint = HFCheckpoint(out)
    assert all(torch.equal(checkpoint.read(name), original[name]) for name in original)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert all(torch.equal(tensor, original[name]) for name, tensor in model.state_dict().items())


def test_b23_single_file_has_the_metadata_and_no_index(tmp_path: Path) -> None:
    source = make_toy(tmp_path / "in")
    write_hf_checkpoint(tmp_path / "out", source, load_file(source / WEIGHTS).items())
    with safe_open(tmp_path / "out" / WEIGHTS, "pt") as handle:
        assert handle.metadata()["format"] == "pt"
    assert not (tmp_path / "out" / INDEX_FILE).exists()


def test_a_reused_buffer_is_not_written_twice(tmp_path: Path) -> None:
    """The caller may hand out one buffer again and again, and views of it."""
    source = make_toy(tmp_path / "in")
    original = load_file(source / WEIGHTS)
    buffer = torch.empty(max(t.numel() for t in original.values()))

    def stream() -> object:
        for name, tensor in original.items():
            buffer.fill_(-1)
            yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)

    write_hf_checkpoint(tmp_path / "out", source, stream())
    written = load_file(tmp_path / "out" / WEIGHTS)
    assert all(torch.equal(written[name], original[name]) for name in original)


def test_b24_sidecars_are_copied_byte_by_byte(tmp_path: Path) -> None:
    source = make_toy(tmp_path / "in")
    sidecars = {
        "generation_config.json": '{"eos_token_id": [151643,\n 151645]}',
        "tokenizer.json": '{"a":  1}',
        "tokenizer_config.json": "{}",
        "special_tokens_map.json": "{ }",
        "chat_template.jinja": "{% for m in messages %}{{ m }}{% endfor %}\n",
        "tokenizer.model": "\x00\x01binary",
        "vocab.json": "{}",
        "merges.txt": "a b\n",
        "additional_chat_templates/tool.jinja": "{{ tool }}",
        "LICENSE": "words",
    }
    for name, content in sidecars.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(content.encode())
    (source / "optimizer.pt").write_bytes(b"not for the export")
    write_hf_checkpoint(tmp_path / "out", source, load_file(source / WEIGHTS).items())
    written = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert written == set(sidecars) | {"config.json", WEIGHTS}
    for name, content in sidecars.items():
        assert (tmp_path / "out" / name).read_bytes() == content.encode()


def test_b24_absent_stays_absent_and_malformed_is_refused(tmp_path: Path) -> None:
    source = make_toy(tmp_path / "in")
    (source / "generation_config.json").unlink(missing_ok=True)
    weights = load_file(source / WEIGHTS)
    write_hf_checkpoint(tmp_path / "out", source, weights.items())
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", WEIGHTS}
    (source / "generation_config.json").write_text('{"eos_token_id": [1,')
    with pytest.raises(ValueError, match=r"generation_config\.json is not valid JSON"):
        write_hf_checkpoint(tmp_path / "bad", source, weights.items())
    assert not (tmp_path / "bad").exists()


def test_incomplete_or_double_exports_leave_no_weights(tmp_path: Path) -> None:
    source = make_toy(tmp_path / "in")
    weights = load_file(source / WEIGHTS)
    cases: list[tuple[list[tuple[str, Tensor]], str]] = [
        ([item for item in weights.items() if item[0] != LM_HEAD], r"missing: lm_head\.weight"),
        ([*weights.items(), (SCORE_HEAD, torch.zeros(1, 64))], r"not consumed: score\.weight"),
        ([*weights.items(), (f"module.{LM_HEAD}", weights[LM_HEAD])], r"are both lm_head\.weight"),
        ([*(weights | {EMBEDDING: torch.zeros(256, 64)}).items()], r"embed_tokens\.weight: \(256, 64\)"),
    ]
    for number, (tensors, message) in enumerate(cases):
        out = tmp_path / str(number)
        with pytest.raises(ValueError, match=message):
            write_hf_checkpoint(out, source, tensors, max_shard_bytes=30_000)
        assert list(out.iterdir()) == []


@pytest.mark.parametrize("at", ["a shard", "the index"])
def test_an_export_that_the_disk_cuts_short_leaves_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """Half a shard under its temporary name, or whole shards without their index: neither stays, so that a second try can be made."""
    source = make_toy(tmp_path / "in")
    weights = load_file(source / WEIGHTS)
    write_text = Path.write_text

    def half(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        save_file(tensors, path, metadata=metadata)
        if at == "a shard" and "00003" in path.name:
            path.write_bytes(path.read_bytes()[:1000])
            raise OSError("no space left")

    def half_text(path: Path, text: str, **options: str) -> int:
        write_text(path, text[:20], **options)
        raise OSError("no space left")

    monkeypatch.setattr("megatron_ppo.resharding.hf_checkpoint.save_file", half)
    monkeypatch.setattr(Path, "write_text", half_text)
    with pytest.raises(OSError, match="no space left"):
        write_hf_checkpoint(tmp_path / "out", source, weights.items(), max_shard_bytes=30_000)
    monkeypatch.undo()
    assert list((tmp_path / "out").iterdir()) == []
    write_hf_checkpoint(tmp_path / "out", source, weights.items(), max_shard_bytes=30_000)
    assert HFCheckpoint(tmp_path / "out").shapes.keys() == weights.keys()


def test_a_folder_that_holds_weights_is_not_written_into(tmp_path: Path) -> None:
    source = make_toy(tmp_path / "in")
    copy = shutil.copytree(source, tmp_path / "copy")
    with pytest.raises(ValueError, match="already holds weights"):
        write_hf_checkpoint(copy, source, load_file(source / WEIGHTS).items())
    with pytest.raises(ValueError, match="max_shard_bytes must be at least 1"):
        write_hf_checkpoint(tmp_path / "out", source, [], 0)
