"""Layouts of small dense models for the tests, written down independently of the package's own layout modules."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ppo.resharding.layout import Block, Ranges, RankLayout, view


@dataclass(frozen=True)
class Dense:
    """A dense decoder: Llama, with the biases of Qwen2 or the query and key norms of Qwen3 where asked."""

    num_layers: int = 4
    hidden: int = 16
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 4
    ffn: int = 16
    vocab: int = 21
    tied: bool = False
    bias: bool = False
    qk_norm: bool = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> shape."""
        h, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, h), "model.norm.weight": (h,)}
        if not self.tied:
            found["lm_head.weight"] = (self.vocab, h)
        for layer in range(self.num_layers):
            p = f"model.layers.{layer}."
            found |= {p + "input_layernorm.weight": (h,), p + "post_attention_layernorm.weight": (h,)}
            for part, rows in (("q", q), ("k", kv), ("v", kv)):
                found[p + f"self_attn.{part}_proj.weight"] = (rows, h)
                if self.bias:
                    found[p + f"self_attn.{part}_proj.bias"] = (rows,)
            if self.qk_norm:
                found |= {p + "self_attn.q_norm.weight": (self.head_dim,), p + "self_attn.k_norm.weight": (self.head_dim,)}
            found[p + "self_attn.o_proj.weight"] = (h, q)
            found |= {p + "mlp.gate_proj.weight": (self.ffn, h), p + "mlp.up_proj.weight": (self.ffn, h)}
            found[p + "mlp.down_proj.weight"] = (h, self.ffn)
        return found

    def tensors(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """Every element of the whole model differs from every other (exact up to 2^53 in float64)."""
        found, start = {}, 1
        for name, shape in self.shapes().items():
            count = torch.Size(shape).numel()
            found[name] = torch.arange(start, start + count, dtype=dtype).reshape(shape)
            start += count
        return found


class _Builder:
    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.shapes: dict[str, tuple[int, ...]] = {}

    def rows(self, name: str, parameter: str, ranges: list[tuple[str, int, int]], tail: tuple[int, ...], pad_to: int = 0) -> None:
        """Stack row ranges of canonical tensors into one parameter."""
        at = 0
        for canonical, start, stop in ranges:
            if start < stop:
                rest: Ranges = tuple((0, size) for size in tail)
                self.blocks.append(Block(name + canonical, ((start, stop), *rest), parameter, ((at, at + stop - start), *rest)))
            at += stop - start
        self.shapes[parameter] = (max(at, pad_to), *tail)

    def columns(self, name: str, parameter: str, rows: int, start: int, stop: int) -> None:
        """A column slice of a matrix."""
        self.blocks.append(Block(name, ((0, rows), (start, stop)), parameter, ((0, rows), (0, stop - start))))
        self.shapes[parameter] = (rows, stop - start)

    def build(self) -> RankLayout:
        return RankLayout(tuple(self.blocks), self.shapes)


def _vocab(builder: _Builder, model: Dense, names: tuple[str, str], r: int, local: int) -> None:
    start, stop = min(r * local, model.vocab), min((r + 1) * local, model.vocab)
    builder.rows("", names[1], [(names[0], start, stop)], (model.hidden,), pad_to=local)


def trainer_layout(model: Dense, tp: int, stage_layers: list[int], place: tuple[int, bool, bool], multiple: int = 4) -> RankLayout:
    """One training rank: interleaved QKV, gate and up in one matrix, padded vocabulary.

    ``place`` is (tensor rank, first stage, last stage); ``stage_layers`` the global numbers of the rank's layers. A tied model of
    more than one stage keeps a copy of the embedding on the last one, as Megatron does.
    """
    r, first, last = place
    b, h, d = _Builder(), model.hidden, model.head_dim
    vocab_rows = -(-model.vocab // (multiple * tp)) * multiple
    if first:
        _vocab(b, model, ("model.embed_tokens.weight", "embedding.word_embeddings.weight"), r, vocab_rows)
    for local, layer in enumerate(stage_layers):
        p, m = f"decoder.layers.{local}.", f"model.layers.{layer}."
        b.rows(m, p + "input_layernorm.weight", [("input_layernorm.weight", 0, h)], ())
        b.rows(m, p + "pre_mlp_layernorm.weight", [("post_attention_layernorm.weight", 0, h)], ())
        groups, per = model.kv_heads // tp, model.heads // model.kv_heads
        for kind, tail in (("weight", (h,)), ("bias", ())):
            ranges = []
            for g in range(r * groups, (r + 1) * groups):
                ranges += [(f"self_attn.q_proj.{kind}", g * per * d, (g + 1) * per * d)]
                ranges += [(f"self_attn.{part}_proj.{kind}", g * d, (g + 1) * d) for part in "kv"]
            if kind == "weight" or model.bias:
                b.rows(m, p + f"self_attention.linear_qkv.{kind}", ranges, tail)
        if model.qk_norm:
            b.rows(m, p + "self_attention.q_layernorm.weight", [("self_attn.q_norm.weight", 0, d)], ())
            b.rows(m, p + "self_attention.k_layernorm.weight", [("self_attn.k_norm.weight", 0, d)], ())
        q, f = model.heads * d // tp, model.ffn // tp
        b.columns(m + "self_attn.o_proj.weight", p + "self_attention.linear_proj.weight", h, r * q, (r + 1) * q)
        halves = [(f"mlp.{part}_proj.weight", r * f, (r + 1) * f) for part in ("gate", "up")]
        b.rows(m, p + "mlp.linear_fc1.weight", halves, (h,))
        b.columns(m + "mlp.down_proj.weight", p + "mlp.linear_fc2.weight", h, r * f, (r + 1) * f)
    if last:
        b.rows("", "decoder.final_layernorm.weight", [("model.norm.weight", 0, h)], ())
        if not (model.tied and first):
            head = "model.embed_tokens.weight" if model.tied else "lm_head.weight"
            _vocab(b, model, (head, "output_layer.weight"), r, vocab_rows)
    return b.build()


def engine_layout(model: Dense, tp: int, r: int, multiple: int = 8) -> RankLayout:
    """One rollout rank as vLLM has it: ``[q_r; k_r; v_r]``, key-value heads replicated where there are fewer than ranks."""
    b, h, d = _Builder(), model.hidden, model.head_dim
    local = -(-model.vocab // multiple) * multiple // tp
    for name in ["model.embed_tokens.weight"] + ([] if model.tied else ["lm_head.weight"]):
        _vocab(b, model, (name, name), r, local)
    q, kv = model.heads // tp * d, max(model.kv_heads // tp, 1) * d
    kv_rank = r if model.kv_heads >= tp else r // (tp // model.kv_heads)
    for layer in range(model.num_layers):
        m = f"model.layers.{layer}."
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            b.rows(m, m + norm, [(norm, 0, h)], ())
        for kind, tail in (("weight", (h,)), ("bias", ())):
            ranges = [(f"self_attn.q_proj.{kind}", r * q, (r + 1) * q)]
            ranges += [(f"self_attn.{part}_proj.{kind}", kv_rank * kv, (kv_rank + 1) * kv) for part in "kv"]
            if kind == "weight" or model.bias:
                b.rows(m, m + f"self_attn.qkv_proj.{kind}", ranges, tail)
        if model.qk_norm:
            for norm in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
                b.rows(m, m + norm, [(norm, 0, d)], ())
        b.columns(m + "self_attn.o_proj.weight", m + "self_attn.o_proj.weight", h, r * q, (r + 1) * q)
        f = model.ffn // tp
        b.rows(m, m + "mlp.gate_up_proj.weight", [(f"mlp.{p}_proj.weight", r * f, (r + 1) * f) for p in ("gate", "up")], (h,))
        b.columns(m + "mlp.down_proj.weight", m + "mlp.down_proj.weight", h, r * f, (r + 1) * f)
    b.rows("", "model.norm.weight", [("model.norm.weight", 0, h)], ())
    return b.build()


def stage_chunks(num_layers: int, pp: int, vpp: int = 1) -> list[list[int]]:
    """Global layer numbers of each pipeline rank; virtual chunks are dealt in turn."""
    edges = [num_layers * i // (pp * vpp) for i in range(pp * vpp + 1)]
    return [[x for v in range(vpp) for x in range(edges[v * pp + p], edges[v * pp + p + 1])] for p in range(pp)]


def trainer_mesh(model: Dense, tp: int, pp: int, dp: int = 1, vpp: int = 1, *, multiple: int = 4) -> dict[int, RankLayout]:
    """Global rank -> layout, in Megatron's order (tensor fastest, then data, then pipeline); replicas share an object."""
    stages = stage_chunks(model.num_layers, pp, vpp)
    found = {}
    for p in range(pp):
        for r in range(tp):
            layout = trainer_layout(model, tp, stages[p], (r, p == 0, p == pp - 1), multiple)
            for replica in range(dp):
                found[p * dp * tp + replica * tp + r] = layout
    return found


def engine_mesh(model: Dense, tp: int, replicas: int, first_rank: int, multiple: int = 8) -> dict[int, RankLayout]:
    """Global rank -> layout of ``replicas`` engines of ``tp`` ranks each."""
    layouts = [engine_layout(model, tp, r, multiple) for r in range(tp)]
    return {first_rank + i * tp + r: layouts[r] for i in range(replicas) for r in range(tp)}


def fill(layout: RankLayout, tensors: dict[str, Tensor], padding: float = -1.0) -> dict[str, Tensor]:
    """A rank's parameters by slicing the full tensors: the definition that every path is held to. Padding has a value of its own."""
    dtype = next(iter(tensors.values())).dtype
    found = {name: torch.full(shape, padding, dtype=dtype) for name, shape in layout.shapes.items()}
    for block in layout.blocks:
        view(found[block.parameter], block.local).copy_(view(tensors[block.name], block.canonical))
    return found


def shard_elements(layout: RankLayout) -> int:
    """Elements of a rank's own shard, padding excluded."""
    return sum(block.num_elements for block in layout.blocks)
