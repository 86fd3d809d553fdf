"""The slow reference: whole tensors out of shards, to one rank or to all, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from dense_layouts import Dense, fill, trainer_mesh
from spawn import run_ranks

from megatron_ppo.resharding.gather import gather_canonical


def gather_all_cases(rank: int, world_size: int) -> list[str]:
    """Every topology and target on one set of processes; returns what differed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    wrong: list[str] = []
    for model in (Dense(), Dense(tied=True, num_layers=2), Dense(qk_norm=True, bias=True, num_layers=2, vocab=130)):
        full = model.tensors(torch.float32)
        for tp, pp, dp in ((1, 1, 4), (2, 2, 1), (2, 1, 2), (1, 2, 2)):
            layouts = trainer_mesh(model, tp, pp, dp)
            own = {name: t.to(torch.bfloat16) for name, t in fill(layouts[rank], full).items()}
            for to in (None, 0, 3):
                found = dict(gather_canonical(layouts, own, to=to, shapes=model.shapes(), check_replicas=True))
                what = f"{model} tp {tp} pp {pp} to {to} on rank {rank}"
                if found.keys() != full.keys():
                    wrong.append(f"{what}: names {found.keys() ^ full.keys()}")
                for name, tensor in found.items():
                    if to not in (None, rank):
                        wrong += [] if tensor is None else [f"{what}: has {name}"]
                    elif tensor is None or not torch.equal(tensor, full[name].to(torch.bfloat16)):
                        wrong.append(f"{what}: {name}")
    wrong += refused(rank)
    dist.destroy_process_group()
    return wrong


def refused(rank: int) -> list[str]:
    """Each case must raise on every rank, with its words."""
    model = Dense(tied=True, num_layers=2)
    layouts = trainer_mesh(model, 1, 2, 2)  # ranks 0, 1: first stage; 2, 3: last stage with a copy of the embedding
    own = fill(layouts[rank], model.tensors(torch.float32))
    copy = {name: tensor.clone() for name, tensor in own.items()}
    if rank == 3:
        copy["output_layer.weight"][2, 5] += 1
    mixed = {name: tensor.to(torch.float64) for name, tensor in own.items()} if rank == 1 else own
    holes = {r: replace(own, blocks=tuple(b for b in own.blocks if "mlp.up" not in b.name or r > 1)) for r, own in layouts.items()}
    cases = [
        (layouts, copy, None, r"embed_tokens\.weight \[0:21, 0:16\]: ranks \[3\] differ from rank 0"),
        (layouts, mixed, None, "hold model.embed_tokens.weight, .* in different dtypes"),
        (layouts, own, ["model.norm.weight", "lm_head.weight"], r"no rank holds lm_head\.weight"),
        (holes, own, ["model.layers.0.mlp.up_proj.weight"], r"no rank holds model\.layers\.0\.mlp\.up_proj\.weight"),
        ({0: layouts[0]}, own, None, r"layouts are given for \[0\]"),
    ]
    wrong = []
    for given, parameters, names, message in cases:
        try:
            with pytest.raises(ValueError, match=message):
                gather_canonical(given, parameters, to=0, names=names, check_replicas=True)
        except BaseException as error:
            wrong.append(f"rank {rank}: {message}: {error}")
    try:  # the tail of a tensor is missed only where its shape is known
        with pytest.raises(ValueError, match=r"norm\.weight spans \(16,\), the model's is \(17,\)"):
            gather_canonical(layouts, own, to=0, shapes=model.shapes() | {"model.norm.weight": (17,)})
    except BaseException as error:
        wrong.append(f"rank {rank}: {error}")
    return wrong


def test_gathered_tensors_are_the_whole_model_for_every_topology_and_target() -> None:
    """Tied copies, biases, norms, padded vocabulary; replicas that differ and tensors that nobody holds are refused on all ranks."""
    results = run_ranks(gather_all_cases, 4, timeout_s=120)
    assert [wrong for rank in results for wrong in rank] == []
