"""Hugging Face -> the ranks of a training mesh -> Hugging Face, for every family and many meshes: the same names, bits, config and logits.

The checkpoint is read by each rank through its own layout and written from what the ranks then hold. ``test_hf_checkpoint.py`` has
what a checkpoint may get wrong; here is what must come back, mixtures of experts included, whose experts transformers stacks when it loads.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from checkpoint_support import Mesh, join, load_ranks, same_bits, shapes_of
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from toy_models import LLAMA31, Family, make_toy
from toy_tokenizers import make_bpe_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from megatron_ppo.families import (
    EMBEDDING,
    FAMILIES,
    LM_HEAD,
    SCORE_HEAD,
    WRAPPER_SEGMENTS,
    canonical_names,
    canonical_tensors,
    network_shape,
)
from megatron_ppo.resharding.hf_checkpoint import INDEX_FILE, HFCheckpoint, load_hf_weights, write_hf_checkpoint
from megatron_ppo.resharding.megatron_layout import training_layouts
from megatron_ppo.resharding.megatron_mesh import MegatronParallel, stage_layers
from megatron_ppo.resharding.vllm_layout import vllm_layout

WEIGHTS = "model.safetensors"
MIXTURES: tuple[Family, ...] = ("mixtral", "qwen3_moe")
TINY = {"hidden_size": 16, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "ffn": 24, "num_experts": 8}

DENSE_MESHES = {
    "one rank": Mesh(1, MegatronParallel()),
    "tp2 pp2, fused norms": Mesh(4, MegatronParallel(2, 2), True),
    "tp4 with 2 kv heads": Mesh(4, MegatronParallel(4)),
    "tp2 pp4": Mesh(8, MegatronParallel(2, 4, make_vocab_size_divisible_by=8)),
    "pp2, 2 chunks": Mesh(2, MegatronParallel(1, 2, 2)),
    "tp2 cp2 dp2": Mesh(8, MegatronParallel(2, context_parallel_size=2)),
    "pp2, 1 + 3 layers": Mesh(2, MegatronParallel(1, 2, num_layers_in_first_pipeline_stage=1)),
    "tp2 pp3, 1 + 2 + 1": Mesh(6, MegatronParallel(2, 3, num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=1)),
    "pp6, embedding and head alone": Mesh(
        6, MegatronParallel(1, 6, account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True)
    ),
}
EXPERT_MESHES = {
    "ep2": Mesh(2, MegatronParallel(expert_model_parallel_size=2)),
    "ep4, one module of experts": Mesh(4, MegatronParallel(expert_model_parallel_size=4), True),
    "tp2 ep2, experts whole": Mesh(2, MegatronParallel(2, expert_model_parallel_size=2, expert_tensor_parallel_size=1)),
    "tp2 ep2, experts cut": Mesh(4, MegatronParallel(2, expert_model_parallel_size=2)),
    "ep2, experts cut, the rest whole": Mesh(4, MegatronParallel(expert_model_parallel_size=2, expert_tensor_parallel_size=2)),
    "tp2 ep2 pp2, fused norms": Mesh(4, MegatronParallel(2, 2, expert_model_parallel_size=2, expert_tensor_parallel_size=1), True),
    "ep2 pp2, 3 + 1 layers": Mesh(4, MegatronParallel(1, 2, expert_model_parallel_size=2, num_layers_in_last_pipeline_stage=1)),
    "ep4 tp2 pp2, 2 chunks": Mesh(8, MegatronParallel(2, 2, 2, expert_model_parallel_size=4, expert_tensor_parallel_size=1)),
}


def logits(folder: Path) -> Tensor:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    with torch.no_grad():
        return model(torch.arange(12)[None]).logits


# -- all families over all meshes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_b05_b07_b09_b12_every_mesh_gives_the_checkpoint_back_bit_for_bit(tmp_path: Path, family: Family, tied: bool) -> None:
    """Qwen2's biases, gate and up of each rank, tied heads, stages of unequal size, experts by number: whatever the mesh, the same file."""
    dtype = "bfloat16" if tied else "float32"
    source = make_toy(tmp_path / "in", family, tied=tied, num_layers=4, head_dim=24, dtype=dtype)
    original = load_file(source / WEIGHTS)
    expected = logits(source)
    for number, (name, mesh) in enumerate((DENSE_MESHES | (EXPERT_MESHES if family in MIXTURES else {})).items()):
        full = join(load_ranks(source, mesh), shapes_of(source))
        out = tmp_path / str(number)
        write_hf_checkpoint(out, source, full.items())
        assert same_bits(load_file(out / WEIGHTS), original), name
        assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()
        assert (LM_HEAD in HFCheckpoint(out).shapes) != tied
    assert torch.equal(logits(out), expected)


