"""``python -m megatron_ppo verify``: every family from every training mesh to every rollout mesh, and the command itself.

The product runs in three launches, one a rollout mesh: each rank runs many verifications in one process, each training rank with a new
trainer, each rollout rank with one engine a family, whose weights are forgotten in between.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from spawn import run_ranks
from toy_models import Family, make_toy
from train_support import Processes, warnings_in

from megatron_ppo.__main__ import main
from megatron_ppo.config import Config
from megatron_ppo.families import FAMILIES, canonical_tensors, network_shape
from megatron_ppo.verify_ranks import _Stream, change_weights, kind_of, policy_only, verify_on_rank
from megatron_ppo.world import close_world, init_world

MIXTURES = [name for name, spec in FAMILIES.items() if spec.experts is not None]
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
TRAINING: dict[str, dict[str, object]] = {
    "TP2": TP2,
    "PP2": PP2,
    "TP2xPP2": TP2 | PP2,
    "VPP2": PP2 | {"virtual_pipeline_model_parallel_size": 2},
    "EP2": {"expert_model_parallel_size": 2},
}
"""Meshes of four training ranks; what is left is data parallelism. EP2 is for mixtures only, which want sequence parallelism beside TP."""
ROLLOUT = {
    "TP1 x 2 replicas": {"rollout_world_size": 2, "rollout_tensor_parallel_size": 1},
    "TP2": {"rollout_world_size": 2, "rollout_tensor_parallel_size": 2},
    "TP4 with 2 KV heads": {"rollout_world_size": 4, "rollout_tensor_parallel_size": 4},
}
BF16 = "bfloat16"
TOYS: dict[Family, dict[str, Any]] = {
    "llama": {},
    "mistral": {"dtype": BF16},
    "qwen2": {"tied": True},
    "qwen3": {"vocab_size": 201},
    "mixtral": {},
    "qwen3_moe": {"vocab_size": 201},
}
DTYPES: dict[Family, dict[str, str]] = {
    "mistral": {"rollout_dtype": BF16},  # the folder is bf16 too: read to fp32, and cast back
    "qwen2": {"rollout_dtype": BF16},
    "qwen3": {"params_dtype": BF16},  # an fp32 folder, rounded by the trainer: the engine's fp32 holds rounded values
    "qwen3_moe": {"params_dtype": BF16, "rollout_dtype": BF16},
}
CACHE = {"kv_cache_memory_bytes": "53687091"}
SMALL = {"max_prompt_length": 24, "max_response_length": 8, "vllm_overrides": CACHE, "bucket_bytes": 50_000, "critic": "none"}


def toy(folder: Path, family: Family) -> Path:
    """Four layers (two virtual stages of two), heads of 32 (vLLM's smallest on a CPU)."""
    return make_toy(folder / family, family, num_layers=4, hidden_size=128, **TOYS[family])


# -- the product ------------------------------------------------------------------------------------------------------


def verify_all(
    rank: int, world_size: int, folders: Mapping[Family, str], rollout: Mapping[str, object], product: list[Filled]
) -> dict[str, Any]:
    """On rank 0: ``family from mesh`` -> report."""
    torch.set_num_threads(1)
    base = policy_only(Config().replace(**SMALL, **rollout))
    world = init_world(base.replace(model_path=next(iter(folders.values()))), needs_data=False)
    found: dict[str, Any] = {}
    for family, engine_fields, meshes in product:
        config = base.replace(model_path=folders[family], **DTYPES.get(family, {}), **engine_fields)
        with _engine(config, world.replica) if world.is_rollout else contextlib.nullcontext() as engine:
            for mesh in meshes:
                label = f"{family}{' whole experts' if engine_fields else ''} from {mesh}"
                sequence_parallel = family in MIXTURES and "TP2" in mesh
                found[label] = _verify(config.replace(**TRAINING[mesh], sequence_parallel=sequence_parallel), world, engine, label)
    close_world(world)
    return {label: dataclasses.asdict(report) for label, report in found.items() if report is not None}


Filled = tuple[Family, dict[str, object], list[str]]
"""(family, fields of its engine, training meshes that fill it)."""
WHOLE_EXPERTS: dict[str, object] = {"vllm_overrides": CACHE | {"enable_expert_parallel": "true"}}
COVERING: dict[str, list[Filled]] = {
    "TP1 x 2 replicas": [("llama", {}, ["TP2", "VPP2"]), ("mixtral", {}, ["EP2", "PP2", "TP2xPP2"])],
    "TP2": [
        ("qwen2", {}, ["PP2", "TP2xPP2"]),
        ("mistral", {}, ["VPP2"]),
        ("qwen3_moe", {}, ["EP2", "TP2"]),
        ("qwen3_moe", WHOLE_EXPERTS, ["EP2"]),
    ],
    "TP4 with 2 KV heads": [("qwen3", {}, ["TP2xPP2", "VPP2", "PP2"]), ("qwen3_moe", {}, ["EP2", "TP2"])],
}
"""Every pair of meshes once, every family at least once."""


def whole_product(rollout: Mapping[str, object]) -> Iterator[Filled]:
    """Every family from every training mesh, in the order in which engines are built."""
    for family in TOYS:
        yield family, {}, [mesh for mesh in TRAINING if mesh != "EP2" or family in MIXTURES]
        if family in MIXTURES and rollout["rollout_tensor_parallel_size"] == 2:
            yield family, WHOLE_EXPERTS, ["TP2xPP2", "EP2"]


@contextlib.contextmanager
def _engine(config: Config, replica: int) -> Iterator[Any]:
    from megatron_ppo.backends.vllm import VLLMBackend

    engine = VLLMBackend(config, seed=replica)
    yield engine
    engine.close()


def _verify(config: Config, world: Any, engine: Any, label: str) -> Any:
    if engine is not None:
        return verify_on_rank(config, world, None, engine, contextlib.nullcontext, label=label)
    from megatron_ppo.backends.megatron import MegatronBackend
    from megatron_ppo.backends.megatron_setup import destroy_megatron

    trainer = MegatronBackend(config, num_optimizer_steps=1)
    report = verify_on_rank(config, world, trainer, None, contextlib.nullcontext, label=label)
    del trainer
    destroy_megatron()
    for group in list(dist.distributed_c10d._world.pg_map):  # megatron-core forgets its groups, but their threads live on
        if group != dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()
    return report


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", ROLLOUT)
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["covering", "whole product"])
def test_weights_of_every_family_arrive_bit_for_bit_from_every_training_mesh(tmp_path: Path, name: str, whole: bool) -> None:
    assert {family for filled in COVERING.values() for family, _, _ in filled} == set(TOYS) == set(FAMILIES)
    assert all({mesh for _, _, meshes in filled for mesh in meshes} == set(TRAINING) for filled in COVERING.values())
    folders = {family: str(toy(tmp_path, family)) for family in TOYS}
    rollout = ROLLOUT[name]
    num_rollout = int(str(rollout["rollout_world_size"]))
    product = list(whole_product(rollout)) if whole else COVERING[name]
    found = run_ranks(verify_all, 4 + num_rollout, folders, rollout, product, timeout_s=1400)[0]
    assert len(found) == sum(len(meshes) for _, _, meshes in product) >= 5
    for label, report in found.items():
        assert report["faults"] == [], label
        assert report["num_tensors"] == len(canonical_tensors(network_shape(folders[label.split()[0]])))
        rollout_ranks = [one for one in report["ranks"] if one["mesh"] == "rollout"]
        assert len(report["ranks"]) == 4 + num_rollout and len(rollout_ranks) == num_rollout
        for one in rollout_ranks:
            assert one["bytes_received"] == one["shard_bytes"] > 0 and one["not_run"] == []
            assert all(kind["differing"] == {"gather": 0, "folder": 0} for kind in one["kinds"].values()), label
        assert report["log_probs"]["tokens"] > 4 and report["log_probs"]["mean"] < report["log_probs"]["limit"]


