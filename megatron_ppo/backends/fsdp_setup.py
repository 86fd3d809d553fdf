"""Builds a role's network in shards: PyTorch's FSDP2 around a Hugging Face model, layer by layer.

    config.json -> modules without memory ("meta") -> one layer at a time: memory, fully_shard -> this rank's rows of a folder's weights

So a rank never holds more than its shard and one whole layer (and, while computing, the embedding and the output head). Weights that are
trained are kept in fp32 and gathered in ``params_dtype``; frozen ones are kept in ``params_dtype``. Gradients are summed in fp32.

    mesh (replicate, shard)     rank r stands at (r // shard_size, r % shard_size)
    shard                       all-gather before each layer, reduce-scatter of its gradients behind it
    replicate                   all-reduce of the shards' gradients, once an optimizer step

Left out: passes (``fsdp.py``), the optimizer (``fsdp_optimizer.py``), which rows are whose (``resharding/fsdp_layout.py``), and tensor
parallelism, which ``config_checks.py`` refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from megatron_ppo import device
from megatron_ppo.config import Config
from megatron_ppo.families import Head
from megatron_ppo.resharding.fsdp_layout import fsdp_faults
from megatron_ppo.roles.actor_critic import ActorCritic, Critic
from megatron_ppo.roles.hf_heads import hidden_size
from megatron_ppo.roles.reference import ReferenceRole
from megatron_ppo.roles.reward import RewardRole

Compute = Callable[[Any], dict[str, Tensor]]
"""(role) -> named results."""


_ATTENTION = ("self_attn", "attn", "attention", "self_attention")
"""Names of a layer's attention in transformers' models."""


class Root(nn.Module):
    """Holds a role, so that anything can be computed with it while FSDP has the root's parameters (embedding, norm, heads) gathered."""

    def __init__(self, role: nn.Module, trunk: str) -> None:
        """``trunk``: transformers' name of the network without its heads (``base_model_prefix``)."""
        super().__init__()
        self.role = role
        self.trunk = trunk

    def forward(self, compute: Compute) -> dict[str, Tensor]:
        """``compute(role)``. A function and a dict: FSDP would look into a micro-batch, and cast what it finds there."""
        return {name: tensor.clone() for name, tensor in compute(self.role).items()}  # FSDP warns of results that are views


def make_mesh(config: Config) -> DeviceMesh:
    """The training ranks as (shard) or (replicate, shard). Collective over the training mesh, whose default process group exists.

    ``ValueError`` where ``fsdp_shard_size`` does not divide them.
    """
    if not dist.is_initialized():
        raise RuntimeError("the training mesh has no default process group yet; make it (world.py) before the FSDP backend")
    world_size = dist.get_world_size()
    shard_size = config.fsdp_shards(world_size)
    fault = fsdp_faults(world_size, shard_size)
    if fault:
        raise ValueError(fault)
    kind, replicas = device.device().type, world_size // shard_size
    if replicas == 1:
        return init_device_mesh(kind, (shard_size,), mesh_dim_names=("shard",))
    return init_device_mesh(kind, (replicas, shard_size), mesh_dim_names=("replicate", "shard"))


def build_network(config: Config, mesh: DeviceMesh, folder: Path, head: Head, *, frozen: bool) -> Root:
    """The sharded network of ``folder`` with uninitialised weights; a value head is 0. Collective over the training mesh."""
    dtype = getattr(torch, config.model.params_dtype)
    model, role = empty_role(config, folder, head, frozen=frozen)
    layers = decoder_layers(model.base_model)
    policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": _offload_policy(config)}
    for layer in layers:
        if not frozen:
            _recompute(layer, config.model.recompute_granularity)
        _allocate(layer)
        _shard(layer, options)
    root = Root(role, model.base_model_prefix).eval()  # for good: dropout would change the probabilities that a ratio compares
    _allocate(root)
    for module in root.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device.device())
    _shard(root, options)
    return root


