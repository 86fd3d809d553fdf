"""The quickstart's job: make the inputs, start one torchrun, show the learning curve. Called by quickstart.sh after the set-up."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ppo.config import Config

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mesh:
    """Sizes of both meshes; ``--mesh tp=2,replicas=2`` sets some of them, ``--mesh tp=2,colocated`` makes both meshes one."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    dp: int = 1
    rollout_tp: int = 1
    replicas: int = 1
    colocated: bool = False
    """The same ranks train and sample; their number says how many replicas there are."""

    @property
    def rollout_world_size(self) -> int:
        """Ranks that sample and do nothing else."""
        return 0 if self.colocated else self.rollout_tp * self.replicas

    @property
    def world_size(self) -> int:
        """Ranks of the launch."""
        return self.tp * self.pp * self.cp * self.dp + self.rollout_world_size

    def flags(self) -> list[str]:
        """Flags of ``megatron_ppo train``."""
        virtual = ["--virtual-pipeline-model-parallel-size", str(self.vpp)] if self.vpp > 1 else []
        return [
            *("--tensor-model-parallel-size", str(self.tp)),
            *("--pipeline-model-parallel-size", str(self.pp)),
            *("--context-parallel-size", str(self.cp)),
            *("--rollout-tensor-parallel-size", str(self.rollout_tp)),
            *("--rollout-world-size", str(self.rollout_world_size)),
            *virtual,
        ]


DEFAULT_MESH = {
    ("tiny", "megatron"): Mesh(tp=2, replicas=2),
    ("tiny", "fsdp"): Mesh(dp=2, replicas=2),
    ("smollm2", "megatron"): Mesh(pp=2),
    ("smollm2", "fsdp"): Mesh(dp=2),
}
"""(model, training backend) -> mesh."""


def parse_mesh(text: str) -> Mesh:
    """``tp=2,pp=2,replicas=2`` or ``tp=2,colocated`` as a mesh; sizes that are not named are 1."""
    names = [f.name for f in fields(Mesh) if f.name != "colocated"]
    parts = text.split(",")
    colocated = parts.count("colocated") == 1
    sizes: dict[str, int] = {}
    for part in parts:
        if part == "colocated" and colocated:
            continue
        name, _, size = part.partition("=")
        if name not in names or not size.isdigit() or int(size) < 1 or name in sizes:
            raise argparse.ArgumentTypeError(
                f"{part!r}: expected SIZE=NUMBER with each size at most once, of {', '.join(names)}, or the word colocated"
            )
        sizes[name] = int(size)
    if colocated and "replicas" in sizes:
        raise argparse.ArgumentTypeError("replicas are not chosen where colocated: training ranks / rollout_tp; leave them out")
    return Mesh(**sizes, colocated=colocated)


def main() -> int:
    """Command line; the exit code of the run."""
    parser = argparse.ArgumentParser(
        prog="bash scripts/quickstart.sh",
        description="Run PPO on a small model. Flags that are not listed here go to `python -m megatron_ppo train`.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", choices=["tiny", "smollm2"], default="tiny", help="a small random Llama, or SmolLM2-135M-Instruct")
    parser.add_argument(
        "--mesh",
        type=parse_mesh,
        help="sizes, each 1 where not named, e.g. tp=2,pp=2,replicas=2 (of tp, pp, vpp, cp, dp, rollout_tp, replicas), "
        "or tp=2,colocated where the same ranks train and sample; default: tp=2,replicas=2, and pp=2 for smollm2; dp=2 for fsdp",
    )
    parser.add_argument("--backend", choices=["megatron", "fsdp"], default="megatron", help="what trains (default: megatron)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the initial weights, the data and the run (default: 1)")
    parser.add_argument("--run-dir", type=Path, help="run folder (default: runs/quickstart, runs/smollm2)")
    arguments, train_flags = parser.parse_known_args()
    from megatron_ppo.config_io import parse_arguments  # after --help, which needs no set-up

    mesh = arguments.mesh or DEFAULT_MESH[arguments.model, arguments.backend]
    run_dir = arguments.run_dir or Path("runs") / ("quickstart" if arguments.model == "tiny" else arguments.model)
    inputs = Path("runs") / "inputs" / f"{arguments.model}-seed{arguments.seed}"
    flags = [
        *("--config", f"examples/{arguments.model}.yaml"),
        *("--model-path", str(inputs / "model"), "--prompt-data", str(inputs / "prompts.jsonl")),
        *("--run-dir", str(run_dir), "--seed", str(arguments.seed), "--backend", arguments.backend),
        *mesh.flags(),
        *train_flags,
    ]
    os.chdir(ROOT)
    config = parse_arguments(flags, program="bash scripts/quickstart.sh")
    num_ranks = count_ranks(config, mesh.dp)
    make_inputs(arguments.model, inputs, arguments.seed)
    try:
        config.validate(num_ranks)  # the ranks do it too, but here the words stand alone
    except ValueError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 2
    started = time.time()
    code = launch(num_ranks, flags)
    if (run_dir / "metrics.jsonl").is_file() and (run_dir / "metrics.jsonl").stat().st_mtime >= started:
        show(run_dir)
    return code


def count_ranks(config: Config, data_parallel_size: int) -> int:
    """Ranks that the configuration asks for: a flag given by hand stands above the mesh."""
    return config.model_parallel_size * data_parallel_size + config.parallel.rollout_world_size


def make_inputs(model: str, folder: Path, seed: int) -> None:
    """Model, tokenizer and prompts, unless this recipe has made them before; whole or not at all."""
    script = ROOT / "scripts" / "quickstart_assets.py"
    recipe = hashlib.sha256(script.read_bytes()).hexdigest()
    mark = folder / "recipe"
    if mark.is_file() and mark.read_text() == recipe:
        return
    print(f"quickstart: making model, tokenizer and prompts in {folder}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, str(script), model, str(folder), "--seed", str(seed)], check=True)
    mark.write_text(recipe)


def launch(num_ranks: int, train_flags: list[str]) -> int:
    """One torchrun with all ranks on this machine."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)),
        *("--no-python", sys.executable, "-m", "megatron_ppo", "train"),
        *train_flags,
    ]
    print(f"quickstart: {num_ranks} ranks: torchrun {' '.join(command[3:])}", flush=True)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "CUDA_VISIBLE_DEVICES": "",  # the environment of setup.sh is for CPU ranks, also on a machine with a GPU
    }
    process = subprocess.Popen(command, env=environment)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        return process.wait()
    except KeyboardInterrupt:  # the ranks have heard it too: they end the iteration, write their records and go
        print("quickstart: stopping after this iteration; press Ctrl-C again to stop at once", flush=True)
    try:
        return process.wait()
    except KeyboardInterrupt:
        print("quickstart: stopping at once; iterations after the last checkpoint are lost", flush=True)
    process.kill()
    process.wait()
    return 128 + signal.SIGINT


def show(run_dir: Path) -> None:
    """The learning curve, the time split, and where everything lies."""
    from megatron_ppo.learning_curve import draw_text, read_metrics, time_split

    records = read_metrics(run_dir)
    if not records:
        return
    if len(records) > 1:
        print(draw_text(records))
    print(time_split(records))
    first, last = records[0]["reward/mean"], records[-1]["reward/mean"]
    print(f"mean reward {first:.3f} -> {last:.3f}")
    print(f"files in {run_dir}: " + ", ".join(sorted(path.name for path in run_dir.iterdir())))


if __name__ == "__main__":
    sys.exit(main())