# -- the command ------------------------------------------------------------------------------------------------------

SPOILT, STALE = "model.layers.1.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight"
PLANTED = f'''
import os, signal, sys, time
from megatron_ppo.__main__ import main
from megatron_ppo.resharding import executor

kind, victim = sys.argv[1:3]
receive, kept = executor.ReshardExecutor.receive, []

def planted(self, parameters):
    """The first sync loses two elements of a weight; the second leaves another weight as it was."""
    if kind == "kill":
        time.sleep(3)  # until all ranks have heard of the phase
        os.kill(os.getpid(), signal.SIGKILL)
    before = parameters["{STALE}"].clone()
    stats = receive(self, parameters)
    if not kept:
        parameters["{SPOILT}"][3:5, 7] += 1
    else:
        parameters["{STALE}"].copy_(before)
    kept.append(stats)
    return stats

if os.environ["RANK"] == victim:
    executor.ReshardExecutor.receive = planted
sys.exit(main(sys.argv[3:]))
'''


def flags(model: Path, **fields: object) -> list[str]:
    """What follows ``python``; a value of several words is several arguments."""
    found = ["-m", "megatron_ppo", "verify"]
    small = {"max_prompt_length": 24, "max_response_length": 8, "vllm_overrides": "kv_cache_memory_bytes 53687091"}
    for name, value in ({"model_path": model} | small | fields).items():
        found += [f"--{name.replace('_', '-')}", *str(value).split(" ")]
    return found