def empty_role(config: Config, folder: Path, head: Head, *, frozen: bool) -> tuple[PreTrainedModel, nn.Module]:
    """(Hugging Face model, the role around it), both without memory, in the dtype that shards are kept in."""
    dtype = getattr(torch, config.model.params_dtype) if frozen else torch.float32
    with _parameters_on_meta():
        model = _empty_model(folder, dtype, trust_remote_code=config.model.trust_remote_code)
        return model, _make_role(model, head, frozen=frozen)


def decoder_layers(trunk: nn.Module) -> list[nn.Module]:
    """The layers of any decoder: of its lists of modules, that which holds the most weights.

    ``ValueError`` where there is none, or where layers share weights: each layer is gathered by itself.
    """
    lists: list[nn.ModuleList] = [module for module in trunk.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise ValueError(f"{type(trunk).__name__} has no list of layers, by which FSDP could shard it")
    layers: list[nn.Module] = list(lists[max(range(len(lists)), key=lambda number: _num_elements(lists[number]))])
    owners: dict[int, int] = {}
    for number, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            if owners.setdefault(id(parameter), number) != number:
                raise ValueError(f"layers of {type(trunk).__name__} share {name}: FSDP gathers layers one by one and cannot train it")
    return layers


def _num_elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def named_parameters(root: Root) -> dict[str, nn.Parameter]:
    """Transformers' name -> parameter."""
    return {_hf_name(name, root.trunk): parameter for name, parameter in root.named_parameters()}


def _hf_name(name: str, trunk: str) -> str:
    """Transformers' name of a parameter of ``Root``: without the roles around it, and of a trunk as of a causal LM's."""
    while name.startswith("role."):
        name = name.removeprefix("role.")
    if name.startswith("trunk."):
        return f"{trunk}." + name.removeprefix("trunk.")
    return name.removeprefix("model.")  # ActorCritic keeps a causal LM as its ``model``


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules built meanwhile have parameters without memory, and real buffers: those are computed (rotary tables), not loaded."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # one that is meta may be tied, and stays the same object
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        original(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _empty_model(folder: Path, dtype: torch.dtype, *, trust_remote_code: bool) -> PreTrainedModel:
    settings = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code, local_files_only=True)
    return AutoModelForCausalLM.from_config(settings, dtype=dtype, trust_remote_code=trust_remote_code)


def _make_role(model: PreTrainedModel, head: Head, *, frozen: bool) -> nn.Module:
    if head == "value":
        return Critic(model)
    if head == "score":
        return RewardRole(model, torch.empty(1, hidden_size(model), device="meta"))
    actor = ActorCritic(model, critic="shared" if head == "lm+value" else "none")
    return ReferenceRole(actor) if frozen else actor


def _shard(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Its gradients are summed, not averaged: a loss is a sum too, divided by the global number of tokens when that is known."""
    fully_shard(module, **options)
    assert isinstance(module, FSDPModule)
    module.set_force_sum_reduction_for_comms(True)
    module.set_gradient_divide_factor(1.0)


def _allocate(module: nn.Module) -> None:
    """Give parameters that have no memory yet some; one that stands in two places (a tied head) stays one."""
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if not parameter.is_meta:
                continue
            if id(parameter) not in made:
                empty = torch.zeros_like(parameter, device=device.device())
                made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            setattr(owner, name, made[id(parameter)])


def _recompute(layer: nn.Module, granularity: str) -> None:
    """Keep what goes into the layer (``full``) or into its attention (``selective``), and compute it again in the backward pass."""
    if granularity == "none":
        return
    named = dict(layer.named_children())
    module: Any = layer if granularity == "full" else next((named[name] for name in _ATTENTION if name in named), None)
    if module is None:
        raise ValueError(
            f"recompute_granularity = selective recomputes attention, but a {type(layer).__name__} has none of {', '.join(_ATTENTION)}; "
            "set it to full or none"
        )
    forward = module.forward

    def checkpointed(*inputs: Any, **options: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **options)  # nothing here is random

    module.forward = checkpointed


def _offload_policy(config: Config) -> OffloadPolicy:
    if config.parallel.cpu_offload != "always":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device.has_cuda())  # pages that a GPU reads from
