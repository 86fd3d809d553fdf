"""Splits one launch into two meshes that never share a default process group.

    global ranks   0  1  2  3  4  5  6  7 | 8  9 10 11
    mesh           ------- training ----- | -- rollout -      replicas of two: (8, 9), (10, 11)
    rank           0  1  2  3  4  5  6  7 | 0  1  2  3        what RANK says from here on

megatron-core and vLLM both take the default group for their own, so each mesh gets one (``init_world``), and RANK and WORLD_SIZE
are rewritten to be the mesh's. LOCAL_RANK stays the node's: it names the device. One TCPStore serves the whole launch; every
group lives in it under ``{run id}/{restart count}/{mesh or group}``, because a launcher may keep its store across restarts, and a group
that found the addresses of the attempt before would hang.

This runs once, before any model is built. Groups across the meshes are ``bridge.py``'s, noticing lost ranks is ``watchdog.py``'s,
and the groups inside a mesh belong to the backends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, NoReturn

import torch.distributed as dist

from megatron_ppo import slurm
from megatron_ppo.config import Config
from megatron_ppo.device import bind_device, process_group_backend

MeshName = Literal["training", "rollout", "both"]
"""``both``: colocated, the two meshes are the whole world and take turns."""

_STORE_TIMEOUT = timedelta(minutes=5)
"""For connecting to the store and for keys that the other ranks write during set-up."""
_QUIET_RANKS_WAIT_S = 10.0
"""How long the other ranks wait for rank 0 to print a fault. Launchers end them as soon as rank 0 has ended with an error."""


@dataclass(frozen=True)
class Launch:
    """What the launcher's environment says of this process."""

    global_rank: int
    world_size: int
    local_rank: int
    """Number of this rank on its node."""
    node: str
    """Names the node, in the launcher's terms; equal on all ranks of a node."""
    master_addr: str
    master_port: int
    run_id: str
    """The launcher's name of the run (``local`` where it has none)."""
    attempt: str
    """The launcher's restart count."""
    agent_hosts_store: bool
    """Whether the launcher's own process already serves a store at master_addr:master_port."""


@dataclass(frozen=True)
class World:
    """One rank's place in the launch. All rank numbers but ``rank`` and ``replica_tp_rank`` are global."""

    global_rank: int
    world_size: int
    local_rank: int
    mesh: MeshName
    rank: int
    """Rank within the mesh."""
    mesh_size: int
    training_ranks: range
    rollout_ranks: range
    rollout_tensor_parallel_size: int
    store: dist.Store = field(repr=False, compare=False)
    """The launch's store, already prefixed for this run and attempt. Main thread only; other threads ``connect``."""
    run_id: str
    attempt: str = "0"
    store_address: tuple[str, int] = ("127.0.0.1", 0)
    store_prefix: str = ""
    rank0_hosts_store: bool = True
    """False where the launcher's agent serves the store, which then outlives rank 0."""

    @property
    def is_training(self) -> bool:
        """Whether this rank trains."""
        return self.mesh != "rollout"

    @property
    def is_rollout(self) -> bool:
        """Whether this rank samples."""
        return self.mesh != "training"

    @property
    def is_colocated(self) -> bool:
        """Whether it does both, by turns; the same on every rank."""
        return self.mesh == "both"

    @property
    def num_replicas(self) -> int:
        """Inference engines in the rollout mesh."""
        return len(self.rollout_ranks) // self.rollout_tensor_parallel_size

    @property
    def replica(self) -> int:
        """The replica this rollout rank belongs to. ``RuntimeError`` on a training rank."""
        self._require_rollout("replica")
        return self.rank // self.rollout_tensor_parallel_size

    @property
    def replica_tp_rank(self) -> int:
        """This rollout rank's place in its replica. ``RuntimeError`` on a training rank."""
        self._require_rollout("replica_tp_rank")
        return self.rank % self.rollout_tensor_parallel_size

    @property
    def is_head(self) -> bool:
        """Whether this rollout rank speaks for its replica. ``RuntimeError`` on a training rank."""
        self._require_rollout("is_head")
        return self.replica_tp_rank == 0

    @property
    def replica_heads(self) -> list[int]:
        """Global ranks of the heads of all replicas, in replica order."""
        return list(self.rollout_ranks[:: self.rollout_tensor_parallel_size])

    def describe(self, global_rank: int) -> str:
        """``rank 5 (rollout rank 1)``, as all messages name a rank; ``rank 5 (training and rollout rank 5)`` where it is in both meshes."""
        if self.is_colocated:
            return f"rank {global_rank} (training and rollout rank {global_rank})"
        if global_rank in self.training_ranks:
            return f"rank {global_rank} (training rank {global_rank - self.training_ranks.start})"
        return f"rank {global_rank} (rollout rank {global_rank - self.rollout_ranks.start})"

    def connect(self, timeout_s: float) -> dist.Store:
        """A connection to the launch's store that no other thread shares: a client that waits for a key blocks its other users."""
        host, port = self.store_address
        client = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
        return dist.PrefixStore(self.store_prefix, client)

    def _require_rollout(self, name: str) -> None:
        if not self.is_rollout:
            raise RuntimeError(f"{name} is defined on rollout ranks, but {self.describe(self.global_rank)} trains")


