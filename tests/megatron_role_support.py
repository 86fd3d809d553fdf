"""What the ranks of the Megatron role tests do: build a role from a folder, run it through its pipeline, hand back plain tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ppo.config import Config
from megatron_ppo.types import MicroBatch, RoleOutput, Sampling

TEMPERATURE = 0.7
LENGTHS = (9, 16, 5)
GREEDY = Sampling(max_response_length=6, greedy=True, stop_token_ids=frozenset({2}))
PROMPTS = ([5, 6, 7], [9], [20, 3, 44, 51, 8])


def fixed_batch(padding: int = 0) -> MicroBatch:
    """Three right-padded rows of different lengths, T = 16."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, 130, (len(LENGTHS), max(LENGTHS)), generator=generator)
    lengths = torch.tensor(LENGTHS)
    real = torch.arange(max(LENGTHS))[None, :] < lengths[:, None]
    tokens = torch.where(real, tokens, padding)
    labels = torch.cat([tokens[:, 1:], torch.zeros(len(LENGTHS), 1, dtype=torch.int64)], dim=1)
    mask = real & (torch.arange(max(LENGTHS))[None, :] < lengths[:, None] - 1)
    return MicroBatch(tokens, labels, mask, rows=torch.arange(len(LENGTHS)), lengths=lengths)


@contextmanager
def megatron(config: Config) -> Iterator[None]:
    """megatron's groups for ``config`` over the default group."""
    from megatron_ppo.backends.megatron_setup import destroy_megatron, initialize_megatron

    initialize_megatron(config, config.training.seed)
    try:
        yield
    finally:
        destroy_megatron()


def build(folder: Path, config: Config, head: Any) -> list[Any]:
    """This rank's chunks of the role, with the weights of the folder."""
    from megatron.core import parallel_state

    from megatron_ppo.families import network_shape
    from megatron_ppo.resharding.hf_checkpoint import load_hf_weights
    from megatron_ppo.resharding.megatron_layout import megatron_layout
    from megatron_ppo.resharding.megatron_mesh import megatron_parallel, rank_coordinates
    from megatron_ppo.roles.megatron_actor_critic import MegatronActorCritic

    sizes = megatron_parallel(config)
    virtual = sizes.virtual_pipeline_model_parallel_size
    network = network_shape(folder)
    chunks = []
    for stage in range(virtual) if virtual is not None else (None,):
        chunk = MegatronActorCritic(
            network,
            config,
            head=head,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            vp_stage=stage,
        )
        chunks.append(chunk)
    layout = megatron_layout(
        network,
        sizes,
        rank_coordinates(dist.get_rank(), dist.get_world_size(), sizes),
        head=head,
    )
    parameters = {
        ("" if virtual is None else f"model{index}.") + name: parameter
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }
    load_hf_weights(folder, layout, parameters, head=head)
    return chunks


def run(chunks: list[Any], batch: MicroBatch) -> RoleOutput | None:
    """The role's output for whole rows, on the ranks of the last stage; None elsewhere. Hidden states travel by broadcast."""
    from megatron_ppo.roles.megatron_spec import context_parallel_part, context_parallel_whole

    groups, config = chunks[0].pg_collection, chunks[0].config
    cp, pp = groups.cp, groups.pp
    part = MicroBatch(
        **{name: context_parallel_part(getattr(batch, name), 1, cp.rank(), cp.size()) for name in ("tokens", "labels", "loss_mask")},
        rows=batch.rows,
        lengths=batch.lengths,
    )
    width = part.tokens.shape[1] // (config.tensor_model_parallel_size if config.sequence_parallel else 1)
    hidden = torch.empty(width, part.tokens.shape[0], config.hidden_size)
    total = len(chunks) * pp.size()
    for number in range(total):
        if number % pp.size() == pp.rank():
            chunk = chunks[number // pp.size()]
            chunk.set_input_tensor([None if chunk.pre_process else hidden])
            result = chunk(part, temperature=TEMPERATURE, with_entropy=True)
            if number == total - 1:
                named = {name: context_parallel_whole(t, 1, cp) for name, t in vars(result).items() if t is not None}
                return RoleOutput(**named)
            hidden = result.contiguous()
        if number < total - 1 and pp.size() > 1:
            dist.broadcast(hidden, group_src=number % pp.size(), group=pp)
    return None


def plain(output: RoleOutput | None) -> Mapping[str, Tensor] | None:
    """Picklable."""
    return None if output is None else {name: t.detach() for name, t in vars(output).items() if t is not None}
