"""One rank's part of ``verify``: three ways of bringing weights into the inference engine, compared bit for bit.

    exact    the plan and its executor, as in every sync of a run
    gather   full tensors from the training mesh (``resharding/gather.py``), sent whole to every rollout rank, the engine's own loader
    folder   the files of the Hugging Face folder, read by every rollout rank, the engine's own loader

Round 1 has the weights of the folder: all three must agree, and the log-probs of a few random sequences show that trainer and engine
compute the same network. Round 2 has other weights, the same change on every rank: exact and gather must agree, and no block may be what
it was. The engine's own loader forgets all weights first, so that a tensor that a way leaves out shows.

Stands above the backends; every rank of the launch runs ``verify_on_rank`` together, any number of times in one process. Left out: building
backends, starting ranks, printing (``verify.py``). A full tensor is in memory on every rollout rank, one at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from megatron_ppo import device
from megatron_ppo.backends.base import InferenceBackend, TrainingBackend
from megatron_ppo.backends.inference_checks import forget_weights
from megatron_ppo.bridge import Bridge
from megatron_ppo.config import Config
from megatron_ppo.data_bus import DataBus
from megatron_ppo.families import LM_HEAD, canonical_tensors
from megatron_ppo.generic_network import describe_network
from megatron_ppo.resharding.boxes import box_text
from megatron_ppo.resharding.compare import compare_blocks
from megatron_ppo.resharding.executor import ReshardExecutor, TransferStats, compare_descriptions
from megatron_ppo.resharding.gather import gather_canonical
from megatron_ppo.resharding.hf_checkpoint import HFCheckpoint
from megatron_ppo.resharding.layout import RankLayout
from megatron_ppo.resharding.megatron_mesh import megatron_parallel, rank_coordinates
from megatron_ppo.training_engine import TrainingEngine
from megatron_ppo.types import Sampling, TrajectoryBatch
from megatron_ppo.weight_synchronizer import actor_layouts, refit_plan, rollout_layouts, transfer_dtype
from megatron_ppo.world import World

NUM_SEQUENCES = 4
"""Random prompts of the comparison of log-probs."""
LONGEST_PROMPT = LONGEST_RESPONSE = 16
GATHER, FOLDER = "gather", "folder"

Phase = Callable[[str], AbstractContextManager[None]]
"""Names what this rank does next: ``Watchdog.phase``."""


@dataclass
class KindReport:
    """One kind of parameter on one rollout rank."""

    names: list[str] = field(default_factory=list)
    """Canonical names."""
    num_bytes: int = 0
    differing: dict[str, int] = field(default_factory=dict)
    """Way -> elements in which it differs from exact, over all rounds in which it ran."""


@dataclass
class RankReport:
    """What one rank saw."""

    rank: int
    mesh: str
    place: str
    """``TP 0 PP 1 DP 0``, or ``replica 0 TP 1``; both where the rank is colocated."""
    bytes_sent: int = 0
    bytes_received: int = 0
    shard_bytes: int = 0
    """Bytes of the engine's live parameters without vocabulary padding, as the engine counts them."""
    kinds: dict[str, KindReport] = field(default_factory=dict)
    """Canonical name with numbers as ``*`` -> what was compared."""
    not_run: list[str] = field(default_factory=list)
    """Ways that the engine's loader refused in some round."""
    faults: list[str] = field(default_factory=list)
    """Differences and ways that did not run, in words; empty where all is well."""


@dataclass
class Report:
    """What all ranks saw, on global rank 0."""

    ranks: list[RankReport]
    num_tensors: int
    """Canonical tensors that were compared on at least one rollout rank."""
    faults: list[str]
    """All that is wrong; empty: every way gives the same bits."""
    log_probs: dict[str, float]
    """``largest`` and ``mean`` difference between trainer and engine in nats, ``tokens``, and ``limit`` of the mean."""


def policy_only(config: Config) -> Config:
    """The configuration without what verify has no use for: separate critic, reference, reward model."""
    critic = "shared" if config.model.critic == "shared" else "none"
    unused = {"critic_path": None, "reward_model_path": None, "kl_coef": 0.0, "kl_loss_coef": 0.0, "max_tokens_per_micro_batch": None}
    return config.replace(critic=critic, **unused)


