"""Where an iteration's time goes and what a rank holds: Megatron against FSDP2, and training and rollout apart against colocated.

    python benchmarks/backends.py [--json FILE] [--png FILE]            some 8 minutes on two cores that do nothing else

Every case is a real job on the same four ranks, model, prompts and seed: ``megatron_ppo train`` under torchrun, PPO with a separate critic
and a reference, vLLM rollout. Rounds go through all cases, so that what else the machine does hits all alike; each job's first iteration
is left out; seconds are medians over the iterations of all rounds, as ``metrics.jsonl`` has them. ``backends_rank.py`` is what runs on a
rank: the job's own loop, bound to an equal share of the cores, and its memory counted.

Exit code 0: in their first iteration all cases sampled the same tokens, bit for bit, and trained the same within rounding. They must: the
weights are the same, each request has its own seed, and no result depends on a mesh. ``backends_output.py`` makes the tables.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402

from benchmarks.backends_output import draw, memory_table, show, time_table  # noqa: E402
from megatron_ppo.metrics import PHASES  # noqa: E402
from tests.train_support import Processes, make_inputs, read_lines, tiny_flags  # noqa: E402

PROGRAM = Path(__file__).with_name("backends_rank.py")
NUM_RANKS = 4
LAUNCH_TIMEOUT_S = 500.0
SAME = {"loss/policy": 1e-4, "loss/value": 1e-4, "grad_norm": 1e-3, "critic/grad_norm": 1e-3}
"""Metric of the first iteration -> largest relative difference to the first case's."""


@dataclass(frozen=True)
class Case:
    """A job: which ranks train, with what, and which sample."""

    name: str
    backend: str
    num_rollout: int
    """0: all ranks do both."""
    fields: dict[str, object] = field(default_factory=dict, hash=False)


