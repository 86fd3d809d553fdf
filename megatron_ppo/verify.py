"""``python -m megatron_ppo verify``: proves, on the meshes of a configuration, that weights reach the inference engine bit for bit.

Real training ranks and real engines are built, and three ways of bringing the weights over are compared (``verify_ranks.py``). Under
torchrun or srun every rank is one process, as in ``train``; otherwise the command starts all ranks on this machine and ends with their
exit code.

    exit code 0   every tensor on every rollout rank is equal
              1   something differs, or a rank failed; rank, parameter and range are printed
              2   bad input; nothing was built

Prompts, rewards and batch sizes of the configuration are not looked at.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_ppo.backends.base import InferenceBackend, TrainingBackend
from megatron_ppo.config import Config
from megatron_ppo.config_io import parse_command
from megatron_ppo.generic_network import describe_network
from megatron_ppo.resharding.hf_checkpoint import HFCheckpoint, check_heads
from megatron_ppo.resharding.megatron_mesh import smallest_world_size
from megatron_ppo.verify_ranks import FOLDER, GATHER, KindReport, Report, policy_only, verify_on_rank
from megatron_ppo.watchdog import InputError, Watchdog
from megatron_ppo.weight_synchronizer import refit_plan
from megatron_ppo.world import World, close_world, init_world

PROGRAM = "megatron_ppo verify"
_SHOWN = 20
"""Faults that are printed in full."""
_WIDTH = 160
"""Columns of the tables where standard output is no terminal."""


@dataclass(frozen=True)
class Options:
    """How verify starts its ranks where no launcher did."""

    num_ranks: int | None = None
    """Ranks to start on this machine. Default: one copy of the training model, and rollout_world_size. Under a launcher: its ranks."""


def main(arguments: Sequence[str]) -> int:
    """``python -m megatron_ppo verify``; the exit code."""
    options, config = parse_command(arguments, Options(), program=PROGRAM)
    config = policy_only(config)
    launched = "RANK" in os.environ or "SLURM_PROCID" in os.environ
    if launched:
        return _run_rank(config, options)
    try:
        num_ranks = options.num_ranks if options.num_ranks is not None else smallest_world_size(config)
        _check_input(config, num_ranks)
    except ValueError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    return launch_here("verify", arguments, num_ranks)


def _check_input(config: Config, num_ranks: int) -> None:
    """``ValueError`` for all that can be known before a rank exists: sizes, the folder's files, layouts of both sides."""
    config.validate(num_ranks, needs_data=False)
    checkpoint = HFCheckpoint(Path(config.model.model_path))
    check_heads(checkpoint, describe_network(checkpoint.config), "lm", head_required=False)
    refit_plan(config, num_ranks)


def launch_here(command: str, arguments: Sequence[str], num_ranks: int) -> int:
    """Start all ranks of a command of the project on this machine, wait, and hand back their exit code. Ranks print for themselves."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks say what went wrong
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    try:
        with tempfile.TemporaryDirectory() as notes:  # of the launcher; it would leave them behind
            launch = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=num_ranks,
                run_id=uuid.uuid4().hex,
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                max_restarts=0,
                logs_specs=DefaultLogsSpecs(log_dir=notes),
            )
            elastic_launch(launch, sys.executable)("-m", "megatron_ppo", command, *arguments)
    except ChildFailedError as failed:
        code = int(failed.get_first_failure()[1].exitcode)
        return code if code > 0 else 128 - code
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _run_rank(config: Config, options: Options) -> int:
    """One rank's whole part, under a launcher."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    try:
        world = init_world(config, needs_data=False)
    except ValueError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    with Watchdog(world, config.parallel.heartbeat_timeout_s) as watchdog:
        if options.num_ranks not in (None, world.world_size):
            raise InputError(f"num_ranks = {options.num_ranks}, but the launcher started {world.world_size} ranks; leave it out")
        engine = trainer = None
        if world.is_rollout:
            with watchdog.phase("start-up: inference engine"):
                engine = _build_engine(config, world)
        if world.is_training:
            with watchdog.phase("start-up: models"):
                trainer = _build_trainer(config)
        report = verify_on_rank(config, world, trainer, engine, watchdog.phase)
        if report is not None:
            _print(report, world, config)
            world.store.set("verify/outcome", "differs" if report.faults else "equal")
        differs = world.store.get("verify/outcome") == b"differs"
        with watchdog.phase("closing"):
            if engine is not None:
                engine.close()
            close_world(world)
    return int(differs)