def verify_on_rank(
    config: Config, world: World, trainer: TrainingBackend | None, engine: InferenceBackend | None, phase: Phase, *, label: str = "verify"
) -> Report | None:
    """Both rounds. Collective over the launch; the report on global rank 0, None on all other ranks.

    Args:
        config: from ``policy_only``; equal on all ranks but for what a backend was built with.
        trainer: a training rank's backend, with the weights of the folder, which are changed; None on a rollout rank.
        engine: a rollout rank's backend, with any weights; None on a training rank. A colocated rank has both.
        phase: names what is being done.
        label: unique among the calls of one launch.
    """
    part = _Part(config, world, trainer, phase, label)
    with phase("verify: bridges"):
        part.connect(None if trainer is None else trainer.weights(), None if engine is None else engine.weights())
    if engine is not None:
        report = part.rollout(engine)
    else:
        assert trainer is not None
        report = part.train(trainer)
    with phase("verify: report"):
        world.store.set(f"{label}/report/{world.global_rank}", json.dumps(asdict(report)))
        found = part.collect() if world.global_rank == 0 else None
        part.close()
    return found


class _Part:
    """One rank's connections and steps."""

    def __init__(self, config: Config, world: World, trainer: TrainingBackend | None, phase: Phase, label: str) -> None:
        self._config = config
        self._trainer = trainer
        self._world = world
        self._phase = phase
        self._label = label
        self._network = describe_network(config.model.model_path)
        self._bridges: list[Bridge] = []
        self._held_dtype = torch.float32 if config.parallel.backend == "fsdp" else getattr(torch, config.model.params_dtype)
        self._log_probs: dict[str, float] = {}

    def connect(self, sources: Mapping[str, Tensor] | None, destinations: Mapping[str, Tensor] | None) -> None:
        """Make the groups between the meshes; compare plans before the first byte."""
        config, world = self._config, self._world
        self._executor = ReshardExecutor(
            refit_plan(config, world.world_size),
            world.global_rank,
            self._bridge,
            bucket_bytes=config.parallel.bucket_bytes,
            transfer_dtype=transfer_dtype(config),
        )
        key = f"{self._label}/description"
        world.store.set(f"{key}/{world.global_rank}", self._executor.describe(sources=sources, destinations=destinations))
        ranks = range(world.world_size) if world.global_rank == 0 else [0, world.global_rank]
        compare_descriptions([world.store.get(f"{key}/{rank}").decode() for rank in ranks])
        # Full tensors go from the first training rank to every rollout rank.
        self._is_first = world.is_training and world.rank == 0
        members = (world.training_ranks[0], *world.rollout_ranks)
        self._full = self._bridge("full", members) if world.global_rank in members and not world.is_colocated else None
        self._all = self._bridge("all", range(world.world_size))

    def _bridge(self, name: str, ranks: Iterable[int]) -> Bridge:
        timeout_s = 60.0 * self._config.parallel.distributed_timeout_minutes
        self._bridges.append(Bridge(f"{self._label}/{name}", list(ranks), self._world, device.process_group_backend(), timeout_s))
        return self._bridges[-1]

    def close(self) -> None:
        """Leave the groups, together: rank 0 may host the launch's store."""
        self._all.barrier()
        for bridge in self._bridges:
            bridge.close()

    # -- training mesh ------------------------------------------------------------------------------------------------

    def train(self, backend: TrainingBackend) -> RankReport:
        """Send both rounds both ways."""
        report = RankReport(self._world.global_rank, "training", _training_place(self._config, self._world))
        with self._phase("verify: exact, weights of the folder"):
            report.bytes_sent = self._executor.send(backend.weights()).bytes_sent
        with self._phase("verify: log-probs"):
            self._compare_log_probs(backend)
        with self._phase("verify: gather, weights of the folder"):
            self._send_full(backend)
        change_weights(backend.weights())
        with self._phase("verify: exact, changed weights"):
            self._executor.send(backend.weights())
        with self._phase("verify: gather, changed weights"):
            self._send_full(backend)
        return report

    def _send_full(self, backend: TrainingBackend) -> None:
        for _, tensor in self._gather(backend, to=0):
            if self._is_first:
                assert tensor is not None and self._full is not None
                self._full.broadcast(tensor, self._world.global_rank)

    def _gather(self, backend: TrainingBackend, *, to: int | None) -> Iterator[tuple[str, Tensor | None]]:
        """Full tensors at one training rank, or (None) at all."""
        wanted = {tensor.name: tensor.shape for tensor in canonical_tensors(self._network)}
        layouts = actor_layouts(self._config, self._world.mesh_size)
        for name, tensor in gather_canonical(
            layouts, backend.weights(), to=to, names=list(wanted), shapes=wanted, check_replicas=True
        ):
            assert tensor is None or tensor.dtype == self._held_dtype, f"{name} is not held in {self._held_dtype}"
            yield name, tensor

    def _compare_log_probs(self, backend: TrainingBackend) -> None:
        """Every training rank recomputes what all replicas have sampled."""
        config, world = self._config, self._world
        texts = [world.store.get(f"{self._label}/samples/{replica}").decode() for replica in range(world.num_replicas)]
        batch = _as_batch([sample for text in texts for sample in json.loads(text)])
        engine = TrainingEngine(config, world, DataBus(world, timeout_s=60.0), backend, device.device())
        difference = (engine.compute_log_probs(batch) - batch.rollout_log_probs).abs()[batch.response_mask]
        exact = (config.model.params_dtype, config.rollout.rollout_dtype) == ("float32", "float32")
        self._log_probs = {
            "largest": float(difference.max()),
            "mean": float(difference.mean()),
            "tokens": len(difference),
            "limit": 1e-3 if exact else 0.1,  # rounding stays far below, the log-probs of another network far above
        }

    # -- rollout mesh -------------------------------------------------------------------------------------------------

    def rollout(self, backend: InferenceBackend) -> RankReport:
        """Receive both rounds both ways, read the folder, and compare. A colocated rank does the training mesh's part in between."""
        world, trainer = self._world, self._trainer
        place = f"replica {world.replica} TP {world.replica_tp_rank}"
        if trainer is not None:
            place = f"{_training_place(self._config, world)}, {place}"
        report = RankReport(world.global_rank, world.mesh, place)
        report.shard_bytes = backend.shard_bytes()
        layout = rollout_layouts(self._config)[world.replica_tp_rank]
        comparison = _Comparison(report, layout, transfer_dtype(self._config).itemsize, world.describe(world.global_rank))
        forget_weights(backend.weights(), layout)
        with self._phase("verify: exact, weights of the folder"):
            stats = self._exact(backend)
            report.bytes_sent, report.bytes_received = stats.bytes_sent, stats.bytes_received
            first = _copy(backend)
        with self._phase("verify: log-probs"):
            self._sample(backend)
            if trainer is not None:
                self._compare_log_probs(trainer)
        with self._phase("verify: gather, weights of the folder"):
            comparison.hold(first, self._load(backend, self._receive_full(), GATHER, report), GATHER, "the folder's weights")
        with self._phase("verify: folder"):
            comparison.hold(first, self._load(backend, self._read_folder(), FOLDER, report), FOLDER, "the folder's weights")
        if trainer is not None:
            change_weights(trainer.weights())
        with self._phase("verify: exact, changed weights"):
            self._exact(backend)
            second = _copy(backend)
            comparison.find_stale(first, second)
        with self._phase("verify: gather, changed weights"):
            comparison.hold(second, self._load(backend, self._receive_full(), GATHER, report), GATHER, "changed weights")
        if comparison.num_bytes != report.shard_bytes:
            place = world.describe(world.global_rank)
            report.faults.append(f"{place}: {comparison.num_bytes} bytes were compared, but the engine holds {report.shard_bytes}")
        return report

    def _exact(self, backend: InferenceBackend) -> TransferStats:
        if self._trainer is None:
            stats = self._executor.receive(backend.weights())
        else:
            stats = self._executor.exchange(self._trainer.weights(), backend.weights())
        backend.after_weight_update()
        return stats

    def _load(
        self, backend: InferenceBackend, tensors: Iterator[tuple[str, Tensor]], way: str, report: RankReport
    ) -> dict[str, Tensor] | None:
        """The engine's live parameters after its own loader; None, and a fault, where the loader refuses."""
        fault, stream = None, _Stream(tensors)
        try:
            backend.load_hf_weights(stream)
        except Exception as error:  # an engine's loader may raise anything
            if stream.is_broken:  # it was the transfer that failed, not the loader
                raise
            fault = f"{type(error).__name__}: {error}"
        for _ in stream:  # the sender counts on every tensor being received
            pass
        if fault is None:
            return backend.weights()
        report.faults.append(f"{self._world.describe(report.rank)}: {way} did not run: {fault}")
        return None

    def _receive_full(self) -> Iterator[tuple[str, Tensor]]:
        if self._trainer is not None:
            for name, whole in self._gather(self._trainer, to=None):
                assert whole is not None
                yield name, whole
            return
        assert self._full is not None
        for tensor in canonical_tensors(self._network):
            full = torch.empty(tensor.shape, dtype=self._held_dtype, device=device.device())
            self._full.broadcast(full, self._world.training_ranks[0])
            yield tensor.name, full

    def _read_folder(self) -> Iterator[tuple[str, Tensor]]:
        """All that the files hold, in the values that the trainer reads: cast to its dtype first."""
        checkpoint = HFCheckpoint(Path(self._config.model.model_path))
        checkpoint.name_as(self._network)
        wanted = {tensor.name for tensor in canonical_tensors(self._network)} | {LM_HEAD}  # not the rotary buffers of old checkpoints
        for name in checkpoint.shapes.keys() & wanted:
            yield name, checkpoint.read(name).to(self._held_dtype)

    def _sample(self, backend: InferenceBackend) -> None:
        r, generator = self._config.rollout, torch.Generator().manual_seed(self._config.training.seed)
        longest = min(LONGEST_PROMPT, r.max_prompt_length)
        lengths = torch.randint(1, longest + 1, (NUM_SEQUENCES,), generator=generator).tolist()
        prompts = [torch.randint(0, self._network.vocab_size, (length,), generator=generator).tolist() for length in lengths]
        sampling = Sampling(min(LONGEST_RESPONSE, r.max_response_length), temperature=r.temperature)
        completions = backend.generate(prompts, sampling, range(len(prompts)))
        if self._world.is_head:
            samples = [(prompt, one.token_ids, one.log_probs) for prompt, one in zip(prompts, completions, strict=True)]
            self._world.store.set(f"{self._label}/samples/{self._world.replica}", json.dumps(samples))

    # -- rank 0 -------------------------------------------------------------------------------------------------------

    def collect(self) -> Report:
        """All ranks' reports as one."""
        reports = []
        for rank in range(self._world.world_size):
            content = json.loads(self._world.store.get(f"{self._label}/report/{rank}"))
            kinds = {name: KindReport(**kind) for name, kind in content.pop("kinds").items()}
            reports.append(RankReport(**content, kinds=kinds))
        faults = [fault for report in reports for fault in report.faults]
        for report in reports:
            if report.bytes_received != report.shard_bytes:
                faults.append(
                    f"{self._world.describe(report.rank)}: {report.bytes_received} bytes received, but its shard has {report.shard_bytes}"
                )
        compared = {name for report in reports for kind in report.kinds.values() for name in kind.names}
        lost = [tensor.name for tensor in canonical_tensors(self._network) if tensor.name not in compared]
        if lost:
            faults.append(f"on no rollout rank: {', '.join(lost[:8])}{f' and {len(lost) - 8} more' if len(lost) > 8 else ''}")
        found = self._log_probs
        if not found["mean"] <= found["limit"]:
            faults.append(
                f"log-probs: trainer and engine differ by {found['mean']:.3g} nats on average, more than {found['limit']}: they do not "
                "compute the same network, though the weights may be equal"
            )
        return Report(reports, len(compared), faults, found)


