"""The configuration: what every field means, its one default, and which values do not go together.

Order of precedence: the default in the dataclass below, then the YAML file of ``--config``, then the command line.
Sections are frozen dataclasses; the string under a field is its help text. Field names are unique across sections, so that
the command line is flat (``--tensor-model-parallel-size 2``). Spelling is Megatron's wherever Megatron has the thing.
Reading files and the command line stands in ``config_io.py``; equations across sections are checked by ``Config.validate``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

CriticKind = Literal["shared", "separate", "none"]
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class ModelConfig:
    """The networks: actor, critic, reference and reward model."""

    model_path: str = ""
    """Folder of the actor in Hugging Face format (config.json, safetensors, tokenizer). Required."""
    tokenizer_path: str | None = None
    """Folder of a Hugging Face tokenizer, or a sentencepiece .model file. Default: model_path."""
    critic: CriticKind = "separate"
    """separate: own network and optimizer. shared: a value head on the actor's trunk. none: for critic-free estimators."""
    critic_path: str | None = None
    """Folder the separate critic's trunk (and score head, where it has one) starts from. Default: model_path."""
    reward_model_path: str | None = None
    """Folder of a sequence-classification checkpoint with one label; its score is added to the function reward."""
    params_dtype: Dtype = "float32"
    """Dtype of the training weights in forward and backward. bfloat16 keeps fp32 master weights in the optimizer."""
    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this times the tensor-parallel size (rows that never leave the trainer)."""
    recompute_granularity: Literal["none", "selective", "full"] = "none"
    """Activation recomputation in the training backward pass."""
    transformer_overrides: dict[str, str] = field(default_factory=dict)
    """Escape hatch: fields of megatron-core's TransformerConfig to set, by name. Unknown names are refused. transformer_impl is local or
    transformer_engine; without it Transformer Engine is taken where it is installed with CUDA. overlap_grad_reduce reduces gradients while
    the backward pass still runs."""
    trust_remote_code: bool = False
    """Allow model and tokenizer folders to run Python code of their own."""


@dataclass(frozen=True)
class ParallelConfig:
    """The two meshes: training ranks come first, rollout ranks after them."""

    backend: Literal["megatron", "fsdp"] = "megatron"
    """megatron: megatron-core. fsdp: PyTorch's FSDP2 around Hugging Face's own model; every training rank is a data-parallel replica."""
    fsdp_shard_size: int | None = None
    """Training ranks over which FSDP shards weights and optimizer; the others hold copies of the shards. Default: all, no copies."""
    cpu_offload: Literal["none", "sampling", "always"] = "none"
    """sampling: while ranks that train sample (rollout_world_size = 0), their optimizer is in host memory, and their gradients are freed.
    always: FSDP's shards and optimizer stay in host memory, and step there."""
    tensor_model_parallel_size: int = 1
    """Training ranks that share each matrix."""
    pipeline_model_parallel_size: int = 1
    """Training pipeline stages."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Model chunks a pipeline stage holds (interleaved schedule). Default: one, the plain 1F1B schedule."""
    context_parallel_size: int = 1
    """Training ranks that share each sequence."""
    expert_model_parallel_size: int = 1
    """Training ranks that share the experts of a mixture-of-experts model; each holds experts / this of them."""
    sequence_parallel: bool = False
    """Split norms and residuals of a tensor-parallel group along the sequence."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer state over the data-parallel ranks."""
    rollout_world_size: int = 1
    """Ranks at the end of the launch that sample. The ranks before them train; data parallelism takes what is left. 0: colocated, all ranks
    train and sample by turns."""
    rollout_tensor_parallel_size: int = 1
    """Ranks of one vLLM replica. rollout_world_size / this = number of replicas."""
    distributed_timeout_minutes: int = 30
    """Time limit of a collective. Lost ranks are noticed by the heartbeat long before."""
    heartbeat_timeout_s: float = 6.0
    """A rank that has not been heard of for this long is lost, and all ranks end."""
    bucket_bytes: int = 64 * 2**20
    """Size of the buckets in which weights travel to the rollout mesh; two of them are all the extra memory."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule; all counters are optimizer steps."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """adam is AdamW; sgd has no momentum."""
    lr: float = 1e-6
    """Peak learning rate of the actor."""
    critic_lr: float = 1e-5
    """Peak learning rate of a separate critic."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay after the warm-up."""
    lr_warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    weight_decay: float = 0.0
    """Decoupled weight decay; biases and norms are left out."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """Adam's decay rates of the first and the second moment."""
    adam_eps: float = 1e-8
    """Adam's epsilon."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""


@dataclass(frozen=True)
class TrainingConfig:
    """The loop and its batches."""

    train_iters: int = 100
    """Iterations of the outer loop: sync, rollout, score, advantage, update."""
    global_batch_size: int = 128
    """Responses in one optimizer step (a mini-batch), over all data-parallel ranks."""
    micro_batch_size: int = 8
    """Most responses in one forward/backward pass of a rank."""
    max_tokens_per_micro_batch: int | None = None
    """Most padded tokens in one forward/backward pass of a rank. Default: no limit but micro_batch_size."""
    ppo_epochs: int = 1
    """Times that the update goes through the batch of an iteration."""
    max_skipped_steps: int = 10
    """Optimizer steps in a row that may be skipped because a loss or gradient was not finite; the run ends at the next one."""
    seed: int = 1
    """Seed of everything: data order, sampling, initialisation of new heads."""


@dataclass(frozen=True)
class AlgorithmConfig:
    """Loss and advantage estimator. One ``update_policy`` call serves them all."""

    advantage_estimator: Literal["gae", "grpo", "rloo"] = "gae"
    """gae: PPO with a critic. grpo: reward against mean and deviation of its prompt's group. rloo: leave-one-out baseline."""
    gamma: float = 1.0
    """Discount per token."""
    gae_lambda: float = 0.95
    """Lambda of GAE."""
    whiten_advantages: bool = True
    """Give the advantages of the whole batch mean 0 and deviation 1 (gae only)."""
    bootstrap_truncated: bool = False
    """Take the last value, not 0, as the future of a response that was cut off at its length limit (gae only)."""
    clip_ratio: tuple[float, float] = (0.2, 0.2)
    """The surrogate's ratio is clipped to [1 - the first, 1 + the second]."""
    dual_clip_ratio: float | None = None
    """For negative advantages the loss is at most -this * advantage (arXiv:1912.09729). Default: off."""
    value_clip: float | None = 0.2
    """Clip range of the value loss around the old values. None: no clipping."""
    value_loss_coef: float = 0.1
    """Weight of the value loss in the sum where critic = shared."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] = "token_mean"
    """token_mean: sum over tokens / tokens of the global mini-batch. sequence_mean, sequence_sum: each response's mean or sum, averaged."""
    kl_coef: float = 0.0
    """Weight of the per-token KL penalty against the reference in the reward (k1). 0 here and in kl_loss_coef: no reference model."""
    kl_target: float | None = None
    """Nats per response; set: an adaptive controller moves kl_coef to meet it (arXiv:1909.08593). None: kl_coef stays as it is."""
    kl_loss_coef: float = 0.0
    """Weight of the KL against the reference inside the loss."""
    kl_loss_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL (http://joschu.net/blog/kl-approx.html)."""
    importance_weight_cap: float | None = None
    """Cap of truncated importance weights exp(trainer - rollout log-prob) on the policy loss. None: no weights."""


@dataclass(frozen=True)
class RolloutConfig:
    """Sampling on the rollout mesh."""

    rollout_backend: Literal["vllm", "hf"] = "vllm"
    """vllm: one SPMD engine a replica. hf: plain generation with the Hugging Face model, for machines without vLLM."""
    compute_on: Literal["training", "rollout"] = "training"
    """Where values, reference log-probs and reward-model scores are computed. rollout: by the rollout ranks, on what they sampled, with
    copies of these networks there; needs rollout_backend = hf, and values a shared critic."""
    prompts_per_iteration: int = 32
    """Prompts in one iteration."""
    samples_per_prompt: int = 8
    """Responses to each prompt."""
    max_prompt_length: int = 512
    """Longest prompt, in tokens."""
    max_response_length: int = 512
    """Longest response, in tokens."""
    prompt_overflow: Literal["left", "right", "error", "filter"] = "error"
    """What happens to a longer prompt. left: keep its last tokens. right: keep its first. filter: leave it out, counted."""
    temperature: float = 1.0
    """Sampling temperature, above 0; the trainer's log-probs use the same."""
    top_p: float = 1.0
    """Nucleus of the sampler. Below 1 the trainer's log-probs are of the full distribution."""
    top_k: int = -1
    """Most likely tokens to sample from; -1: all."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Further ids that end a response, beside the end-of-sequence ids of model and tokenizer."""
    rollout_dtype: Dtype = "float32"
    """Dtype of the rollout weights."""
    vllm_overrides: dict[str, str] = field(default_factory=dict)
    """Escape hatch: vLLM's engine arguments, by name (gpu_memory_utilization, enforce_eager, max_num_seqs, kv_cache_memory_bytes, ...).
    enable_expert_parallel gives each rank of a replica whole experts (mixtures only) instead of a slice of every expert."""


@dataclass(frozen=True)
class DataConfig:
    """Prompts, tokenizer limits and rewards."""

    prompt_data: str = ""
    """JSONL or Parquet file of prompts. Required."""
    data_columns: tuple[str, str] = ("prompt", "answer")
    """Column of the prompt (a string, or a list of chat messages), and of the reference answer for the reward, which may be absent."""
    chat_template: str | None = None
    """File with a Jinja chat template, for tokenizers that have none."""
    add_bos: bool = True
    """Begin plain-string prompts with the tokenizer's BOS, where it has one."""
    strict_data: bool = True
    """Refuse a file with bad lines. Otherwise bad lines are counted and left out."""
    reward: str | None = None
    """exact_match, math, token_accuracy, length, format, module:function or FILE.py:function. None: the reward model alone."""
    reward_timeout_s: float = 10.0
    """Time limit for the reward of one response."""
    reward_num_workers: int = 1
    """Processes a replica uses for rewards."""


@dataclass(frozen=True)
class LoggingConfig:
    """The run folder, metrics, proofs."""

    run_dir: str = "runs/default"
    """Folder of the run: resolved config, metrics.jsonl, samples.jsonl, learning_curve.png."""
    num_logged_samples: int = 4
    """Responses of an iteration written to samples.jsonl."""
    verify_weights: bool = False
    """Compare the checksum of every parameter after each weight sync. The first sync is always compared."""
    loggers: list[Literal["wandb", "tensorboard"]] = field(default_factory=list)
    """Where rank 0 logs too. wandb: one run, as its variables say (WANDB_PROJECT, WANDB_MODE, ...). tensorboard: RUN_DIR/tensorboard."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved when, and what a run starts from."""

    save_interval: int | None = None
    """Iterations from one checkpoint to the next. None: only where a signal or RUN_DIR/SAVE_NOW asks for one."""
    keep_checkpoints: int | None = 2
    """Complete checkpoints that stay; older ones of this run are deleted after a new one is complete. None: all stay."""
    async_save: bool = False
    """Write checkpoints in the background: training waits for the copy only, not for the disk."""
    resume: str = "auto"
    """auto: go on from the newest complete checkpoint of RUN_DIR, where there is one. never: begin anew. Or the folder of a checkpoint, of
    any run, or one that convert made: its weights alone."""
    allow_changed: list[str] = field(default_factory=list)
    """Fields that may differ from those of the checkpoint; any other difference that changes what is computed is refused."""
    load_hf: str | None = None
    """Folder in Hugging Face format whose weights the actor starts from, in place of model_path's; the reference stays at model_path's."""
    save_hf_interval: int | None = None
    """Write the actor in Hugging Face format every so many iterations, to RUN_DIR/hf_iter_N, and at the end, to RUN_DIR/hf. 0: at the end
    only. None: never."""


@dataclass(frozen=True)
class Config:
    """Everything about one run."""

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    data: DataConfig = DataConfig()
    logging: LoggingConfig = LoggingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    # -- what follows from the fields ---------------------------------------------------------------------------------

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the training weights: TP x PP x CP."""
        p = self.parallel
        return p.tensor_model_parallel_size * p.pipeline_model_parallel_size * p.context_parallel_size

    @property
    def is_colocated(self) -> bool:
        """Whether the same ranks train and sample."""
        return self.parallel.rollout_world_size == 0

    def training_size(self, world_size: int) -> int:
        """Ranks of the training mesh in a launch of ``world_size`` ranks."""
        return world_size - self.parallel.rollout_world_size

    def rollout_size(self, world_size: int) -> int:
        """Ranks of the rollout mesh in a launch of ``world_size`` ranks."""
        return self.parallel.rollout_world_size or world_size

    def num_replicas(self, world_size: int) -> int:
        """Inference engines in the rollout mesh of a launch of ``world_size`` ranks."""
        return self.rollout_size(world_size) // self.parallel.rollout_tensor_parallel_size

    @property
    def rollout_batch_size(self) -> int:
        """Responses in one iteration."""
        return self.rollout.prompts_per_iteration * self.rollout.samples_per_prompt

    @property
    def num_optimizer_steps(self) -> int:
        """Optimizer steps of the actor in the whole run."""
        mini_batches = self.rollout_batch_size // self.training.global_batch_size
        return mini_batches * self.training.ppo_epochs * self.training.train_iters

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus response, in tokens."""
        return self.rollout.max_prompt_length + self.rollout.max_response_length

    @property
    def uses_reference(self) -> bool:
        """Whether a frozen reference model is needed."""
        return self.algorithm.kl_coef != 0 or self.algorithm.kl_loss_coef != 0

    @property
    def transformer_impl(self) -> str:
        """Megatron's layer spec, as asked for: auto, local or transformer_engine."""
        return self.model.transformer_overrides.get("transformer_impl", "auto")

    @property
    def overlap_grad_reduce(self) -> bool:
        """Whether gradients are reduced while the backward pass still runs."""
        return self.model.transformer_overrides.get("overlap_grad_reduce", "false").lower() == "true"

    @property
    def rollout_expert_parallel(self) -> bool:
        """Whether each rank of a vLLM replica holds whole experts."""
        return self.rollout.vllm_overrides.get("enable_expert_parallel", "false").lower() == "true"

    def data_parallel_size(self, world_size: int) -> int:
        """Data-parallel replicas of the trainer in a launch of ``world_size`` ranks."""
        return self.training_size(world_size) // self.model_parallel_size

    def training_mesh_sizes(self, num_training: int) -> dict[str, int]:
        """Sizes of a training mesh of ``num_training`` ranks, by the names of its axes, for records and messages."""
        p = self.parallel
        data_parallel = num_training // self.model_parallel_size
        if p.backend == "fsdp":
            shard = self.fsdp_shards(num_training)
            return {"replicate": data_parallel // shard, "shard": shard}
        return {
            "tp": p.tensor_model_parallel_size,
            "pp": p.pipeline_model_parallel_size,
            "vpp": p.virtual_pipeline_model_parallel_size or 1,
            "cp": p.context_parallel_size,
            "ep": p.expert_model_parallel_size,
            "dp": data_parallel,
        }

    def mesh_sizes(self, world_size: int) -> dict[str, int]:
        """``training_mesh_sizes`` of a launch of ``world_size`` ranks, and the rollout mesh's."""
        p = self.parallel
        rollout = {"rollout_tp": p.rollout_tensor_parallel_size, "replicas": self.num_replicas(world_size)}
        return self.training_mesh_sizes(self.training_size(world_size)) | rollout

    def fsdp_shards(self, num_training: int) -> int:
        """Of ``num_training`` training ranks, those over which FSDP shards."""
        return num_training if self.parallel.fsdp_shard_size is None else self.parallel.fsdp_shard_size

    def replace(self, **fields: object) -> Config:
        """A copy with fields set by their flat names; an unknown name is a ``TypeError``."""
        changed = self
        for name, value in fields.items():
            section = SECTION_OF.get(name)
            if section is None:
                raise TypeError(f"no configuration field is called {name!r}")
            part = dataclasses.replace(getattr(changed, section), **{name: value})
            changed = dataclasses.replace(changed, **{section: part})
        return changed

    def validate(self, world_size: int, *, needs_data: bool = True) -> None:
        """Check all equations between fields for a launch of ``world_size`` ranks; ``ValueError`` with every fault found.

        ``needs_data`` False: only the model and the meshes are used.
        """
        from megatron_ppo.config_checks import faults  # keeps the list of rules out of the list of fields

        found = faults(self, world_size, needs_data=needs_data)
        if found:
            raise ValueError("the configuration does not fit together:\n  - " + "\n  - ".join(found))


SECTION_OF: dict[str, str] = {
    f.name: section.name
    for section in dataclasses.fields(Config)
    for f in dataclasses.fields(section.default)  # type: ignore[arg-type]
}
"""Flat field name -> section."""
