"""What the ranks of the Megatron parity tests do: a few optimizer steps on fixed data, and everything that came of it.

``run_cases`` is one launch: it builds and tears down a backend a case, so that many topologies and settings are proved by one start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from megatron_ppo.backends.base import LossMetrics, TrainingBackend
from megatron_ppo.config import Config
from megatron_ppo.resharding.layout import Block
from megatron_ppo.types import MicroBatch, RoleOutput, Sampling

ROWS, LENGTH, VOCAB = 8, 16, 130
PROMPT_LENGTHS = (3, 4, 2, 5, 3, 6, 2, 4)
RESPONSE_LENGTHS = (9, 5, 12, 1, 10, 10, 3, 7)


@dataclass(frozen=True)
class Case:
    """One backend: settings, and how the fixed rows are cut into micro-batches."""

    fields: Mapping[str, Any]
    """Flat configuration fields."""
    rows: tuple[int, ...] = tuple(range(ROWS))
    """Rows of the fixed batch that the optimizer steps learn from; split evenly over replicas unless ``rows_by_replica``."""
    rows_by_replica: tuple[tuple[int, ...], ...] | None = None
    micro_batch_size: int = 4
    num_dummies: tuple[int, ...] = ()
    """Dummy micro-batches added at the end, one number a replica."""
    num_steps: int = 2
    poison: Literal["none", "no_tokens", "nan"] = "none"
    """Makes the second step one that must be skipped."""
    roles: tuple[Literal["actor", "critic"], ...] = ("actor",)
    export: str | None = None
    """Folder into which the roles are exported after the steps, one folder a role."""
    generate: bool = False
    """Also sample greedily from the actor after the steps: 5 tokens on the first replica, 1 on all others."""


def fields(models: Mapping[str, str], model: str = "llama", **changes: object) -> dict[str, object]:
    """SGD, so that weights can be compared closely; no critic; a vocabulary of 130 rows padded as little as possible."""
    start: dict[str, object] = {
        "model_path": models[model],
        "critic": "none",
        "optimizer": "sgd",
        "use_distributed_optimizer": False,
        "lr": 0.05,
        "critic_lr": 0.05,
        "make_vocab_size_divisible_by": 4,
    }
    return start | changes


def adam(models: Mapping[str, str], **changes: object) -> dict[str, object]:
    """Adam at a rate at which two steps change the weights visibly."""
    return fields(models, **({"optimizer": "adam", "lr": 1e-3, "critic_lr": 1e-3, "use_distributed_optimizer": True} | changes))


def fixed_rows(rows: Sequence[int]) -> MicroBatch:
    """Rows of a batch that is the same everywhere, cut to the longest of them."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=generator)
    noise = [torch.randn(ROWS, LENGTH, generator=generator) for _ in range(4)]
    prompts, responses = torch.tensor(PROMPT_LENGTHS), torch.tensor(RESPONSE_LENGTHS)
    lengths = prompts + responses
    positions = torch.arange(LENGTH)[None, :]
    tokens = torch.where(positions < lengths[:, None], tokens, torch.zeros_like(tokens))
    labels = torch.cat([tokens[:, 1:], torch.zeros(ROWS, 1, dtype=torch.long)], dim=1)
    mask = (positions + 1 >= prompts[:, None]) & (positions + 1 < lengths[:, None])
    whole = MicroBatch(
        tokens=tokens,
        labels=labels,
        loss_mask=mask,
        rows=torch.arange(ROWS),
        lengths=lengths,
        old_log_probs=-4.9 + 0.1 * noise[0],
        advantages=noise[1],
        returns=noise[2],
        values=0.1 * noise[3],
    )
    chosen = torch.tensor(list(rows))
    return _select(whole, chosen, int(lengths[chosen].max()))