class _Comparison:
    """Holds one rollout rank's parameters to those of exact, and notes in its report what differs."""

    def __init__(self, report: RankReport, layout: RankLayout, itemsize: int, rank: str) -> None:
        self._report = report
        self._layout = layout
        self._rank = rank
        for block in layout.blocks:
            kind = report.kinds.setdefault(kind_of(block.name), KindReport())
            if block.name not in kind.names:
                kind.names.append(block.name)
            kind.num_bytes += block.num_elements * itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes that each comparison covers."""
        return sum(kind.num_bytes for kind in self._report.kinds.values())

    def hold(self, exact: Mapping[str, Tensor], live: Mapping[str, Tensor] | None, way: str, what: str) -> None:
        """``live``: what the engine holds after ``way``; None: it did not run."""
        if live is None:
            self._report.not_run.append(way)
            return
        for found in compare_blocks(self._layout, exact, live):
            kind = self._report.kinds[kind_of(found.block.name)]
            kind.differing[way] = kind.differing.get(way, 0) + found.num_differing
            if found.num_differing:
                self._report.faults.append(f"{self._rank}: {way} differs from exact with {what}: {found}")

    def find_stale(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """A block that the second exact sync left as it was, though every weight of the trainer had changed."""
        for found in compare_blocks(self._layout, before, after):
            if not found.num_differing:
                block = found.block
                self._report.faults.append(
                    f"{self._rank}: exact left {block.name} {box_text(block.canonical)} (in {block.parameter}) as it was before the change"
                )


class _Stream:
    """Tensors by name, for a loader that may stop early: unlike a generator, it can be read on after a ``yield from`` of it has ended."""

    def __init__(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        self.is_broken = False
        self._tensors = tensors

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        try:
            return next(self._tensors)
        except StopIteration:
            raise
        except BaseException:
            self.is_broken = True
            raise


def kind_of(name: str) -> str:
    """A canonical name with the numbers of layers and experts as ``*``."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


