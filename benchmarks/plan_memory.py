"""What the planner predicts of a rank's memory, held to what real ranks hold: weights, gradients, optimizer, activations.

    python benchmarks/plan_memory.py [--case TP2 ...] [--json FILE] [--into PAGE]

Each case starts its ranks on this machine (gloo, one thread each), builds the real backend around a small model with random weights, takes
two optimizer steps and measures, on every rank,

    weights       memory of all parameters, of trained and of frozen networks
    gradients     megatron-core's gradient buffers; FSDP: the shards' gradients
    optimizer     moments and fp32 masters
    activations   the most that autograd held at once in the second step: every tensor that it saves goes through a hook
                  (torch.autograd.graph.saved_tensors_hooks); each memory counts once, parameters do not count

The prediction is the planner's own, from config.json and the sizes of the mesh. Exit code 1 where one is off by more than 10%.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from refit_launch import Ranks
from refit_output import put_into
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 0.10
KINDS = ("weights", "gradients", "optimizer", "activations")
_MARKS = ("<!-- measured: begin -->", "<!-- measured: end -->")
LENGTH, ROWS = 128, 16
"""Tokens of a row (all are full) and rows of an optimizer step."""
SHAPE = {"num_layers": 4, "hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "ffn": 352, "vocab_size": 1000}


@dataclass(frozen=True)
class Case:
    """Ranks, and what differs from the plain configuration."""

    num_ranks: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    family: str = "llama"


TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
CASES = {
    "1 rank": Case(1),
    "TP2": Case(2, TP2),
    "TP2, sequence parallel": Case(2, TP2 | {"sequence_parallel": True}),
    "PP2": Case(2, PP2),
    "PP2, interleaved": Case(2, PP2 | {"virtual_pipeline_model_parallel_size": 2}),
    "DP2, distributed optimizer": Case(2),
    "DP2, whole optimizer": Case(2, {"use_distributed_optimizer": False}),
    "CP2": Case(2, {"context_parallel_size": 2}),
    "TP2 x PP2": Case(4, TP2 | PP2),
    "full recomputation": Case(1, {"recompute_granularity": "full"}),
    "selective recomputation": Case(1, {"recompute_granularity": "selective"}),
    "bf16, DP2": Case(2, {"params_dtype": "bfloat16"}),
    "bf16, TP2 x PP2, sequence parallel": Case(4, TP2 | PP2 | {"params_dtype": "bfloat16", "sequence_parallel": True}),
    "bf16, TP2 x PP2, full": Case(4, TP2 | PP2 | {"params_dtype": "bfloat16", "recompute_granularity": "full"}),
    "critic and reference": Case(1, {"critic": "separate", "kl_coef": 0.1}),
    "Qwen3, TP2": Case(2, TP2, "qwen3"),
    "Mixtral, EP2": Case(2, {"expert_model_parallel_size": 2}, "mixtral"),
    "FSDP 2": Case(2, {"backend": "fsdp"}),
    "FSDP 2, bf16": Case(2, {"backend": "fsdp", "params_dtype": "bfloat16"}),
    "FSDP 2, full recomputation": Case(2, {"backend": "fsdp", "recompute_granularity": "full"}),
}


# -- on a rank --------------------------------------------------------------------------------------------------------


class MeasuredRank:
    """One training rank of one case: takes its steps when it is built, then answers."""

    def __init__(self, rank: int, num_ranks: int, fields: Mapping[str, Any]) -> None:
        import torch.distributed as dist

        from megatron_ppo.config import Config

        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
        config = Config().replace(**fields)
        backend = _backend(config)
        held = _Held(backend)
        seen = _watch_gradients(backend)
        for step in range(2):
            seen.clear()
            for role in ("actor", "critic") if config.model.critic == "separate" else ("actor",):
                self._step(backend, config, role, held if step else None)
        self._found = {
            "weights": _unique_bytes(_parameters(backend)),
            "gradients": _gradient_bytes(backend) + sum(seen),
            "optimizer": _optimizer_bytes(backend),
            "activations": held.peak,
        }

    def measured(self) -> dict[str, int]:
        """Kind -> bytes."""
        return self._found

    @staticmethod
    def _step(backend: Any, config: Any, role: str, held: _Held | None) -> None:
        from megatron_ppo.losses import make_actor_loss, make_critic_loss
        from megatron_ppo.packing import make_micro_batch

        loss = make_critic_loss(config.algorithm) if role == "critic" else make_actor_loss(config.algorithm, critic_shared=False)
        rows = range(backend.dp_rank, ROWS, backend.dp_size)
        experience, size = _experience(), config.training.micro_batch_size
        cuts = [list(rows)[start : start + size] for start in range(0, len(rows), size)]
        batches = [make_micro_batch(experience, torch.tensor(cut), backend.length_multiple, torch.device("cpu")) for cut in cuts]
        if held is None:
            backend.train_step(role, batches, loss)
            return
        with torch.autograd.graph.saved_tensors_hooks(held.pack, held.unpack):
            backend.train_step(role, batches, loss)


class _Held:
    """Memory that saved tensors keep alive; each counts once, however many tensors share it."""

    def __init__(self, backend: Any) -> None:
        self._parameters = {_storage(tensor) for tensor in _parameters(backend)}
        self._gathered = _gathered_parameters(backend)
        self._users: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._now = 0
        self.peak = 0

    def pack(self, tensor: torch.Tensor) -> Any:
        """Autograd saves a tensor."""
        storage = _storage(tensor)
        if storage in self._parameters or any(storage == _storage(one._unsharded_param) for one in self._gathered):
            return tensor
        if storage not in self._users:
            self._users[storage], self._sizes[storage] = 0, tensor.untyped_storage().nbytes()
            self._now += self._sizes[storage]
            self.peak = max(self.peak, self._now)
        self._users[storage] += 1
        return _Saved(self, tensor, storage)

    @staticmethod
    def unpack(saved: Any) -> torch.Tensor:
        """Autograd takes it back for a moment; it is given up when its node is freed."""
        tensor = saved.tensor if isinstance(saved, _Saved) else saved
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def release(self, storage: int) -> None:
        """One tensor less."""
        self._users[storage] -= 1
        if not self._users[storage]:
            self._now -= self._sizes.pop(storage)
            del self._users[storage]


class _Saved:
    """A saved tensor, for as long as autograd holds it."""

    def __init__(self, held: _Held, tensor: torch.Tensor, storage: int) -> None:
        self._held, self.tensor, self._storage = held, tensor, storage

    def __del__(self) -> None:
        self._held.release(self._storage)


def _backend(config: Any) -> Any:
    if config.parallel.backend == "fsdp":
        from megatron_ppo.backends.fsdp import FSDPBackend

        return FSDPBackend(config, num_optimizer_steps=10)
    from megatron_ppo.backends.megatron import MegatronBackend

    return MegatronBackend(config, num_optimizer_steps=10)


def _experience() -> Any:
    """Full rows, the same on all ranks."""
    from megatron_ppo.types import Experience, TrajectoryBatch

    generator = torch.Generator().manual_seed(1)
    noise = [torch.randn(ROWS, LENGTH, generator=generator) * 0.1 for _ in range(5)]
    half = torch.full((ROWS,), LENGTH // 2)
    trajectories = TrajectoryBatch(
        tokens=torch.randint(3, SHAPE["vocab_size"], (ROWS, LENGTH), generator=generator),
        prompt_lengths=half,
        response_lengths=half,
        rollout_log_probs=noise[0],
        scores=torch.zeros(ROWS),
        truncated=torch.zeros(ROWS, dtype=torch.bool),
        prompt_ids=torch.arange(ROWS),
        sample_indices=torch.zeros(ROWS, dtype=torch.int64),
        version=0,
    )
    return Experience(trajectories, noise[0] - 7, noise[1], returns=noise[2], values=noise[3], ref_log_probs=noise[4] - 7)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _gathered_parameters(backend: Any) -> list[Any]:
    """FSDP's records of its parameters, which know where these lie while they are gathered."""
    modules = [module for network in _networks(backend) if hasattr(network, "root") for module in network.root.modules()]
    groups = [module._get_fsdp_state()._fsdp_param_group for module in modules if hasattr(module, "_get_fsdp_state")]
    return [one for group in groups if group is not None for one in group.fsdp_params]