def cut(rows: Sequence[int], micro_batch_size: int, length_multiple: int) -> list[MicroBatch]:
    """Micro-batches of the given rows, each padded only to its own longest row (rounded up)."""
    batches = []
    for start in range(0, len(rows), micro_batch_size):
        part = rows[start : start + micro_batch_size]
        longest = int((torch.tensor(PROMPT_LENGTHS) + torch.tensor(RESPONSE_LENGTHS))[list(part)].max())
        length = -(-longest // length_multiple) * length_multiple
        batches.append(_pad(fixed_rows(part), length))
    return batches


def dummy(batch: MicroBatch) -> MicroBatch:
    """A micro-batch that must count for nothing, with numbers that would show."""
    return dataclasses.replace(batch, loss_mask=torch.zeros_like(batch.loss_mask), rows=torch.full_like(batch.rows, -1))


def ppo_like_loss(output: RoleOutput, batch: MicroBatch) -> tuple[Tensor, Tensor, LossMetrics]:
    """Clipped surrogate with an entropy bonus, and half the squared value error where there are values; summed over valid tokens."""
    mask = batch.loss_mask
    count = mask.sum()
    loss = torch.zeros((), device=mask.device)
    metrics: dict[str, Tensor] = {}
    if output.log_probs is not None and output.entropy is not None:
        assert batch.old_log_probs is not None and batch.advantages is not None
        ratio = torch.exp(torch.where(mask, output.log_probs - batch.old_log_probs, 0.0).clamp(-20, 20))
        surrogate = torch.minimum(ratio * batch.advantages, ratio.clamp(0.8, 1.2) * batch.advantages)
        policy = -torch.where(mask, surrogate + 0.01 * output.entropy, 0.0).sum()
        loss = loss + policy
        metrics["policy_loss"] = torch.stack([policy.detach(), count.float()])
    if output.values is not None:
        assert batch.returns is not None
        value = 0.5 * torch.where(mask, output.values - batch.returns, 0.0).square().sum()
        loss = loss + 0.1 * value
        metrics["value_loss"] = torch.stack([value.detach(), count.float()])
    return loss, count.int(), metrics


def nan_loss(output: RoleOutput, batch: MicroBatch) -> tuple[Tensor, Tensor, LossMetrics]:
    """The loss above, spoilt for row 0 alone: only the replica that holds it sees a NaN of its own."""
    loss, count, metrics = ppo_like_loss(output, batch)
    return loss * (float("nan") if bool((batch.rows == 0).any()) else 1.0), count, metrics


def run_cases(rank: int, world_size: int, cases: Mapping[str, Case]) -> dict[str, dict[str, Any]]:
    """One launch: what each case gave, as seen by this rank (weights only on rank 0, whole and under canonical names)."""
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    try:
        return {name: run_case(case) for name, case in cases.items()}
    finally:
        torch.distributed.destroy_process_group()


def run_case(case: Case, backend_class: type[TrainingBackend] | None = None) -> dict[str, Any]:
    """Log-probs and values before and after, what each step reported, and the weights. ``backend_class``: default Megatron's."""
    from megatron_ppo.backends.megatron import MegatronBackend
    from megatron_ppo.backends.megatron_setup import destroy_megatron

    torch.manual_seed(11)
    backend: Any = (backend_class or MegatronBackend)(Config().replace(**dict(case.fields)), num_optimizer_steps=8)
    try:
        share = len(case.rows) // backend.dp_size
        mine = (
            case.rows_by_replica[backend.dp_rank]
            if case.rows_by_replica is not None
            else case.rows[backend.dp_rank * share : (backend.dp_rank + 1) * share]
        )
        batches = cut(mine, case.micro_batch_size, backend.length_multiple)
        if case.num_dummies:
            batches += [dummy((batches or cut((0,), 1, backend.length_multiple))[0])] * case.num_dummies[backend.dp_rank]
        probe = cut(range(ROWS), 3, backend.length_multiple)
        result: dict[str, Any] = {"before": _outputs(backend, probe, case), "steps": {}, "dp_rank": backend.dp_rank}
        for role in case.roles:
            result["steps"][role] = _steps(backend, role, batches, case)
        result["after"] = _outputs(backend, probe, case)
        result["weights"] = {role: gather_canonical(backend, role) for role in case.roles}
        if case.export is not None:
            result["export fault"] = _export(backend, Path(case.export))
        if case.generate:
            result["generated"] = _generate(backend)
        return result
    finally:
        if backend_class is None:
            destroy_megatron()


def gather_canonical(backend: Any, role: str) -> dict[str, Tensor] | None:
    """Whole tensors by canonical name on rank 0, None elsewhere; every element must come from somewhere, copies must agree."""
    parameters = backend.weights() if role == "actor" else backend.named_parameters(role)
    layout = backend.layout(role)
    assert set(layout.shapes) == set(parameters), set(layout.shapes) ^ set(parameters)
    assert all(tuple(parameters[name].shape) == shape for name, shape in layout.shapes.items())
    mine = [(block.name, block.canonical, _block_values(parameters[block.parameter], block)) for block in layout.blocks]
    everywhere: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, mine)
    if torch.distributed.get_rank() != 0:
        return None
    extent: dict[str, list[int]] = {}
    for name, ranges, _ in [entry for part in everywhere for entry in part]:
        sizes = extent.setdefault(name, [0] * len(ranges))
        extent[name] = [max(size, stop) for size, (_, stop) in zip(sizes, ranges, strict=True)]
    whole = {name: torch.full(sizes, float("nan")) for name, sizes in extent.items()}
    for name, ranges, tensor in [entry for part in everywhere for entry in part]:
        target = _box(whole[name], ranges)
        known = ~target.isnan()
        assert torch.equal(target[known], tensor[known]), f"two ranks hold different values of {name}"
        target.copy_(tensor)
    holes = {name: int(tensor.isnan().sum()) for name, tensor in whole.items() if tensor.isnan().any()}
    assert not holes, f"{role} of {type(backend).__name__}: nobody holds {holes}"
    return whole


