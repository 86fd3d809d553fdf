"""What the ranks of the Megatron checkpoint tests do: train, save, load in a fresh backend, and compare every bit of the state.

One launch runs many jobs. ``state_of`` is the whole live state of a rank; what two meshes have in common is compared in the files, whose
tensors are the same for every mesh.
"""

from __future__ import annotations

import io
import logging
import os
import random
import resource
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
import torch
from megatron_parity_support import ROWS, adam, cut, fields, gather_canonical, nan_loss, ppo_like_loss
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from megatron_ppo.backends import megatron_checkpoint
from megatron_ppo.config import Config

Fields = Mapping[str, Any]
RESUMED_STEPS = 2


@dataclass(frozen=True)
class Resume:
    """Train, save, go on; load in a fresh backend, go on; both ends must be equal bit by bit."""

    fields: Fields
    folder: str
    num_steps: int = 2
    """Optimizer steps of each role before the checkpoint."""
    skipped: bool = False
    """One more step before the checkpoint, whose gradient is not finite."""


@dataclass(frozen=True)
class Move:
    """Load what another mesh saved, and save it again; then one step."""

    fields: Fields
    source: str
    target: str
    same_mesh: bool = False
    """Only the optimizer is cut otherwise: random states are taken over."""


@contextmanager
def backend_of(fields: Fields) -> Iterator[Any]:
    """A fresh backend with fresh random states; its process groups are given back at the end."""
    from megatron_ppo.backends.megatron import MegatronBackend
    from megatron_ppo.backends.megatron_setup import destroy_megatron

    torch.manual_seed(11)
    numpy.random.seed(12)
    random.seed(13)
    try:
        yield MegatronBackend(Config().replace(**dict(fields)), num_optimizer_steps=8)
    finally:
        destroy_megatron()


