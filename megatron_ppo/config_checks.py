"""The equations between fields of the configuration, checked before any process group or model exists.

Each fault says the fact, the equation with its numbers, and a remedy. Facts of the model folder (heads, vocabulary) are read from its
config.json; weights are not touched. How a network is cut is said where it is cut (``resharding``).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_ppo.config import SECTION_OF, Config
from megatron_ppo.families import GenericNetwork, Network, as_mapping, is_built_in, mixture_faults
from megatron_ppo.generic_network import describe_network
from megatron_ppo.resharding.fsdp_layout import fsdp_faults
from megatron_ppo.resharding.megatron_layout import megatron_faults
from megatron_ppo.resharding.megatron_mesh import data_parallel_size, megatron_parallel
from megatron_ppo.resharding.vllm_layout import vllm_faults


def faults(config: Config, world_size: int, *, needs_data: bool = True) -> list[str]:
    """Every reason why ``config`` cannot run on ``world_size`` ranks; empty where it can.

    ``needs_data`` False: only the model and the meshes are used; prompts, rewards, batches and the algorithm may be anything.
    """
    found = list(_ranges(config))
    if found:  # the equations below divide by these numbers
        return found
    found += _meshes(config, world_size)
    if needs_data:
        if not found:
            found += batch_faults(config, config.data_parallel_size(world_size), config.num_replicas(world_size))
        found += _algorithm(config)
        found += _prompt_file(config)
    found += _checkpoints(config)
    found += _files(config)
    return found


def _ranges(config: Config) -> Iterator[str]:
    p, t, r = config.parallel, config.training, config.rollout
    at_least_one = {
        "tensor_model_parallel_size": p.tensor_model_parallel_size,
        "pipeline_model_parallel_size": p.pipeline_model_parallel_size,
        "context_parallel_size": p.context_parallel_size,
        "expert_model_parallel_size": p.expert_model_parallel_size,
        "rollout_tensor_parallel_size": p.rollout_tensor_parallel_size,
        "bucket_bytes": p.bucket_bytes,
        "distributed_timeout_minutes": p.distributed_timeout_minutes,
        "train_iters": t.train_iters,
        "global_batch_size": t.global_batch_size,
        "micro_batch_size": t.micro_batch_size,
        "ppo_epochs": t.ppo_epochs,
        "prompts_per_iteration": r.prompts_per_iteration,
        "samples_per_prompt": r.samples_per_prompt,
        "max_prompt_length": r.max_prompt_length,
        "max_response_length": r.max_response_length,
        "make_vocab_size_divisible_by": config.model.make_vocab_size_divisible_by,
        "reward_num_workers": config.data.reward_num_workers,
        "max_skipped_steps": t.max_skipped_steps,
    }
    for name, value in at_least_one.items():
        if value < 1:
            yield f"{name} = {value} must be at least 1"
    if p.virtual_pipeline_model_parallel_size is not None and p.virtual_pipeline_model_parallel_size < 2:
        yield (
            f"virtual_pipeline_model_parallel_size = {p.virtual_pipeline_model_parallel_size} must be at least 2; "
            "leave it out for the plain schedule"
        )
    if p.rollout_world_size < 0:
        yield f"rollout_world_size = {p.rollout_world_size} must be at least 1, or 0: all ranks train and sample by turns"
    expert_parallel = r.vllm_overrides.get("enable_expert_parallel", "false")
    if expert_parallel.lower() not in ("true", "false"):
        yield f"vllm_overrides: enable_expert_parallel = {expert_parallel!r} must be true or false"
    overlap = config.model.transformer_overrides.get("overlap_grad_reduce", "false")
    if overlap.lower() not in ("true", "false"):
        yield f"transformer_overrides: overlap_grad_reduce = {overlap!r} must be true or false"
    if config.transformer_impl not in ("auto", "local", "transformer_engine"):
        yield f"transformer_overrides: transformer_impl = {config.transformer_impl!r} must be auto, local or transformer_engine"
    if r.top_k != -1 and r.top_k < 1:
        yield f"top_k = {r.top_k} must be at least 1, or -1 for all tokens"
    yield from _real_ranges(config)


def _real_ranges(config: Config) -> Iterator[str]:
    """Every comparison is written so that NaN fails it."""
    r, a, o, p = config.rollout, config.algorithm, config.optimizer, config.parallel
    above_zero = {
        "temperature": (r.temperature, "log-probs are divided by it; use top_k = 1 for greedy samples"),
        "reward_timeout_s": (config.data.reward_timeout_s, "a reward needs some time"),
        "kl_target": (a.kl_target, "the adaptive controller divides by it"),
        "adam_eps": (o.adam_eps, "it keeps the step finite"),
        "importance_weight_cap": (a.importance_weight_cap, "it caps weights, which are above 0"),
    }
    for name, (amount, why) in above_zero.items():
        if amount is not None and not 0 < amount < math.inf:
            yield f"{name} = {amount} must be a finite number above 0: {why}"
    at_least_zero = {
        "lr": o.lr,
        "critic_lr": o.critic_lr,
        "min_lr": o.min_lr,
        "weight_decay": o.weight_decay,
        "clip_grad": o.clip_grad,
        "lr_warmup_steps": o.lr_warmup_steps,
        "clip_ratio[1]": a.clip_ratio[1],
        "value_clip": a.value_clip,
        "value_loss_coef": a.value_loss_coef,
        "entropy_coef": a.entropy_coef,
        "kl_coef": a.kl_coef,
        "kl_loss_coef": a.kl_loss_coef,
        "num_logged_samples": config.logging.num_logged_samples,
        "seed": config.training.seed,
    }
    for name, number in at_least_zero.items():
        if number is not None and not 0 <= number < math.inf:
            yield f"{name} = {number} must be a finite number of at least 0"
    in_unit = {"gamma": a.gamma, "gae_lambda": a.gae_lambda, "clip_ratio[0]": a.clip_ratio[0]}
    for name, share in in_unit.items():
        if not 0 <= share <= 1:
            yield f"{name} = {share} must be in [0, 1]"
    for rate in o.adam_betas:
        if not 0 <= rate < 1:
            yield f"adam_betas = {o.adam_betas} must be in [0, 1)"
    if not 0 < r.top_p <= 1:
        yield f"top_p = {r.top_p} must be in (0, 1]"
    if not 3 <= p.heartbeat_timeout_s < math.inf:
        yield f"heartbeat_timeout_s = {p.heartbeat_timeout_s} must be a finite number of at least 3: heartbeats come every 1 to 2 s"
    if a.dual_clip_ratio is not None and not 1 < a.dual_clip_ratio < math.inf:
        yield f"dual_clip_ratio = {a.dual_clip_ratio} must be a finite number above 1 (arXiv:1912.09729)"
    if o.min_lr > min(o.lr, o.critic_lr) and o.lr_decay_style != "constant":
        yield f"min_lr = {o.min_lr} is the end of the decay, but lr = {o.lr} and critic_lr = {o.critic_lr} start below it"


def _meshes(config: Config, world_size: int) -> Iterator[str]:
    p = config.parallel
    training = config.training_size(world_size)
    size = config.model_parallel_size
    product = f"TP {p.tensor_model_parallel_size} x PP {p.pipeline_model_parallel_size} x CP {p.context_parallel_size} = {size}"
    if training < size or training % size:
        good = max(1, round(training / size)) * size + p.rollout_world_size
        yield (
            f"world size {world_size} = training + rollout ranks, and rollout_world_size is {p.rollout_world_size}, so {training} ranks "
            f"are left to train; that must be a multiple of {product} (the factor is the data-parallel size). "
            f"Launch {good} ranks, or change a size"
        )
    rollout, tp = config.rollout_size(world_size), p.rollout_tensor_parallel_size
    if rollout % tp:
        named = f"{rollout} ranks sample" if config.is_colocated else f"rollout_world_size = {rollout}"
        nearest = sorted({max(1, rollout // tp) * tp, -(-rollout // tp) * tp})
        yield (
            f"{named}, which is not a multiple of rollout_tensor_parallel_size = {tp}: replicas x TP = rollout ranks. "
            f"The nearest are {' and '.join(map(str, nearest))}; or choose another TP"
        )
    if p.cpu_offload == "sampling" and not config.is_colocated:
        yield "cpu_offload = sampling makes room for an engine on the same ranks: set rollout_world_size to 0, or leave it out"
    yield from _computed_on_rollout(config)
    if config.rollout.rollout_backend == "hf" and p.rollout_tensor_parallel_size > 1:
        yield (
            f"rollout_backend = hf holds the whole model on each rank, but rollout_tensor_parallel_size = "
            f"{p.rollout_tensor_parallel_size}; set it to 1, or use vllm"
        )
    if config.rollout_expert_parallel and config.rollout.rollout_backend == "hf":
        yield "enable_expert_parallel is set, but rollout_backend = hf holds the whole model on each rank; leave it out, or use vllm"
    if p.backend == "fsdp":
        yield from _fsdp(config, training)
        return
    for name, value in {"fsdp_shard_size": p.fsdp_shard_size, "cpu_offload": "always" if p.cpu_offload == "always" else None}.items():
        if value is not None:
            yield f"{name} = {value} is FSDP's, but backend = megatron: leave it out, or set backend to fsdp"
    if p.sequence_parallel and p.tensor_model_parallel_size == 1:
        yield "sequence_parallel needs tensor_model_parallel_size above 1 (it is 1): it splits the sequence over the TP group"
    try:
        parallel = megatron_parallel(config)
        if training >= size and not training % size:
            data_parallel_size(training, parallel)  # what is left to refuse are the experts' equations
    except ValueError as error:
        yield str(error)


def _computed_on_rollout(config: Config) -> Iterator[str]:
    if config.rollout.compute_on == "training":
        return
    if config.rollout.rollout_backend != "hf":
        yield (
            f"compute_on = rollout needs rollout_backend = hf, which can score what it sampled; it is {config.rollout.rollout_backend}. "
            "Set it to hf, or compute_on to training"
        )
    if config.model.critic == "separate":
        yield (
            "compute_on = rollout needs the values of a shared critic, whose weights travel with the actor's; critic = separate stays on "
            "the training ranks. Set critic to shared or none, or compute_on to training"
        )


def _fsdp(config: Config, num_training: int) -> Iterator[str]:
    """FSDP shards weights only: no rank computes a part of another's sequence or matrix."""
    p = config.parallel
    split = {
        "tensor_model_parallel_size": p.tensor_model_parallel_size,
        "pipeline_model_parallel_size": p.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": p.virtual_pipeline_model_parallel_size or 1,
        "context_parallel_size": p.context_parallel_size,
        "expert_model_parallel_size": p.expert_model_parallel_size,
    }
    for name, size in split.items():
        if size > 1:
            yield f"{name} = {size} is megatron-core's, but backend = fsdp shares weights only: leave it out, or set backend to megatron"
    for name, value in {"sequence_parallel": p.sequence_parallel, "transformer_overrides": config.model.transformer_overrides}.items():
        if value:
            yield f"{name} = {value} is megatron-core's, but backend = fsdp: leave it out, or set backend to megatron"
    if num_training >= 1 and (fault := fsdp_faults(num_training, config.fsdp_shards(num_training))):
        yield fault