def _generate(backend: Any) -> list[list[int]]:
    """Replicas have different numbers of prompts and of tokens to sample."""
    first = backend.dp_rank == 0
    prompts = [[5, 6, 7], [8, 9], [10]] if first else [[5, 6, 7]]
    sampling = Sampling(max_response_length=5, greedy=True, stop_token_ids=frozenset() if first else frozenset(range(VOCAB)))
    return [completion.token_ids for completion in backend.generate(prompts, sampling, seeds=[1, 2, 3][: len(prompts)])]


def _export(backend: Any, folder: Path) -> str:
    """Export actor and critic; a second export into the same folder must fail on every rank: the message it fails with."""
    backend.export_hf(folder / "actor")
    backend.export_hf(folder / "critic", role="critic")
    try:
        backend.export_hf(folder / "actor")
    except ValueError as error:
        return str(error)
    return ""


def _steps(backend: Any, role: Literal["actor", "critic"], batches: list[MicroBatch], case: Case) -> list[Any]:
    reports = []
    for step in range(case.num_steps):
        poisoned = case.poison != "none" and step == 1
        chosen = [dummy(batch) for batch in batches] if poisoned and case.poison == "no_tokens" else batches
        loss = nan_loss if poisoned and case.poison == "nan" else ppo_like_loss
        before = {name: tensor.clone() for name, tensor in backend.named_parameters(role).items()}
        report = backend.train_step(role, chosen, loss, temperature=0.7)
        changed = any(not torch.equal(before[name], tensor) for name, tensor in backend.named_parameters(role).items())
        reports.append((report, changed))
    return reports


