"""One rank of a vLLM replica: the engine behind ``RolloutWorker`` (steps 1 and 2 of an iteration).

Where it stands: weights are written in place into the tensors of ``weights()``, ``after_weight_update`` forgets what was cached under
the old ones, then ``generate`` samples. Token ids go in and token ids come out; nothing is decoded or encoded again on the way.

vLLM runs as one program on every rank of the replica ("external launcher"): the rollout mesh's default process group exists before the
engine is built (``world.py``), and vLLM takes every further group of ``rollout_tensor_parallel_size`` ranks as an independent replica.
All that touches vLLM's internals stands in this file and in ``vllm_experts.py``, and vllm is imported only when an engine is built. Left
out: rewards, prompts, how weights travel (``resharding/``), and which replica answers which prompt (``rollout_engine.py``).
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import logging
import os
import secrets
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn

from megatron_ppo.backends.base import EngineMemory, InferenceBackend
from megatron_ppo.backends.inference_checks import check_complete, check_dense, check_layout, check_requests, forget_weights
from megatron_ppo.backends.vllm_experts import check_experts, check_reloads, expert_options, plain_cpu_experts
from megatron_ppo.config import Config
from megatron_ppo.device import has_cuda, preserved_global_state
from megatron_ppo.families import NetworkShape
from megatron_ppo.generic_network import describe_network
from megatron_ppo.resharding.layout import RankLayout
from megatron_ppo.resharding.vllm_layout import check_vllm, held_experts, vllm_layout
from megatron_ppo.types import Completion, Sampling

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

logger = logging.getLogger(__name__)

_DEFAULTS = {"gpu_memory_utilization": 0.85, "enable_prefix_caching": True}
_CPU_DEFAULTS = {"kv_cache_memory_bytes": 2**30}
_COLOCATED_DEFAULTS = {"gpu_memory_utilization": 0.5}
"""The engine is built before the trainer and sleeps while that works: what it plans with is free then, but not all of it stays so."""
_WEIGHTS_LIE_ELSEWHERE = frozenset(
    "quantization pipeline_parallel_size data_parallel_size prefill_context_parallel_size decode_context_parallel_size "
    "enable_lora enable_eplb speculative_config cpu_offload_gb offload_backend hf_overrides tokenizer tokenizer_mode revision".split()
)
"""Engine arguments under which parameters would not lie as ``vllm_layout`` says, or something else would be sampled."""
_SAME_KERNEL_ROWS = 4

_NOISE = (
    "The global random seed is set to",  # put back by ``_start_up``
    "Enforce eager set",  # by us
    "Inductor compilation was disabled by user settings",
    "Triton is not installed",
    "Model Runner V2 requires Triton",
    "Reset SSM cache type",  # of layers that no supported family has
    "libtcmalloc is not found in LD_PRELOAD",
    "libiomp is not found in LD_PRELOAD",
    "CPU backend doesn't allow to use `torch.set_num_threads`",  # vLLM's own calls
    "Chat template warmup failed",  # there is no tokenizer, on purpose
    "Using None for EOS token id",
    "Unknown vLLM environment variable detected: VLLM_DIST_IDENT",  # vLLM's own, at the second engine of a process
    "Kernel vllm.",  # "is already registered", likewise
    "Attempted to load weight",  # of another dtype than the parameter: its loader casts, as it should
)
"""Beginnings of vLLM's warnings that are of its own making or follow from how it is used here."""


