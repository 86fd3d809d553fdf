"""Starts a run by Ray instead of torchrun: one actor a rank, each of which runs the program that torchrun would start.

    placement groups   training   one bundle a training rank, packed on as few nodes as they fit
                       replica 0  one bundle a rank of the replica, all on one node
                       replica 1  ...
    ranks              training first, node by node; then the replicas in order

The driver is the launcher and no more: it places actors, gives each what torchrun would put into its environment (RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR, MASTER_PORT), and waits. Lost ranks are noticed by the ranks' own watchdogs, which end them all; the driver
then starts them again as often as it was told to, and they go on from the newest checkpoint of the run folder.

Trajectories travel over Ray's object store (``ray_data_bus.py``); weights over the same process groups as ever.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ppo.config import Config
from megatron_ppo.config_io import parse_command
from megatron_ppo.resharding.megatron_mesh import smallest_world_size

PROGRAM = "train_ray"
_PLACEMENT_S = 300.0
"""For a cluster to give what it has in all; one that scales up may need minutes."""
_LAST_WORDS_S = 20.0
"""For the other ranks to end by themselves once one has, and for their last lines to arrive."""
_LOG_DELAY_S = 1.0
"""What ranks print goes through files that Ray reads twice a second; with the actors the rest of it would be gone."""
_TORCHRUN_ONLY = ("TORCHELASTIC_", "SLURM_")
"""Variables of another launcher that a rank must not find."""


@dataclass(frozen=True)
class Options:
    """Flags of this launcher."""

    num_training_ranks: int | None = None
    """Ranks that train, each with a bundle of its own; rollout_world_size more sample. Default: the smallest training mesh."""
    ray_address: str | None = None
    """Address of the cluster, as ray.init takes it (auto: the one of this host). Default: RAY_ADDRESS, or a cluster on this host alone."""
    gpus_per_rank: float | None = None
    """Default: 1 where the cluster has GPUs, otherwise 0."""
    cpus_per_rank: float = 1.0
    """CPUs that Ray sets aside for a rank."""
    max_restarts: int = 0
    """How often a launch that lost a rank is started again."""


@dataclass(frozen=True)
class Place:
    """Where an actor is."""

    node: str
    """Ray's id of the node."""
    address: str
    """The node's address."""


class Rank:
    """One rank, in a process of its own. Every method runs in the main thread, where the watchdog takes over signals."""

    def __init__(self, folder: str) -> None:
        """``folder``: where the driver was started; paths of the configuration are relative to it."""
        os.chdir(folder)
        for name in [name for name in os.environ if name.startswith(_TORCHRUN_ONLY)]:
            del os.environ[name]

    def place(self) -> Place:
        """Where it has been put."""
        import ray

        return Place(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())

    def free_port(self) -> int:
        """A port of this node on which nobody listens."""
        import socket

        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def run(self, config: Config, environment: dict[str, str], directory: Any) -> None:
        """The program. ``RuntimeError`` with its words where the input does not fit; a run that fails ends the process."""
        os.environ.update(environment)
        from megatron_ppo.ray_data_bus import RayDataBus
        from megatron_ppo.run import train
        from megatron_ppo.world import World

        def make_bus(world: World, *, timeout_s: float) -> RayDataBus:
            return RayDataBus(world, directory, timeout_s=timeout_s)

        try:
            train(config, make_bus)
        except SystemExit as error:  # Ray would take it for the actor's wish to leave
            if error.code not in (None, 0):
                raise RuntimeError(str(error)) from None
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


def main(arguments: Sequence[str]) -> int:
    """``python scripts/train_ray.py``; the exit code: 0, 1 where a rank failed, 2 where input or cluster do not fit."""
    options, config = parse_command(arguments, Options(), program=PROGRAM)
    try:
        smallest = smallest_world_size(config)
        rollout = config.parallel.rollout_world_size
        num_training = smallest - rollout if options.num_training_ranks is None else options.num_training_ranks
        config.validate(num_training + rollout)
        if options.max_restarts < 0:
            raise ValueError(f"--max-restarts {options.max_restarts} must be 0 or more")
    except ValueError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when ray is imported
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # what several ranks say alike is said by several ranks
    os.environ.setdefault("RAY_worker_niceness", "0")  # of a cluster that starts here: ranks are no background work
    try:
        import ray
    except ImportError:
        print(f"{PROGRAM}: Ray is not installed: pip install -e '.[ray]', or bash scripts/setup.sh ray", file=sys.stderr)
        return 2
    address = options.ray_address or os.environ.get("RAY_ADDRESS") or "local"
    try:
        ray.init(address=address, include_dashboard=False if address == "local" else None)
    except Exception as error:  # Ray raises Exception itself where its processes do not start in time
        print(
            f"{PROGRAM}: Ray at {address!r} cannot be used: {error}. Is the address right, and this machine not overloaded?",
            file=sys.stderr,
        )
        return 2
    try:
        return _launch(options, config, num_training)
    except ValueError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        ray.shutdown()


def _launch(options: Options, config: Config, num_training: int) -> int:
    """Place and run all ranks, again where one was lost and a restart is left."""
    import ray

    gpus = options.gpus_per_rank
    if gpus is None:
        gpus = 1.0 if ray.cluster_resources().get("GPU", 0) else 0.0
    bundle = {"CPU": options.cpus_per_rank} | ({"GPU": gpus} if gpus else {})
    _check_room(bundle, num_training + config.parallel.rollout_world_size)
    groups = _place(config, num_training, bundle)
    run_id = uuid.uuid4().hex[:12]
    try:
        for attempt in range(options.max_restarts + 1):
            fault = _attempt(config, groups, bundle, run_id, attempt)
            if fault is None:
                return 0
            left = options.max_restarts - attempt
            print(f"{PROGRAM}: {fault}" + (f"; starting again ({left} restarts left)" if left else ""), file=sys.stderr, flush=True)
        return 1
    finally:
        for group in groups:
            ray.util.remove_placement_group(group)


