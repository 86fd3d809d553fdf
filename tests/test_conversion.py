"""``convert``: both directions are bit-equal for every family and head, also across topologies of real megatron-core; what is refused.

Most tests call the command in this process; the launches and the few child processes say why they are there.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_support import same_bits
from conversion_support import Crossing, Run, cross, files_below, run_backend, tensors_of
from safetensors.torch import load_file, save_file
from spawn import run_ranks
from toy_models import CLASSES, LLAMA31, Family, make_toy
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megatron_ppo import megatron_store
from megatron_ppo.checkpoint_manifest import write_manifest
from megatron_ppo.conversion import MARKER, main
from megatron_ppo.families import network_shape
from megatron_ppo.resharding.hf_checkpoint import HFCheckpoint

TP2 = {"tensor_model_parallel_size": 2}
TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
SIDECAR_FILES = {
    "generation_config.json": '{"eos_token_id": [1, 2],   "temperature": 0.6}',
    "tokenizer.json": '{"version": "1.0"}',
    "tokenizer_config.json": "{}\n",
    "chat_template.jinja": "{{ messages[0].content }}\n",
    "tokenizer.model": "bytes of sentencepiece",
    "LICENSE": "words",
}


def convert(source: Path, target: Path, *flags: str) -> Path:
    """The target of a conversion that must succeed."""
    assert main(["--source", str(source), "--target", str(target), *flags]) == 0
    return target


def refusal(source: Path, target: Path, capsys: pytest.CaptureFixture[str], *flags: str, code: int = 2) -> str:
    """The words of a conversion that must fail and leave nothing."""
    parent = target.parent
    before = files_below(parent) if parent.is_dir() else set()
    capsys.readouterr()
    assert main(["--source", str(source), "--target", str(target), *flags]) == code
    assert (files_below(parent) if parent.is_dir() else set()) == before, "a failed conversion leaves no file"
    words = capsys.readouterr().err
    assert words.startswith("megatron_ppo convert: ")
    return words


def round_trip(source: Path, root: Path, *flags: str) -> Path:
    """Hugging Face -> Megatron -> Hugging Face, verified both times."""
    return convert(convert(source, root / "megatron", "--verify", *flags), root / "back", "--verify", *flags)


# -- round trips ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", CLASSES)
def test_a_round_trip_is_bit_equal_with_all_that_belongs_to_the_model(tmp_path: Path, family: Family, tied: bool) -> None:
    dtype = "bfloat16" if tied else "float32"
    source = make_toy(tmp_path / "source", family, tied=tied, dtype=dtype, rope_scaling=LLAMA31 if family == "llama" else None)
    for name, text in SIDECAR_FILES.items():
        (source / name).write_text(text)
    back = round_trip(source, tmp_path)
    assert files_below(back) == files_below(source) | {MARKER}
    assert all((back / name).read_bytes() == (source / name).read_bytes() for name in files_below(source))
    assert ("lm_head.weight" in tensors_of(back)) is not tied
    tokens = torch.arange(3, 60)[None]
    logits = [AutoModelForCausalLM.from_pretrained(folder)(tokens).logits for folder in (source, back)]
    assert torch.equal(*logits)


def test_a_converted_checkpoint_has_the_agreed_form(tmp_path: Path) -> None:
    source = make_toy(tmp_path / "source", "qwen3_moe")
    (source / "tokenizer.json").write_text("{}")
    target = convert(source, tmp_path / "target")
    store = ("megatron/.metadata", "megatron/__0_0.distcp", "megatron/common.pt", "megatron/metadata.json")
    assert files_below(target) == {"COMPLETE", "hf/config.json", "hf/generation_config.json", "hf/tokenizer.json", *store}
    manifest = json.loads((target / "COMPLETE").read_text())
    assert manifest["format"] == 1 and set(manifest["files"]) == files_below(target) - {"COMPLETE"}
    shapes = megatron_store.MegatronStore(target / "megatron").shapes
    assert shapes["actor.model.decoder.layers.mlp.experts.experts.linear_fc1.weight"] == (2, 4, 192, 64)
    assert shapes["actor.model.embedding.word_embeddings.weight"] == (130, 64), "no padding, which depends on the mesh"
    both = ("actor.model.decoder.layers.pre_mlp_layernorm.weight", "actor.model.decoder.layers.mlp.linear_fc1.layer_norm_weight")
    assert [shapes[name] for name in both] == [(2, 64), (2, 64)], "the names of Transformer Engine's layers and of local ones"
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_critic_from_policy_critic_from_critic_and_reward_model(tmp_path: Path) -> None:
    policy = make_toy(tmp_path / "policy", tied=True)
    critic = round_trip(policy, tmp_path / "a", "--critic")
    found, trunk = tensors_of(critic), tensors_of(policy)
    assert torch.equal(found.pop("score.weight"), torch.zeros(1, 64)) and same_bits(found, trunk)
    config = json.loads((critic / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"] and config["tie_word_embeddings"] is False
    model = AutoModelForSequenceClassification.from_pretrained(critic)
    assert model.score.weight.shape == (1, 64)

    reward = make_toy(tmp_path / "reward", "qwen3", score_head=True)
    for flag in ("--critic", "--reward-model"):
        assert same_bits(tensors_of(round_trip(reward, tmp_path / flag, flag)), tensors_of(reward))


def test_a_shared_critics_folder_keeps_both_heads_and_gives_either(tmp_path: Path) -> None:
    source = make_toy(tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    weights["score.weight"] = torch.randn(1, 64)
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    target = convert(source, tmp_path / "target", "--verify")
    actor, critic = convert(target, tmp_path / "actor"), convert(target, tmp_path / "critic", "--critic")
    assert same_bits(tensors_of(actor), {name: tensor for name, tensor in weights.items() if name != "score.weight"})
    assert same_bits(tensors_of(critic), {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"})


def test_dtype_casts_either_way_and_keep_keeps(tmp_path: Path) -> None:
    source = make_toy(tmp_path / "source")
    plain = tensors_of(source)
    rounded = {name: tensor.bfloat16() for name, tensor in plain.items()}
    narrow = convert(source, tmp_path / "narrow", "--dtype", "bfloat16", "--verify")
    assert same_bits(tensors_of(convert(narrow, tmp_path / "kept", "--verify")), rounded)
    assert json.loads((tmp_path / "kept" / "config.json").read_text())["dtype"] == "bfloat16"
    widened = tensors_of(convert(narrow, tmp_path / "wide", "--dtype", "float32", "--verify"))
    assert same_bits(widened, {name: tensor.float() for name, tensor in rounded.items()})
    wide = convert(source, tmp_path / "full")
    assert same_bits(tensors_of(convert(wide, tmp_path / "cast", "--dtype", "bfloat16", "--verify")), rounded)


def test_a_bare_folder_of_megatron_lm_is_read_with_the_config_that_is_named(tmp_path: Path) -> None:
    source = make_toy(tmp_path / "source", "mixtral")
    weights = tensors_of(source)
    slabs = megatron_store.stored_slabs(network_shape(source))
    dtypes = dict.fromkeys(weights, torch.float32)
    bare = tmp_path / "iter_0000010"
    megatron_store.write_store(bare, slabs, HFCheckpoint(source).read, dtypes, prefix="")
    (bare / "common.pt").write_bytes(b"a pickle of Megatron-LM's arguments, never opened")
    assert same_bits(tensors_of(convert(bare, tmp_path / "back", "--hf-folder", str(source))), weights)


def test_many_chunks_files_and_shards_hold_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_toy(tmp_path / "source", "mixtral", vocab_size=999)
    monkeypatch.setattr(megatron_store, "CHUNK_BYTES", 5000)
    monkeypatch.setattr(megatron_store, "FILE_BYTES", 100_000)
    monkeypatch.setattr("megatron_ppo.conversion._working_bytes", lambda network: 200_000)
    back = round_trip(source, tmp_path)
    assert len(list((tmp_path / "megatron" / "megatron").glob("*.distcp"))) > 5
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) >= 3
    assert same_bits(tensors_of(back), tensors_of(source))


# -- real megatron-core -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_megatron_core_loads_a_converted_checkpoint_on_any_mesh_and_convert_reads_what_it_saves(tmp_path: Path) -> None:
    """Every family under TP2, PP2 (tied over two stages), virtual stages, EP2; each head. Two ranks, one launch."""
    crossings: list[Crossing] = []

    def add(name: str, family: Family, fields: dict[str, object], *, head: str = "lm", flag: str | None = None, **rest: object) -> None:
        options = {"tied": "tied" in name, "num_layers": 4 if fields is VPP2 else 2, "score_head": head != "lm"}
        source, other = (make_toy(tmp_path / name / str(seed), family, seed=seed, **options) for seed in (0, 1))  # type: ignore[arg-type]
        converted = convert(source, tmp_path / name / "converted", *([] if flag is None else [flag]))
        role = {None: "actor", "--critic": "critic", "--reward-model": "reward"}[flag]
        crossings.append(Crossing(source, other, converted, tmp_path / name / "saved", dict(fields), head, role, **rest))  # type: ignore[arg-type]

    mixtures: tuple[Family, ...] = ("mixtral", "qwen3_moe")
    for family in CLASSES:
        add(f"{family} TP2", family, TP2_SP if family in mixtures else TP2)  # type: ignore[arg-type]
        add(f"{family} PP2 tied", family, PP2)  # type: ignore[arg-type]
    for family in mixtures:
        add(f"{family} EP2", family, EP2)
    add("llama VPP2 tied", "llama", VPP2)
    add("qwen3_moe PP2 single layers", "qwen3_moe", PP2, stacked=False)
    add("llama critic TP2", "llama", TP2, head="value", flag="--critic")
    add("qwen2 reward PP2", "qwen2", PP2, head="score", flag="--reward-model")
    differing = run_ranks(cross, 2, crossings, timeout_s=500)
    assert differing == [[[] for _ in crossings]] * 2
    for crossing in crossings:
        flag = {"actor": [], "critic": ["--critic"], "reward": ["--reward-model"]}[crossing.role]
        named = ["--hf-folder", str(crossing.source)]
        target = convert(crossing.saved / "megatron", crossing.saved / "hf", "--verify", *flag, *named)
        assert same_bits(tensors_of(target), tensors_of(crossing.source)), crossing.saved


@pytest.mark.slow
def test_runs_start_from_converted_weights_and_their_checkpoints_are_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The product's backend on TP2 and PP2: separate and shared critic, a mixture. A run folder stands for its newest checkpoint."""
    runs: list[Run] = []

    def add(name: str, family: Family, critic: str, fields: dict[str, object]) -> None:
        weights, model = (make_toy(tmp_path / name / str(seed), family, seed=seed) for seed in (0, 1))
        flags: list[list[str]] = [[], ["--critic"]] if critic == "separate" else [[]]
        converted = tuple(convert(weights, tmp_path / name / f"converted{len(flag)}", *flag) for flag in flags)
        runs.append(Run(model, converted, tmp_path / name / "run", {"critic": critic, "params_dtype": "float32", **fields}))

    add("separate", "llama", "separate", TP2)  # type: ignore[arg-type]
    add("shared", "qwen2", "shared", PP2)  # type: ignore[arg-type]
    add("mixture", "qwen3_moe", "none", TP2_SP)  # type: ignore[arg-type]
    run_ranks(run_backend, 2, runs, timeout_s=250)
    for run in runs:
        actor = convert(run.folder, run.folder / "actor", "--verify")
        assert same_bits(tensors_of(actor), tensors_of(run.folder.parent / "0"))
        assert same_bits(tensors_of(actor), tensors_of(run.folder / "by_backend" / "actor"))
        assert (actor / "config.json").read_bytes() == (run.model / "config.json").read_bytes()
        if run.fields["critic"] == "none":
            assert "holds no weights of the critic" in refusal(run.folder, tmp_path / "out" / "critic", capsys, "--critic")
        else:
            critic = convert(run.folder / "checkpoints" / "iter_0000003", run.folder / "critic", "--critic", "--verify")
            assert same_bits(tensors_of(critic), tensors_of(run.folder / "by_backend" / "critic"))
            assert (critic / "config.json").read_bytes() == (run.folder / "by_backend" / "critic" / "config.json").read_bytes()