def test_b13_uneven_stages_hold_every_layer_once_or_are_refused() -> None:
    """First and last stages of their own size, embedding and loss counted as layers, interleaved or not: never 28 of 30."""
    accepted = refused = 0
    firsts: tuple[int | None, ...] = (None, 1, 2, 3)
    for layers, pp, first, last in itertools.product(range(1, 13), range(1, 14), firsts, firsts):
        for embedding, loss, vpp in itertools.product((False, True), (False, True), (None, 2)):
            parallel = MegatronParallel(
                1,
                pp,
                vpp,
                num_layers_in_first_pipeline_stage=first,
                num_layers_in_last_pipeline_stage=last,
                account_for_embedding_in_pipeline_split=embedding,
                account_for_loss_in_pipeline_split=loss,
            )
            try:
                stages = stage_layers(layers, parallel)
            except ValueError:
                refused += 1
                continue
            order = [layer for chunk in range(vpp or 1) for stage in range(pp) for layer in stages[stage][chunk]]
            assert order == list(range(layers)), parallel
            assert pp <= layers + embedding + loss, parallel
            accepted += 1
    assert accepted > 300 and refused > 300


# -- B01 ------------------------------------------------------------------------------------------------------------------


def with_row_numbers(source: Path) -> None:
    """Row i of embedding and head is i."""
    tensors = load_file(source / WEIGHTS)
    for name in (EMBEDDING, LM_HEAD):
        tensors[name] = torch.arange(tensors[name].shape[0], dtype=torch.float32)[:, None].expand_as(tensors[name]).contiguous()
    save_file(tensors, source / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_b01_padded_rows_stay_in_the_trainer(tmp_path: Path, family: Family) -> None:
    """Vocabulary 32001 at TP 4: 8064 rows a rank, of which the export and every engine see 32001, row i at place i."""
    source = make_toy(tmp_path / "in", family, **{**TINY, "num_layers": 1}, vocab_size=32001)
    with_row_numbers(source)
    ranks = load_ranks(source, Mesh(4, MegatronParallel(4)))
    for number, (_, parameters) in enumerate(ranks):
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            assert parameters[name].shape == (8064, 16)
            rows = torch.arange(number * 8064, (number + 1) * 8064, dtype=torch.float32)
            assert torch.equal(parameters[name][:, 5], torch.where(rows < 32001, rows, 0))
    full = join(ranks, shapes_of(source))
    write_hf_checkpoint(tmp_path / "out", source, full.items())
    written = load_file(tmp_path / "out" / WEIGHTS)
    for name in (EMBEDDING, LM_HEAD):
        assert torch.equal(written[name], torch.arange(32001.0)[:, None].expand(32001, 16))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 32001
    for tp in (1, 2, 4):
        parts = []
        for rank in range(tp):
            layout = vllm_layout(network_shape(source), tensor_parallel_size=tp, tp_rank=rank)
            live = {name: torch.zeros(shape) for name, shape in layout.shapes.items()}
            load_hf_weights(tmp_path / "out", layout, live)
            parts.append(live[LM_HEAD])
        assert torch.equal(torch.cat(parts)[:32001, 0], torch.arange(32001.0)) and not torch.cat(parts)[32001:].any()


def test_b01_the_checkpoints_vocabulary_is_exported_not_the_tokenizers(tmp_path: Path) -> None:
    source = make_toy(tmp_path / "in", "qwen2", **{**TINY, "num_layers": 1}, vocab_size=152064)
    with_row_numbers(source)
    end = "<|endoftext|>"  # transformers adds it to a Qwen2 tokenizer that lacks it
    words = Tokenizer(models.WordLevel({end: 0} | {f"w{i}": i for i in range(1, 151665)}, unk_token=end))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(source)
    full = join(load_ranks(source, Mesh(2, MegatronParallel(2))), shapes_of(source))
    write_hf_checkpoint(tmp_path / "out", source, full.items())
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 151665
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 152064
    written = load_file(tmp_path / "out" / WEIGHTS)
    assert all(torch.equal(written[name][:, 0], torch.arange(152064.0)) for name in (EMBEDDING, LM_HEAD))


# -- B07, B15, B18: the case's own numbers --------------------------------------------------------------------------------


def test_b07_gate_and_up_of_cut_experts_are_not_a_naive_concatenation(tmp_path: Path) -> None:
    """Width 24: expert tensor rank r holds [gate_r; up_r] of each expert, 12 + 12 rows; cat of the shards is not cat(gate, up)."""
    source = make_toy(tmp_path, "qwen3_moe", **TINY)
    stored = load_file(source / WEIGHTS)
    ranks = load_ranks(source, Mesh(2, MegatronParallel(2, expert_tensor_parallel_size=2)))
    for expert in range(8):
        gate, up = (stored[f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up"))
        shards = [p[f"decoder.layers.1.mlp.experts.local_experts.{expert}.linear_fc1.weight"] for _, p in ranks]
        assert all(torch.equal(s, torch.cat([gate.chunk(2)[r], up.chunk(2)[r]])) for r, s in enumerate(shards))
        assert not torch.equal(torch.cat(shards), torch.cat([gate, up]))
        halves = [shard.chunk(2) for shard in shards]
        assert torch.equal(torch.cat([h[0] for h in halves]), gate) and torch.equal(torch.cat([h[1] for h in halves]), up)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_b15_head_dim_128_at_hidden_1024_comes_back(tmp_path: Path, family: Family) -> None:
    """16 heads, 8 key/value heads: 4096 fused rows, q_proj (2048, 1024), o_proj (1024, 2048)."""
    sizes = {"hidden_size": 1024, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "num_layers": 1, "ffn": 24}
    source = make_toy(tmp_path / "in", family, **sizes)
    original = load_file(source / WEIGHTS)
    assert original["model.layers.0.self_attn.q_proj.weight"].shape == (2048, 1024)
    assert original["model.layers.0.self_attn.o_proj.weight"].shape == (1024, 2048)
    for tp in (1, 2, 8):
        ranks = load_ranks(source, Mesh(tp, MegatronParallel(tp)))
        assert all(p["decoder.layers.0.self_attention.linear_qkv.weight"].shape == (4096 // tp, 1024) for _, p in ranks)
        assert same_bits(join(ranks, shapes_of(source)), original)


def with_expert_numbers(source: Path, family: Family) -> dict[str, Tensor]:
    """Every matrix of expert e is e."""
    tensors = load_file(source / WEIGHTS)
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensor.fill_(int(name.split(".experts.")[1].split(".")[0]))
    save_file(tensors, source / WEIGHTS, metadata={"format": "pt"})
    return tensors


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("fused", [False, True], ids=["module a expert", "one module"])
@pytest.mark.parametrize(
    ("tp", "ep", "expert_tp", "world_size"), [(1, 4, 1, 4), (2, 4, 1, 4), (2, 4, 2, 8), (1, 2, 1, 4), (1, 8, 1, 8), (1, 2, 2, 4)]
)
def test_b18_experts_keep_their_numbers(
    tmp_path: Path, family: Family, fused: bool, tp: int, ep: int, expert_tp: int, world_size: int
) -> None:
    """8 experts, EP 4: local expert j of expert rank r is global 2 r + j, and the export has each under its own name, the index first."""
    source = make_toy(tmp_path / "in", family, **TINY, vocab_size=40)
    original = with_expert_numbers(source, family)
    parallel = MegatronParallel(tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=expert_tp)
    ranks = load_ranks(source, Mesh(world_size, parallel, fused))
    local_experts = 8 // ep
    for rank, (_, parameters) in enumerate(ranks):
        ep_rank = rank // expert_tp % ep
        for j in range(local_experts):
            for part in ("linear_fc1", "linear_fc2"):
                tail = f"{part}.weight{j}" if fused else f"local_experts.{j}.{part}.weight"
                assert set(parameters[f"decoder.layers.3.mlp.experts.{tail}"].flatten().tolist()) == {local_experts * ep_rank + j}
    write_hf_checkpoint(tmp_path / "out", source, join(ranks, shapes_of(source)).items())
    written = load_file(tmp_path / "out" / WEIGHTS)
    assert same_bits(written, original)
    block, gate = ("mlp", "gate_proj") if family == "qwen3_moe" else ("block_sparse_moe", "w1")
    for expert in range(8):
        assert set(written[f"model.layers.0.{block}.experts.{expert}.{gate}.weight"].flatten().tolist()) == {expert}
    assert sum(t.numel() for t in written.values()) == sum(t.numel() for t in original.values())


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize(("tp", "whole"), [(1, False), (2, False), (4, True), (3, True)])
def test_b18_engines_find_expert_e_in_slot_e(tmp_path: Path, family: Family, tp: int, whole: bool) -> None:
    """w13 and w2 of every rollout rank, cut or shared out as whole experts, also where 3 ranks share 8."""
    heads = {"num_heads": 12, "num_kv_heads": 3} if tp == 3 else {}
    source = make_toy(tmp_path, family, **{**TINY, **heads}, vocab_size=150)
    with_expert_numbers(source, family)
    found: list[list[int]] = []
    for rank in range(tp):
        layout = vllm_layout(network_shape(source), tensor_parallel_size=tp, tp_rank=rank, expert_parallel=whole)
        live = {name: torch.full(shape, 99.0) for name, shape in layout.shapes.items()}
        load_hf_weights(source, layout, live)
        slots = {}
        for kind in ("w13_weight", "w2_weight"):
            (stack,) = [t for n, t in live.items() if n.startswith("model.layers.2.") and n.endswith(kind)]
            slots[kind] = [int(slot.unique().item()) for slot in stack]
        assert slots["w13_weight"] == slots["w2_weight"]
        found.append(slots["w2_weight"])
    if whole:
        assert [number for held in found for number in held] == list(range(8))
    else:
        assert found == [list(range(8))] * tp


# -- B16, B21, B23, B24 for every family -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_b16_rope_survives_the_export_of_every_family(tmp_path: Path, family: Family) -> None:
    """Llama 3.1's block, field by field, and the frequencies that transformers makes of the exported config."""
    source = make_toy(tmp_path / "in", family, head_dim=128, rope_scaling=LLAMA31)
    halved = {name: tensor.bfloat16() for name, tensor in load_file(source / WEIGHTS).items()}
    write_hf_checkpoint(tmp_path / "out", source, halved.items())
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "out"))
    assert after == before | {"dtype": "bfloat16"} and before["dtype"] == "float32"
    assert after["rope_parameters"] == LLAMA31
    frequencies = AutoModelForCausalLM.from_pretrained(tmp_path / "out").model.rotary_emb.inv_freq
    plain = 500000.0 ** (-torch.arange(0, 128, 2).double() / 128)
    assert frequencies[28].item() == pytest.approx(3.21145e-3, rel=1e-5) == plain[28].item()
    assert (frequencies[30] / plain[30]).item() == pytest.approx(0.64374, rel=1e-4)
    assert frequencies[63].item() == pytest.approx(3.06893e-7, rel=1e-5)


def test_b16_the_older_spelling_of_rope_is_exported_as_it_is(tmp_path: Path) -> None:
    """Theta at the top level, ``rope_scaling`` beside it: both keys stay what they are, and mean the same."""
    source = make_toy(tmp_path / "in", "mixtral", head_dim=128, rope_scaling=LLAMA31)
    config = json.loads((source / "config.json").read_text())
    block = config.pop("rope_parameters")
    config |= {"rope_theta": block.pop("rope_theta"), "rope_scaling": block}
    (source / "config.json").write_text(json.dumps(config))
    write_hf_checkpoint(tmp_path / "out", source, [(n, t.bfloat16()) for n, t in load_file(source / WEIGHTS).items()])
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config | {"dtype": "bfloat16"}
    shape = network_shape(tmp_path / "out")
    assert shape.rope_theta == 500000.0 and dict(shape.rope_scaling) | {"rope_theta": 500000.0} == LLAMA31


@pytest.mark.parametrize("family", MIXTURES)
def test_b21_b23_a_mixture_in_many_files_agrees_with_its_index(tmp_path: Path, family: Family) -> None:
    """An expert's three matrices, and the experts of a layer, may lie in several files: transformers still stacks what it computed with."""
    source = make_toy(tmp_path / "in", family)
    original = load_file(source / WEIGHTS)
    out = tmp_path / "out"
    write_hf_checkpoint(out, source, original.items(), sum(t.nbytes for t in original.values()) // 5)
    index = json.loads((out / INDEX_FILE).read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) >= 3 and set(index["weight_map"].values()) == set(files)
    stored = {file: load_file(out / file) for file in files}
    assert sorted(name for tensors in stored.values() for name in tensors) == sorted(original)
    assert {name: file for file, tensors in stored.items() for name in tensors} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in original.values())
    for file in files:
        with safe_open(out / file, "pt") as handle:
            assert handle.metadata()["format"] == "pt"
    layer = [index["weight_map"][name] for name in original if name.startswith("model.layers.0.") and ".experts." in name]
    assert len(set(layer)) > 1, "the experts of a layer must be spread over files, or this proves nothing"
    assert same_bits(join(load_ranks(out, EXPERT_MESHES["tp2 ep2, experts cut"]), shapes_of(out)), original)
    assert torch.equal(logits(out), logits(source))
    file = index["weight_map"][f"model.layers.1.{FAMILIES[family].experts.block}.experts.3.{FAMILIES[family].experts.up}.weight"]
    (out / file).unlink()
    with pytest.raises(ValueError, match=rf"do not exist: .*{file}"):
        HFCheckpoint(out)


@pytest.mark.parametrize("family", MIXTURES)
def test_b21_an_expert_that_is_missing_or_too_many_is_named_on_every_rank(tmp_path: Path, family: Family) -> None:
    """Every rank checks all experts, not its own alone, so that all fail alike."""
    source = make_toy(tmp_path, family)
    tensors = load_file(source / WEIGHTS)
    experts = FAMILIES[family].experts
    assert experts is not None
    name = f"model.layers.1.{experts.block}.experts.{{}}.{experts.down}.weight"
    tensors[name.format(4)] = tensors.pop(name.format(2))
    save_file(tensors, source / WEIGHTS)
    layouts = training_layouts(network_shape(source), MegatronParallel(expert_model_parallel_size=4), 4)
    for layout in layouts.values():
        live = {n: torch.full(shape, 7.0) for n, shape in layout.shapes.items()}
        with pytest.raises(ValueError) as error:
            load_hf_weights(source, layout, live)
        assert f"missing: {name.format(2)} (64, 96)" in str(error.value)
        assert f"not consumed: {name.format(4)} (64, 96)" in str(error.value)
        assert all(bool((tensor == 7).all()) for tensor in live.values())


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_b23_files_without_metadata_load_and_exports_have_it(tmp_path: Path, family: Family) -> None:
    source = make_toy(tmp_path / "in", family)
    original = load_file(source / WEIGHTS)
    save_file(original, source / WEIGHTS)
    with safe_open(source / WEIGHTS, "pt") as handle:
        assert not handle.metadata()
    write_hf_checkpoint(tmp_path / "out", source, join(load_ranks(source, DENSE_MESHES["one rank"]), shapes_of(source)).items())
    with safe_open(tmp_path / "out" / WEIGHTS, "pt") as handle:
        assert handle.metadata() == {"format": "pt"}
    assert same_bits(load_file(tmp_path / "out" / WEIGHTS), original)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_b24_an_export_stands_alone(tmp_path: Path, family: Family) -> None:
    """config.json says one end id, generation_config.json two: both stay as they are, and the copied tokenizer loads and encodes alike."""
    source = make_toy(tmp_path / "in", family)
    make_bpe_tokenizer(source, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    config = json.loads((source / "config.json").read_text()) | {"eos_token_id": 151643}
    (source / "config.json").write_text(json.dumps(config))
    (source / "generation_config.json").write_text('{"eos_token_id": [151643, 151645],\n "temperature": 0.7, "do_sample": true}')
    for number, head in enumerate(("lm", "value")):
        out = tmp_path / str(number)
        tensors = load_file(source / WEIGHTS)
        if head == "value":
            tensors = {n: t for n, t in tensors.items() if n != LM_HEAD} | {SCORE_HEAD: torch.randn(1, 64)}
        write_hf_checkpoint(out, source, tensors.items(), head=head)
        assert (out / "generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()
        assert json.loads((out / "config.json").read_text())["eos_token_id"] == 151643
        copied, own = (AutoTokenizer.from_pretrained(folder) for folder in (out, source))
        assert copied("hello, world")["input_ids"] == own("hello, world")["input_ids"] != []
        assert copied.get_vocab() == own.get_vocab() and copied.chat_template == own.chat_template
    assert (tmp_path / "0" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "0").generation_config.eos_token_id == [151643, 151645]
    (source / "generation_config.json").unlink()
    write_hf_checkpoint(tmp_path / "none", source, load_file(source / WEIGHTS).items())
    assert not (tmp_path / "none" / "generation_config.json").exists()
    (source / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json is not valid JSON"):
        write_hf_checkpoint(tmp_path / "bad", source, load_file(source / WEIGHTS).items())


# -- B25, B26 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", MIXTURES)
def test_b25_a_critic_from_a_mixture(tmp_path: Path, family: Family, tied: bool) -> None:
    """Its trunk is the policy's bit for bit, its head [1, hidden] is its own and untied, and transformers loads the export."""
    source = make_toy(tmp_path / "in", family, tied=tied)
    stored = load_file(source / WEIGHTS)
    mesh = Mesh(4, MegatronParallel(1, 2, expert_model_parallel_size=2))
    ranks = load_ranks(source, mesh, "value")
    heads = [parameters["value_head.weight"] for _, parameters in ranks if "value_head.weight" in parameters]
    assert len(heads) == 2 and all(head.shape == (1, 64) and bool((head == 7).all()) for head in heads), "left as it was"
    assert not any("output_layer" in name for _, parameters in ranks for name in parameters)
    for head in heads:
        head.copy_(torch.linspace(-1, 1, 64)[None])
    full = join(ranks, shapes_of(source, "value"))
    assert same_bits({n: t for n, t in full.items() if n != SCORE_HEAD}, {n: t for n, t in stored.items() if n != LM_HEAD})
    write_hf_checkpoint(tmp_path / "out", source, full.items(), head="value")
    critic, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(critic.score.weight, full[SCORE_HEAD]) and critic.config.num_labels == 1 and not critic.config.tie_word_embeddings
    policy, tokens = AutoModelForCausalLM.from_pretrained(source), torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(critic.model(tokens).last_hidden_state, policy.model(tokens).last_hidden_state)
        assert critic.score(critic.model(tokens).last_hidden_state)[..., 0].shape == (1, 9)
    again = join(load_ranks(tmp_path / "out", mesh, "value", head_required=True), shapes_of(source, "value"))
    assert same_bits(again, full)


@pytest.mark.parametrize("family", MIXTURES)
def test_b25_a_reward_model_that_is_a_mixture(tmp_path: Path, family: Family) -> None:
    """Its score head is used exactly, on every last-stage rank; without one it is refused on every rank."""
    source = make_toy(tmp_path / "rm", family, score_head=True)
    mesh = Mesh(4, MegatronParallel(1, 2, expert_model_parallel_size=2))
    for head in ("value", "score"):
        ranks = load_ranks(source, mesh, head, head_required=True)
        heads = [parameters["value_head.weight"] for _, parameters in ranks if "value_head.weight" in parameters]
        assert len(heads) == 2 and all(torch.equal(h, load_file(source / WEIGHTS)[SCORE_HEAD]) for h in heads)
    policy = make_toy(tmp_path / "policy", family)
    for layout in training_layouts(network_shape(policy), mesh.parallel, 4, head="score").values():
        live = {name: torch.zeros(shape) for name, shape in layout.shapes.items()}
        with pytest.raises(ValueError, match=r"holds no score\.weight: it is no reward model"):
            load_hf_weights(policy, layout, live, head="score")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_b26_any_mix_of_wrappers_is_the_same_name(data: st.DataObject) -> None:
    """Wrapper segments before, between and after the others; the two names that become one are both said."""
    plain = data.draw(st.sampled_from(sorted(shape.name for shape in canonical_tensors(network_shape(MIXTURE)))))
    wrappers = st.lists(st.sampled_from(sorted(WRAPPER_SEGMENTS)), max_size=3)

    def wrapped() -> str:
        return ".".join(part for segment in plain.split(".") for part in (*data.draw(wrappers), segment))

    one, other = wrapped(), wrapped()
    assert canonical_names([one]) == {one: plain} and canonical_names([other]) == {other: plain}
    if one != other:
        with pytest.raises(ValueError) as error:
            canonical_names([one, other])
        assert all(text in str(error.value) for text in (one, other, plain))


MIXTURE: dict[str, object] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 130,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_b26_wrapped_tensors_are_exported_as_the_plain_ones(tmp_path: Path, family: Family) -> None:
    """What FSDP, torch.compile and activation checkpointing call the same tensors gives the same file as Megatron's shards do."""
    source = make_toy(tmp_path / "in", family)
    megatron = join(load_ranks(source, DENSE_MESHES["tp2 pp2, fused norms"]), shapes_of(source))
    write_hf_checkpoint(tmp_path / "megatron", source, megatron.items())
    wrapped = []
    for number, (name, tensor) in enumerate(load_file(source / WEIGHTS).items()):
        parts = name.split(".")
        where = number % len(parts)
        wrapped.append((".".join(["_fsdp_wrapped_module", *parts[:where], sorted(WRAPPER_SEGMENTS)[number % 4], *parts[where:]]), tensor))
    write_hf_checkpoint(tmp_path / "wrapped", source, wrapped)
    for folder in ("megatron", "wrapped"):
        assert same_bits(load_file(tmp_path / folder / WEIGHTS), load_file(source / WEIGHTS))
        assert (tmp_path / folder / "config.json").read_bytes() == (source / "config.json").read_bytes()
    with pytest.raises(ValueError, match=r"are both model\.norm\.weight"):
        write_hf_checkpoint(tmp_path / "twice", source, [*wrapped, ("_orig_mod.model.norm.weight", torch.zeros(64))])
    assert list((tmp_path / "twice").iterdir()) == []
