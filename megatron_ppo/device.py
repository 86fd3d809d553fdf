"""The only file that knows whether there is a GPU.

Everything else asks here for its device, its collective backend, and a megatron-core that imports. On a machine without CUDA
``prepare_megatron`` installs stand-ins for the CUDA calls that megatron-core makes unconditionally. Each stands below with its
reason, and they act only when the caller is megatron-core itself: anybody else who asks for CUDA still gets torch's own
error, and ``torch.cuda.is_available()`` stays False. Nothing here changes a number.

Left out: process groups (``world.py``, ``backends/megatron_setup.py``).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch.utils._device import _device_constructors

# -- what there is ----------------------------------------------------------------------------------------------------


def has_cuda() -> bool:
    """Whether this process can use a CUDA device."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """The device of this rank: the CPU, or the GPU numbered LOCAL_RANK (number 0 where the launcher shows each rank only
    its own).

    ``ValueError`` where the node shows several GPUs, but fewer than it has ranks, or one GPU to all of its ranks.
    """
    if not has_cuda():
        return torch.device("cpu")
    local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    shown_its_own = count == 1 and bool(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if local_rank >= count and not shown_its_own:
        raise ValueError(
            f"LOCAL_RANK {local_rank} has no GPU: this node shows {count}. "
            f"Start at most {count} ranks here, or widen CUDA_VISIBLE_DEVICES (empty: run on the CPU)"
        )
    return torch.device("cuda", 0 if shown_its_own else local_rank)


def bind_device() -> torch.device:
    """Make ``device()`` the current CUDA device, once, before any process group is made. Does nothing on a CPU."""
    this = device()
    if this.type == "cuda":
        # Read when CUDA starts. Tensor-parallel overlap needs one hardware queue, and megatron warns where this is not set.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        torch.cuda.set_device(this)
        os.environ["LOCAL_RANK"] = str(this.index)  # vLLM takes it as the number of a visible device
    return this


def process_group_backend() -> Literal["nccl", "gloo"]:
    """Backend of the collectives on ``device()``."""
    return "nccl" if has_cuda() else "gloo"


def synchronize() -> None:
    """Wait until the device has done all work given to it. CPU work is in program order."""
    if has_cuda():
        torch.cuda.synchronize()


def has_transformer_engine() -> bool:
    """Whether Transformer Engine can be used: installed with its torch extension, and a CUDA device to run on."""
    return has_cuda() and _imports("transformer_engine.pytorch")


def apex_flavour() -> Literal["nvidia", "impostor"] | None:
    """Which ``apex`` is installed, told by its files, without importing it.

    NVIDIA Apex (fused optimizers) is not on PyPI; the project of that name there is a toolkit for the Pyramid web framework.
    """
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    is_nvidia = any((folder / "multi_tensor_apply").is_dir() and (folder / "optimizers").is_dir() for folder in folders)
    return "nvidia" if is_nvidia else "impostor"


def has_nvidia_apex() -> bool:
    """Whether NVIDIA Apex can be used: the right one, importable, and a CUDA device to run on."""
    return has_cuda() and apex_flavour() == "nvidia" and _imports("apex")


def report() -> str:
    """One line for the start of a run: device, versions, and which optional accelerators are in use."""
    where = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if has_cuda() else "CPU (no CUDA device)"
    apex = {"nvidia": "installed", "impostor": "impostor from PyPI (not NVIDIA's)", None: "absent"}[apex_flavour()]
    parts = [
        where,
        f"{process_group_backend()} collectives",
        f"torch {torch.__version__}",
        f"megatron-core {_version('megatron-core')}",
        f"transformers {_version('transformers')}",
        f"Transformer Engine {_version('transformer_engine') if has_transformer_engine() else 'not used'}",
        f"NVIDIA Apex {apex if has_cuda() or apex_flavour() != 'nvidia' else 'not used'}",
    ]
    return ", ".join(parts)


def _imports(module: str) -> bool:
    try:
        importlib.import_module(module)
    except (ImportError, OSError):  # OSError: its shared library is built for another CUDA
        return False
    return True


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


# -- state that other libraries overwrite -----------------------------------------------------------------------------


@contextlib.contextmanager
def preserved_global_state() -> Iterator[None]:
    """Leave Python's, numpy's and torch's random state and ``torch.cuda.Event`` as they were.

    For colocated runs: building a vLLM engine seeds all of them anew, and on a CPU it puts its own class in the place of
    ``torch.cuda.Event``.
    """
    import numpy

    saved_random, saved_numpy, saved_torch = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    saved_cuda = torch.cuda.get_rng_state_all() if has_cuda() else []
    saved_event = torch.cuda.Event
    try:
        yield
    finally:
        random.setstate(saved_random)
        numpy.random.set_state(saved_numpy)
        torch.set_rng_state(saved_torch)
        if saved_cuda:
            torch.cuda.set_rng_state_all(saved_cuda)
        torch.cuda.Event = saved_event  # type: ignore[misc]


# -- megatron-core ----------------------------------------------------------------------------------------------------

_MEGATRON_MODULES = (
    "megatron.core.parallel_state",
    "megatron.core.tensor_parallel",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.distributed",
    "megatron.core.pipeline_parallel",
)
"""Imported under the filters of ``prepare_megatron``: these warn, or compile, while they are imported."""


@functools.cache
def prepare_megatron() -> None:
    """Make megatron-core importable and quiet here, and import it. Call before any other import of ``megatron``; idempotent.

    ``RuntimeError`` where ``apex`` is not NVIDIA's (megatron-core would take it for that), or where megatron was imported
    before the stand-ins could be installed.
    """
    if apex_flavour() == "impostor":
        raise RuntimeError(
            "the installed package 'apex' is not NVIDIA Apex, but megatron-core would take it for that. "
            "Remove it: pip uninstall apex (NVIDIA's is optional and built from its source)"
        )
    if not has_cuda():
        if "megatron.core" in sys.modules:
            raise RuntimeError("megatron.core was imported before device.prepare_megatron(), which it needs on a machine without CUDA")
        _install_stand_ins()
    # On a GPU ``bind_device`` has set it in time; on a CPU only megatron's warning is at stake.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with _without_compiler(), warnings.catch_warnings():
        _filter_import_warnings()
        for module in _MEGATRON_MODULES:
            importlib.import_module(module)
    _repair_mixtures()
    _filter_runtime_warnings()


def _filter_import_warnings() -> None:
    """Warnings of megatron-core's import that a user cannot act on; everything else passes."""
    # Both are optional and need CUDA; ``report`` says whether they are used.
    warnings.filterwarnings("ignore", message=r"(Transformer Engine and )?Apex (is|are) not installed")
    warnings.filterwarnings("ignore", message=r"transformer_engine.* is not installed")
    # megatron-core importing its own deprecated modules and torch's deprecated script compiler.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"megatron\.core")
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.jit")
    warnings.filterwarnings("ignore", message=r"(?s)The 'megatron\.core\.transformer\.custom_layers")


