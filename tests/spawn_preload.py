"""What ``spawn.py``'s server imports before ranks are forked from it: what nearly every rank imports first. Test support only.

Imported in that server alone. Only libraries that do nothing by being imported, and of which all ranks want the same. Left out:
megatron-core, which needs stand-ins in torch that other ranks must not see, and vLLM itself, which sets variables and options of torch.
"""

from __future__ import annotations

import gc
import importlib

MODULES = (
    "pytest",
    "safetensors.torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "megatron_ppo.backends.fsdp",
    "megatron_ppo.backends.hf",
    "megatron_ppo.backends.megatron",
    "megatron_ppo.backends.vllm",
    "megatron_ppo.rollout_engine",
    "megatron_ppo.training_engine",
    # What vLLM imports of others.
    "aiohttp",
    "fastapi",
    "networkx",
    "openai.types.responses",
    "torch._dynamo",
    "torch._inductor.compile_fx",
)

gc.disable()
for _name in MODULES:
    importlib.import_module(_name)
gc.collect()
gc.freeze()  # a rank's own collections do not walk through all of this, and its pages stay shared
gc.enable()
