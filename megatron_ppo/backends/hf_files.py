"""What training backends do with Hugging Face folders beside loading them: export a network, and hold one folder's weights to another's.

Left out: the files themselves (``resharding/hf_checkpoint.py``) and how a network lies on its ranks (``resharding/*_layout.py``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, dtype

from megatron_ppo.families import Head, Network, NetworkShape, canonical_tensors
from megatron_ppo.generic_network import describe_network
from megatron_ppo.resharding.gather import gather_canonical
from megatron_ppo.resharding.hf_checkpoint import write_hf_checkpoint
from megatron_ppo.resharding.layout import RankLayout


def export_network(
    folder: Path,
    source: Path,
    layouts: Mapping[int, RankLayout],
    parameters: Mapping[str, Tensor],
    head: Head,
    *,
    cast: dtype | None = None,
) -> None:
    """Write the part of a network that belongs to ``head`` to ``folder``, from rank 0. Collective over the training mesh.

    ``source``: the folder whose config and tokenizer it gets. ``layouts``: rank -> how its ``parameters`` lie. ``cast``: dtype of the
    files, where it is not the parameters'. ``ValueError``, on all ranks, where rank 0 cannot write.
    """
    names = [tensor.name for tensor in canonical_tensors(describe_network(source), head)]
    stream = gather_canonical(layouts, parameters, to=0, names=names)
    fault: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            write_hf_checkpoint(folder, source, _received(stream, cast), head=head)
        except (ValueError, OSError) as error:
            fault[0] = str(error)
    for _ in stream:  # the other ranks send; rank 0, after a fault, lets them come to their end
        pass
    dist.broadcast_object_list(fault, src=0)
    if fault[0] is not None:
        raise ValueError(f"export to {folder} failed: {fault[0]}")


def check_same_network(shape: Network, folder: Path, other: Network, weights: Path) -> None:
    """``ValueError`` where weights would be computed with otherwise than they were trained, tensors of equal shapes included."""
    mine, theirs = _numbers(shape), _numbers(other)
    differing = [name for name in mine if name != "max_position_embeddings" and mine[name] != theirs.get(name)]
    if differing:
        listed = "; ".join(f"{name} is {theirs.get(name)} there and {mine[name]} here" for name in differing)
        raise ValueError(f"load_hf {weights} is of another model than model_path {folder}: {listed}")


def _numbers(network: Network) -> Mapping[str, object]:
    return vars(network) if isinstance(network, NetworkShape) else {"model_type": network.family, **json.loads(network.settings)}


def _received(stream: Iterable[tuple[str, Tensor | None]], cast: dtype | None) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in stream:
        assert tensor is not None, f"rank 0 asked for {name} and got nothing"
        yield name, tensor if cast is None else tensor.to(cast)