def _filter_runtime_warnings() -> None:
    """Warnings of megatron-core's collectives and optimizers that a user cannot act on; everything else passes."""
    # torch 2.13 renames these functions; the calls are megatron-core's.
    warnings.filterwarnings("ignore", category=FutureWarning, message=r".*(reduce_scatter_tensor|all_gather_into_tensor)")
    # megatron-core reads checkpoints by a name of torch's function that will go.
    warnings.filterwarnings("ignore", category=FutureWarning, message=r"`load_state_dict` is deprecated", module=r"megatron\.core")
    # megatron's optimizer looks at ``.grad`` of its own shards of a parameter, which are not leaves.
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed")
    # Experts that are not cut over tensor-parallel ranks: megatron-core makes their layers with the settings of attention, which are.
    warnings.filterwarnings("ignore", message=r"`sequence_parallel` is set to `True`, but tensor model parallel size is 1")
    # megatron-core frees its gradient buffers through torch's older name of a storage.
    warnings.filterwarnings("ignore", message=r"TypedStorage is deprecated", module=r"megatron\.core")
    # Said to everybody who recomputes attention; it is about an attention that is not there.
    if not has_transformer_engine():
        warnings.filterwarnings("ignore", message=r"If you are using transformer_engine as the transformer implementation, the core_attn")


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """On a CPU ``torch.compile`` is the identity while megatron is imported.

    megatron-core decorates small functions with it at import; that alone loads dynamo and inductor (1.3 s a rank), and
    the first call would start a C++ compiler for no gain. Eager code computes the same.
    """
    if has_cuda():
        yield
        return
    compiler = torch.compile
    torch.compile = _identity_compiler  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compiler


def _identity_compiler(function: Any = None, **_: object) -> Any:
    return function if function is not None else (lambda inner: inner)


def _repair_mixtures() -> None:
    """What megatron-core's mixtures of experts lack without Transformer Engine, and without CUDA."""
    moe_utils, token_dispatcher = (
        importlib.import_module(f"megatron.core.transformer.moe.{name}") for name in ("moe_utils", "token_dispatcher")
    )
    # The router asks whether this is None, but where Transformer Engine is absent the name is not bound at all.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]
    # The dispatcher wants counts of tokens as numpy arrays (they are sizes of messages), but converts CUDA tensors only.
    if not has_cuda():
        token_dispatcher.maybe_move_tensor_to_cpu = _on_host  # type: ignore[attr-defined]


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """``moe_utils.maybe_move_tensor_to_cpu`` for a tensor that is on the CPU already."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


# -- stand-ins for CUDA -----------------------------------------------------------------------------------------------


class _Stream:
    """Stand-in for ``torch.cuda.Stream``: CPU work is in program order, so that there is nothing to wait for."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: object) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def record_event(self, event: _Event | None = None) -> _Event:
        """A mark in program order."""
        return event if event is not None else _Event()

    def query(self) -> bool:
        """All work is done."""
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None