def planted(folder: Path, kind: str, victim: int, arguments: list[str]) -> list[str]:
    """What follows ``python`` for the command with a fault on one rank."""
    script = folder / "planted.py"
    script.write_text(PLANTED, encoding="utf-8")
    return [str(script), kind, str(victim), *arguments[2:]]


def rows(output: str) -> list[list[str]]:
    """Cells of the printed tables' rows."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines() if line.startswith("│")]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("family", "fields", "num_tensors", "num_rollout"),
    [
        ("mixtral", {"expert_model_parallel_size": 2, "rollout_world_size": 1}, 3 + 4 * (7 + 3 * 4), 1),
        pytest.param(
            "llama",
            TP2 | ROLLOUT["TP1 x 2 replicas"] | {"rollout_backend": "hf", "num_ranks": 6, "params_dtype": BF16},
            3 + 4 * 9,
            2,
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["mixture", "Hugging Face engine, two copies of the trainer"],
)
def test_the_command_starts_its_ranks_and_proves_every_tensor(
    tmp_path: Path, family: Family, fields: dict[str, object], num_tensors: int, num_rollout: int
) -> None:
    with Processes(tmp_path / "log") as processes:
        processes.start(flags(toy(tmp_path, family), **fields))
        assert processes.wait(500) == 0, processes.output()
        output, errors = processes.stdout(), processes.stderr()
        assert processes.alive() == []
    assert errors == "" and warnings_in(output) == []
    *_, verdict, log_probs = output.splitlines()
    assert verdict == f"verify: {num_tensors} tensors on {num_rollout} rollout ranks are equal bit for bit"
    assert re.fullmatch(r"log-probs: trainer and engine differ by at most \S+ nats \(\S+ on average\) on \d+ tokens", log_probs)
    table = rows(output)
    by_rank, by_kind = [row for row in table if len(row) == 7], [row for row in table if len(row) == 5]
    num_ranks = int(str(fields.get("num_ranks", 2 + num_rollout)))
    assert [row[:2] for row in by_rank] == [[str(r), "training" if r < num_ranks - num_rollout else "rollout"] for r in range(num_ranks)]
    assert [row[-1] for row in by_rank[-num_rollout:]] == ["1.000"] * num_rollout
    assert all(row[3:] == ["equal", "equal"] for row in by_kind)
    assert sum(int(row[1]) for row in by_kind) == num_tensors
    assert sum(int(row[2].replace(",", "")) for row in by_kind) == sum(int(row[5].replace(",", "")) for row in by_rank[-num_rollout:])


@pytest.mark.slow
def test_under_torchrun_a_difference_is_found_and_named(tmp_path: Path) -> None:
    """Rank 2 of three loses two elements in the first sync, and a whole norm in the second; rank 1 is sound."""
    arguments = flags(toy(tmp_path, "qwen2"), rollout_backend="hf", rollout_world_size=2)
    with Processes(tmp_path / "log") as processes:
        processes.torchrun(3, planted(tmp_path, "spoil", 2, arguments))
        assert processes.wait(200) == 1, processes.output()
        output = processes.stdout()
    faults = [line for line in output.splitlines() if line.startswith("verify: ")]
    where = f"{SPOILT} [3:5, 7:8] (in {SPOILT}): 2 of 12288 elements differ"
    for way in ("gather", "folder"):
        assert f"verify: rank 2 (rollout rank 1): {way} differs from exact with the folder's weights: {where}" in faults
    assert f"verify: rank 2 (rollout rank 1): exact left {STALE} [0:128] (in {STALE}) as it was before the change" in faults
    changed = f"verify: rank 2 (rollout rank 1): gather differs from exact with changed weights: {STALE} [0:128] (in {STALE}): "
    assert f"{changed}128 of 128 elements differ" in faults
    assert any(line.startswith("verify: log-probs: trainer and engine differ by") for line in faults)  # its samples are another network's
    assert "verify: FAILED, 5 faults" in faults and len(faults) == 6 and "equal bit for bit" not in output
    kinds = {row[0]: row[3:] for row in rows(output) if len(row) == 5}
    assert kinds[kind_of(SPOILT)] == ["2 elements differ", "2 elements differ"]
    assert kinds[kind_of(STALE)] == ["128 elements differ", "equal"]
    assert all(cells == ["equal", "equal"] for kind, cells in kinds.items() if kind not in (kind_of(SPOILT), kind_of(STALE)))


@pytest.mark.slow
def test_under_torchrun_a_lost_rank_ends_all(tmp_path: Path) -> None:
    arguments = flags(toy(tmp_path, "llama"), rollout_backend="hf")
    with Processes(tmp_path / "log") as processes:
        processes.torchrun(2, planted(tmp_path, "kill", 1, arguments))
        assert processes.wait(200) == 1
        processes.wait_until(lambda: not processes.alive(), "the end of all ranks", 30)
        output = processes.output()
    lost = r"^rank 1 \(rollout rank 0\) lost in phase verify: exact, weights of the folder; this is rank 0 in phase verify: .*; ending"
    assert re.search(lost, output, re.M), output


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"model_path": "/nowhere"}, ["/nowhere", "config.json"]),
        ({"tensor_model_parallel_size": 3, "num_ranks": 4}, ["4 attention heads", "tensor_model_parallel_size = 3"]),
        ({"num_ranks": 3, "rollout_world_size": 2, "tensor_model_parallel_size": 2}, ["world size 3"]),
        ({"pipeline_model_parallel_size": 3}, ["4 layers"]),
        ({"transformer_overrides": "expert_tensor_parallel_size two"}, ["expert_tensor_parallel_size = 'two'", "a whole number"]),
    ],
)
def test_bad_input_is_said_before_any_rank_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, object], parts: list[str]
) -> None:
    arguments = flags(toy(tmp_path, "llama"), **fields)[2:]
    capsys.readouterr()
    assert main(arguments) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("megatron_ppo verify: ") and "Traceback" not in errors
    for part in parts:
        assert part in errors


def test_a_folder_that_lacks_a_tensor_is_refused_with_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = toy(tmp_path, "llama")
    tensors = load_file(model / "model.safetensors")
    del tensors[SPOILT]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert main(flags(model)[2:]) == 2
    assert f"missing: {SPOILT}" in capsys.readouterr().err


# -- parts ------------------------------------------------------------------------------------------------------------


def test_a_loader_that_stops_early_leaves_the_rest_to_be_received() -> None:
    """The sender counts on it. A generator would be closed with the ``yield from`` that an engine's loader may put around it."""

    def sent() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(4):
            yield str(number), torch.tensor(number)

    def loader(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors

    stream, read = _Stream(sent()), []
    for name, _ in loader(stream):
        read.append(name)
        if name == "1":
            break
    assert read == ["0", "1"] and [name for name, _ in stream] == ["2", "3"] and not stream.is_broken


def test_a_stream_knows_its_own_failure_from_its_readers() -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "0", torch.tensor(0)
        raise RuntimeError("connection lost")

    stream = _Stream(broken())
    with pytest.raises(RuntimeError, match="connection lost"):
        list(stream)
    assert stream.is_broken


def test_kinds_have_no_numbers_of_layers_and_experts() -> None:
    assert kind_of("model.layers.31.mlp.experts.127.down_proj.weight") == "model.layers.*.mlp.experts.*.down_proj.weight"
    assert kind_of("model.layers.3.block_sparse_moe.experts.4.w2.weight") == "model.layers.*.block_sparse_moe.experts.*.w2.weight"
    assert kind_of("lm_head.weight") == "lm_head.weight"


def test_the_change_depends_on_an_element_alone_and_leaves_nothing_as_it_was() -> None:
    weights = {"bias": torch.zeros(3), "norm": torch.ones(3, dtype=torch.bfloat16), "matrix": torch.tensor([-0.5, 2.0])}
    change_weights(weights)
    assert weights["bias"].tolist() == pytest.approx([0.01] * 3) and weights["matrix"].tolist() == pytest.approx([-0.615, 2.51])
    assert weights["norm"].dtype == torch.bfloat16 and weights["norm"].tolist() == [1.2578125] * 3


def test_only_the_policy_is_built() -> None:
    config = Config().replace(critic="separate", critic_path="c", reward_model_path="r", kl_coef=0.1, kl_loss_coef=0.1)
    left = policy_only(config)
    assert left.model.critic == "none" and left.model.critic_path is left.model.reward_model_path is None and not left.uses_reference
    assert policy_only(config.replace(critic="shared", critic_path=None)).model.critic == "shared"  # its trunk holds a value head
