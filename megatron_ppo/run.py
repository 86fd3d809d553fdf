"""Puts the parts of a run together on this rank, and runs the loop: ``torchrun ... -m megatron_ppo train``.

Order: environment and configuration are checked before anything is built; then data and tokenizer, so that a bad file costs seconds; then
this mesh's networks or engine; then the groups between the meshes.
"""

from __future__ import annotations

import gc
import logging
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch

from megatron_ppo import device
from megatron_ppo.backends.base import InferenceBackend, TrainingBackend
from megatron_ppo.bridge import Bridge
from megatron_ppo.checkpointer import Checkpointer
from megatron_ppo.config import Config, DataConfig
from megatron_ppo.config_io import parse_arguments
from megatron_ppo.controller import ColocatedController, RolloutController, RunContext, Stopped, TrainingController
from megatron_ppo.data_bus import DataBus
from megatron_ppo.generic_network import describe_network
from megatron_ppo.learning_curve import draw_png, read_metrics
from megatron_ppo.metrics import MetricsWriter
from megatron_ppo.prompts import PromptSampler, PromptSet, load_prompts
from megatron_ppo.resharding.executor import Parameters, compare_descriptions
from megatron_ppo.resharding.hf_weight_loader import WeightTransfer
from megatron_ppo.resume import ResumePoint, find_resume_point
from megatron_ppo.reward_pool import RewardPool
from megatron_ppo.rollout_engine import RolloutWorker
from megatron_ppo.run_folder import PREEMPTED, LaunchRecord, RunFolder
from megatron_ppo.tokenizer import Tokenizer, check_same_tokenizer, check_vocabulary, load_tokenizer, refuse_remote_code, stop_token_ids
from megatron_ppo.training_engine import TrainingEngine
from megatron_ppo.watchdog import InputError, Watchdog
from megatron_ppo.weight_synchronizer import WeightSynchronizer, make_transfer
from megatron_ppo.world import World, close_world, init_world


class BusFactory(Protocol):
    """``DataBus``, or what makes another kind of it."""

    def __call__(self, world: World, *, timeout_s: float) -> DataBus: ...


def main(arguments: Sequence[str]) -> int:
    """``python -m megatron_ppo train``."""
    train(parse_arguments(arguments, program="megatron_ppo train"))
    return 0


