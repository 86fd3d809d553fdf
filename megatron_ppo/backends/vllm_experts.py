"""Mixtures of experts in vLLM: parameters that lie as the layout says and stay live, so that an update is an in-place write.

Part of ``vllm.py``, while an engine is built and once after it. vLLM has many kernels for experts, and several of them keep the weights in
an order of their own behind the same names and shapes: a write by the layout would then give garbage without a word.

    machine   asked of vLLM            weights in memory
    CPU       experts computed here    w13 [E, 2 * width, H], w2 [E, H, width]; vLLM's own kernels would repack both, in every dtype
    GPU       moe_backend = triton     the same; FlashInfer's kernels swap or shuffle rows, AITER's shuffle them

Experts of a rank under expert parallelism: "linear" placement, as in ``vllm_layout.py``. Left out: load balancing with redundant experts
(EPLB), experts with biases, other activations than SiLU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron_ppo.families import Network

GPU_BACKEND = "triton"
"""vLLM's ``moe_backend`` whose kernels read the weights in the checkpoint's order."""
LIVE_BACKENDS = frozenset({"TRITON", "BATCHED_TRITON"})
"""Members of vLLM's UnquantizedMoeBackend that do; the second is the same kernel for another order of the activations."""

Linear = Callable[[Tensor, Tensor], Tensor]


def expert_options(network: Network, *, expert_parallel: bool, on_cpu: bool) -> dict[str, Any]:
    """Arguments of ``LLM`` that fix what a default could change; none for a dense network."""
    if network.experts is None:
        return {}
    options = {"enable_expert_parallel": expert_parallel, "expert_placement_strategy": "linear", "enable_eplb": False}
    return options if on_cpu else options | {"moe_backend": GPU_BACKEND}


@contextmanager
def plain_cpu_experts(linear: Linear) -> Iterator[None]:
    """Engines built meanwhile on a CPU compute their experts with ``linear`` (rows, weight) from the live parameters.

    vLLM's own classes (AMX, NEON, VSX, portable; all inherit the method that is replaced) put packed copies in the parameters' place, and
    their kernels index experts by their global number, of which a rank under expert parallelism holds a part only.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    original = CPUUnquantizedExperts.process_weights_after_loading

    def keep_weights(self: Any, layer: Any) -> None:
        self.apply = _PlainExperts(linear)

    CPUUnquantizedExperts.process_weights_after_loading = keep_weights
    try:
        yield
    finally:
        CPUUnquantizedExperts.process_weights_after_loading = original


class _PlainExperts:
    """Takes the place of ``apply`` of vLLM's modular experts."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear

    def __call__(
        self,
        *,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        **_: Any,
    ) -> None:
        """``output`` [tokens, H] gets this rank's share; vLLM adds up the ranks' shares."""
        if activation.value != "silu" or apply_router_weight_on_input:
            raise RuntimeError(f"experts with activation {activation.value} or weighted inputs are not supported on a CPU")
        local = topk_ids if expert_map is None else expert_map[topk_ids.long()]
        output.copy_(mixture(hidden_states, w1, w2, topk_weights, local, self.linear))


def mixture(hidden: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, local: Tensor, linear: Linear) -> Tensor:
    """What the experts ``w13`` [E, 2 * width, H] and ``w2`` [E, H, width] add to each token: [tokens, H] in fp32.

    ``hidden`` [tokens, H]; ``local`` [tokens, k] numbers the chosen experts of each token (-1: held by another rank), ``weights``
    [tokens, k] are theirs. A token's sum runs in the order of the experts, so that it does not depend on other tokens.
    """
    total = torch.zeros(hidden.shape, dtype=torch.float32)
    for expert in range(w13.shape[0]):
        rows, choice = torch.where(local == expert)
        if rows.numel() == 0:
            continue
        gate, up = linear(hidden[rows], w13[expert]).chunk(2, dim=-1)
        inner = nn.functional.silu(gate) * up
        total.index_add_(0, rows, linear(inner, w2[expert]).float() * weights[rows, choice, None].float())
    return total


def check_experts(model: nn.Module, held: range, *, on_cpu: bool) -> None:
    """``RuntimeError`` where writes by the layout would not be what the engine computes with.

    ``held``: global numbers of this rank's experts, by the layout. To be called on the built model; nothing to say of dense ones.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    for name, layer in model.named_modules():
        if isinstance(layer, RoutedExperts):
            fault = _kernel_fault(layer.quant_method, on_cpu) or _placement_fault(layer.expert_map, layer.global_num_experts, held)
            if fault:
                raise RuntimeError(f"weights cannot be written in place into the experts of {name}: {fault}")


def check_reloads(model: nn.Module, *, on_cpu: bool) -> None:
    """``RuntimeError`` where vLLM's own loader, called again, would not be all: parameters repacked, or others derived from them.

    For models that no layout describes. What is derived (the absorbed matrices of latent attention) shows as a tensor of several dims that
    is neither parameter nor buffer of its module; the cache, which is one too, is no weight.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    for name, layer in model.named_modules():
        fault = _kernel_fault(layer.quant_method, on_cpu) if isinstance(layer, RoutedExperts) else None
        derived = [key for key, value in vars(layer).items() if isinstance(value, Tensor) and value.dim() > 1 and key != "kv_cache"]
        if derived and fault is None:
            fault = f"vLLM derives {', '.join(derived)} from them when it loads"
        if fault:
            raise RuntimeError(f"weights of {name} cannot be loaded again: {fault}; use rollout_backend = hf")


def _kernel_fault(method: Any, on_cpu: bool) -> str | None:
    backend = getattr(method, "unquantized_backend", None)
    if backend is None:
        return f"vLLM uses {type(method).__name__}, which may hold them quantised; only unquantised bf16 and fp32 weights are supported"
    if on_cpu:
        plain = isinstance(method.moe_kernel.fused_experts.apply, _PlainExperts)
        return None if plain else f"vLLM's {type(method.moe_kernel.fused_experts).__name__} has repacked them"
    if backend.name not in LIVE_BACKENDS:
        return f"vLLM's kernel {backend.value} may keep them in another order; only {', '.join(sorted(LIVE_BACKENDS))} do not"
    return None


def _placement_fault(expert_map: Tensor | None, count: int, held: range) -> str | None:
    """``expert_map`` [experts]: place of each on this rank, or -1; None: all are here."""
    places = list(range(count)) if expert_map is None else expert_map.tolist()
    planned = [held.index(expert) if expert in held else -1 for expert in range(count)]
    return None if places == planned else f"vLLM has placed them as {places}, planned is {planned} (-1: on another rank)"
