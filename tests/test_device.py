"""What this machine has, which ``apex`` is installed, and that the CUDA stand-ins serve megatron-core and nobody else."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from toy_models import make_toy

from megatron_ppo import device

no_cuda = pytest.mark.skipif(device.has_cuda(), reason="there is a CUDA device here")


def run_python(script: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter with all warnings shown but those that torch's own import causes."""
    root = Path(__file__).parent.parent
    command = [sys.executable, "-W", "always", "-W", "ignore::DeprecationWarning:torch", "-W", "ignore::DeprecationWarning:importlib", "-c"]
    return subprocess.run([*command, script], capture_output=True, text=True, cwd=root, timeout=100)


def package(root: Path, *files: str) -> Path:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    return root


NVIDIA = ("apex/__init__.py", "apex/multi_tensor_apply/__init__.py", "apex/optimizers/__init__.py", "apex/normalization/__init__.py")
IMPOSTOR = ("apex/__init__.py", "apex/models.py", "apex/views.py", "apex/lib/__init__.py", "apex/ext/__init__.py")


@pytest.mark.parametrize(("files", "flavour"), [(NVIDIA, "nvidia"), (IMPOSTOR, "impostor")])
def test_apex_is_told_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...], flavour: str) -> None:
    monkeypatch.syspath_prepend(str(package(tmp_path, *files)))
    assert device.apex_flavour() == flavour


def test_impostor_apex_is_refused_before_megatron_takes_it_for_nvidias(tmp_path: Path) -> None:
    package(tmp_path, *IMPOSTOR)
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from megatron_ppo import device; print(device.report()); "
    result = run_python(script + "device.prepare_megatron()")
    assert "impostor from PyPI" in result.stdout
    assert result.returncode != 0
    assert "not NVIDIA Apex" in result.stderr and "pip uninstall apex" in result.stderr


@no_cuda
def test_cpu_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert device.device() == device.bind_device() == torch.device("cpu")
    assert device.process_group_backend() == "gloo"
    assert not device.has_transformer_engine() and not device.has_nvidia_apex()
    assert "CPU" in device.report() and torch.__version__ in device.report()


