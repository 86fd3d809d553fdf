"""Runs micro-batches through one role's network with megatron-core's pipeline schedules, and brings the results to every rank.

    run_schedule      1F1B, or interleaved for virtual stages; forward only, or forward and backward
    collect_outputs   last stage -> all ranks of the data-parallel replica, as CPU tensors
    reduce_metrics    last stages of all replicas -> every rank of the training mesh

What a rank does with a micro-batch is handed in as two functions: ``compute`` (the role's forward pass on one chunk) and ``finish`` (on
the last stage: the loss, or the outputs that the caller wants). Left out: the optimizer, and what a role computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_ppo import device
from megatron_ppo.backends.base import LossMetrics
from megatron_ppo.backends.loss_metrics import mean_metrics
from megatron_ppo.types import MicroBatch, RoleOutput

Compute = Callable[[Any, MicroBatch], Any]
"""(chunk, micro-batch) -> hidden states [s, b, H], or what the role gives on the last stage."""
Finish = Callable[[Any, MicroBatch], tuple[Tensor, Tensor, Any]]
"""(what the role gave, micro-batch) -> (loss_sum [], num_tokens [] integer, anything)."""


def run_schedule(
    chunks: Sequence[Any], micro_batches: Sequence[MicroBatch], compute: Compute, finish: Finish, *, forward_only: bool
) -> list[Any]:
    """Forward (and backward) of all micro-batches; returns the third value of ``finish`` for each on the last stage, [] elsewhere.

    ``chunks`` are this rank's parts of the network in pipeline order; several only for the interleaved schedule, which wants a multiple
    of the number of stages as ``len(micro_batches)``. Micro-batches may differ in shape.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    local = [batch.to(device.device()) for batch in micro_batches]
    b, length = max(x.tokens.shape[0] for x in local), max(x.tokens.shape[1] for x in local)
    # The interleaved schedule passes tensors of one shape (see megatron_setup.configure_schedule).
    padded = [pad_micro_batch(batch, b, length) for batch in local] if len(chunks) > 1 else local
    network_inputs = [context_part(batch) for batch in padded]

    def forward_step(indices: Any, chunk: Any) -> tuple[Any, Callable[[Any], tuple[Tensor, Tensor, Any]]]:
        index = next(indices)
        return compute(chunk, network_inputs[index]), partial(_finish_cropped, finish, local[index])

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(range(len(local))) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(local),
        seq_length=length,
        micro_batch_size=b,
        forward_only=forward_only,
    )


def pad_micro_batch(batch: MicroBatch, num_rows: int, length: int) -> MicroBatch:
    """``batch`` with rows and columns added up to [num_rows, length]; what is added is not trained on (``loss_mask`` 0).

    Causal attention keeps the results of the real positions as they are. Added rows have length 1 and row number -1.
    """
    rows, columns = batch.tokens.shape
    if (rows, columns) == (num_rows, length):
        return batch
    changed: dict[str, Tensor] = {}
    for field in dataclasses.fields(batch):
        tensor = getattr(batch, field.name)
        if tensor is None:
            continue
        if tensor.dim() == 2:
            changed[field.name] = torch.nn.functional.pad(tensor, (0, length - columns, 0, num_rows - rows))
        else:
            changed[field.name] = torch.nn.functional.pad(tensor, (0, num_rows - rows), value=1 if field.name == "lengths" else -1)
    return dataclasses.replace(batch, **changed)


def context_part(batch: MicroBatch) -> MicroBatch:
    """This context-parallel rank's zig-zag chunks of each row: what a role's forward pass takes. Labels are shifted already."""
    from megatron.core import parallel_state

    from megatron_ppo.roles.megatron_spec import context_parallel_part

    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    if size == 1:
        return batch
    parts = {
        field.name: context_parallel_part(tensor, 1, rank, size)
        for field in dataclasses.fields(batch)
        if (tensor := getattr(batch, field.name)) is not None and tensor.dim() == 2
    }
    return dataclasses.replace(batch, **parts)


def gather_context(output: RoleOutput) -> RoleOutput:
    """Join the zig-zag chunks [b, T/CP] of a context-parallel group into [b, T] on every one of its ranks.

    The gradient of the result flows back into this rank's own chunk only. So each rank may compute the whole loss of the full rows, and
    the sum of the ranks' parameter gradients is the gradient of that loss once, whatever the loss aggregates over.
    """
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return output
    joined = {
        field.name: _GatherZigZag.apply(tensor, group)
        for field in dataclasses.fields(output)
        if (tensor := getattr(output, field.name)) is not None
    }
    return dataclasses.replace(output, **joined)


class _GatherZigZag(torch.autograd.Function):
    """All-gather along the sequence, undoing zig-zag order; backward takes this rank's own chunk.

    Rank r of n holds the chunks r and 2n - 1 - r of the 2n equal chunks of a row (each rank then has the same causal work).
    """

    @staticmethod
    def forward(context: Any, chunk: Tensor, group: Any) -> Tensor:
        context.group = group
        parts = [torch.empty_like(chunk) for _ in range(group.size())]
        torch.distributed.all_gather(parts, chunk.contiguous(), group=group)
        halves = [part.chunk(2, dim=1) for part in parts]
        return torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)], dim=1)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        rank, size = context.group.rank(), context.group.size()
        pieces = gradients[0].chunk(2 * size, dim=1)
        return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]], dim=1), None


def collect_outputs(outputs: Sequence[Mapping[str, Tensor]], shapes: Sequence[Mapping[str, torch.Size]]) -> list[dict[str, Tensor]]:
    """Broadcast the last stage's tensors over the pipeline group: fp32 on the CPU of every rank, one dict a micro-batch.

    ``shapes`` (known to every rank) says which tensors there are and how large; ``outputs`` is read on the last stage only.
    """
    from megatron.core import parallel_state

    wanted = [(index, name, shape) for index, named in enumerate(shapes) for name, shape in named.items()]
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        flat = torch.cat([outputs[index][name].detach().float().reshape(-1) for index, name, _ in wanted])
    else:
        flat = torch.empty(sum(shape.numel() for _, _, shape in wanted), dtype=torch.float32, device=device.device())
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() > 1:
        torch.distributed.broadcast(flat, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    results: list[dict[str, Tensor]] = [{} for _ in shapes]
    pieces = flat.cpu().split([shape.numel() for _, _, shape in wanted])
    for (index, name, shape), piece in zip(wanted, pieces, strict=True):
        results[index][name] = piece.reshape(shape).clone()
    return results


def reduce_metrics(metrics: Sequence[LossMetrics]) -> dict[str, float]:
    """Means over all micro-batches of all replicas, from (sum, count) pairs; the same dict on every rank of the training mesh.

    A name may be missing on some ranks or micro-batches; a name whose count is 0 everywhere is left out. ``metrics`` counts on one rank
    of each replica (last stage, first of its tensor- and context-parallel groups); the others hold the same or none.
    """
    from megatron.core import parallel_state

    counts = (
        parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )
    return mean_metrics(metrics if counts else ())


def _finish_cropped(finish: Finish, batch: MicroBatch, output: Any) -> tuple[Tensor, Tensor, Any]:
    """Cut what the network gave back to the shape of ``batch``, whose padding the loss never sees."""
    rows, length = batch.tokens.shape
    if isinstance(output, RoleOutput):
        output = gather_context(output)
        cropped = {f.name: tensor[:rows, :length] for f in dataclasses.fields(output) if (tensor := getattr(output, f.name)) is not None}
        output = dataclasses.replace(output, **cropped)
    return finish(output, batch)