def _unique_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of tensors that may share memory."""
    sizes = {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in tensors if tensor.numel()}
    return sum(sizes.values())


def _networks(backend: Any) -> list[Any]:
    return list(backend._networks.values())


def _parameters(backend: Any) -> list[torch.Tensor]:
    """The tensors that hold them; of FSDP's the shards."""
    found: list[torch.Tensor] = []
    for network in _networks(backend):
        if hasattr(network, "roles"):
            found += [parameter.data for role in network.roles for parameter in role.parameters()]
        else:
            found += network.shards().values()
    return found


def _gradient_bytes(backend: Any) -> int:
    found: list[torch.Tensor] = []
    for network in _networks(backend):
        if network.optimizer is None:
            continue
        if hasattr(network, "chunks"):  # megatron-core's stay from step to step
            buffers = [buffer for chunk in network.chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
            found += [buffer.grad_data for buffer in buffers]
    return _unique_bytes(found)


def _watch_gradients(backend: Any) -> list[int]:
    """FSDP frees gradients after a step: a list that gets their bytes at the start of each network's step."""
    seen: list[int] = []

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        seen.append(_unique_bytes(parameter.grad for parameter in parameters if parameter.grad is not None))

    for network in _networks(backend):
        if network.optimizer is not None and not hasattr(network, "chunks"):
            network.optimizer._optimizer.register_step_pre_hook(note)
    return seen


def _optimizer_bytes(backend: Any) -> int:
    """Every tensor that torch's optimizers keep and that is no parameter of the network."""
    weights = {_storage(tensor) for tensor in _parameters(backend)}
    found: list[torch.Tensor] = []
    for network in _networks(backend):
        if network.optimizer is None:
            continue
        parts = network.optimizer._parts() if hasattr(network, "chunks") else [network.optimizer._optimizer]
        for part in parts:
            inner = getattr(part, "optimizer", part)
            found += [parameter.data for group in inner.param_groups for parameter in group["params"]]
            found += [tensor for state in inner.state.values() for tensor in state.values() if isinstance(tensor, torch.Tensor)]
    return _unique_bytes(tensor for tensor in found if _storage(tensor) not in weights)


# -- the parent -------------------------------------------------------------------------------------------------------


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    """Predicted and measured bytes of every rank. One launch."""
    from megatron_ppo.config import Config
    from megatron_ppo.plan_memory import predicted_training

    fields = {
        "model_path": str(folder),
        "critic": "none",
        "advantage_estimator": "grpo",
        "lr": 1e-4,
        "micro_batch_size": 4,
        "global_batch_size": ROWS,
        "max_prompt_length": LENGTH // 2,
        "max_response_length": LENGTH // 2,
        "make_vocab_size_divisible_by": 8,
    } | case.fields
    predicted = predicted_training(Config().replace(**fields), case.num_ranks, "hf" if fields.get("backend") == "fsdp" else "local")
    with Ranks(MeasuredRank, case.num_ranks, fields) as ranks:
        measured = ranks.ask("measured")
    return {
        "num_ranks": case.num_ranks,
        "fields": dict(case.fields),
        "ranks": [list(pair) for pair in zip(predicted, measured, strict=True)],
    }


def errors(result: Mapping[str, Any]) -> dict[str, float]:
    """Kind -> predicted / measured - 1 of the rank where it is worst; 0 where both are nothing."""
    worst: dict[str, float] = {}
    for kind in KINDS:
        each = [predicted[kind] / real[kind] - 1 if real[kind] else float(predicted[kind] > 0) for predicted, real in result["ranks"]]
        worst[kind] = max(each, key=abs)
    return worst


def cells(result: Mapping[str, Any]) -> list[str]:
    """``predicted / measured`` of each kind, of the rank where it is worst."""
    found = []
    for kind, off in errors(result).items():
        pairs = [(predicted[kind], real[kind]) for predicted, real in result["ranks"]]
        predicted, real = max(pairs, key=lambda pair: abs(pair[0] / pair[1] - 1) if pair[1] else 0.0)
        found.append(f"{predicted / 1e6:.3f} / {real / 1e6:.3f} MB ({off:+.1%})")
    return found


def table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """A line for each case: bytes of the rank where the prediction is worst, and how far off it is."""
    shown = Table(title="predicted / measured bytes, of the rank where they differ most", title_justify="left")
    shown.add_column("case")
    for kind in KINDS:
        shown.add_column(kind, justify="right")
    for name, result in results.items():
        shown.add_row(name, *cells(result))
    return shown


def markdown(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of ``docs/planner.md``."""
    lines = ["| case | " + " | ".join(KINDS) + " |", "|---" * (len(KINDS) + 1) + "|"]
    for name, result in results.items():
        lines.append(f"| {name} | " + " | ".join(cells(result)) + " |")
    return "\n".join(lines)


def main() -> int:
    """Run the cases; 1 where a prediction is off by more than ``LIMIT``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="*", default=list(CASES), choices=list(CASES), metavar="NAME", help="cases to run; default: all")
    parser.add_argument("--json", type=Path, help="write every rank's bytes into this file")
    parser.add_argument("--into", type=Path, help="page whose table, between two marks, to replace")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    from toy_models import make_toy

    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as root:
        for name in options.case:
            case = CASES[name]
            folder = Path(root) / case.family
            if not folder.exists():
                make_toy(folder, case.family, **SHAPE)  # type: ignore[arg-type]
            results[name] = run_case(case, folder)
            print(name, {kind: f"{off:+.1%}" for kind, off in errors(results[name]).items()}, file=sys.stderr, flush=True)
    Console(width=190).print(table(results))
    if options.json is not None:
        options.json.write_text(json.dumps({"limit": LIMIT, "shape": SHAPE, "cases": results}, indent=1) + "\n", encoding="utf-8")
    if options.into is not None:
        put_into(options.into, markdown(results), _MARKS)
    off = [
        f"{name}: {kind} {error:+.1%}" for name, result in results.items() for kind, error in errors(result).items() if abs(error) > LIMIT
    ]
    print("all within 10%" if not off else "more than 10% off: " + "; ".join(off))
    return int(bool(off))


if __name__ == "__main__":
    sys.exit(main())
