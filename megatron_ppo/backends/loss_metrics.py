"""Means of a loss function's statistics over the whole training mesh (``LossMetrics`` -> ``StepResult.metrics``)."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist

from megatron_ppo.backends.base import LossMetrics


def mean_metrics(metrics: Iterable[LossMetrics]) -> dict[str, float]:
    """Means over all micro-batches of all replicas, from (sum, count) pairs; the same dict on every rank. Collective.

    A name may be missing on some ranks or micro-batches; a name whose count is 0 everywhere is left out. A replica of several ranks gives
    its micro-batches on one of them, and nothing on the others.
    """
    local: dict[str, list[float]] = {}
    for named in metrics:
        for name, pair in named.items():
            total, count = pair.detach().double().tolist()
            entry = local.setdefault(name, [0.0, 0.0])
            entry[0], entry[1] = entry[0] + total, entry[1] + count
    everywhere: list[dict[str, list[float]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, local)
    names = sorted({name for part in everywhere for name in part})
    sums = {name: [sum(part[name][i] for part in everywhere if name in part) for i in (0, 1)] for name in names}
    return {name: total / count for name, (total, count) in sums.items() if count > 0}