def _outputs(backend: Any, probe: list[MicroBatch], case: Case) -> dict[str, Tensor]:
    """Every output of every role, at real positions only, joined over micro-batches."""
    joined: dict[str, Tensor] = {}
    fields = Config().replace(**dict(case.fields))
    roles = ["actor", *(["critic"] if fields.model.critic == "separate" else []), *(["reference"] if fields.uses_reference else [])]
    for role in roles:
        outputs = backend.forward(role, probe, temperature=0.7)
        for name in ("log_probs", "entropy", "values"):
            if getattr(outputs[0], name) is not None:
                joined[f"{role}.{name}"] = torch.cat([_real(getattr(o, name), b) for o, b in zip(outputs, probe, strict=True)])
    if fields.model.reward_model_path is not None:
        joined["scores"] = torch.cat(backend.score(probe))
    return joined


def _real(values: Tensor, batch: MicroBatch) -> Tensor:
    positions = torch.arange(values.shape[1])[None, :]
    return values[positions < batch.lengths[:, None] - 1]


def _block_values(parameter: Tensor, block: Block) -> Tensor:
    """A copy, in the shape of the canonical box: a parameter that stacks experts has a dim more."""
    return _box(parameter, block.local).reshape([stop - start for start, stop in block.canonical]).float().cpu().clone()


def _box(tensor: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    for dim, (start, stop) in enumerate(ranges):
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def _select(batch: MicroBatch, rows: Tensor, length: int) -> MicroBatch:
    picked = {f.name: t[rows] for f in dataclasses.fields(batch) if (t := getattr(batch, f.name)) is not None}
    return dataclasses.replace(batch, **{name: t[:, :length] if t.dim() == 2 else t for name, t in picked.items()})


def _pad(batch: MicroBatch, length: int) -> MicroBatch:
    """Padding with numbers that would show if they were read."""
    padded: dict[str, Tensor] = {}
    for f in dataclasses.fields(batch):
        tensor = getattr(batch, f.name)
        if tensor is not None and tensor.dim() == 2:
            filler = False if tensor.dtype == torch.bool else 1
            padded[f.name] = torch.nn.functional.pad(tensor, (0, length - tensor.shape[1]), value=filler)
    return dataclasses.replace(batch, **padded)


# -- what Hugging Face computes ---------------------------------------------------------------------------------------


@torch.no_grad()
def hugging_face_log_probs(actor: Any) -> Tensor:
    """Log-probs at temperature 0.7 of the fixed rows at their real positions, row by row."""
    found = []
    for row in range(ROWS):
        tokens = fixed_rows([row]).tokens
        logits = actor(tokens).logits[0, :-1].float() / 0.7
        found.append(logits.log_softmax(-1).gather(1, tokens[0, 1:, None]).squeeze(1))
    return torch.cat(found)


@torch.no_grad()
def hugging_face_outputs(actor: Any, critic: Any) -> tuple[Tensor, Tensor]:
    """The log-probs, and the values of the same positions."""
    hidden = [critic.model(fixed_rows([row]).tokens).last_hidden_state for row in range(ROWS)]
    return hugging_face_log_probs(actor), torch.cat([critic.score(one)[0, :-1, 0] for one in hidden])


# -- comparisons ------------------------------------------------------------------------------------------------------


def assert_same(got: dict[str, Any], truth: dict[str, Any], *, weights: float = 1e-5, outputs: float = 1e-5) -> None:
    """Outputs before and after, what the steps reported, and the weights."""
    assert difference(got["before"], truth["before"]) < 1e-5
    assert set(got["steps"]) == set(truth["steps"])
    for role, steps in got["steps"].items():
        for (report, changed), (expected, expected_change) in zip(steps, truth["steps"][role], strict=True):
            assert changed == expected_change and report.skipped == expected.skipped and report.lr == expected.lr
            assert report.grad_norm == pytest.approx(expected.grad_norm, rel=max(1e-5, weights))
            assert report.metrics == pytest.approx(dict(expected.metrics), rel=max(1e-5, weights), abs=1e-5)
        if got["weights"][role] is not None:
            assert difference(got["weights"][role], truth["weights"][role]) < weights
    assert difference(got["after"], truth["after"]) < outputs


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Largest absolute difference; the names must be the same."""
    assert set(one) == set(other)
    return max(float((one[name] - other[name]).abs().max()) for name in one)