# -- refusals ---------------------------------------------------------------------------------------------------------


class Marker:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return Path.touch, (self.path,)


def test_pickles_and_old_megatron_folders_are_refused_unopened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marker = tmp_path / "marker"
    pickled = tmp_path / "pickled.pt"
    torch.save(Marker(marker), pickled)
    target = tmp_path / "out" / "target"

    assert "is a pickle, which can run code" in refusal(pickled, target, capsys)
    old = tmp_path / "old"
    (old / "iter_0000010" / "mp_rank_00").mkdir(parents=True)
    (old / "iter_0000010" / "mp_rank_00" / "model_optim_rng.pt").write_bytes(pickled.read_bytes())
    (old / "latest_checkpointed_iteration.txt").write_text("10")
    for source in (old, old / "iter_0000010", old / "iter_0000010" / "mp_rank_00"):
        words = refusal(source, target, capsys)
        assert "Megatron-LM's older format" in words and "--ckpt-convert-format torch_dist" in words
    (old / "iter_0000010" / "metadata.json").write_text("{}")
    assert f"--source {old / 'iter_0000010'} --hf-folder FOLDER" in refusal(old, target, capsys)

    hf = make_toy(tmp_path / "hf")
    (hf / "model.safetensors").unlink()
    (hf / "pytorch_model.bin").write_bytes(pickled.read_bytes())
    assert "holds weights only as pickle (pytorch_model.bin)" in refusal(hf, target, capsys)
    (tmp_path / "model.nemo").write_bytes(b"\x1f\x8b")
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    assert "transformers cannot read" in refusal(tmp_path / "model.gguf", target, capsys)
    assert "is an archive, and none is unpacked here" in refusal(tmp_path / "model.nemo", target, capsys)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "consolidated.00.pth").write_bytes(pickled.read_bytes())
    assert "holds pickles (consolidated.00.pth)" in refusal(bare, target, capsys)
    assert not marker.exists()