class VLLMBackend(InferenceBackend):
    """A rank of one vLLM replica. Built by all ranks of the rollout mesh together; afterwards only a replica's ranks keep in step.

    ``seed`` is the replica's engine seed, the same on its ranks; samples do not depend on it, each request carries its own.
    With ``load_weights=False`` the engine starts without weights: every parameter is NaN until a sync has written it, and ``generate``
    refuses to sample before ``after_weight_update`` has seen that none was left out. ``ValueError``: the folder or the size is not
    supported. ``RuntimeError``: vLLM's parameters do not lie as ``vllm_layout`` says, or could not be loaded
    a second time where no table knows the model.
    """

    def __init__(self, config: Config, *, seed: int, load_weights: bool = False) -> None:
        if not dist.is_initialized():
            raise RuntimeError("vLLM needs the rollout mesh's default process group: initialise it before the engine is built")
        # A path that does not exist would be taken for the name of a model on a hub: the folder is read first.
        network, tp_size = describe_network(config.model.model_path), config.parallel.rollout_tensor_parallel_size
        expert_parallel = config.rollout_expert_parallel
        if isinstance(network, NetworkShape):
            check_vllm(network, tp_size, expert_parallel)
        self._max_model_len = config.max_model_len
        self._has_weights = load_weights
        on_cpu = not has_cuda()
        self._can_sleep = config.is_colocated and not on_cpu
        if config.is_colocated and on_cpu and dist.get_rank() == 0:
            logger.warning("vLLM cannot sleep on a CPU: its weights and cache keep their memory while the same ranks train")
        set_environment()
        with _start_up(on_cpu):
            from vllm import LLM

            if on_cpu and network.head_dim is not None:
                _check_head_size(network.head_dim)
            fixed = {
                "model": config.model.model_path,
                "skip_tokenizer_init": True,
                "trust_remote_code": config.model.trust_remote_code,
                "load_format": "auto" if load_weights else "dummy",
                "dtype": config.rollout.rollout_dtype,
                "seed": int(seed),
                "max_model_len": config.max_model_len,
                "tensor_parallel_size": tp_size,
                "distributed_executor_backend": "external_launcher",
                "logprobs_mode": "processed_logprobs",  # of the distribution that is drawn from, temperature included
                "generation_config": "vllm",  # not the folder's sampling defaults: the run's configuration is the only source
                **expert_options(network, expert_parallel=expert_parallel, on_cpu=on_cpu),
            } | ({"enforce_eager": True} if on_cpu else {"enable_sleep_mode": self._can_sleep})
            named = {name: text for name, text in config.rollout.vllm_overrides.items() if name != "enable_expert_parallel"}
            chosen = parse_overrides(named, fixed)
            defaults = _DEFAULTS | (_CPU_DEFAULTS if on_cpu else {}) | (_COLOCATED_DEFAULTS if self._can_sleep else {})
            self._llm: LLM | None = LLM(**(defaults | chosen | fixed), use_tqdm_on_load=False)
        self._check_peers(f"engine seed {seed}")
        rank = _tp_group().rank_in_group
        self._layout: RankLayout | None = None
        """How weights lie; None: only vLLM's own loader knows (``load_hf_weights``)."""
        dtype = getattr(torch, config.rollout.rollout_dtype)
        if isinstance(network, NetworkShape):
            self._layout = vllm_layout(network, tensor_parallel_size=tp_size, tp_rank=rank, expert_parallel=expert_parallel)
            check_experts(self._model, held_experts(network, tp_size, rank, expert_parallel), on_cpu=on_cpu)
            check_layout(self.weights(), self._layout, dtype)
        else:
            if config.is_colocated and ".models.transformers." in type(self._model).__module__:
                raise ValueError(
                    f"vLLM runs {network.family} models on transformers' own classes, which it changes in this process, so that it cannot "
                    "train too: give the rollout ranks of their own (rollout_world_size), or set rollout_backend to hf"
                )
            check_reloads(self._model, on_cpu=on_cpu)
            check_dense(self.weights(), dtype)
        if not load_weights:
            forget_weights(self.weights(), self._layout)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        """One response to each prompt, in order; the same list on every rank of the replica.

        Log-probabilities are of the distribution that was drawn from: logits / temperature, cut by top_k and then top_p and
        renormalised; greedy: of the logits themselves (temperature 1). A response ends at an id of ``sampling.stop_token_ids`` alone (the
        engine's own idea of an end-of-sequence id is not asked), and that id belongs to it. Temporary ``torch`` draws leave the global
        random state as it was. ``ValueError``: a prompt is empty or leaves no room for the longest response. ``RuntimeError``: no weights
        yet, or the replica's ranks were given different requests.
        """
        if not self._has_weights:
            raise RuntimeError("the engine has no weights yet: sync them, or build it with load_weights=True")
        check_requests(prompts, sampling, seeds, self._max_model_len)
        self._check_peers(repr((prompts, sampling, seeds)))
        if not prompts:
            return []
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        with torch.random.fork_rng(devices=[]):  # the CPU sampler also draws from the global generator, and throws it away
            outputs = self._engine.generate(requests, [_params(sampling, seed) for seed in seeds], use_tqdm=False)
        return [_completion(output) for output in outputs]

    def weights(self) -> dict[str, Tensor]:
        """This rank's live parameters by vLLM's name, local shapes; tied heads appear once, as the embedding."""
        return {name: parameter.data for name, parameter in self._model.named_parameters()}

    def shard_bytes(self) -> int:
        """Bytes of this rank's live parameters without vocabulary padding, of which vLLM's embedding modules know."""
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        sizes = {id(p): p.numel() * p.element_size() for p in self._model.parameters()}
        for module in self._model.modules():
            if isinstance(module, VocabParallelEmbedding):  # the output head too; one entry where both are tied
                weight = module.weight
                sizes[id(weight)] = module.shard_indices.num_org_elements * weight.shape[1] * weight.element_size()
        return sum(sizes.values())

    def load_hf_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """vLLM's own loader, given all Hugging Face tensors, full, by name; every rank cuts out its part.

        ``RuntimeError`` with names where a tensor was missing. Call ``after_weight_update`` after it, as after any update.
        """
        forget_weights(self.weights(), self._layout)
        self._model.load_weights(iter(weights))
        check_complete(self.weights())

    def after_weight_update(self) -> None:
        """Drop the prefix cache. The first call also proves that no parameter was left without weights (``RuntimeError`` with names)."""
        if not self._has_weights:
            check_complete(self.weights())
            self._has_weights = True
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running while weights change")

    def sleep(self) -> None:
        """Free cache and weights (vLLM's level 2, which keeps buffers such as rotary tables); on a CPU vLLM can free neither."""
        if self._can_sleep and not self._engine.llm_engine.is_sleeping():
            self._engine.sleep(level=2)
            self._has_weights = False

    def wake_up(self, what: EngineMemory) -> None:
        """Map memory at the old addresses again: parameters stay the same tensors, and hold nothing until they are written."""
        if self._can_sleep:
            self._engine.wake_up(tags=["weights" if what == "weights" else "kv_cache"])
            if what == "weights":
                forget_weights(self.weights(), self._layout)

    def close(self) -> None:
        """Free the engine and vLLM's groups; the mesh's default process group stays, it is not vLLM's."""
        if self._llm is None:
            return
        from vllm.distributed import parallel_state
        from vllm.v1.engine import core

        clean_up = core.cleanup_dist_env_and_memory
        core.cleanup_dist_env_and_memory = lambda *_: None  # it would destroy the default group too
        try:
            self._llm.llm_engine.engine_core.shutdown()
        finally:
            core.cleanup_dist_env_and_memory = clean_up
        self._llm = None
        parallel_state.destroy_model_parallel()
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
            parallel_state._WORLD = None

    @property
    def _engine(self) -> LLM:
        if self._llm is None:
            raise RuntimeError("the vLLM engine is closed")
        return self._llm

    @property
    def _model(self) -> Any:
        worker: Any = self._engine.llm_engine.model_executor.driver_worker.worker
        return worker.get_model()

    def _check_peers(self, what: str) -> None:
        """All ranks of the replica must ask for the same: vLLM would hang, or mix up sequences, where they do not."""
        group = _tp_group()
        if group.world_size == 1:
            return
        digest = int.from_bytes(hashlib.sha256(what.encode()).digest()[:8], "big", signed=True)
        mine = torch.tensor([digest])
        digests = [torch.empty_like(mine) for _ in range(group.world_size)]
        dist.all_gather(digests, mine, group=group.cpu_group)
        others = [rank for rank, digest in enumerate(digests) if not torch.equal(digest, digests[0])]
        if others:
            raise RuntimeError(
                f"the {group.world_size} ranks of one vLLM replica must make the same call with the same prompts, sampling and "
                f"seeds, but tensor-parallel rank(s) {others} differ from rank 0 (this is rank {group.rank_in_group}): "
                "broadcast the requests first"
            )