def train(config: Config, make_bus: BusFactory = DataBus) -> None:
    """One whole run on this rank of the launch. Where any rank fails, all processes end with a non-zero code.

    ``make_bus(world, timeout_s=...)``: this rank's end of the data bus, where the launcher brings one of its own.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    try:
        world = init_world(config)
    except ValueError as error:  # the user's, and already in words: a traceback would only hide them
        raise SystemExit(f"megatron_ppo train: {error}") from None
    with Watchdog(world, config.parallel.heartbeat_timeout_s) as watchdog:
        with watchdog.phase("start-up: data"):
            _seed_everything(config.training.seed)
            data = _load_data(config, quiet=world.global_rank != 0)
            folder = _take_folder(config) if world.global_rank == 0 else None
        with watchdog.phase("start-up: checkpoint"):
            resume = find_resume_point(config, world, data.prompts.fingerprint)
        run = Run(config, world, watchdog, data, folder, resume, make_bus)
        if world.is_colocated:
            run.colocated()
        elif world.is_training:
            run.train()
        else:
            run.rollout()
        with watchdog.phase("closing"):
            run.close()
            close_world(world)


@dataclass(frozen=True)
class Data:
    """What is read before any model is built; the same on every rank."""

    tokenizer: Tokenizer
    stop_token_ids: frozenset[int]
    prompts: PromptSet
    sampler: PromptSampler


class Run:
    """One rank's parts, and the order in which they are built and closed."""

    def __init__(
        self,
        config: Config,
        world: World,
        watchdog: Watchdog,
        data: Data,
        folder: RunFolder | None,
        resume: ResumePoint,
        make_bus: BusFactory,
    ) -> None:
        """``folder`` is global rank 0's; None on all other ranks."""
        self._resume = resume
        self._config = config
        self._world = world
        self._watchdog = watchdog
        self._data = data
        self._folder = folder
        self._timeout_s = 60.0 * config.parallel.distributed_timeout_minutes
        self._bus = make_bus(world, timeout_s=self._timeout_s)
        self._bridges: list[Bridge] = []

    def train(self) -> None:
        """A training rank's whole run."""
        engine, weights = self._training_engine()
        context, _ = self._connect(sources=weights)
        del weights  # with cpu_offload = always they are copies on the accelerator

        def controller(writer: MetricsWriter | None, checkpointer: Checkpointer) -> TrainingController:
            return TrainingController(context, engine, writer, checkpointer)

        self._train(engine, controller)

    def rollout(self) -> None:
        """A rollout rank's whole run."""
        rewards = self._rewards()
        with self._watchdog.phase("start-up: inference engine"):
            backend = self._inference_backend()
        context, executor = self._connect(engine=backend)
        worker = self._worker(backend, executor, rewards)
        self._loop(RolloutController(context, worker))
        with self._watchdog.phase("closing"):
            worker.close()

    def colocated(self) -> None:
        """The whole run of a rank that trains and samples by turns.

        The engine is built first, so that it measures its memory without the trainer's, and sleeps while that is built. The random state in
        which the trainer starts is that of a rank that only trains.
        """
        rewards = self._rewards()
        with self._watchdog.phase("start-up: inference engine"), device.preserved_global_state():
            backend = self._inference_backend()
            backend.sleep()
        engine, weights = self._training_engine()
        context, executor = self._connect(sources=weights, engine=backend)
        del weights  # as in train
        worker = self._worker(backend, executor, rewards)

        def controller(writer: MetricsWriter | None, checkpointer: Checkpointer) -> TrainingController:
            return ColocatedController(context, engine, worker, writer, checkpointer)

        self._train(engine, controller)
        with self._watchdog.phase("closing"):
            worker.close()

    def _training_engine(self) -> tuple[TrainingEngine, Parameters]:
        """The trainer, at the point from which the run goes on, and this rank's live weights of the actor."""
        with self._watchdog.phase("start-up: models"):
            backend = self._training_backend()
        engine = TrainingEngine(self._config, self._world, self._bus, backend, device.device())
        if self._resume.folder is not None:
            with self._watchdog.phase("start-up: checkpoint"):
                engine.load_checkpoint(self._resume.folder, self._resume.state)
        return engine, backend.weights()

    def _train(self, engine: TrainingEngine, make_controller: Callable[[MetricsWriter | None, Checkpointer], TrainingController]) -> None:
        """The loop of a rank that trains, its records and checkpoints around it."""
        config, resume, state = self._config, self._resume, self._resume.state
        writer = None
        if self._folder is not None:
            self._folder.begin(LaunchRecord(self._world.run_id, config.checkpoint.resume), resume.iteration if resume.is_own else None)
            wandb_run_id = state.wandb_run_id if state is not None and resume.is_own else None
            writer = MetricsWriter(config, first_iteration=resume.iteration, wandb_run_id=wandb_run_id)
        newest = resume.iteration if resume.is_own else None
        checkpointer = Checkpointer(config, self._world, engine, newest=newest, prompts=self._data.prompts.fingerprint)
        stopped = self._loop(make_controller(writer, checkpointer))
        with self._watchdog.phase("closing"):
            if config.checkpoint.save_hf_interval is not None and stopped is None:
                checkpointer.export_hf("hf", must=True)
            checkpointer.close()
            if writer is not None:
                writer.close()
                self._summarise(resume.iteration + writer.num_records)
            if stopped is not None and self._folder is not None:
                (self._folder.path / PREEMPTED).write_text(f"{stopped}\n", encoding="utf-8")
                print(f"{stopped}; the same command goes on from there", flush=True)

    def _rewards(self) -> RewardPool | None:
        """The function reward of a replica's head."""
        with self._watchdog.phase("start-up: reward"):
            return _make_rewards(self._config.data) if self._config.data.reward is not None and self._world.is_head else None

    def _worker(self, backend: InferenceBackend, executor: WeightTransfer, rewards: RewardPool | None) -> RolloutWorker:
        text = (self._data.tokenizer, self._data.stop_token_ids)
        return RolloutWorker(self._config, self._world, self._bus, backend, executor, *text, rewards)

    def _training_backend(self) -> TrainingBackend:
        num_optimizer_steps = self._config.num_optimizer_steps
        if self._config.parallel.backend == "fsdp":
            from megatron_ppo.backends.fsdp import FSDPBackend

            return FSDPBackend(self._config, num_optimizer_steps=num_optimizer_steps)
        from megatron_ppo.backends.megatron import MegatronBackend  # rollout ranks never import megatron-core

        return MegatronBackend(self._config, num_optimizer_steps=num_optimizer_steps)

    def _inference_backend(self) -> InferenceBackend:
        # Replicas have different engine seeds; what is sampled does not depend on them, each request has its own.
        seed = self._config.training.seed + self._world.replica
        if self._config.rollout.rollout_backend == "hf":
            from megatron_ppo.backends.hf import HFBackend

            return HFBackend(self._config, seed=seed)
        from megatron_ppo.backends.vllm import VLLMBackend

        return VLLMBackend(self._config, seed=seed)

    def _connect(self, *, sources: Parameters | None = None, engine: InferenceBackend | None = None) -> tuple[RunContext, WeightTransfer]:
        """The groups between the meshes, once this rank's weights exist."""
        config, world = self._config, self._world
        with self._watchdog.phase("start-up: bridge"):
            heads = (world.training_ranks[0], world.rollout_ranks[0])
            control = self._bridge("control", heads, "gloo") if world.rank == 0 and not world.is_colocated else None
            executor = make_transfer(config, world, self._weight_group, None if engine is None else engine.load_hf_weights)
            self._compare(executor.describe(sources=sources, destinations=None if engine is None else engine.weights()))
            synchronizer = WeightSynchronizer(world, self._bus, executor, verify_always=config.logging.verify_weights)
        context = RunContext(
            config,
            world,
            self._watchdog,
            self._bus,
            control,
            synchronizer,
            self._data.prompts,
            self._data.sampler,
            self._data.tokenizer,
            device.device(),
            self._resume,
        )
        return context, executor

    def _weight_group(self, name: str, ranks: Sequence[int]) -> Bridge:
        return self._bridge(name, ranks, device.process_group_backend())

    def _bridge(self, name: str, ranks: Sequence[int], backend: Literal["gloo", "nccl"]) -> Bridge:
        self._bridges.append(Bridge(name, ranks, self._world, backend, self._timeout_s))
        return self._bridges[-1]

    def close(self) -> None:
        """Take down the groups between the meshes (the mesh's own is the world's), and let go of the run folder."""
        for bridge in self._bridges:
            bridge.close()
        if self._folder is not None:
            self._folder.close()

    def _compare(self, description: str) -> None:
        """All ranks compare what they would transfer, and what they read of the data, before the first byte."""
        store, rank = self._world.store, self._world.global_rank
        store.set(f"description/{rank}", description)
        store.set(f"prompts/{rank}", self._data.prompts.fingerprint)
        ranks = range(self._world.world_size) if rank == 0 else [0, rank]
        compare_descriptions([store.get(f"description/{other}").decode() for other in ranks])
        for other in ranks:
            if store.get(f"prompts/{other}") != store.get("prompts/0"):
                raise ValueError(
                    f"{self._world.describe(other)} read other prompts from {self._config.data.prompt_data} than rank 0: "
                    "the file, the tokenizer or the chat template differs between the nodes"
                )

    def _loop(self, controller: TrainingController | RolloutController) -> Stopped | None:
        """Run all iterations, or those until the launch is told to stop, and why it was."""
        gc.collect()
        gc.freeze()  # a million objects of the start-up, which no later collection need walk
        gc.enable()
        try:
            controller.run()
        except Stopped as stopped:
            return stopped
        return None

    def _summarise(self, num_iterations: int) -> None:
        """The picture of the run. A run that was stopped before its first iteration has none."""
        folder = Path(self._config.logging.run_dir)
        if num_iterations:
            draw_png(read_metrics(folder), folder / "learning_curve.png")
        print(f"ended after {num_iterations} of {self._config.training.train_iters} iterations; records are in {folder}", flush=True)