@torch.no_grad()
def change_weights(weights: Mapping[str, Tensor]) -> None:
    """Other weights, in place: each element becomes 1.25 times itself plus 0.01, so that replicas stay equal."""
    for tensor in weights.values():
        tensor.mul_(1.25).add_(0.01)


def _copy(backend: InferenceBackend) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in backend.weights().items()}


def _as_batch(samples: Sequence[tuple[list[int], list[int], list[float]]]) -> TrajectoryBatch:
    """(prompt, response, log-probs of the response) of each sequence, as what the training engine takes."""
    num, length = len(samples), max(len(prompt) + len(response) for prompt, response, _ in samples)
    tokens, log_probs = torch.zeros(num, length, dtype=torch.int64), torch.zeros(num, length)
    for row, (prompt, response, sampled) in enumerate(samples):
        tokens[row, : len(prompt) + len(response)] = torch.tensor(prompt + response)
        log_probs[row, len(prompt) : len(prompt) + len(response)] = torch.tensor(sampled)
    return TrajectoryBatch(
        tokens=tokens,
        prompt_lengths=torch.tensor([len(prompt) for prompt, _, _ in samples]),
        response_lengths=torch.tensor([len(response) for _, response, _ in samples]),
        rollout_log_probs=log_probs,
        scores=torch.zeros(num),
        truncated=torch.ones(num, dtype=torch.bool),
        prompt_ids=torch.arange(num),
        sample_indices=torch.zeros(num, dtype=torch.int64),
        version=0,
    )


def _training_place(config: Config, world: World) -> str:
    """``TP 0 PP 1 DP 0``, or of FSDP ``copy 0 shard 1``."""
    if config.parallel.backend == "fsdp":
        copy, shard = divmod(world.rank, config.fsdp_shards(world.mesh_size))
        return f"copy {copy} shard {shard}"
    place = rank_coordinates(world.rank, world.mesh_size, megatron_parallel(config))
    axes = [f"TP {place.tp}", f"PP {place.pp}", f"DP {place.dp}"]
    axes += [f"CP {place.cp}"] if config.parallel.context_parallel_size > 1 else []
    axes += [f"EP {place.ep}"] if config.parallel.expert_model_parallel_size > 1 else []
    return " ".join(axes)
