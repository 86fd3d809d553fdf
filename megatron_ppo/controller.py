"""The Controller: in which order things happen. The same program on every rank; it holds neither weights nor big data.

    1 sync       training -> rollout   every weight, shard to shard
    2 rollout    rollout               responses, function rewards, onto the data bus; with compute_on = rollout also all that is
                                       scored in step 3 but the actor's log-probs
    3 score      training              log-probs of actor and reference, values, reward-model scores
    4 advantage  training              KL-shaped rewards, GAE, whitening
    5 update     training              epochs x mini-batches x micro-batches
    6 log        rank 0                console, files, dashboards

Where one mesh does both (colocated), a rank goes through all of them by turns, and the engine sleeps from 3 to 6.

At each boundary between iterations all ranks agree on what anyone was asked for (stop, save), and the training mesh writes a checkpoint
where one is due. A decision depends only on the configuration, the iteration, or a value agreed by all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_ppo.agreement import all_agree
from megatron_ppo.bridge import Bridge
from megatron_ppo.checkpointer import Checkpointer
from megatron_ppo.config import Config
from megatron_ppo.data_bus import DataBus, DataHandle
from megatron_ppo.experience import make_experience
from megatron_ppo.metrics import MetricsWriter, Stopwatch, summarise, warn
from megatron_ppo.ppo import KLController
from megatron_ppo.prompts import PromptSampler, PromptSet
from megatron_ppo.resume import ResumePoint
from megatron_ppo.rollout_engine import PromptBatch, RemoteRollout, RemoteTraining, RolloutWorker
from megatron_ppo.run_folder import SAVE_NOW
from megatron_ppo.tokenizer import Tokenizer
from megatron_ppo.training_engine import TrainingEngine
from megatron_ppo.types import TrajectoryBatch
from megatron_ppo.watchdog import Watchdog
from megatron_ppo.weight_synchronizer import WeightSynchronizer
from megatron_ppo.world import World


@dataclass(frozen=True)
class RunContext:
    """What every rank has, whichever mesh it belongs to."""

    config: Config
    world: World
    watchdog: Watchdog
    bus: DataBus
    control: Bridge | None
    """Joins rank 0 of both meshes; None on other ranks, and where both are one."""
    synchronizer: WeightSynchronizer
    prompts: PromptSet
    sampler: PromptSampler
    tokenizer: Tokenizer
    device: torch.device
    resume: ResumePoint
    """What the run goes on from."""


@dataclass(frozen=True)
class Asked:
    """What all ranks agreed on at a boundary; each is True where it is so on any rank."""

    stop: bool
    save: bool
    writing: bool
    """A checkpoint is still on its way to the disk."""


class Stopped(Exception):
    """All ranks agreed to stop before the last iteration, because the scheduler asked for it."""


class Controller:
    """Runs the loop on one rank. Subclasses are the two sides of the same iteration."""

    def __init__(self, context: RunContext) -> None:
        self.context = context

    def run(self) -> None:
        """All iterations that are left.

        Raises:
            Stopped: the launch was told to stop; everything that was finished is in a checkpoint.
        """
        num_iterations = self.context.config.training.train_iters
        for iteration in range(self.context.resume.iteration, num_iterations):
            asked = self._ask(f"boundary of iteration {iteration}")
            self._keep(iteration, asked, is_last=asked.stop)
            if asked.stop:
                raise Stopped(f"stopped by a signal after {iteration} of {num_iterations} iterations")
            self._iterate(iteration)
        # Also so that no rank takes its data off the bus before all have what they need.
        self._keep(num_iterations, self._ask("end of the loop"), is_last=True)

    def _iterate(self, iteration: int) -> None:
        raise NotImplementedError

    def _keep(self, iteration: int, asked: Asked, *, is_last: bool) -> None:
        """Write what is due after ``iteration`` finished ones; ``is_last``: nothing more is computed. A rollout rank keeps nothing."""

    def _is_writing(self) -> bool:
        return False

    def _ask(self, phase: str) -> Asked:
        """Where signals are acted upon, by all ranks alike; also a barrier of the whole launch."""
        watchdog = self.context.watchdog
        with watchdog.phase(phase):
            touched = self.context.world.global_rank == 0 and (Path(self.context.config.logging.run_dir) / SAVE_NOW).exists()
            wishes = [watchdog.preempt_requested, watchdog.save_requested or touched, self._is_writing()]
            asked = Asked(*all_agree(self.context.control, wishes, self.context.device))
        if asked.save:
            watchdog.save_requested = False
        return asked

    def _sample(self, worker: RolloutWorker, iteration: int) -> None:
        """A rollout rank's part of step 2; its trajectories are on the bus then."""
        context = self.context
        prompts = tuple(context.prompts.prompts[row] for row in context.sampler.rows(iteration))
        worker.collect(context.bus.put(PromptBatch(iteration, prompts), key=f"prompts/{iteration}"))
        if self._samples_greedily(iteration) and context.world.replica == 0:
            worker.collect_greedy(iteration, prompts[: context.config.logging.num_logged_samples])

    def _samples_greedily(self, iteration: int) -> bool:
        """Whether greedy answers are logged in an iteration: the first, before any update, and the last."""
        last = self.context.config.training.train_iters - 1
        return self.context.config.logging.num_logged_samples > 0 and iteration in (0, last)