def test_gpus_are_numbered_by_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule alone; no CUDA is touched by naming a device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert device.device() == torch.device("cuda", 3)
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(ValueError, match="LOCAL_RANK 4 has no GPU: this node shows 4"):
        device.device()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")  # the launcher shows each rank its own
    assert device.device() == torch.device("cuda", 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")  # all ranks of the node would share the one there is
    with pytest.raises(ValueError, match="LOCAL_RANK 4 has no GPU: this node shows 1"):
        device.device()


STAND_INS = """
import torch
compiler, zeros = torch.compile, torch.zeros
from megatron_ppo import device
device.prepare_megatron()
device.prepare_megatron()
assert not torch.cuda.is_available() and torch.compile is compiler
for call in (lambda: torch.zeros(1, device="cuda"), lambda: torch.zeros(1).cuda(), torch.cuda.current_device):
    try:
        call()
    except (AssertionError, RuntimeError) as error:
        assert "CUDA" in str(error) or "NVIDIA" in str(error), error
    else:
        raise SystemExit("CUDA was pretended to a caller that is not megatron")
assert torch.zeros(1).type() != "torch.cuda.FloatTensor"
inside = {"__name__": "megatron.core.something", "torch": torch}
assert eval('torch.zeros(2, device="cuda")', inside).device.type == "cpu"
assert eval('torch.tensor([1.0], device="cpu", pin_memory=True).cuda()', inside).device.type == "cpu"
assert eval('torch.zeros(1).type() == "torch.cuda.FloatTensor"', inside)
assert eval('torch.zeros(1).bfloat16().type() in ["torch.cuda.HalfTensor", "torch.cuda.BFloat16Tensor"]', inside)
assert eval('torch.zeros(1).type() not in ["torch.cuda.HalfTensor"]', inside)
assert eval('torch.zeros(1).type(torch.int64)', inside).dtype == torch.int64
assert eval('torch.zeros(2, device="meta")', inside).device.type == "meta"
assert eval('torch.cuda.current_device()', inside) == torch.device("cpu")
eval('torch.cuda.manual_seed(7)', inside)
a = torch.rand(3)
torch.manual_seed(7)
assert torch.equal(a, torch.rand(3))
"""


@no_cuda
def test_stand_ins_serve_megatron_alone_and_the_import_is_quiet() -> None:
    result = run_python(STAND_INS)
    assert result.returncode == 0, result.stderr
    noise = [line for line in result.stderr.splitlines() if "Warning" in line]
    assert noise == []


@no_cuda
def test_transformers_models_are_whole_beside_the_stand_ins(tmp_path: Path) -> None:
    """transformers builds models under a device context; its rotary buffers come from factories that the stand-ins replace."""
    folder = make_toy(tmp_path)
    script = f"""
import torch
from megatron_ppo import device
device.prepare_megatron()
from transformers import AutoModelForCausalLM
with torch.device("meta"):
    assert torch.arange(3).is_meta and torch.empty(2).is_meta
model = AutoModelForCausalLM.from_pretrained({str(folder)!r})
size = 2 * len(model.model.rotary_emb.inv_freq)
expected = 10000.0 ** (-torch.arange(0, size, 2) / size)
torch.testing.assert_close(model.model.rotary_emb.inv_freq, expected)
"""
    result = run_python(script)
    assert result.returncode == 0, result.stderr


def test_megatron_imported_too_early_is_an_error() -> None:
    result = run_python("import megatron.core; from megatron_ppo import device; device.prepare_megatron()")
    assert result.returncode != 0
    assert "imported before device.prepare_megatron()" in result.stderr


def test_warnings_that_a_user_can_act_on_pass() -> None:
    script = """
from megatron_ppo import device
device.prepare_megatron()
import warnings
from megatron.core.transformer.transformer_config import TransformerConfig
warnings.warn("The learning rate is 0")
TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, cuda_graph_scope="full")
"""
    result = run_python(script)
    assert result.returncode == 0, result.stderr
    assert "The learning rate is 0" in result.stderr and "full scope is deprecated" in result.stderr


def test_global_state_is_preserved() -> None:
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    expected, event = (random.random(), numpy.random.rand(), torch.rand(1)), torch.cuda.Event
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    with device.preserved_global_state():
        random.seed(9)
        numpy.random.seed(9)
        torch.manual_seed(9)
        torch.cuda.Event = object  # type: ignore[assignment,misc]
    assert (random.random(), numpy.random.rand(), torch.rand(1)) == expected
    assert torch.cuda.Event is event


@pytest.mark.gpu
@pytest.mark.skipif(not device.has_cuda(), reason="needs a CUDA device")
def test_gpu_rank() -> None:
    assert device.bind_device().type == "cuda"
    assert device.process_group_backend() == "nccl"
    before = torch.zeros
    device.prepare_megatron()
    assert torch.zeros is before  # no stand-ins where CUDA is
    device.synchronize()


@pytest.mark.gpu
@pytest.mark.skipif(not device.has_transformer_engine(), reason="needs Transformer Engine")
def test_transformer_engine_is_used() -> None:
    from megatron_ppo.config import Config
    from megatron_ppo.roles.megatron_config import transformer_impl

    assert transformer_impl(Config()) == "transformer_engine"
    assert "Transformer Engine not used" not in device.report()


@pytest.mark.gpu
@pytest.mark.skipif(not device.has_nvidia_apex(), reason="needs NVIDIA Apex")
def test_nvidia_apex_is_used_by_megatrons_optimizer() -> None:
    device.prepare_megatron()
    from megatron.core import optimizer

    assert optimizer.Adam.__module__.startswith(("apex", "transformer_engine"))