def _check_head_size(head_dim: int) -> None:
    """``ValueError`` for a head that vLLM's CPU attention cannot compute: it would say so in the first rollout only."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if head_dim not in sizes:
        raise ValueError(
            f"head_dim {head_dim} is not supported by vLLM on a CPU, which has {sizes}; use another model or --rollout-backend hf"
        )


def _tp_group() -> Any:
    """vLLM's group of this replica's ranks."""
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group()


def parse_overrides(overrides: Mapping[str, str], fixed: Mapping[str, object]) -> dict[str, Any]:
    """``vllm_overrides`` with the values that YAML reads in them (numbers, true/false, lists, mappings); ``fixed`` names what the rest of
    the configuration decides. ``ValueError`` for names that vLLM does not have, or that would change where weights lie or what is sampled.
    """
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    parsed: dict[str, Any] = {}
    for name, text in overrides.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; perhaps you meant {near[0]}" if near else ""
            raise ValueError(f"vllm_overrides: vLLM's engine has no argument {name!r}{hint}")
        if name in fixed or name in _WEIGHTS_LIE_ELSEWHERE:
            raise ValueError(f"vllm_overrides: {name} follows from another field, or weights would not arrive under it; leave it out")
        try:
            parsed[name] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"vllm_overrides: {name} = {text!r} cannot be read as YAML: {error}") from None
    return parsed


def set_environment() -> None:
    """Environment variables and log of vLLM; call before its import. What the user has set wins where it does no harm."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the external launcher needs the scheduler in this process
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["DO_NOT_TRACK"] = "1"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # ranks of one host would be bound to the same cores
    _configure_log()