class _Event:
    """Stand-in for ``torch.cuda.Event``: whatever came before it in the program has happened."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record(self, stream: object = None) -> None:
        """Nothing to mark."""

    def wait(self, stream: object = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """It has happened."""
        return True


class _Generators:
    """Stand-in for ``torch.cuda.default_generators``: whatever the device, its generator is the CPU's."""

    def __getitem__(self, _: object) -> torch.Generator:
        return torch.default_generator


class _TypeName(str):
    """A tensor's type name that equals its CUDA spelling too."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and _plain(self) == _plain(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(_plain(self))


def _plain(type_name: str) -> str:
    return str.replace(type_name, "torch.cuda.", "torch.")


def _install_stand_ins() -> None:
    cpu = torch.device("cpu")
    default_stream = _Stream()

    # ``device=`` of every buffer that megatron makes.
    _stand_in(torch.cuda, "current_device", lambda: cpu)
    # Point-to-point communication and checkpoints wait for the device.
    _stand_in(torch.cuda, "synchronize", lambda *_: None)
    _stand_in(torch.cuda, "current_stream", lambda *_: default_stream)
    _stand_in(torch.cuda, "default_stream", lambda *_: default_stream)
    _stand_in(torch.cuda, "stream", lambda stream: stream if stream is not None else default_stream)
    torch.cuda.Stream = _Stream  # type: ignore[assignment,misc]
    torch.cuda.Event = _Event  # type: ignore[assignment,misc]
    # megatron's tracker of random states forks the CUDA generator: here, the CPU's.
    torch.cuda.default_generators = _Generators()  # type: ignore[assignment]
    _stand_in(torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state())
    _stand_in(torch.cuda.random, "get_rng_state", lambda *_, **__: torch.get_rng_state())
    _stand_in(torch.cuda, "set_rng_state", lambda state, *_, **__: torch.set_rng_state(state))
    _stand_in(torch.cuda, "manual_seed", torch.default_generator.manual_seed)
    # The tracker defers its work until CUDA is initialised, which never happens here.
    _stand_in(torch.cuda, "_lazy_call", lambda call, **_: call())
    # Tied embeddings and the exchange of checkpoint shards move tensors to "their" device, where they are already.
    _stand_in(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor)
    # Optimizers and clipping compare ``param.type()`` with 'torch.cuda.FloatTensor'.
    original_type = torch.Tensor.type
    _stand_in(torch.Tensor, "type", lambda tensor, *args, **options: _named(original_type(tensor, *args, **options)))
    # ``with torch.device(...)`` knows torch's factories by identity, from a list that it makes at its first use: let it make that now.
    # Made later it would hold the stand-ins, and transformers, which builds models under ``torch.device("meta")``, would leave
    # rotary frequencies uninitialised.
    _device_constructors()
    # Schedules, optimizers, clipping and masks make small tensors with a literal device="cuda", or pin them for a copy to it.
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like"):
        _stand_in(torch, name, _on_cpu(getattr(torch, name)))
    # Tensor-parallel ranks that share experts exchange different numbers of tokens: NCCL takes parts of unlike size, gloo does not.
    _stand_in(torch.distributed, "all_gather", _all_gather_uneven(torch.distributed.all_gather))
    _stand_in(torch.distributed, "reduce_scatter", _reduce_scatter_uneven)


def _named(result: Any) -> Any:
    """A type name (``tensor.type()``) matches both spellings; a converted tensor (``tensor.type(dtype)``) is itself."""
    return _TypeName(result) if isinstance(result, str) else result


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> Any:
        where = None if device is None or str(device).startswith("cuda") else device
        return factory(*args, device=where, **options)

    return make


def _all_gather_uneven(even: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.distributed.all_gather`` that pads parts of unlike first dim to the largest."""

    def gather(outputs: list[torch.Tensor], part: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({output.shape for output in outputs}) == 1:
            return even(outputs, part, group=group, async_op=async_op)
        assert not async_op
        rows = max(output.shape[0] for output in outputs)
        padded = part.new_zeros(rows, *part.shape[1:])
        padded[: part.shape[0]] = part
        received = [torch.empty_like(padded) for _ in outputs]
        even(received, padded, group=group)
        for output, whole in zip(outputs, received, strict=True):
            output.copy_(whole[: output.shape[0]])
        return None

    return gather


def _reduce_scatter_uneven(output: torch.Tensor, parts: list[torch.Tensor], group: Any = None) -> None:
    """``torch.distributed.reduce_scatter`` (a sum) of parts of any first dims, as an all-reduce of all of them."""
    whole = torch.cat(parts)
    torch.distributed.all_reduce(whole, group=group)
    output.copy_(whole.split([part.shape[0] for part in parts])[torch.distributed.get_rank(group)])


def _stand_in(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Let calls of ``owner.name`` that come from megatron-core go to ``replacement``; all others go where they always went."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        chosen = replacement if caller.startswith("megatron.") else original
        return chosen(*args, **options)

    setattr(owner, name, call)
