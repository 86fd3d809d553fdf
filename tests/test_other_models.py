"""Models outside the tables, on FSDP and in a rollout: the same numbers as transformers' own, and exports that it reads back."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_parity_support import (
    Case,
    cut,
    difference,
    fields,
    hugging_face_log_probs,
    ppo_like_loss,
    run_case,
)
from other_models import CONFIGS, make_other
from spawn import run_ranks

from megatron_ppo.roles.actor_critic import ActorCritic

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {kind: str(make_other(root / kind, kind)) for kind in CONFIGS}


def run_fsdp(rank: int, world_size: int, cases: Mapping[str, Case]) -> dict[str, Any]:
    from megatron_ppo.backends.fsdp import FSDPBackend

    torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    found = {}
    try:
        for name, case in cases.items():
            found[name] = run_case(case, FSDPBackend)
            gc.collect()
        return found
    finally:
        torch.distributed.destroy_process_group()


def cases(models: Mapping[str, str], folder: Path) -> dict[str, Case]:
    """Each family, its actor exported after two steps."""
    return {
        kind: Case(fields=fields(models, kind, backend="fsdp"), export=str(folder / kind) if kind != "olmoe" else None, generate=True)
        for kind in models
    }


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def two_ranks(models: dict[str, str], exports: Path) -> list[dict[str, Any]]:
    chosen = {kind: Case(fields=fields(models, kind, backend="fsdp"), generate=True) for kind in models}
    return run_ranks(run_fsdp, 2, chosen, timeout_s=400)


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_two_shards_compute_and_learn_as_one_process_does(models: dict[str, str], two_ranks: list[dict[str, Any]], kind: str) -> None:
    """Log-probs of transformers' own forward pass before; after two optimizer steps, the weights of plain PyTorch."""
    actor = ActorCritic.from_folder(models[kind], dtype=torch.float32)
    before = hugging_face_log_probs(actor.model)
    optimizer = torch.optim.SGD(actor.parameters(), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        count = 0
        for batch in cut(range(8), 8, 1):
            loss, tokens, _ = ppo_like_loss(actor(batch, temperature=0.7, with_entropy=True), batch)
            loss.backward()
            count += int(tokens)
        for parameter in actor.parameters():
            parameter.grad.div_(count)
        torch.nn.utils.clip_grad_norm_(actor.parameters(), 1.0)
        optimizer.step()
    after = hugging_face_log_probs(actor.model)
    assert difference({"x": before}, {"x": after}) > 1e-3
    for results in two_ranks:
        assert difference({"x": results[kind]["before"]["actor.log_probs"]}, {"x": before}) < 1e-5
        assert difference({"x": results[kind]["after"]["actor.log_probs"]}, {"x": after}) < 1e-5