def run_jobs(rank: int, world_size: int, jobs: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """One launch: what each job, a picklable call without arguments, gave on this rank."""
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    results = {}
    try:
        for name, job in jobs.items():
            try:
                results[name] = job()
            except BaseException as error:
                error.add_note(f"in job {name!r}")
                raise
        return results
    finally:
        torch.distributed.destroy_process_group()


def take_steps(backend: Any, num_steps: int, *, loss: Any = ppo_like_loss) -> list[Any]:
    """Optimizer steps of every trained role, on this replica's share of the fixed rows."""
    share = ROWS // backend.dp_size
    batches = cut(range(backend.dp_rank * share, (backend.dp_rank + 1) * share), 2, backend.length_multiple)
    return [backend.train_step(role, batches, loss, temperature=0.7) for _ in range(num_steps) for role in backend._trained()]


def state_of(backend: Any) -> dict[str, Tensor]:
    """Copies of everything on this rank that decides how training goes on."""
    from megatron_ppo.backends.megatron_checkpoint import random_states

    state = {f"random.{name}": tensor for name, tensor in random_states().items()}
    for role, network in backend._trained().items():
        for name, tensor in backend.named_parameters(role).items():
            state[f"{role}.{name}"] = tensor.clone()
        state[f"{role}.num_steps"] = torch.tensor(network.optimizer.num_steps)
        for number, owned in enumerate(network.optimizer.owned_states()):
            for name, tensor in owned.tensors.items():
                state[f"{role}.{number}.{name}"] = tensor.clone()
        for part in network.optimizer._parts():
            for number, kept in enumerate(part.optimizer.state.values()):
                if "step" in kept:
                    state[f"{role}.{type(part).__name__}.{number}.step"] = kept["step"].clone()
    return state


def assert_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Same names, types and bits."""
    assert set(one) == set(other), sorted(set(one) ^ set(other))
    unequal = [name for name in one if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])]
    assert not unequal, f"{len(unequal)} of {len(one)} differ: {unequal[:8]}"


def draw() -> list[float]:
    """The next numbers of every generator: takes them."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    drawn = [float(torch.rand(())), float(numpy.random.normal()), random.gauss(0.0, 1.0)]
    with get_cuda_rng_tracker().fork():
        drawn.append(float(torch.rand(())))
    return drawn


def save(backend: Any, folder: Path, *, asynchronous: bool = False) -> Any:
    """``save_checkpoint`` into a folder that rank 0 makes."""
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    pending = backend.save_checkpoint(folder, asynchronous=asynchronous)
    if asynchronous:
        return pending
    assert pending.done()
    pending.wait()
    for name in pending.files:
        assert (folder / name).stat().st_size > 0
    torch.distributed.barrier()
    return pending


def resume(job: Resume) -> dict[str, Any]:
    """The exact resume of one mesh; returns the whole weights at the checkpoint and after the next steps."""
    with backend_of(job.fields) as backend:
        take_steps(backend, job.num_steps)
        if job.skipped:
            assert all(report.skipped for report in take_steps(backend, 1, loss=nan_loss))
        draw()
        before = state_of(backend)
        save(backend, Path(job.folder))
        saved = state_of(backend)
        assert_equal(saved, before)  # saving is not felt
        result = {"saved": _whole_weights(backend)}
        ahead, numbers = take_steps(backend, RESUMED_STEPS), draw()
        end = state_of(backend)
        result["end"] = _whole_weights(backend)
    with backend_of(job.fields) as fresh:
        assert any(not torch.equal(tensor, saved[name]) for name, tensor in state_of(fresh).items())
        fresh.load_checkpoint(Path(job.folder))
        assert_equal(state_of(fresh), saved)
        assert take_steps(fresh, RESUMED_STEPS) == ahead  # metrics, gradient norms and rates
        assert draw() == numbers
        assert_equal(state_of(fresh), end)
    return result


def move(job: Move) -> dict[str, Any]:
    """Whole weights right after loading, and after the next steps."""
    with backend_of(job.fields) as backend:
        random_before = _random(state_of(backend))
        backend.load_checkpoint(Path(job.source))
        if not job.same_mesh:
            assert_equal(_random(state_of(backend)), random_before)
        result = {"saved": _whole_weights(backend)}
        save(backend, Path(job.target))
        take_steps(backend, RESUMED_STEPS)
        return result | {"end": _whole_weights(backend)}


def _random(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name.startswith("random.")}


def _whole_weights(backend: Any) -> dict[str, dict[str, Tensor] | None]:
    return {role: gather_canonical(backend, role) for role in backend._trained()}


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """Every whole tensor of a checkpoint, read by torch alone."""
    reader = FileSystemReader(folder / "megatron")
    entries = reader.read_metadata().state_dict_metadata
    state = {key: torch.full(tuple(entry.size), -1).to(entry.properties.dtype) for key, entry in entries.items()}
    dcp.load(state, storage_reader=FileSystemReader(folder / "megatron"), no_dist=True)
    return state


# -- refusals, faults, saves in the background ------------------------------------------------------------------------


def refusals(models: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Loads that must fail, with their messages; each must leave the backend as it was. Then those that must work."""
    separate = {"critic": "separate", "critic_path": models["score"]}
    both, alone, critic = folder / "dp2", folder / "actor alone", folder / "critic alone"
    with backend_of(adam(models, **separate)) as backend:
        take_steps(backend, 1)
        save(_Part(backend, "actor"), alone)
        save(_Part(backend, "critic"), critic)
    loads: dict[str, tuple[Fields, Path]] = {
        "another model": (adam(models, model="wide"), alone),
        "another precision": (adam(models, params_dtype="bfloat16"), alone),
        "another optimizer": (fields(models), alone),
        "no critic here": (adam(models), both),
        "no critic there": (adam(models, **separate), alone),
        "no folder": (adam(models), folder / "nothing"),
        "truncated": (adam(models, **separate), _copied(both, folder / "truncated", _truncate)),
        "no random states": (adam(models, **separate), _copied(both, folder / "headless", _remove_states)),
    }
    texts = {name: _refused(changed, "load_checkpoint", path) for name, (changed, path) in loads.items()}
    texts["weights of another model"] = _refused(adam(models, model="wide"), "load_weights", alone)
    texts["no role"] = _refused(adam(models), "load_weights", critic)
    texts["another model by load_hf"] = _fault_of_build(adam(models, load_hf=models["wide"]))
    texts["notice"] = _notice(adam(models, **separate), folder / "tp1")
    texts["weights"] = _weights_alone(models, alone)
    return texts


class _Part:
    """One role of a backend, as if the run trained nothing else."""

    def __init__(self, backend: Any, role: str) -> None:
        self._backend, self._role = backend, role

    def save_checkpoint(self, folder: Path, *, asynchronous: bool) -> Any:
        networks = {self._role: self._backend._trained()[self._role]}
        return megatron_checkpoint.save(networks, folder, self._backend._mesh(), asynchronous=asynchronous)


def _copied(source: Path, target: Path, spoil: Callable[[Path], None]) -> Path:
    if torch.distributed.get_rank() == 0:
        shutil.copytree(source, target)
        spoil(target)
    torch.distributed.barrier()
    return target


def _truncate(folder: Path) -> None:
    path = folder / "megatron" / "__0_0.distcp"
    os.truncate(path, path.stat().st_size // 2)


def _remove_states(folder: Path) -> None:
    (folder / "ranks" / "rank_00001.safetensors").unlink()


def _refused(changed: Fields, method: str, path: Path) -> str:
    with backend_of(changed) as backend:
        before = state_of(backend)
        with pytest.raises(ValueError) as caught:
            getattr(backend, method)(path)
        assert_equal(state_of(backend), before)
        take_steps(backend, 1)  # and training can go on
    return str(caught.value)


def _fault_of_build(changed: Fields) -> str:
    with pytest.raises(ValueError) as caught, backend_of(changed):
        pass
    return str(caught.value)


def _notice(changed: Fields, path: Path) -> str:
    """What is logged when a checkpoint of another mesh is loaded."""
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    logging.getLogger("megatron_ppo").addHandler(handler)
    with backend_of(changed) as backend:
        backend.load_checkpoint(path)
    logging.getLogger("megatron_ppo").removeHandler(handler)
    return lines.getvalue()


def _weights_alone(models: Mapping[str, str], path: Path) -> str:
    """An actor's weights into a bf16 run with a fresh value head, and the same from a Hugging Face export."""
    changed = adam(models, critic="shared", params_dtype="bfloat16", kl_coef=0.1)
    with backend_of(adam(models)) as backend:
        backend.load_weights(path)
        expected = {name: tensor.clone() for name, tensor in backend.weights().items()}
        exported = path.parent / "exported"
        backend.export_hf(exported)
    with backend_of(changed) as backend:
        reference = {name: tensor.clone() for name, tensor in backend.named_parameters("reference").items()}
        head = backend.weights()["value_head.weight"].clone()
        backend.load_weights(path)
        found = dict(backend.weights())
        assert torch.equal(found.pop("value_head.weight"), head)
        assert_equal(found, {name: tensor.bfloat16() for name, tensor in expected.items()})
        _assert_masters_fresh(backend)
        assert_equal(backend.named_parameters("reference"), reference)
        loaded = {name: tensor.clone() for name, tensor in backend.weights().items()}
    with backend_of(changed | {"load_hf": str(exported)}) as backend:
        assert_equal(backend.weights(), loaded)
        _assert_masters_fresh(backend)
        assert_equal(backend.named_parameters("reference"), reference)
    return "loaded"


def load_converted(changed: Fields, path: Path) -> None:
    """What ``convert`` made of the folder that the backend started from brings its weights back."""
    with backend_of(changed) as backend:
        start = {name: tensor.clone() for name, tensor in backend.weights().items()}
        take_steps(backend, 1)
        assert any(not torch.equal(tensor, start[name]) for name, tensor in backend.weights().items())
        backend.load_weights(path)
        assert_equal(backend.weights(), start)


def _assert_masters_fresh(backend: Any) -> None:
    """Masters are the weights, widened; no moments, no steps."""
    optimizer = backend._trained()["actor"].optimizer
    assert optimizer.num_steps == 0
    for owned in optimizer.owned_states():
        values = owned.parameter.detach().view(-1)[owned.start : owned.stop]
        assert torch.equal(owned.tensors["master"], values.float()) and not owned.tensors["exp_avg"].any()


def while_training(changed: Fields, folder: Path) -> dict[str, Any]:
    """The same moment saved at once and in the background, with the disk held up while training goes on."""
    with backend_of(changed) as backend:
        take_steps(backend, 2)
        draw()
        save(backend, folder / "sync")
        state, released, real = state_of(backend), threading.Event(), os.fsync

        def held_up(descriptor: int) -> None:
            released.wait(60)
            real(descriptor)

        os.fsync = held_up  # type: ignore[assignment]
        try:
            pending = save(backend, folder / "async", asynchronous=True)
            done_at_once = pending.done()
            reports = take_steps(backend, 2)
            draw()
            still_writing = not pending.done()
            children = len(psutil.Process().children(recursive=True))
        finally:
            released.set()
            pending.wait()
            os.fsync = real
        assert still_writing and pending.done() and all(not report.skipped for report in reports)
        torch.distributed.barrier()
    with backend_of(changed) as backend:
        backend.load_checkpoint(folder / "async")
        assert_equal(state_of(backend), state)
    return {"done at once": done_at_once, "steps meanwhile": len(reports), "children": children}


def broken_saves(changed: Fields, folder: Path) -> dict[str, Any]:
    """Rank 1 may write no file of more than 4 KiB: as if its disk were full."""
    result: dict[str, Any] = {}
    with backend_of(changed) as backend:
        take_steps(backend, 1)
        before = state_of(backend)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if torch.distributed.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        with pytest.raises(OSError) as caught:
            save(backend, folder / "sync")
        result["sync"] = str(caught.value)
        pending = save(backend, folder / "async", asynchronous=True)
        try:
            pending.wait()
            result["async"] = ""
        except OSError as error:
            result["async"] = str(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert_equal(state_of(backend), before)
        save(backend, folder / "again")
        backend.load_checkpoint(folder / "again")
        assert_equal(state_of(backend), before)
    return result
