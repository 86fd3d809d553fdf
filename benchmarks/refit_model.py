"""Models, meshes and values of the refit benchmark: plain tensors in the shapes that megatron-core and vLLM give their parameters.

Every element of every canonical tensor has bits that follow from its tensor and its place in it, so that a rank can check what it
received without ever seeing the whole model.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ppo.families import EMBEDDING, FAMILIES, LM_HEAD, CanonicalTensor, NetworkShape, canonical_tensors
from megatron_ppo.resharding.layout import Ranges, RankLayout, view
from megatron_ppo.resharding.megatron_layout import training_layouts
from megatron_ppo.resharding.megatron_mesh import MegatronParallel
from megatron_ppo.resharding.vllm_layout import vllm_layout

DTYPE = torch.bfloat16
_LAYERS_MULTIPLE = 4


@dataclass(frozen=True)
class Mesh:
    """Sizes of both meshes. Training ranks come first."""

    training: str
    """What the table calls the training side."""
    parallel: MegatronParallel
    num_training: int
    rollout: str
    rollout_tp: int
    num_replicas: int
    expert_parallel: bool = False

    @property
    def name(self) -> str:
        """``TP2xPP2 -> TP2 x 2``."""
        return f"{self.training} -> {self.rollout}"

    @property
    def num_rollout(self) -> int:
        """Rollout ranks."""
        return self.rollout_tp * self.num_replicas

    def source_layouts(self, network: NetworkShape) -> dict[int, RankLayout]:
        """Global rank -> layout of the training mesh."""
        return training_layouts(network, self.parallel, self.num_training)

    def destination_layouts(self, network: NetworkShape, first_rank: int | None = None) -> dict[int, RankLayout]:
        """Global rank -> layout of the rollout mesh, which begins at ``first_rank`` (None: right after the training ranks)."""
        tp, first = self.rollout_tp, self.num_training if first_rank is None else first_rank
        shards = [vllm_layout(network, tensor_parallel_size=tp, tp_rank=rank, expert_parallel=self.expert_parallel) for rank in range(tp)]
        return {first + number: shards[number % tp] for number in range(self.num_rollout)}


def tensor_parallel(name: str, tp: int, pp: int = 1) -> tuple[str, MegatronParallel, int]:
    """The three fields of ``Mesh`` that describe a dense training mesh without data parallelism."""
    # 64 instead of megatron's 128: both sides of megatron-core's own resharding must pad the vocabulary to the same number of rows.
    sizes = MegatronParallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, make_vocab_size_divisible_by=64)
    return name, sizes, tp * pp


def llama_like(model_bytes: int) -> NetworkShape:
    """An untied Llama with grouped queries of at least ``model_bytes`` in bfloat16, of TinyLlama 1.1B's widths unless it is small.

    Layers are added until it is large enough.
    """
    hidden, vocab = (2048, 32000) if model_bytes >= 200_000_000 else (256, 2000)
    heads = hidden // 64
    for num_layers in range(_LAYERS_MULTIPLE, 10_000, _LAYERS_MULTIPLE):
        network = NetworkShape(
            family="llama",
            num_layers=num_layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=4,
            head_dim=64,
            intermediate_size=hidden * 11 // 4,
            vocab_size=vocab,
            tied=False,
        )
        if num_bytes(network) >= model_bytes:
            return network
    raise ValueError(f"--model-bytes {model_bytes} is more than this benchmark is made for; take less than 100 GB")


def tiny(family: str) -> NetworkShape:
    """A model of a few kilobytes with what makes layouts hard: 2 key/value heads, a vocabulary that both sides pad, 4 experts."""
    spec = FAMILIES[family]
    experts = {} if spec.experts is None else {"num_experts": 4, "num_experts_per_tok": 2}
    return NetworkShape(
        family=family,
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        vocab_size=130,
        tied=False,
        has_qkv_bias=spec.has_qkv_bias,
        has_qk_norm=spec.has_qk_norm,
        **experts,
    )


def num_bytes(network: NetworkShape) -> int:
    """Bytes of the whole model on the wire."""
    return sum(torch.Size(tensor.shape).numel() for tensor in canonical_tensors(network)) * DTYPE.itemsize


# ---- values


def expected_bits(tensor: CanonicalTensor, box: Ranges) -> Tensor:
    """int16 bit patterns of a box of a canonical tensor: a hash of the tensor's name and the element's place; all finite as bfloat16."""
    place = torch.zeros([1] * len(box), dtype=torch.int64)
    stride = 1
    for dim in reversed(range(len(box))):
        start, stop = box[dim]
        shape = [1] * len(box)
        shape[dim] = stop - start
        place = place + (torch.arange(start, stop) * stride).view(shape)
        stride *= tensor.shape[dim]
    mixed = (place + zlib.crc32(tensor.name.encode())) * 2654435761
    return ((mixed ^ (mixed >> 15)) & 0x3FFF).to(torch.int16)


def empty_parameters(layout: RankLayout) -> dict[str, Tensor]:
    """A rank's parameters, all NaN."""
    return {name: torch.full(shape, float("nan"), dtype=DTYPE) for name, shape in layout.shapes.items()}


def fill(layout: RankLayout, network: NetworkShape, parameters: Mapping[str, Tensor]) -> None:
    """Write the expected values into every block; padding stays."""
    for name, target, bits in _blocks(layout, network, parameters):
        assert target.shape == bits.shape, name
        target.copy_(bits)


def wrong_blocks(layout: RankLayout, network: NetworkShape, parameters: Mapping[str, Tensor]) -> list[str]:
    """Names of the blocks whose bits are not the expected ones."""
    return [name for name, held, bits in _blocks(layout, network, parameters) if not torch.equal(held, bits)]


def _blocks(layout: RankLayout, network: NetworkShape, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(what it is, the live bits as a view, the bits that it should have) of every block, one at a time."""
    tensors = {tensor.name: tensor for tensor in canonical_tensors(network)}
    for block in layout.blocks:
        held = view(parameters[block.parameter].view(torch.int16), block.local)
        yield f"{block.parameter} {block.local}", held, expected_bits(tensors[block.name], block.canonical).view(held.shape)


def shard_bytes(layout: RankLayout, network: NetworkShape, tp_rank: int) -> int:
    """Bytes of a vLLM rank's own shard, from its parameters' sizes alone: all of them, less the rows that only pad the vocabulary."""
    total = 0
    for name, shape in layout.shapes.items():
        elements = torch.Size(shape).numel()
        if name in (EMBEDDING, LM_HEAD):
            rows = shape[0]
            real = min(max(network.vocab_size - tp_rank * rows, 0), rows)
            elements = elements // rows * real
        total += elements
    return total * DTYPE.itemsize
