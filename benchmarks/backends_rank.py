"""One rank of a job of ``backends.py``: ``megatron_ppo train`` as it is, bound to its share of the cores, and its memory counted.

    torchrun ... --no-python python benchmarks/backends_rank.py FOLDER FLAGS OF TRAIN      writes FOLDER/rank0.json, rank1.json, ...

Rank r of n runs on core ``r * cores // n``: with half as many cores as ranks each has half a core, as each would have a GPU of its own. A
rank that waits leaves its share unused.

Memory is counted by walking live tensors after the last iteration; gradients just before each optimizer step, and what FSDP has gathered
whenever a layer begins its forward pass (the most that was seen of each). Activations and what the libraries themselves hold are in the
peak of the resident memory alone.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.backends_output import KINDS
from megatron_ppo import run
from megatron_ppo.backends.base import InferenceBackend, TrainingBackend


class Memory:
    """Bytes of one rank, by kind. ``training`` and ``inference`` are None where the rank does not do that."""

    def __init__(self) -> None:
        self.training: Any = None
        self.inference: Any = None
        self.executor: Any = None
        self._most = {"gradients": 0, "gathered": 0}

    def watch(self, backend: TrainingBackend) -> None:
        """Look at gradients and gathered parameters while ``backend`` trains."""
        self.training = backend
        for network in self.training._trained().values():
            network.optimizer.step = self._looking_at_gradients(network.optimizer.step)
        for module in self._sharded_modules():
            module.register_forward_pre_hook(lambda *_: self._note("gathered", _num_bytes(self._gathered())))

    def bytes(self) -> dict[str, int]:
        """All kinds, as they are now or, of those that come and go, at most were."""
        found = dict.fromkeys(KINDS, 0) | self._most
        if self.training is not None:
            networks = self.training._networks
            for role, network in networks.items():
                kind = "frozen" if network.optimizer is None else "weights"
                found[kind] += _num_bytes(self.training.named_parameters(role).values())
                found["optimizer"] += 0 if network.optimizer is None else _num_bytes(_optimizer_state(network.optimizer))
        if self.inference is not None:
            found["engine"] = _num_bytes(self.inference.weights().values())
            found["cache"] = _num_bytes(_key_value_cache(self.inference))
        if self.executor is not None:
            found["buckets"] = _num_bytes(self.executor._buffers)
        return found

    def _looking_at_gradients(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def look_and_step(*arguments: Any) -> Any:
            self._note("gradients", sum(_num_bytes(_gradients(network)) for network in self.training._trained().values()))
            return step(*arguments)

        return look_and_step

    def _note(self, kind: str, size: int) -> None:
        self._most[kind] = max(self._most[kind], size)

    def _sharded_modules(self) -> list[Any]:
        """FSDP's modules of all networks, none with megatron-core."""
        roots = [network.root for network in self.training._networks.values() if hasattr(network, "root")]
        return [module for root in roots for module in root.modules() if hasattr(module, "_get_fsdp_state")]

    def _gathered(self) -> Iterable[Tensor]:
        for module in self._sharded_modules():
            group = module._get_fsdp_state()._fsdp_param_group
            for parameter in [] if group is None else group.fsdp_params:
                yield from parameter.all_gather_outputs


def _gradients(network: Any) -> Iterable[Tensor]:
    """Megatron's gradient buffers, which stay; FSDP's shards, which go after the step."""
    if hasattr(network, "chunks"):
        return [buffer.grad_data for chunk in network.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    return [parameter.grad.to_local() for parameter in network.parameters.values() if parameter.grad is not None]


def _optimizer_state(optimizer: Any) -> Iterable[Tensor]:
    if hasattr(optimizer, "owned_states"):
        return [tensor for state in optimizer.owned_states() for tensor in state.tensors.values()]
    return [tensor for kind in optimizer.moments().values() for tensor in kind.values()]


def _key_value_cache(engine: Any) -> Iterable[Tensor]:
    """vLLM's, which is reserved at the start; that of Hugging Face's generation lives inside a call."""
    if not hasattr(engine, "_engine"):
        return []
    caches: list[Tensor] = engine._engine.llm_engine.model_executor.driver_worker.worker.model_runner.kv_caches
    return caches


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    """Of the memory behind the tensors, each piece once: FSDP frees it under tensors that stay, and Megatron's share buffers."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        held = min(storage.nbytes(), tensor.numel() * tensor.element_size())
        if held:
            sizes[tensor.data_ptr()] = held
    return sum(sizes.values())


def peak_resident_bytes() -> int:
    """Most resident memory that this process has had, libraries included."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


class CountedRun(run.Run):
    """A run that keeps hold of its parts, and writes what they hold after the loop."""

    folder: Path
    """Where the figures go."""

    def _training_backend(self) -> TrainingBackend:
        backend = super()._training_backend()
        self._memory().watch(backend)
        return backend

    def _inference_backend(self) -> InferenceBackend:
        backend = super()._inference_backend()
        self._memory().inference = backend
        return backend

    def _connect(self, **weights: Any) -> Any:
        context, executor = super()._connect(**weights)
        self._memory().executor = executor
        return context, executor

    def _loop(self, controller: Any) -> Any:
        stopped = super()._loop(controller)
        world = self._world
        record = {"trains": world.is_training, "samples": world.is_rollout, "peak_resident": peak_resident_bytes()}
        (self.folder / f"rank{world.global_rank}.json").write_text(json.dumps(record | {"bytes": self._memory().bytes()}))
        return stopped

    def _memory(self) -> Memory:
        if not hasattr(self, "_counted"):
            self._counted = Memory()
        return self._counted


def bind(rank: int, num_ranks: int) -> None:
    """This process, and all that it starts, to one core."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank * len(cores) // num_ranks]})


def main(arguments: Sequence[str]) -> int:
    """``FOLDER FLAGS``."""
    bind(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    CountedRun.folder = Path(arguments[0])
    run.Run = CountedRun  # type: ignore[misc]  # ``train`` makes the run
    return run.main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