class RolloutController(Controller):
    """A rollout rank's side of the loop."""

    def __init__(self, context: RunContext, worker: RolloutWorker) -> None:
        super().__init__(context)
        self._worker = worker
        self._training = RemoteTraining(context.world, context.resume.iteration)

    def _iterate(self, iteration: int) -> None:
        context = self.context
        with context.watchdog.phase(f"weight sync v{self._training.version}"):
            context.synchronizer.sync(self._training, self._worker)
        with context.watchdog.phase(f"rollout of iteration {iteration}"):
            self._sample(self._worker, iteration)
        self._training.finished_update()


class TrainingController(Controller):
    """A training rank's side of the loop. Global rank 0 also writes the records."""

    def __init__(
        self, context: RunContext, engine: TrainingEngine, writer: MetricsWriter | None, checkpointer: Checkpointer
    ) -> None:
        super().__init__(context)
        self._checkpointer = checkpointer
        self._engine = engine
        self._writer = writer
        self._rollout = RemoteRollout(context.world)
        self._answers = {prompt.prompt_id: prompt.answer for prompt in context.prompts.prompts}
        algorithm = context.config.algorithm
        state = context.resume.state
        self._kl = KLController(algorithm.kl_coef if state is None else state.kl_coef, algorithm.kl_target)

    def _iterate(self, iteration: int) -> None:
        context, engine, watch = self.context, self._engine, Stopwatch()
        with context.watchdog.phase(f"weight sync v{engine.version}"):
            self._sync()
            engine.release_weights()
        watch.lap("sync")
        with context.watchdog.phase(f"rollout of iteration {iteration}"):
            batch = engine.fetch(self._collect(iteration))
        watch.lap("rollout")
        with context.watchdog.phase(f"score of iteration {iteration}"):
            experience, metrics = make_experience(batch, *self._score(batch), context.config.algorithm, self._kl.kl_coef)
            handle = context.bus.put(experience)
        watch.lap("score")
        with context.watchdog.phase(f"update of iteration {iteration}"):
            metrics |= engine.update_policy(handle, context.config.algorithm)
            context.bus.delete(handle)
        metrics["kl_coef"] = self._kl.kl_coef
        self._kl.update(metrics["kl/per_response"], batch.num_rows)
        watch.lap("update")
        with context.watchdog.phase(f"log of iteration {iteration}"):
            self._log(iteration, batch, metrics, watch)

    def _score(self, batch: TrajectoryBatch) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Old log-probs, values, reference log-probs ([B, T]) and reward-model scores ([B]); None where the run has none.

        Old log-probs are the trainer's own always, so that the first update's ratio is exactly 1.
        """
        engine, log_probs = self._engine, self._engine.compute_log_probs(batch)
        if self.context.config.rollout.compute_on == "rollout":
            return log_probs, batch.values, batch.ref_log_probs, batch.model_scores
        return log_probs, engine.compute_values(batch), engine.compute_ref_log_probs(batch), engine.compute_scores(batch)

    def _sync(self) -> None:
        self.context.synchronizer.sync(self._engine, self._rollout)

    def _collect(self, iteration: int) -> list[DataHandle]:
        """Handles of all replicas' trajectories."""
        return self._rollout.collect(iteration)

    def _is_writing(self) -> bool:
        return self._checkpointer.is_writing

    def _keep(self, iteration: int, asked: Asked, *, is_last: bool) -> None:
        config, keeper = self.context.config.checkpoint, self._checkpointer
        # The end of a run that has checkpoints is one of them: otherwise the next launch would take its last iterations for lost.
        due = asked.save or asked.stop or (is_last and (config.save_interval is not None or keeper.newest is not None))
        due = due or (config.save_interval is not None and iteration % config.save_interval == 0 and iteration > 0)
        with self.context.watchdog.phase(f"save of iteration {iteration}"):
            if not asked.writing or is_last:
                keeper.conclude()
            if due and asked.writing and not (is_last or asked.save):
                self._warn(f"the checkpoint of iteration {keeper.newest} is still being written: that of iteration {iteration} is left out")
            elif due and iteration != keeper.newest:
                if self._writer is not None:
                    self._writer.sync()  # records of finished iterations are not made again
                wandb_run_id = None if self._writer is None else self._writer.wandb_run_id
                keeper.save(iteration, kl_coef=self._kl.kl_coef, wandb_run_id=wandb_run_id, must=is_last)
            if asked.save and self.context.world.global_rank == 0:
                _remove(Path(self.context.config.logging.run_dir) / SAVE_NOW)
            interval = config.save_hf_interval
            if interval and not is_last and iteration > 0 and iteration % interval == 0:
                keeper.export_hf(f"hf_iter_{iteration:07d}", must=False)

    def _warn(self, text: str) -> None:
        if self.context.world.global_rank == 0:
            warn(text)

    def _log(self, iteration: int, batch: TrajectoryBatch, metrics: dict[str, float], watch: Stopwatch) -> None:
        if self._writer is None:
            return
        greedy = self._fetch_greedy(iteration)
        scalars = metrics | {f"time/{phase}_s": seconds for phase, seconds in watch.seconds.items()}
        observed = summarise(batch.metrics)
        scalars |= {name: value for name, value in observed.items() if name not in scalars}
        scalars["time/iteration_s"] = watch.total
        scalars["tokens_per_s"] = float(batch.response_lengths.sum()) / watch.total
        self._writer.log(iteration, scalars)
        shown = min(self.context.config.logging.num_logged_samples, batch.num_rows)
        rows = torch.arange(shown) * (batch.num_rows // max(shown, 1))
        self._writer.log_samples(self._describe(batch.select(rows), iteration, greedy=False))
        if greedy is not None:
            self._writer.log_samples(self._describe(greedy, iteration, greedy=True))

    def _fetch_greedy(self, iteration: int) -> TrajectoryBatch | None:
        if not self._samples_greedily(iteration):
            return None
        greedy = self.context.bus.get(self._rollout.collect_greedy(iteration))
        assert isinstance(greedy, TrajectoryBatch)
        return greedy

    def _describe(self, batch: TrajectoryBatch, iteration: int, *, greedy: bool) -> list[dict[str, object]]:
        """Rows of samples.jsonl."""
        decode = self.context.tokenizer.decode
        rows = []
        for row in range(batch.num_rows):
            start = int(batch.prompt_lengths[row])
            stop = start + int(batch.response_lengths[row])
            rows.append(
                {
                    "iteration": iteration,
                    "greedy": greedy,
                    "prompt_id": int(batch.prompt_ids[row]),
                    "sample_index": int(batch.sample_indices[row]),
                    "prompt": decode(batch.tokens[row, :start].tolist(), skip_special_tokens=False),
                    "answer": self._answers.get(int(batch.prompt_ids[row])),
                    "response": decode(batch.tokens[row, start:stop].tolist(), skip_special_tokens=False),
                    "reward": float(batch.scores[row]),
                    "num_tokens": stop - start,
                    "truncated": bool(batch.truncated[row]),
                }
            )
        return rows


class ColocatedController(TrainingController):
    """Both sides of the loop on every rank, by turns: while one works, the memory that the other can do without is free."""

    def __init__(
        self,
        context: RunContext,
        engine: TrainingEngine,
        worker: RolloutWorker,
        writer: MetricsWriter | None,
        checkpointer: Checkpointer,
    ) -> None:
        super().__init__(context, engine, writer, checkpointer)
        self._worker = worker

    def _sync(self) -> None:
        self._engine.make_room()
        self._worker.wake_up("weights")
        self.context.synchronizer.sync(self._engine, self._worker)

    def _collect(self, iteration: int) -> list[DataHandle]:
        self._worker.wake_up("cache")
        self._sample(self._worker, iteration)
        self._worker.sleep()
        self._engine.take_room()
        return super()._collect(iteration)


def _remove(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError as error:  # the folder has become read-only: no reason to end a run
        warn(f"{file} cannot be removed ({error}): it asks for a checkpoint at every boundary")
