"""Puts the parts of a run together on this rank, and runs the loop: ``torchrun ... -m megatron_ppo train``.

Order: environment and configuration are checked before anything is built; then data and tokenizer, so that a bad file costs seconds; then
this mesh's networks or engine; then the groups between the meshes.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from megatron_ppo import device
from megatron_ppo.backends.base import InferenceBackend
from megatron_ppo.bridge import Bridge
from megatron_ppo.config import Config
from megatron_ppo.controller import RolloutController, RunContext, Stopped, TrainingController
from megatron_ppo.data_bus import DataBus
from megatron_ppo.learning_curve import draw_png, read_metrics
from megatron_ppo.metrics import MetricsWriter
from megatron_ppo.prompts import PromptSampler, PromptSet, load_prompts
from megatron_ppo.resharding.executor import Parameters, ReshardExecutor, compare_descriptions
from megatron_ppo.resharding.families import network_shape
from megatron_ppo.reward_pool import RewardPool
from megatron_ppo.rollout_engine import RolloutWorker
from megatron_ppo.run_folder import PREEMPTED, open_run_folder, set_aside
from megatron_ppo.tokenizer import Tokenizer, check_vocabulary, load_tokenizer, stop_token_ids
from megatron_ppo.training_engine import TrainingEngine
from megatron_ppo.watchdog import Watchdog
from megatron_ppo.weight_synchronizer import WeightSynchronizer, refit_plan, transfer_dtype
from megatron_ppo.world import World, close_world, init_world


def train(config: Config) -> None:
    """One whole run on this rank of the launch. Where any rank fails, all processes end with a non-zero code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    device.bind_device()
    try:
        world = init_world(config)
    except ValueError as error:  # the user's, and already in words: a traceback would only hide them
        raise SystemExit(f"megatron_ppo train: {error}") from None
    with Watchdog(world, config.parallel.heartbeat_timeout_s) as watchdog:
        with watchdog.phase("start-up: data"):
            _seed_everything(config.training.seed)
            tokenizer, prompts, sampler = _load_data(config)
            if world.global_rank == 0:
                folder = open_run_folder(config)
                print(f"{device.report()}\nrun folder: {folder.resolve()}", flush=True)
        run = Run(config, world, watchdog, tokenizer, prompts, sampler)
        if world.is_training:
            run.train()
        else:
            run.rollout()
        close_world(world)