def test_a_metadata_pickle_that_runs_code_is_refused_unopened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marker, source = tmp_path / "marker", make_toy(tmp_path / "source")
    store = convert(source, tmp_path / "target") / "megatron"
    (store / ".metadata").write_bytes(pickle.dumps(Marker(marker)))
    target = tmp_path / "out" / "again"
    assert "megatron/.metadata has" in refusal(store.parent, target, capsys)
    (store.parent / "COMPLETE").unlink()
    assert "holds no COMPLETE" in refusal(store.parent, target, capsys)
    write_manifest(store.parent, {})  # whoever can write the folder can write its manifest
    for folder, flags in ((store.parent, ()), (store, ("--hf-folder", str(source)))):
        assert "which is not in the list of what a checkpoint may name" in refusal(folder, target, capsys, *flags)
    assert not marker.exists()


def test_targets_are_never_overwritten_silently(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_toy(tmp_path / "source")
    target = convert(source, tmp_path / "target")
    before = {name: (target / name).read_bytes() for name in files_below(target)}
    assert "exists; name another, or remove it" in refusal(source, target, capsys)
    assert {name: (target / name).read_bytes() for name in files_below(target)} == before
    convert(make_toy(tmp_path / "new", seed=1), target, "--force")
    assert "exists and will be replaced (--force)" in capsys.readouterr().out
    assert (target / "megatron" / "__0_0.distcp").read_bytes() != before["megatron/__0_0.distcp"]

    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    assert "nothing that convert has made, and --force does not replace it" in refusal(source, mine, capsys, "--force")
    downloaded = make_toy(tmp_path / "downloaded", seed=2)
    assert "nothing that convert has made" in refusal(target, downloaded, capsys, "--force", "--to", "hf")
    assert "holds the source" in refusal(source, source, capsys, "--force", "--to", "megatron")
    (tmp_path / ".fresh.partial").mkdir()
    assert "another convert is writing it, or one was killed" in refusal(source, tmp_path / "fresh", capsys)
    (tmp_path / "empty").mkdir()
    convert(source, tmp_path / "empty")


def test_bad_sources_are_refused_with_a_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = make_toy(tmp_path / "source"), tmp_path / "out" / "target"
    megatron = convert(source, tmp_path / "megatron")
    assert "--source /nowhere does not exist" in refusal(Path("/nowhere"), target, capsys)
    (tmp_path / "empty").mkdir()
    assert "is none of these: a folder in Hugging Face format" in refusal(tmp_path / "empty", target, capsys)
    assert "is read under any mesh as it stands" in refusal(megatron, target, capsys, "--to", "megatron")
    assert "is in that format already; leave out --to hf" in refusal(source, target, capsys, "--to", "hf")
    assert "exclude each other" in refusal(source, target, capsys, "--critic", "--reward-model")
    assert "holds no weights of the critic; for the actor say neither" in refusal(megatron, target, capsys, "--critic")
    assert "--hf-folder" in refusal(megatron / "megatron", target, capsys)
    assert "holds no score.weight: it is no reward model" in refusal(source, target, capsys, "--reward-model")
    classifier = make_toy(tmp_path / "classifier", score_head=True)
    assert "is a sequence classifier, no language model; say --reward-model" in refusal(classifier, target, capsys)
    other = make_toy(tmp_path / "other", hidden_size=32)
    assert "but the config says" in refusal(megatron, target, capsys, "--hf-folder", str(other))
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert "is a run folder without a checkpoint" in refusal(tmp_path / "run", target, capsys)
    (tmp_path / "run" / "checkpoints" / "latest").write_text("../../elsewhere\n")
    assert "holds '../../elsewhere', not the name of a checkpoint" in refusal(tmp_path / "run", target, capsys)
    (tmp_path / "run" / "checkpoints" / "iter_0000046" / "fsdp").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "latest").write_text("iter_0000046\n")
    assert "was written by backend fsdp" in refusal(tmp_path / "run", target, capsys)