@contextmanager
def _start_up(on_cpu: bool) -> Iterator[None]:
    """What building an engine changes in the process is put back: random states, ``torch.cuda`` classes, ``set_num_threads``."""
    stream, set_num_threads = torch.cuda.Stream, torch.set_num_threads
    with preserved_global_state(), _quiet_imports(), ExitStack() as stack:
        if on_cpu:
            stack.enter_context(_without_compiler())
            stack.enter_context(_plain_cpu_linear())
            stack.enter_context(plain_cpu_experts(_linear))
            stack.enter_context(_unbound_memory())
            stack.enter_context(_private_shared_memory())
        try:
            yield
        finally:
            torch.cuda.Stream = stream  # type: ignore[misc]
            torch.set_num_threads = set_num_threads


@contextmanager
def _quiet_imports() -> Iterator[None]:
    """Import vLLM without what it and torch say of machines without a GPU."""
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, message=r".*torch\.distributed\.reduce_op")
        import vllm  # noqa: F401

        yield


def _configure_log() -> None:
    """Send vLLM's warnings to standard error without known noise; ``VLLM_LOGGING_LEVEL`` in the environment asks for more (or less)."""
    logger = logging.getLogger("vllm")
    if logger.handlers:
        return
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"  # vLLM would put its own handlers back while an engine is built
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("vLLM %(levelname)s: %(message)s"))
    handler.addFilter(lambda record: not record.getMessage().startswith(_NOISE))
    logger.addHandler(handler)
    logger.setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "WARNING").upper())
    logger.propagate = False


@contextmanager
def _without_compiler() -> Iterator[None]:
    """On a CPU ``torch.compile`` is the identity while vLLM is imported.

    vLLM decorates small functions with it (the rank of a log-probability); the first request would wait seconds for a C++
    compiler, which a machine need not have. Eager code computes the same.
    """
    compiler = torch.compile

    def identity(function: Any = None, **_: object) -> Any:
        return function if function is not None else (lambda inner: inner)

    torch.compile = identity  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compiler


