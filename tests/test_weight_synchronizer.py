"""The plan that follows from a configuration alone, where megatron-core really puts the weights, and when a sync is proved.

Real transfers into real engines are in ``test_refit_vllm.py``; here planning is pure, and syncs run in one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from spawn import run_ranks
from torch import Tensor
from toy_models import make_toy

from megatron_ppo.config import Config
from megatron_ppo.data_bus import DataBus, DataHandle
from megatron_ppo.device import prepare_megatron
from megatron_ppo.resharding.executor import TransferStats
from megatron_ppo.resharding.layout import view
from megatron_ppo.resharding.plan import ReshardPlan
from megatron_ppo.rollout_engine import RemoteRollout, RemoteTraining, version_of
from megatron_ppo.weight_synchronizer import WeightSynchronizer, refit_plan, transfer_dtype, uses_transformer_engine
from megatron_ppo.world import World


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    paths = {family: make_toy(root / family, family, num_layers=4, vocab_size=201) for family in ("llama", "qwen2", "qwen3")}
    paths["tied"] = make_toy(root / "tied", tied=True, num_layers=4, vocab_size=201)
    return {name: str(path) for name, path in paths.items()}


def mesh(tp: int = 1, pp: int = 1, cp: int = 1, vpp: int | None = None) -> dict[str, object]:
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": cp,
        "virtual_pipeline_model_parallel_size": vpp,
    }


def rollout(world_size: int = 1, tp: int = 1, **changes: object) -> dict[str, object]:
    return {"rollout_world_size": world_size, "rollout_tensor_parallel_size": tp} | changes


LOCAL = {"transformer_impl": "local"}


def make_config(folder: str, *parts: Mapping[str, object]) -> Config:
    fields: dict[str, Any] = {"model_path": folder, "critic": "none", "transformer_overrides": LOCAL, "make_vocab_size_divisible_by": 8}
    for part in parts:
        fields |= part
    return Config().replace(**fields)


def checkpoint(folder: str) -> dict[str, Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def num_elements(tensors: Mapping[str, Tensor], *, of_vectors: bool = False) -> int:
    return sum(tensor.numel() for tensor in tensors.values() if not of_vectors or tensor.dim() == 1)


# -- the plan, from the configuration alone ---------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["llama", "qwen2", "qwen3", "tied"])
@pytest.mark.parametrize(
    ("train", "sample", "world_size"),
    [
        (mesh(), rollout(), 2),
        (mesh(tp=2), rollout(2), 4),
        (mesh(tp=2), rollout(4, 2), 8),
        (mesh(pp=2), rollout(2, 2), 6),
        (mesh(tp=2, pp=2), rollout(2), 6),
        (mesh(tp=2, pp=2, cp=2), rollout(4, 2), 12),
        (mesh(tp=2, pp=2, vpp=2), rollout(4, 4), 12),
    ],
    ids=["1to1", "tp2", "tp2dp2", "pp2dp2", "tp2pp2", "tp2pp2cp2", "tp2pp2vpp2dp2"],
)
def test_every_rollout_rank_gets_its_shard_and_no_byte_more(
    models: dict[str, str], model: str, train: dict[str, object], sample: dict[str, object], world_size: int
) -> None:
    """One replica's shards hold every weight once; what tensor-parallel ranks share are norms, and key/value heads where they are few."""
    config = make_config(models[model], train, sample)
    plan = refit_plan(config, world_size)
    num_training = world_size - config.parallel.rollout_world_size
    assert list(plan.source_shapes) == list(range(num_training))
    assert list(plan.destination_shapes) == list(range(num_training, world_size))
    traffic = plan.summary(1 << 20)
    tensors = checkpoint(models[model])
    assert all(traffic[rank].bytes_received == 0 for rank in range(num_training))
    assert all(traffic[rank].bytes_sent == 0 for rank in range(num_training, world_size))
    tp = config.parallel.rollout_tensor_parallel_size
    for start in range(num_training, world_size, tp):
        received = sum(traffic[rank].bytes_received for rank in range(start, start + tp)) // 4
        # 2 key/value heads on 4 ranks: each pair holds the same one.
        kv = {n: t for n, t in tensors.items() if "k_proj" in n or "v_proj" in n}
        copies = max(1, tp // 2) - 1
        shared = {n: t for n, t in tensors.items() if t.dim() == 1 and not n.endswith("bias")}
        assert received == num_elements(tensors) + (tp - 1) * num_elements(shared) + copies * num_elements(kv)
    # Replicas cost nothing: what leaves the trainer is what one replica takes in.
    sent = sum(traffic[rank].bytes_sent for rank in range(num_training))
    assert sent == sum(traffic[rank].bytes_received for rank in range(num_training, num_training + tp))


def test_ranks_are_counted_tp_first_and_stages_last(models: dict[str, str]) -> None:
    """Who sends or gets which columns of ``down_proj`` (96 of them, of each layer) says where a rank stands."""

    def columns(plan: ReshardPlan, *, senders: bool) -> dict[int, set[tuple[str, tuple[int, int]]]]:
        held: dict[int, set[tuple[str, tuple[int, int]]]] = {}
        for group in plan.groups:
            for transfer in group.transfers:
                if "down_proj" in transfer.name:
                    for rank in (group.source,) if senders else group.destinations:
                        held.setdefault(rank, set()).add((transfer.name.split(".")[2], transfer.canonical[1]))
        return held

    halves = [(0, 48), (48, 96)]
    plan = refit_plan(make_config(models["llama"], mesh(tp=2, pp=2), rollout(2, 2)), 10)
    for rank, held in columns(plan, senders=True).items():
        assert held <= {(layer, halves[rank % 2]) for layer in ("01" if rank < 4 else "23")}
    for first in (1, 2, 3):  # training ranks before them
        plan = refit_plan(make_config(models["llama"], rollout(4, 2)), first + 4)
        for rank, held in columns(plan, senders=False).items():
            assert held == {(layer, halves[(rank - first) % 2]) for layer in "0123"}


def test_the_plan_depends_on_what_matters_and_nothing_else(models: dict[str, str]) -> None:
    def digest(*changes: Mapping[str, object], world_size: int = 6) -> str:
        return refit_plan(make_config(models["llama"], mesh(tp=2, pp=2), rollout(2), *changes), world_size).digest()

    one = digest()
    assert one == digest({"lr": 1.0, "seed": 9, "bucket_bytes": 1 << 20, "params_dtype": "bfloat16", "run_dir": "elsewhere"})
    different = [
        digest(rollout(2, 2)),
        digest(mesh(tp=4)),
        digest(mesh(tp=2, pp=2, vpp=2)),
        digest({"rollout_dtype": "bfloat16"}),
        digest({"make_vocab_size_divisible_by": 128}),
        digest({"transformer_overrides": {"transformer_impl": "transformer_engine"}}),
        digest({"rollout_backend": "hf"}),
        digest(world_size=10),
        digest({"model_path": models["qwen3"]}),
    ]
    assert len({one, *different}) == 10


def test_the_value_head_of_a_shared_critic_stays_at_home(models: dict[str, str]) -> None:
    plain = refit_plan(make_config(models["llama"], mesh(tp=2, pp=2), rollout(2)), 6)
    shared = refit_plan(make_config(models["llama"], mesh(tp=2, pp=2), rollout(2), {"critic": "shared"}), 6)
    separate = refit_plan(make_config(models["llama"], mesh(tp=2, pp=2), rollout(2), {"critic": "separate"}), 6)
    moved = {transfer.name for group in shared.groups for transfer in group.transfers}
    assert moved == set(checkpoint(models["llama"])) and "score.weight" not in moved
    assert shared.groups == plain.groups == separate.groups and separate.digest() == plain.digest()
    more = {rank: set(shared.source_shapes[rank]) - set(plain.source_shapes[rank]) for rank in range(4)}
    assert not more[0] and not more[1], "the head stands on the last stage"
    assert len(more[2]) == 1 and more[2] == more[3]


@pytest.mark.parametrize("params_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rollout_dtype", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_weights_travel_in_the_dtype_of_the_rollout_engine(
    models: dict[str, str], params_dtype: str, rollout_dtype: str, dtype: torch.dtype
) -> None:
    config = make_config(models["llama"], rollout(), {"rollout_dtype": rollout_dtype, "params_dtype": params_dtype})
    plan = refit_plan(config, 2)
    assert transfer_dtype(config) is dtype and plan.bytes_per_element == dtype.itemsize
    assert plan.summary(1 << 20)[1].bytes_received == dtype.itemsize * num_elements(checkpoint(models["llama"]))


def test_names_of_parameters_follow_the_layer_spec(models: dict[str, str]) -> None:
    local = make_config(models["llama"], rollout())
    fused = make_config(models["llama"], rollout(), {"transformer_overrides": {"transformer_impl": "transformer_engine"}})
    assert not uses_transformer_engine(local) and uses_transformer_engine(fused)
    names = [set(refit_plan(config, 2).source_shapes[0]) for config in (local, fused)]
    assert any("linear_qkv.layer_norm_weight" in name for name in names[1] - names[0])


# -- against megatron-core --------------------------------------------------------------------------------------------


def hold_to_megatron(rank: int, world_size: int, configs: Mapping[str, Config]) -> dict[str, Any]:
    """For each mesh: this rank's coordinates, shapes that differ from the plan's, and boxes that do not hold what the plan says."""
    from megatron_ppo.backends.megatron import MegatronBackend
    from megatron_ppo.backends.megatron_setup import destroy_megatron

    prepare_megatron()
    from megatron.core import parallel_state

    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, config in configs.items():
        live = MegatronBackend(config, num_optimizer_steps=1).weights()
        plan, whole = refit_plan(config, world_size + 1), checkpoint(config.model.model_path)
        planned = plan.source_shapes[rank]
        own = [transfer for group in plan.groups if group.source == rank for transfer in group.transfers]
        found[name] = {
            "coordinates": (
                parallel_state.get_tensor_model_parallel_rank(),
                parallel_state.get_context_parallel_rank(),
                parallel_state.get_data_parallel_rank(),
                parallel_state.get_pipeline_model_parallel_rank(),
            ),
            "shapes": {n for n in {*planned, *live} if planned.get(n) != (tuple(live[n].shape) if n in live else None)},
            "wrong": [
                t for t in own if not torch.equal(view(live[t.source_parameter], t.source), view(whole[t.name], t.canonical))
            ],
            "checked": sum(t.num_elements for t in own),
        }
        destroy_megatron()
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_rank_order_and_shards_are_those_of_megatron(models: dict[str, str]) -> None:
    """TP fastest, then CP, DP, PP. Eight real ranks hold exactly what the plan, made from the configuration, says they hold."""
    meshes = {
        "tp2 dp2 pp2": make_config(models["llama"], mesh(tp=2, pp=2), rollout(), {"critic": "shared"}),
        "tp2 cp2 pp2": make_config(models["qwen2"], mesh(tp=2, cp=2, pp=2), rollout()),
        "dp2 pp4, tied": make_config(models["tied"], mesh(pp=4), rollout()),
        "tp2 dp2 pp2 vpp2": make_config(models["qwen3"], mesh(tp=2, pp=2, vpp=2), rollout()),
    }
    everywhere = run_ranks(hold_to_megatron, 8, meshes, timeout_s=380)
    for name, config in meshes.items():
        found = [one[name] for one in everywhere]
        tp, cp = config.parallel.tensor_model_parallel_size, config.parallel.context_parallel_size
        dp = config.data_parallel_size(9)
        expected = [(r % tp, r // tp % cp, r // (tp * cp) % dp, r // (tp * cp * dp)) for r in range(8)]
        assert [one["coordinates"] for one in found] == expected, name
        assert not any(one["shapes"] for one in found), name
        assert not any(one["wrong"] for one in found), name
        assert sum(one["checked"] for one in found) == num_elements(checkpoint(config.model.model_path)), name


# -- when a sync is proved --------------------------------------------------------------------------------------------


class Hand:
    """Stands for both ends' executors in one process: carries boxes as the plan says, and may drop one."""

    def __init__(self, plan: ReshardPlan, dtype: torch.dtype) -> None:
        self.plan = plan
        self.transfer_dtype = dtype
        self.drops: str | None = None
        """Canonical name of a tensor that does not arrive."""
        self._on_the_way: dict[str, Tensor] = {}

    def send(self, parameters: Mapping[str, Tensor]) -> TransferStats:
        self._on_the_way = {name: tensor.clone() for name, tensor in parameters.items()}
        return TransferStats(sum(g.num_elements for g in self.plan.groups) * self.plan.bytes_per_element, 0, 1, 0.0)

    def receive(self, parameters: Mapping[str, Tensor]) -> TransferStats:
        (group,) = self.plan.groups
        for t in group.transfers:
            if t.name != self.drops:
                view(parameters[t.destination_parameter], t.destination).copy_(view(self._on_the_way[t.source_parameter], t.source))
        return TransferStats(0, group.num_elements * self.plan.bytes_per_element, 1, 0.0)


class Worker:
    """The rollout worker's part."""

    def __init__(self, hand: Hand, live: dict[str, Tensor]) -> None:
        self.version: int | None = None
        self._hand = hand
        self._live = live

    def set_weights(self, handle: DataHandle) -> TransferStats:
        self.version = None
        stats = self._hand.receive(self._live)
        self.version = version_of(handle)
        return stats

    def live_weights(self) -> dict[str, Tensor]:
        return self._live


class Pair:
    """A training rank and a rollout rank of one launch, in one process."""

    def __init__(self, config: Config, *, verify_always: bool = False) -> None:
        self.store = dist.HashStore()
        self.hand = Hand(refit_plan(config, 2), transfer_dtype(config))
        training, rollout_ = range(1), range(1, 2)
        self.worlds = [
            World(rank, 2, 0, "rollout" if rank else "training", 0, 1, training, rollout_, 1, self.store, "test") for rank in range(2)
        ]
        hand: Any = self.hand
        self.ends = []
        self.buses = [DataBus(world, timeout_s=5) for world in self.worlds]
        for world, bus in zip(self.worlds, self.buses, strict=True):
            self.ends.append(WeightSynchronizer(world, bus, hand, verify_always=verify_always))
        generator = torch.Generator().manual_seed(1)
        shapes, dtype = self.hand.plan.source_shapes[0], torch.float32
        self.weights = {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}
        shapes, dtype = self.hand.plan.destination_shapes[1], self.hand.transfer_dtype
        self.live = {name: torch.full(shape, float("nan"), dtype=dtype) for name, shape in shapes.items()}
        self.version = 0
        self.training = RemoteTraining(self.worlds[1])
        self.worker = Worker(self.hand, self.live)

    def get_weights(self) -> DataHandle:
        """The training engine's part."""
        return self.buses[0].put(self.weights, f"weights/{self.version}")

    def sync(self) -> tuple[Any, Any]:
        sent = self.ends[0].sync(self, RemoteRollout(self.worlds[0]))
        return sent, self.ends[1].sync(self.training, self.worker)

    def next_version(self) -> None:
        self.version += 1
        self.training.finished_update()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sync_moves_all_weights_and_reports_bytes(models: dict[str, str], dtype: str) -> None:
    """bf16 on the wire: the sender's checksums are of the cast values, so that they equal the receiver's."""
    pair = Pair(make_config(models["qwen2"], rollout(), {"rollout_dtype": dtype}))
    sent, received = pair.sync()
    assert not any(tensor.isnan().any() for name, tensor in pair.live.items() if "embed_tokens" not in name and "lm_head" not in name)
    expected = getattr(torch, dtype).itemsize * num_elements(checkpoint(models["qwen2"]))
    assert (sent.bytes_sent, sent.bytes_received, sent.version) == (expected, 0, 0)
    assert (received.bytes_sent, received.bytes_received, received.version) == (0, expected, 0)


def test_version_0_is_always_proved_and_later_ones_on_demand(models: dict[str, str]) -> None:
    pair = Pair(make_config(models["llama"], rollout()))
    pair.hand.drops = "model.layers.2.mlp.up_proj.weight"
    with pytest.raises(RuntimeError, match="1 blocks of weights v0 on rank 1") as error:
        pair.sync()
    assert "model.layers.2.mlp.up_proj.weight" in str(error.value) and "gate_up_proj" in str(error.value)
    assert pair.worker.version is None, "all bytes came, but the proof failed: nothing may be sampled"
    pair.next_version()
    pair.sync()  # not proved: this mesh was not told to
    assert pair.worker.version == 1
    assert not pair.store.check(["checksums/0/v1"])

    watched = Pair(make_config(models["llama"], rollout()), verify_always=True)
    watched.sync()
    watched.next_version()
    watched.sync()
    assert watched.store.check(["checksums/0/v1"])
    watched.next_version()
    watched.weights["embedding.word_embeddings.weight"][3, 5] += 1e-3
    watched.hand.drops = "model.embed_tokens.weight"
    with pytest.raises(RuntimeError, match=r"weights v2(.|\n)*model.embed_tokens.weight"):
        watched.sync()
    assert watched.worker.version is None
    watched.hand.drops = None
    watched.next_version()
    watched.sync()
    assert watched.worker.version == 3, "a whole sync that is proved makes it usable again"


def test_many_differences_are_counted_and_some_shown(models: dict[str, str]) -> None:
    pair = Pair(make_config(models["llama"], rollout()))
    pair.ends[0].sync(pair, RemoteRollout(pair.worlds[0]))
    pair.hand._on_the_way = {name: tensor + 1 for name, tensor in pair.hand._on_the_way.items()}
    with pytest.raises(RuntimeError) as error:
        pair.ends[1].sync(pair.training, pair.worker)
    (group,) = pair.hand.plan.groups
    assert str(error.value).startswith(f"{len(group.transfers)} blocks") and str(error.value).count("\n") == 20