def _take_folder(config: Config) -> RunFolder:
    """Global rank 0's part of the start: the run folder, and what runs where."""
    try:
        folder = RunFolder(config)
    except ValueError as error:
        raise InputError(str(error)) from None
    print(f"{device.report()}\nrun folder: {folder.path.resolve()}\nbuilding networks and inference engines ...", flush=True)
    return folder


def _load_data(config: Config, *, quiet: bool) -> Data:
    """Tokenizer and prompts, held to the vocabularies of all networks. ``quiet``: another rank says what there is to warn of."""
    logger = logging.getLogger("megatron_ppo")
    level = logger.level
    logger.setLevel(logging.ERROR if quiet else level)
    folder = Path(config.model.model_path)
    try:
        for used in (folder, config.model.critic_path, config.model.reward_model_path):
            if used is not None:
                refuse_remote_code(Path(used), config.model.trust_remote_code)
        tokenizer = load_tokenizer(config)
        prompts = load_prompts(config, tokenizer)
        stops = stop_token_ids(tokenizer, folder, config)
        check_vocabulary(tokenizer, prompts.prompts, describe_network(folder).vocab_size)
        for other in (config.model.critic_path, config.model.reward_model_path):
            if other is not None:
                check_same_tokenizer(tokenizer, Path(other), prompts.prompts, config)
        sampler = PromptSampler(len(prompts), config.rollout.prompts_per_iteration, config.training.seed)
    except ValueError as error:
        raise InputError(str(error)) from None
    finally:
        logger.setLevel(level)
    return Data(tokenizer, stops, prompts, sampler)


def _make_rewards(data: DataConfig) -> RewardPool:
    """The function reward; ``InputError`` where it cannot be imported."""
    assert data.reward is not None
    try:
        return RewardPool(data.reward, num_workers=data.reward_num_workers, timeout_s=data.reward_timeout_s)
    except ValueError as error:
        raise InputError(str(error)) from None


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