def _check_room(bundle: dict[str, float], num_ranks: int) -> None:
    """``ValueError`` where the cluster has too little in all, whoever uses it now."""
    import ray

    there = ray.cluster_resources()
    for name, amount in bundle.items():
        if num_ranks * amount > there.get(name, 0):
            raise ValueError(
                f"{num_ranks} ranks x {amount:g} {name} = {num_ranks * amount:g}, but the cluster has {there.get(name, 0):g} {name}: "
                f"add nodes, choose smaller meshes, or set --{name.lower()}s-per-rank"
            )


def _place(config: Config, num_training: int, bundle: dict[str, float]) -> list[Any]:
    """Placement groups: the training ranks', then one a replica; none of the latter where all ranks do both."""
    import ray

    tp = config.parallel.rollout_tensor_parallel_size
    if config.is_colocated:
        kinds = [(tp, "STRICT_PACK")] * (num_training // tp)
    else:
        kinds = [(num_training, "PACK")] + [(tp, "STRICT_PACK")] * (config.parallel.rollout_world_size // tp)
    groups = [ray.util.placement_group([bundle] * size, strategy=strategy) for size, strategy in kinds]
    until = time.monotonic() + _PLACEMENT_S
    for number, (group, (size, strategy)) in enumerate(zip(groups, kinds, strict=True)):
        if not group.wait(max(1.0, until - time.monotonic())):
            what = "on one node" if strategy == "STRICT_PACK" else "in all"
            for made in groups:
                ray.util.remove_placement_group(made)
            free = {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
            raise ValueError(
                f"Ray has no room for placement group {number} of {len(groups)}: {size} bundles of {bundle} {what}; free now: {free}. "
                "Wait for other jobs, add nodes, or choose smaller meshes"
            )
    return groups


def _attempt(config: Config, groups: list[Any], bundle: dict[str, float], run_id: str, attempt: int) -> str | None:
    """One launch of all ranks; what ended it, or None where it ended well. No actor outlives the call."""
    import ray

    directory = ray.remote(num_cpus=0)(_directory_class()).remote()
    actors: list[Any] = []
    try:
        for number, group in enumerate(groups):
            if not group.wait(_PLACEMENT_S):  # placed before, but a node of it is gone, and no other has room
                return f"placement group {number} of {len(groups)} has lost a node, and found no other within {_PLACEMENT_S:.0f} s"
        for index, group in enumerate(groups):
            made = [_actor(group, bundle, number) for number in range(group.bundle_count)]
            actors += _by_node(made) if index == 0 else made
        environments = _environments(actors, run_id, attempt)
        running = [actor.run.remote(config, mine, directory) for actor, mine in zip(actors, environments, strict=True)]
        return _wait(running)
    except ray.exceptions.RayError as error:
        return f"a rank did not start: {_words(error)}"
    finally:
        for actor in [*actors, directory]:
            ray.kill(actor)


def _directory_class() -> type:
    from megatron_ppo.ray_data_bus import Directory

    return Directory


def _actor(group: Any, bundle: dict[str, float], number: int) -> Any:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    options = {
        "num_cpus": bundle["CPU"],
        "num_gpus": bundle.get("GPU", 0),
        "max_restarts": 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}},
    }
    return ray.remote(**options)(Rank).remote(os.getcwd())


def _by_node(actors: list[Any]) -> list[Any]:
    """Actors of a node beside one another, nodes in the order in which they appear: tensor-parallel ranks are neighbours."""
    import ray

    nodes = [place.node for place in ray.get([actor.place.remote() for actor in actors])]
    order = sorted(range(len(actors)), key=lambda number: (nodes.index(nodes[number]), number))
    return [actors[number] for number in order]


def _environments(actors: list[Any], run_id: str, attempt: int) -> list[dict[str, str]]:
    """What torchrun would tell each rank."""
    import ray

    places: list[Place] = ray.get([actor.place.remote() for actor in actors])
    port = ray.get(actors[0].free_port.remote())
    nodes = list(dict.fromkeys(place.node for place in places))
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(actors)),
            "LOCAL_RANK": str([other.node for other in places[:rank]].count(place.node)),
            "LOCAL_WORLD_SIZE": str([other.node for other in places].count(place.node)),
            "GROUP_RANK": str(nodes.index(place.node)),
            "MASTER_ADDR": places[0].address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": run_id,
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
        }
        for rank, place in enumerate(places)
    ]


def _wait(running: list[Any]) -> str | None:
    """Wait for all ranks. The first that fails is the fault; the others get the time to end by themselves and to say why."""
    import ray

    pending, fault = list(running), None
    until: float | None = None
    while pending:
        limit = None if until is None else max(0.0, until - time.monotonic())
        ended, pending = ray.wait(pending, num_returns=1, timeout=limit)
        if not ended:
            break  # the time is over: the caller ends the rest
        try:
            ray.get(ended[0])
        except ray.exceptions.RayError as error:
            if fault is None:
                fault, until = f"rank {running.index(ended[0])} ended: {_words(error)}", time.monotonic() + _LAST_WORDS_S
    time.sleep(_LOG_DELAY_S)
    return fault


def _words(error: Exception) -> str:
    """Of an exception in a rank its own words; of a process that ended, Ray's first line."""
    cause = getattr(error, "cause", None)
    text = str(cause) if cause is not None else str(error)
    return text.strip().splitlines()[0] if text.strip() else type(error).__name__