class Run:
    """One rank's parts, and the order in which they are built and closed."""

    def __init__(
        self, config: Config, world: World, watchdog: Watchdog, tokenizer: Tokenizer, prompts: PromptSet, sampler: PromptSampler
    ) -> None:
        self._config = config
        self._world = world
        self._watchdog = watchdog
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._sampler = sampler
        self._timeout_s = 60.0 * config.parallel.distributed_timeout_minutes
        self._bus = DataBus(world, timeout_s=self._timeout_s)

    def train(self) -> None:
        """A training rank's whole run."""
        from megatron_ppo.backends.megatron import MegatronBackend  # rollout ranks never import megatron-core

        config = self._config
        with self._watchdog.phase("start-up: models"):
            backend = MegatronBackend(config, num_optimizer_steps=config.num_optimizer_steps)
        engine = TrainingEngine(config, self._world, self._bus, backend, device.device())
        context, _ = self._connect(sources=backend.weights())
        writer = MetricsWriter(config) if self._world.global_rank == 0 else None
        stopped = self._loop(TrainingController(context, engine, writer))
        with self._watchdog.phase("closing"):
            if config.logging.save_hf and not stopped:
                self._export(engine)
            if writer is not None:
                writer.close()
                self._summarise(stopped)

    def rollout(self) -> None:
        """A rollout rank's whole run."""
        config, data = self._config, self._config.data
        with self._watchdog.phase("start-up: reward"):
            rewards = None
            if data.reward is not None and self._world.is_head:
                rewards = RewardPool(data.reward, num_workers=data.reward_num_workers, timeout_s=data.reward_timeout_s)
        with self._watchdog.phase("start-up: inference engine"):
            backend = self._inference_backend()
        context, executor = self._connect(destinations=backend.weights())
        stops = stop_token_ids(self._tokenizer, Path(config.model.model_path), config)
        worker = RolloutWorker(config, self._world, self._bus, backend, executor, self._tokenizer, stops, rewards)
        self._loop(RolloutController(context, worker))
        with self._watchdog.phase("closing"):
            worker.close()

    def _inference_backend(self) -> InferenceBackend:
        # Replicas have different engine seeds; what is sampled does not depend on them, each request has its own.
        seed = self._config.training.seed + self._world.replica
        if self._config.rollout.rollout_backend == "hf":
            from megatron_ppo.backends.hf import HFBackend

            return HFBackend(self._config, seed=seed)
        from megatron_ppo.backends.vllm import VLLMBackend

        return VLLMBackend(self._config, seed=seed)

    def _connect(self, *, sources: Parameters | None = None, destinations: Parameters | None = None) -> tuple[RunContext, ReshardExecutor]:
        """The groups between the meshes, once this rank's weights exist."""
        config, world = self._config, self._world
        with self._watchdog.phase("start-up: bridge"):
            heads = (world.training_ranks[0], world.rollout_ranks[0])
            control = Bridge("control", heads, world, "gloo", self._timeout_s) if world.rank == 0 else None
            dtype = transfer_dtype(config)
            executor = ReshardExecutor(
                refit_plan(config, world.world_size),
                world.global_rank,
                self._weight_group,
                bucket_bytes=config.parallel.bucket_bytes,
                transfer_dtype=dtype,
            )
            self._compare(executor.describe(sources=sources, destinations=destinations))
            synchronizer = WeightSynchronizer(world, self._bus, executor, verify_always=config.logging.verify_weights)
        context = RunContext(
            config, world, self._watchdog, self._bus, control, synchronizer, self._prompts, self._sampler, self._tokenizer, device.device()
        )
        return context, executor

    def _weight_group(self, name: str, ranks: Sequence[int]) -> Bridge:
        return Bridge(name, ranks, self._world, device.process_group_backend(), self._timeout_s)

    def _compare(self, description: str) -> None:
        """All ranks compare what they would transfer, and what they read of the data, before the first byte."""
        store, rank = self._world.store, self._world.global_rank
        store.set(f"description/{rank}", description)
        store.set(f"prompts/{rank}", self._prompts.fingerprint)
        ranks = range(self._world.world_size) if rank == 0 else [0, rank]
        compare_descriptions([store.get(f"description/{other}").decode() for other in ranks])
        for other in ranks:
            if store.get(f"prompts/{other}") != store.get("prompts/0"):
                raise ValueError(
                    f"{self._world.describe(other)} read other prompts from {self._config.data.prompt_data} than rank 0: "
                    "the file, the tokenizer or the chat template differs between the nodes"
                )

    def _loop(self, controller: TrainingController | RolloutController) -> bool:
        """Run all iterations; whether the launch was stopped before the last one."""
        try:
            controller.run()
        except Stopped as stopped:
            if self._world.global_rank == 0:
                (Path(self._config.logging.run_dir) / PREEMPTED).write_text(f"{stopped}\n", encoding="utf-8")
                print(f"{stopped}", flush=True)
            return True
        return False

    def _export(self, engine: TrainingEngine) -> None:
        """Write the trained actor in Hugging Face format. Collective over the training mesh."""
        folder = Path(self._config.logging.run_dir) / "hf"
        if self._world.global_rank == 0:
            set_aside(folder)
        engine.export_hf(folder)

    def _summarise(self, stopped: bool) -> None:
        """The pictures of the run. A run that was stopped before its first iteration has none."""
        folder = Path(self._config.logging.run_dir)
        records = read_metrics(folder)
        if records:
            draw_png(records, folder / "learning_curve.png")
        if not stopped:
            print(f"finished {len(records)} iterations; records are in {folder}", flush=True)


def _load_data(config: Config) -> tuple[Tokenizer, PromptSet, PromptSampler]:
    """Tokenizer and prompts, checked against the model's vocabulary, and the order of the prompts."""
    try:
        tokenizer = load_tokenizer(config)
        prompts = load_prompts(config, tokenizer)
        check_vocabulary(tokenizer, prompts.prompts, network_shape(Path(config.model.model_path)).vocab_size)
        return tokenizer, prompts, PromptSampler(len(prompts), config.rollout.prompts_per_iteration, config.training.seed)
    except ValueError as error:  # as in train: the words are enough
        raise ValueError(str(error)) from None


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