def init_world(config: Config, *, needs_data: bool = True) -> World:
    """Join the launch: check the configuration, connect to the store, set up this mesh's default process group.

    Collective over all ranks of the launch. RANK and WORLD_SIZE in ``os.environ`` are the mesh's afterwards. ``needs_data`` is that of
    ``Config.validate``.

    Raises:
        ValueError: on rank 0, where environment or configuration do not fit; all other ranks then end with exit code 1 and print
            nothing, so that the launch shows one message.
        RuntimeError: where this process already has a default process group.
    """
    if dist.is_initialized():
        raise RuntimeError("this process already has a default process group; init_world must be the first to make one")
    launch = read_launch(os.environ)
    try:
        config.validate(launch.world_size, needs_data=needs_data)
    except ValueError:
        _raise_on_rank_0(launch)
    # srun has names of its own for these, or none.
    os.environ.update(LOCAL_RANK=str(launch.local_rank), MASTER_ADDR=launch.master_addr, MASTER_PORT=str(launch.master_port))
    bind_device()
    store, prefix = _open_store(launch)
    training_size, rollout_size = config.training_size(launch.world_size), config.rollout_size(launch.world_size)
    mesh: MeshName = "training" if launch.global_rank < training_size else "rollout"
    if config.is_colocated:
        mesh = "both"
    world = World(
        global_rank=launch.global_rank,
        world_size=launch.world_size,
        local_rank=launch.local_rank,
        mesh=mesh,
        rank=launch.global_rank - (training_size if mesh == "rollout" else 0),
        mesh_size=rollout_size if mesh == "rollout" else training_size,
        training_ranks=range(training_size),
        rollout_ranks=range(launch.world_size - rollout_size, launch.world_size),
        rollout_tensor_parallel_size=config.parallel.rollout_tensor_parallel_size,
        store=store,
        run_id=launch.run_id,
        attempt=launch.attempt,
        store_address=(launch.master_addr, launch.master_port),
        store_prefix=prefix,
        rank0_hosts_store=not launch.agent_hosts_store,
    )
    _check_nodes(world, launch)
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    _init_mesh(world, timeout=timeout)
    store.set_timeout(timeout)  # ranks that are ready wait here for those that still build a model
    return world


def close_world(world: World) -> None:
    """Leave the mesh's default group and give RANK and WORLD_SIZE their launch-wide values back."""
    dist.destroy_process_group()
    os.environ.update(RANK=str(world.global_rank), WORLD_SIZE=str(world.world_size))


# -- the launcher's environment ---------------------------------------------------------------------------------------

_TORCHRUN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_SLURM_NAMES = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")