CASES = (
    Case("Megatron TP2 DP2, colocated", "megatron", 0, {"tensor_model_parallel_size": 2}),
    Case("Megatron PP2 DP2, colocated", "megatron", 0, {"pipeline_model_parallel_size": 2}),
    Case("Megatron TP2 PP2, colocated", "megatron", 0, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    Case("FSDP 4, colocated", "fsdp", 0),
    Case("FSDP 2 x 2, colocated", "fsdp", 0, {"fsdp_shard_size": 2}),
    Case("Megatron TP2, 2 + 2 ranks", "megatron", 2, {"tensor_model_parallel_size": 2}),
    Case("FSDP 2, 2 + 2 ranks", "fsdp", 2),
)


@dataclass(frozen=True)
class Job:
    """Sizes that all cases share."""

    hidden: int = 512
    layers: int = 6
    vocab: int = 8192
    iterations: int = 4
    """The first of each launch is left out."""
    prompts: int = 4
    samples: int = 4
    response_length: int = 32
    rollout_backend: str = "vllm"

    def fields(self) -> dict[str, object]:
        """Of the configuration."""
        rows = self.prompts * self.samples
        return {
            "train_iters": self.iterations,
            "prompts_per_iteration": self.prompts,
            "samples_per_prompt": self.samples,
            "global_batch_size": rows,
            "micro_batch_size": max(1, rows // 4),  # the same for all meshes: one pass a rank with DP 4, and a pipeline that can fill
            "max_response_length": self.response_length,
            "num_logged_samples": rows,
            "rollout_backend": self.rollout_backend,
            "kl_coef": 0.01,
            "lr": 1e-5,
            "critic_lr": 1e-5,
            "vllm_overrides": {"kv_cache_memory_bytes": str(64 << 20)},
        }


def make_model(folder: Path, job: Job) -> int:
    """The quickstart's tokenizer and prompts, and a random Llama of the job's sizes. Returns the number of its parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    make_inputs(folder)
    torch.manual_seed(1)
    heads = job.hidden // 64
    sizes: dict[str, Any] = {"hidden_size": job.hidden, "intermediate_size": 64 * round(job.hidden * 8 / 3 / 64)}
    sizes |= {"num_hidden_layers": job.layers, "num_attention_heads": heads, "num_key_value_heads": max(2, heads // 2)}
    sizes |= {"vocab_size": job.vocab, "max_position_embeddings": 256, "tie_word_embeddings": False}
    config = LlamaConfig(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=None)
    network = LlamaForCausalLM(config)
    network.save_pretrained(folder / "model")
    return sum(parameter.numel() for parameter in network.parameters())


def run_job(case: Case, job: Job, inputs: Path, folder: Path) -> dict[str, Any]:
    """One launch to its end: seconds of each iteration but the first, memory of each rank, and what the first iteration gave.

    ``RuntimeError`` with its output where it fails.
    """
    folder.mkdir(parents=True)
    fields: dict[str, object] = job.fields() | case.fields | {"backend": case.backend, "rollout_world_size": case.num_rollout}
    flags = tiny_flags(inputs, folder / "run", **fields)
    with Processes(folder / "log") as processes:
        processes.torchrun(NUM_RANKS, [str(PROGRAM), str(folder), *flags])
        if processes.wait(LAUNCH_TIMEOUT_S) != 0:
            raise RuntimeError(f"{case.name} failed:\n{processes.output()}")
    metrics = read_lines(folder / "run" / "metrics.jsonl")
    samples = [row for row in read_lines(folder / "run" / "samples.jsonl") if row["iteration"] == 0]
    return {
        "seconds": {name: [record[f"time/{name}_s"] for record in metrics[1:]] for name in (*PHASES, "iteration")},
        "ranks": [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(NUM_RANKS)],
        "first": metrics[0],
        "samples": samples,
    }


def run_cases(cases: Sequence[Case], job: Job, rounds: int, folder: Path) -> tuple[int, list[dict[str, Any]]]:
    """(parameters of the actor, one row a case): all cases once a round."""
    inputs = folder / "inputs"
    num_parameters = make_model(inputs, job)
    runs: list[list[dict[str, Any]]] = [[] for _ in cases]
    for number in range(rounds):
        for case, found in zip(cases, runs, strict=True):
            found.append(run_job(case, job, inputs, folder / f"round{number}-{case.name}"))
            seconds = statistics.median(found[-1]["seconds"]["iteration"])
            print(f"round {number + 1}/{rounds}  {case.name:28} {seconds:6.2f} s an iteration", flush=True)
    return num_parameters, [_row(case, found) for case, found in zip(cases, runs, strict=True)]


def _row(case: Case, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    seconds = {name: [value for one in runs for value in one["seconds"][name]] for name in runs[0]["seconds"]}
    ranks = []
    for rank, first in enumerate(runs[0]["ranks"]):
        peaks = [one["ranks"][rank]["peak_resident"] for one in runs]
        ranks.append(first | {"peak_resident": statistics.median(peaks)})
    return {
        "case": case.name,
        "backend": case.backend,
        "colocated": case.num_rollout == 0,
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "all_seconds": seconds,
        "ranks": ranks,
        "first": runs[0]["first"],
        "samples": runs[0]["samples"],
    }


def faults(rows: Sequence[dict[str, Any]]) -> list[str]:
    """In what the cases' first iterations differ from the first case's. They may not."""
    found, truth = [], rows[0]
    for row in rows[1:]:
        if row["samples"] != truth["samples"]:
            found.append(f"{row['case']} sampled other tokens than {truth['case']}")
        for name, tolerance in SAME.items():
            mine, other = row["first"][name], truth["first"][name]
            if not math.isclose(mine, other, rel_tol=tolerance, abs_tol=1e-6):
                found.append(f"{row['case']}: {name} {mine}, but {other} of {truth['case']}")
    return found


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--png", type=Path, help="draw them into this file")
    parser.add_argument("--case", action="append", default=[], help="only cases whose name holds this text; may be repeated")
    parser.add_argument("--rounds", type=int, default=2, help="launches of each case")
    for name in ("hidden", "layers", "vocab", "iterations", "prompts", "samples", "response_length"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Job, name), help="(default: %(default)s)")
    parser.add_argument("--rollout-backend", choices=("vllm", "hf"), default=Job.rollout_backend, help="(default: %(default)s)")
    options = parser.parse_args()
    if options.iterations < 2:
        parser.error("--iterations must be at least 2: the first is left out")
    cases = [case for case in CASES if not options.case or any(text in case.name for text in options.case)]
    if not cases:
        parser.error(f"--case {options.case}: no such case; there are: {', '.join(case.name for case in CASES)}")
    job = Job(**{name: getattr(options, name) for name in vars(Job())})
    with tempfile.TemporaryDirectory(prefix="backends-") as folder:
        num_parameters, rows = run_cases(cases, job, options.rounds, Path(folder))
    show("seconds (medians)", time_table(rows))
    show("MB a rank", memory_table(rows))
    wrong = faults(rows)
    print("\n".join(wrong) if wrong else f"first iteration: the same {len(rows[0]['samples'])} samples and the same training in all cases")
    if options.json:
        about = {"machine": f"{os.cpu_count()} cores, {platform.machine()}", "num_ranks": NUM_RANKS, "rounds": options.rounds}
        kept = [{key: value for key, value in row.items() if key != "samples"} for row in rows]
        found = about | {"parameters": num_parameters, "job": vars(job), "cases": kept, "faults": wrong}
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    if options.png:
        draw(rows, options.png)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