def _build_trainer(config: Config) -> TrainingBackend:
    """``InputError`` where settings or folder do not fit it."""
    try:
        if config.parallel.backend == "fsdp":
            from megatron_ppo.backends.fsdp import FSDPBackend

            return FSDPBackend(config, num_optimizer_steps=1)
        from megatron_ppo.backends.megatron import MegatronBackend  # rollout ranks never import megatron-core

        return MegatronBackend(config, num_optimizer_steps=1)
    except ValueError as error:
        raise InputError(str(error)) from None


def _build_engine(config: Config, world: World) -> InferenceBackend:
    """As ``_build_trainer``."""
    try:
        seed = config.training.seed + world.replica
        if config.rollout.rollout_backend == "hf":
            from megatron_ppo.backends.hf import HFBackend

            return HFBackend(config, seed=seed)
        from megatron_ppo.backends.vllm import VLLMBackend

        return VLLMBackend(config, seed=seed)
    except ValueError as error:
        raise InputError(str(error)) from None


# -- output -----------------------------------------------------------------------------------------------------------


def _print(report: Report, world: World, config: Config) -> None:
    """Two tables, then what differs, the verdict, and the log-probs."""
    console = Console(file=sys.stdout, highlight=False, markup=False, width=None if sys.stdout.isatty() else _WIDTH)
    console.print(_rank_table(report))
    console.print(_kind_table(report))
    for fault in report.faults[:_SHOWN]:
        console.print(f"verify: {fault}", soft_wrap=True)
    if len(report.faults) > _SHOWN:
        console.print(f"verify: and {len(report.faults) - _SHOWN} more")
    if config.model.params_dtype == "bfloat16" and config.parallel.backend == "megatron":  # FSDP's shards are fp32
        console.print("verify: the folder was read through bfloat16 (params_dtype), as the trainer reads it", soft_wrap=True)
    if report.faults:
        console.print(f"verify: FAILED, {len(report.faults)} faults", soft_wrap=True)
    else:
        num_ranks = len(world.rollout_ranks)
        console.print(f"verify: {report.num_tensors} tensors on {num_ranks} rollout ranks are equal bit for bit", soft_wrap=True)
    sampled = report.log_probs
    console.print(
        f"log-probs: trainer and engine differ by at most {sampled['largest']:.2e} nats ({sampled['mean']:.2e} on average) "
        f"on {sampled['tokens']:.0f} tokens",
        soft_wrap=True,
    )


def _rank_table(report: Report) -> Table:
    table = Table(title="bytes of one sync, by rank")
    for name in ("rank", "mesh", "place"):
        table.add_column(name, no_wrap=True)
    for name in ("sent", "received", "shard", "received / shard"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank in report.ranks:
        if rank.mesh == "training":
            cells = [f"{rank.bytes_sent:,}", "", "", ""]
        else:
            ratio = rank.bytes_received / rank.shard_bytes
            sent = f"{rank.bytes_sent:,}" if rank.mesh == "both" else ""
            cells = [sent, f"{rank.bytes_received:,}", f"{rank.shard_bytes:,}", f"{ratio:.3f}"]
        table.add_row(str(rank.rank), rank.mesh, rank.place, *cells)
    return table


def _kind_table(report: Report) -> Table:
    table = Table(title="parameters, by kind")
    table.add_column("parameter", overflow="fold")
    for name in ("tensors", "bytes on all ranks", "exact = gather", "exact = folder"):
        table.add_column(name, justify="right", no_wrap=True)
    rollout = [rank for rank in report.ranks if rank.mesh != "training"]
    not_run = {way for rank in rollout for way in rank.not_run}
    for name in dict.fromkeys(kind for rank in rollout for kind in rank.kinds):
        kinds = [rank.kinds[name] for rank in rollout if name in rank.kinds]
        num_tensors = len({tensor for kind in kinds for tensor in kind.names})
        cells = [_verdict(kinds, way, way in not_run) for way in (GATHER, FOLDER)]
        table.add_row(name, str(num_tensors), f"{sum(kind.num_bytes for kind in kinds):,}", *cells)
    return table


def _verdict(kinds: Sequence[KindReport], way: str, not_run: bool) -> str:
    differing = sum(kind.differing.get(way, 0) for kind in kinds)
    if differing:
        return f"{differing:,} elements differ"
    return "did not run" if not_run else "equal"