def read_launch(environ: Mapping[str, str]) -> Launch:
    """Read torchrun's variables, or srun's where torchrun's are absent.

    Under ``srun torchrun`` both are there and Slurm's belong to the agents, so torchrun's count. Without a torchrun agent two
    different answers are refused.

    Raises:
        ValueError: for a missing, malformed, out-of-range or conflicting variable, naming it.
    """
    by_torchrun, by_slurm = "RANK" in environ, "SLURM_PROCID" in environ
    if by_torchrun and by_slurm and "TORCHELASTIC_RUN_ID" not in environ:
        _refuse_conflict(environ)
    if not by_torchrun and not by_slurm:
        raise ValueError("neither RANK (torchrun) nor SLURM_PROCID (srun) is set: start the program with torchrun or srun")
    names = _TORCHRUN_NAMES if by_torchrun else _SLURM_NAMES
    global_rank, world_size, local_rank = (_number(environ, name, minimum) for name, minimum in zip(names, (0, 1, 0), strict=True))
    if global_rank >= world_size:
        raise ValueError(f"{names[0]}={global_rank} must be below {names[1]}={world_size}")
    if by_torchrun and "MASTER_ADDR" not in environ:
        raise ValueError("MASTER_ADDR is not set: torchrun sets it; export the name of rank 0's node")
    return Launch(
        global_rank=global_rank,
        world_size=world_size,
        local_rank=local_rank,
        node=environ.get("GROUP_RANK", "0") if by_torchrun else environ.get("SLURM_NODEID", "0"),
        master_addr=environ["MASTER_ADDR"] if "MASTER_ADDR" in environ else slurm.rank0_host(environ),
        master_port=(
            _number(environ, "MASTER_PORT", 1, maximum=65535) if by_torchrun or "MASTER_PORT" in environ else slurm.step_port(environ)
        ),
        run_id=_run_id(environ),
        attempt=environ.get("TORCHELASTIC_RESTART_COUNT", environ.get("SLURM_RESTART_COUNT", "0")),
        agent_hosts_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _refuse_conflict(environ: Mapping[str, str]) -> None:
    for ours, slurms in zip(_TORCHRUN_NAMES, _SLURM_NAMES, strict=True):
        if ours in environ and slurms in environ and environ[ours] != environ[slurms]:
            raise ValueError(
                f"{ours}={environ[ours]} and {slurms}={environ[slurms]} contradict each other: "
                f"unset the variables of the launcher that did not start this process"
            )


def _number(environ: Mapping[str, str], name: str, minimum: int, maximum: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        raise ValueError(f"{name} is not set in the environment: start the program with torchrun or srun, or export {name}")
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a whole number") from None
    if number < minimum or (maximum is not None and number > maximum):
        limits = f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
        raise ValueError(f"{name}={number} must be {limits}")
    return number


def _run_id(environ: Mapping[str, str]) -> str:
    if "TORCHELASTIC_RUN_ID" in environ:
        return environ["TORCHELASTIC_RUN_ID"]
    if "SLURM_PROCID" in environ and "SLURM_JOB_ID" in environ:
        return f"{environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '0')}"
    return "local"


# -- set-up -----------------------------------------------------------------------------------------------------------


def _raise_on_rank_0(launch: Launch) -> NoReturn:
    """Re-raise the error that is being handled on rank 0; end every other rank without a word."""
    if launch.global_rank == 0:
        raise  # noqa: PLE0704 (called from an except clause only)
    # A launcher ends rank 0 as soon as another rank has failed: leave it the time to print.
    time.sleep(_QUIET_RANKS_WAIT_S)
    raise SystemExit(1)


def _open_store(launch: Launch) -> tuple[dist.Store, str]:
    """Connect to the launch's one store, which rank 0 hosts unless the launcher's agent does; (prefixed store, prefix)."""
    hosts = launch.global_rank == 0 and not launch.agent_hosts_store
    address = f"{launch.master_addr}:{launch.master_port}"
    try:
        server = dist.TCPStore(
            launch.master_addr, launch.master_port, is_master=hosts, wait_for_workers=False, multi_tenant=hosts, timeout=_STORE_TIMEOUT
        )
    except dist.DistNetworkError as error:
        if not hosts:
            raise
        raise ValueError(
            f"rank 0 cannot serve the launch's store at {address}: is another job using that port? Choose another MASTER_PORT"
        ) from error
    prefix = f"{launch.run_id}/{launch.attempt}"
    store = dist.PrefixStore(prefix, server)
    # A port may belong to another launch whose rank 0 was faster; its ranks have already signed in under these names.
    if store.add(f"signed_in/{launch.global_rank}", 1) != 1:
        raise ValueError(
            f"rank {launch.global_rank} of run {prefix!r} has already signed in at {address}: another launch uses this port. "
            f"Choose another MASTER_PORT"
        )
    return store, prefix


def _check_nodes(world: World, launch: Launch) -> None:
    """Refuse replicas that straddle nodes. Rank 0 decides and tells the others, so that the launch shows one message."""
    world.store.set(f"node/{world.global_rank}", launch.node)
    if world.global_rank != 0:
        verdict = world.store.get("node_check").decode()
        if verdict:
            world.store.add("node_check_read", 1)
            time.sleep(_QUIET_RANKS_WAIT_S)
            raise SystemExit(1)
        return
    nodes = [name.decode() for name in world.store.multi_get([f"node/{rank}" for rank in range(world.world_size)])]
    fault = straddling_replica(nodes, world.rollout_ranks, world.rollout_tensor_parallel_size)
    world.store.set("node_check", fault or "")
    if fault:
        # The store goes with this rank: leave it up until the others have read the verdict.
        until = time.monotonic() + _QUIET_RANKS_WAIT_S
        while world.store.add("node_check_read", 0) < world.world_size - 1 and time.monotonic() < until:
            time.sleep(0.05)
        raise ValueError(fault)


def straddling_replica(nodes: Sequence[str], rollout_ranks: range, tensor_parallel_size: int) -> str | None:
    """The fault of the first rollout replica whose ranks are not all on one node, or None. ``nodes[global rank]`` names a node."""
    for start in range(rollout_ranks.start, rollout_ranks.stop, tensor_parallel_size):
        ranks = range(start, start + tensor_parallel_size)
        if len({nodes[rank] for rank in ranks}) > 1:
            placed = ", ".join(f"rank {rank} on node {nodes[rank]}" for rank in ranks)
            return (
                f"a rollout replica may not straddle nodes, but replica {(start - rollout_ranks.start) // tensor_parallel_size} "
                f"(global ranks {ranks.start}-{ranks.stop - 1}, rollout_tensor_parallel_size = {tensor_parallel_size}) has {placed}. "
                f"Choose rollout_world_size and rollout_tensor_parallel_size so that each replica starts and ends on one node"
            )
    return None


def _init_mesh(world: World, timeout: timedelta) -> None:
    os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.mesh_size))
    dist.init_process_group(
        process_group_backend(),
        store=dist.PrefixStore(world.mesh, world.store),
        rank=world.rank,
        world_size=world.mesh_size,
        timeout=timeout,
    )