def batch_faults(config: Config, data_parallel_size: int, num_replicas: int) -> Iterator[str]:
    """How an iteration is cut into steps, replicas and micro-batches."""
    t, r = config.training, config.rollout
    batch = config.rollout_batch_size
    if batch % t.global_batch_size:
        good = [n for n in range(1, batch + 1) if batch % n == 0]
        nearest = min(good, key=lambda n: abs(n - t.global_batch_size))
        yield (
            f"prompts_per_iteration {r.prompts_per_iteration} x samples_per_prompt {r.samples_per_prompt} = {batch} responses are not a "
            f"multiple of global_batch_size = {t.global_batch_size}; the nearest that divides is {nearest}"
        )
    if t.global_batch_size % data_parallel_size:
        good_size = max(1, round(t.global_batch_size / data_parallel_size)) * data_parallel_size
        yield (
            f"global_batch_size = {t.global_batch_size} is not a multiple of the data-parallel size {data_parallel_size}; "
            f"the nearest multiple is {good_size}"
        )
    if r.prompts_per_iteration < num_replicas:
        yield (
            f"prompts_per_iteration = {r.prompts_per_iteration} is less than the {num_replicas} rollout replicas: "
            "some would have nothing to do; use fewer rollout ranks or more prompts"
        )
    p, limit = config.parallel, t.max_tokens_per_micro_batch
    multiple = (2 * p.context_parallel_size if p.context_parallel_size > 1 else 1) * (
        p.tensor_model_parallel_size if p.sequence_parallel else 1
    )
    longest = -(-config.max_model_len // multiple) * multiple
    if limit is not None and limit < longest:
        yield (
            f"max_tokens_per_micro_batch = {limit} cannot hold one sequence of max_prompt_length + max_response_length = "
            f"{config.max_model_len} tokens, {longest} with padding to a multiple of {multiple}"
        )
    if limit is not None and p.virtual_pipeline_model_parallel_size is not None:
        yield (
            "max_tokens_per_micro_batch does not hold under the interleaved schedule, which pads all micro-batches to one shape; "
            "use micro_batch_size, or leave virtual_pipeline_model_parallel_size out"
        )


def _algorithm(config: Config) -> Iterator[str]:
    a, m, r = config.algorithm, config.model, config.rollout
    if a.advantage_estimator == "gae" and m.critic == "none":
        yield (
            "advantage_estimator = gae needs a critic, but critic = none; set critic to separate or shared, "
            "or the estimator to grpo or rloo"
        )
    if a.advantage_estimator != "gae" and m.critic != "none":
        yield f"advantage_estimator = {a.advantage_estimator} uses no critic, but critic = {m.critic}; set critic to none"
    if a.advantage_estimator != "gae" and r.samples_per_prompt < 2:
        yield (
            f"advantage_estimator = {a.advantage_estimator} compares the responses to one prompt, but samples_per_prompt = "
            f"{r.samples_per_prompt}; it must be at least 2"
        )
    sharded = config.parallel.use_distributed_optimizer and config.parallel.backend == "megatron"
    if config.optimizer.optimizer == "sgd" and sharded:
        yield "optimizer = sgd cannot be sharded by megatron-core; set use_distributed_optimizer to false"
    if a.kl_target is not None and a.kl_coef == 0:
        yield "kl_target is set, but kl_coef is 0: the adaptive controller scales it; set kl_coef above 0, or leave kl_target out"
    if config.data.reward is None and m.reward_model_path is None:
        kinds = "exact_match, math, token_accuracy, length, format, module:function or FILE.py:function"
        yield f"there is no reward: set reward ({kinds}) or reward_model_path"


def _checkpoints(config: Config) -> Iterator[str]:
    c = config.checkpoint
    for name, least in {"save_interval": 1, "keep_checkpoints": 1, "save_hf_interval": 0}.items():
        number = getattr(c, name)
        if number is not None and number < least:
            yield f"{name} = {number} must be at least {least}, or None"
    unknown = [name for name in c.allow_changed if name not in SECTION_OF]
    if unknown:
        yield f"allow_changed names {', '.join(unknown)}: no such field"
    if c.resume not in ("auto", "never") and not Path(c.resume).is_dir():
        yield f"resume = {c.resume}: there is no such folder; give auto, never, or the folder of a checkpoint"
    if c.load_hf is not None and c.resume not in ("auto", "never"):
        yield f"load_hf and resume = {c.resume} both name the weights to start from; give one of them"


def _prompt_file(config: Config) -> Iterator[str]:
    if not config.data.prompt_data:
        yield "prompt_data is not set: name a JSONL or Parquet file of prompts"
    elif not Path(config.data.prompt_data).is_file():
        yield f"prompt_data = {config.data.prompt_data}: there is no such file"


def _files(config: Config) -> Iterator[str]:
    m = config.model
    if m.critic_path is not None and m.critic != "separate":
        yield f"critic_path is set, but critic = {m.critic}: only a separate critic has weights of its own"
    if not m.model_path:
        yield "model_path is not set: name a folder in Hugging Face format"
        return
    vocabularies: dict[str, int] = {}
    folders = {"model_path": m.model_path, "critic_path": m.critic_path, "reward_model_path": m.reward_model_path}
    for name, folder in (folders | {"load_hf": config.checkpoint.load_hf}).items():
        if folder is None:
            continue
        try:
            settings = as_mapping(folder)
            network = describe_network(settings)
        except ValueError as error:
            yield f"{name} = {folder}: {error}"
            continue
        yield from _network(config, name, network)
        yield from (f"{name}: {fault}" for fault in _rope_of_the_longest_row(settings, config.max_model_len))
        vocabularies[name] = network.vocab_size
    for name, size in vocabularies.items():
        if size != vocabularies.get("model_path", size):
            yield (
                f"{name} has a vocabulary of {size} tokens, model_path one of {vocabularies['model_path']}: the critic and the reward "
                "model read the policy's token ids, so choose one of its family"
            )


def _rope_of_the_longest_row(settings: Mapping[str, Any], max_model_len: int) -> Iterator[str]:
    """transformers' longrope: one row beyond the original length gives every row of the same pass other frequencies."""
    block = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    for part in (block, *(inner for inner in block.values() if isinstance(inner, dict))):  # of all layers, or of each kind of layer
        name = "original_max_position_embeddings"
        limit = part.get(name, settings.get(name, settings.get("max_position_embeddings", 0)))
        if part.get("rope_type", part.get("type")) == "longrope" and max_model_len > limit:
            yield (
                f"max_prompt_length + max_response_length = {max_model_len} exceeds {name} = {limit} of its longrope, beyond which a row's "
                f"numbers depend on the rows beside it: shorten them to {limit} or less"
            )


def _network(config: Config, folder: str, network: Network) -> Iterator[str]:
    """Whether a network can be split as the meshes want it; only the actor has a rollout mesh."""
    p = config.parallel
    found: list[str] = []
    if p.backend == "megatron" and (isinstance(network, GenericNetwork) or not is_built_in(network.family)):
        reason = network.reason if isinstance(network, GenericNetwork) else f"of family {network.family} only the tensors are known"
        found.append(f"{reason}; set backend to fsdp, which trains any causal language model that transformers loads")
    elif p.backend == "megatron":
        assert not isinstance(network, GenericNetwork)
        with contextlib.suppress(ValueError):  # overrides that cannot be read are a fault of the meshes
            found += megatron_faults(network, megatron_parallel(config))
        found += mixture_faults(network, p.tensor_model_parallel_size, p.sequence_parallel)
    if folder == "model_path" and config.rollout.rollout_backend == "vllm" and not isinstance(network, GenericNetwork):
        found += vllm_faults(network, p.rollout_tensor_parallel_size, config.rollout_expert_parallel)
    if folder == "model_path" and config.rollout_expert_parallel and isinstance(network, GenericNetwork):
        found.append(f"enable_expert_parallel needs a table of the model's experts, and there is none: {network.reason}; leave it out")
    if network.max_position_embeddings is not None and config.max_model_len > network.max_position_embeddings:
        found.append(
            f"max_prompt_length + max_response_length = {config.max_model_len} exceeds the model's max_position_embeddings = "
            f"{network.max_position_embeddings}"
        )
    yield from (f"{folder}: {fault}" for fault in found)