def test_names_in_an_index_cannot_leave_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_toy(tmp_path / "source")
    (source / "model.safetensors").rename(tmp_path / "outside.safetensors")
    names = dict.fromkeys(load_file(tmp_path / "outside.safetensors"), "../outside.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert "is no file name in the same folder" in refusal(source, tmp_path / "out" / "target", capsys)


def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = convert(make_toy(tmp_path / "source"), tmp_path / "target")
    data = target / "megatron" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert "megatron/__0_0.distcp" in refusal(target, tmp_path / "out" / "back", capsys)


def test_verify_names_what_differs_and_leaves_no_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that lies: one element of one tensor is changed on its way."""
    source, real = make_toy(tmp_path / "source"), megatron_store.MegatronStore.read

    def read(self: megatron_store.MegatronStore, key: str, box: tuple[tuple[int, int], ...]) -> torch.Tensor:
        tensor = real(self, key, box)
        if key.endswith("linear_fc1.weight") and box[0] == (1, 2):
            tensor.view(-1)[7] += 1
        return tensor

    monkeypatch.setattr(megatron_store.MegatronStore, "read", read)
    words = refusal(source, tmp_path / "out" / "target", capsys, "--verify", code=1)
    assert "1 tensors of the target differ from the source: model.layers.1.mlp.gate_proj.weight; it is removed" in words


def test_a_full_disk_leaves_no_target(tmp_path: Path) -> None:
    """In a process of its own, whose files may not grow beyond a limit; the same process shows that megatron-core is never imported."""
    source = make_toy(tmp_path / "source")
    megatron = convert(source, tmp_path / "megatron")
    code = (
        "import resource, sys\nfrom megatron_ppo.__main__ import main\ncodes = []\n"
        "for limit in (20_000, 500):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))\n"
        "    codes += [main(['convert', '--source', source, '--target', sys.argv[3]]) for source in sys.argv[1:3]]\n"
        "assert not any(name.split('.')[0] in ('megatron', 'vllm') for name in sys.modules)\nprint(codes)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(source), str(megatron), str(tmp_path / "out" / "target")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        timeout=100,
    )
    assert result.returncode == 0 and result.stdout.splitlines()[-1] == "[1, 1, 1, 1]", result.stdout + result.stderr
    assert result.stderr.count("target was not made, and what there was of it is removed") == 4
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.slow
def test_the_benchmark_finds_every_bit_and_writes_its_figures(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parent.parent
    sizes = ["--only", "synthetic", "--layers", "1", "--vocab-size", "1000"]
    command = [sys.executable, "benchmarks/convert.py", *sizes, "--folder", str(tmp_path), "--json", str(tmp_path / "figures.json")]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["good"] and figures["bit_equal"] == {"synthetic": True}
    assert [step["step"] for step in figures["steps"]] == ["Hugging Face -> Megatron", "Megatron -> Hugging Face"]
    assert all(step["import_bytes"] < step["peak_bytes"] < 2**30 for step in figures["steps"])
    assert files_below(tmp_path) == {"figures.json"}, "what it works on is removed"