@contextmanager
def _plain_cpu_linear() -> Iterator[None]:
    """Keep vLLM from repacking linear weights on a CPU, which would leave parameters of size 0.

    They stay live, so that an update is an in-place write.
    """
    from vllm.model_executor.layers import utils

    original = utils.dispatch_cpu_unquantized_gemm

    def keep_weight(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = _linear

    utils.dispatch_cpu_unquantized_gemm = keep_weight
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = original


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``rows`` [tokens, in] (or [..., tokens, in]) times ``weight``, each row as in any larger batch, bit for bit.

    For fewer than four fp32 rows MKL takes another kernel, whose last bits differ: a sample would depend on how many others run
    along. Zero rows are added instead; from four rows on results were seen not to depend on their number.
    """
    flat = rows.reshape(-1, rows.shape[-1])
    num_rows = flat.shape[0]
    if num_rows < _SAME_KERNEL_ROWS:
        flat = nn.functional.pad(flat, (0, 0, 0, _SAME_KERNEL_ROWS - num_rows))
    return nn.functional.linear(flat, weight, bias)[:num_rows].reshape(*rows.shape[:-1], -1)


@contextmanager
def _private_shared_memory() -> Iterator[None]:
    """Name the shared memory of tensor-parallel CPU ranks after this launch, and unlink it as soon as all ranks have mapped it.

    vLLM names it alike for every launch on a host and leaves it behind: a second launch, or one after a killed one, could not start.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    launch = torch.tensor([secrets.randbits(60)])
    dist.broadcast(launch, src=0)
    original = _CPUSHMDistributed._init_cpu_shm

    def init_and_unlink(self: Any) -> int:
        self.group_name = f"megatron_ppo-{int(launch):x}-{self.group_name.lstrip('/')}"
        try:
            return original(self)  # ends with a barrier after the last mapping
        finally:
            Path("/dev/shm", f"{self.group_name}_{self.communicator.rank}").unlink(missing_ok=True)

    _CPUSHMDistributed._init_cpu_shm = init_and_unlink
    try:
        yield
    finally:
        _CPUSHMDistributed._init_cpu_shm = original


@contextmanager
def _unbound_memory() -> Iterator[None]:
    """Keep vLLM from binding the memory of this process to one NUMA node: the ranks of a host would all take the first one."""
    import vllm._custom_ops  # noqa: F401  loads the operators

    operators: Any = torch.ops._C
    original = operators.init_cpu_memory_env
    if os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind":
        operators.init_cpu_memory_env = lambda nodes: None
    try:
        yield
    finally:
        operators.init_cpu_memory_env = original


def _params(sampling: Sampling, seed: int) -> SamplingParams:
    from vllm import SamplingParams

    return SamplingParams(
        n=1,
        seed=int(seed),
        temperature=0.0 if sampling.greedy else sampling.temperature,
        top_p=1.0 if sampling.greedy else sampling.top_p,
        top_k=-1 if sampling.greedy else sampling.top_k,
        max_tokens=sampling.max_response_length,
        stop_token_ids=sorted(sampling.stop_token_ids),
        ignore_eos=True,  # the model folder's own id: all stops come from stop_token_ids
        logprobs=0,  # of the sampled id alone
        detokenize=False,
    )


def _completion(output: RequestOutput) -> Completion:
    (response,) = output.outputs
    ids = list(response.token_ids)
    entries = response.logprobs or []
    if len(entries) != len(ids):
        raise RuntimeError(f"vLLM returned {len(ids)} tokens with {len(entries)} log-probabilities")
    log_probs = [float(entry[token].logprob) for entry, token in zip(entries, ids, strict=True)]
    return Completion(token_ids=ids, log_probs=log_probs, truncated=response.finish_reason == "length")
