"""Which differences between a checkpoint's configuration and the present one change what a resumed run computes.

Every field stands either in ``DOES_NOT_ALTER``, with the reason, or alters the meaning of the run: going on with another value of such a
field would make a run that is neither the old one nor a new one, and is refused unless the user names the field in ``allow_changed``.
Meshes are no matter of this list: their sizes are in the checkpoint's state, and a backend says what it can bring to another mesh.
"""

from __future__ import annotations

import dataclasses
import os.path
from collections.abc import Collection
from pathlib import Path

import yaml

from megatron_ppo.config import SECTION_OF, Config
from megatron_ppo.config_io import read_yaml

CONFIG_FILE = "config.yaml"

DOES_NOT_ALTER: dict[str, tuple[str, ...]] = {
    "where things are written, and what is logged": ("run_dir", "num_logged_samples", "verify_weights", "loggers"),
    "when checkpoints are written and which one is read": (
        "save_interval",
        "keep_checkpoints",
        "async_save",
        "resume",
        "allow_changed",
        "save_hf_interval",
    ),
    "the mesh: the notice on meshes states both, and the backend refuses what it cannot load; equal up to rounding": (
        "fsdp_shard_size",
        "cpu_offload",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "sequence_parallel",
        "use_distributed_optimizer",
        "rollout_world_size",
        "rollout_tensor_parallel_size",
    ),
    "how a batch is cut: a loss is a sum over the global batch, so that results are equal up to rounding": (
        "micro_batch_size",
        "max_tokens_per_micro_batch",
    ),
    "the padding of the vocabulary, which neither leaves the trainer nor enters a checkpoint": ("make_vocab_size_divisible_by",),
    "speed and memory; the arithmetic is the same": (
        "recompute_granularity",
        "bucket_bytes",
        "reward_num_workers",
    ),
    "when a run gives up": ("distributed_timeout_minutes", "heartbeat_timeout_s", "max_skipped_steps"),
    "a permission, which only the present user can give": ("trust_remote_code",),
    "the length of the run, where no learning rate decays towards its end (see _alters)": ("train_iters",),
}
"""Reason -> fields. All others alter. Among these: ``reward_timeout_s`` (what takes longer gets no reward), ``backend``,
``transformer_overrides`` and ``rollout_backend`` (other kernels), ``load_hf`` (a resumed run would ignore it) and every path: the same name
is no proof of the same content, so that a folder that was moved is accepted by name, once."""

NEUTRAL_FIELDS = frozenset(name for names in DOES_NOT_ALTER.values() for name in names)

PATHS = frozenset(
    ("model_path", "tokenizer_path", "critic_path", "reward_model_path", "prompt_data", "chat_template", "load_hf"),
)
"""Compared without the spelling of a path (``a//b/`` is ``a/b``)."""

NEUTRAL_ENGINE_ARGUMENTS = frozenset(
    (
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "max_num_seqs",
        "max_num_batched_tokens",
        "enforce_eager",
        "disable_log_stats",
        "enable_expert_parallel",
    )
)
"""Keys of ``vllm_overrides`` that only say how much memory and speed the engine takes, and how its ranks share the work; others alter."""


def read_config(folder: Path, accepted: Collection[str] = ()) -> Config:
    """The configuration that a checkpoint was written with.

    ``accepted``: fields that may be absent, because the checkpoint is older than they are; they get their defaults, as do absent fields
    that alter nothing.

    Raises:
        ValueError: the file is missing or cannot be read, or another version with other fields has written it.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{path} does not exist: {folder} was not written by a training run, and there is nothing to compare with")
    try:
        written = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        text = " ".join(str(error).split())
        raise ValueError(f"{path} is damaged: it is not YAML ({text}); name another checkpoint by --resume FOLDER") from None
    sections = {f.name for f in dataclasses.fields(Config)}
    if not isinstance(written, dict) or not all(isinstance(fields, dict) for fields in written.values()):
        raise ValueError(f"{path} is damaged: it must hold one mapping a section; name another checkpoint by --resume FOLDER")
    present = {name for section in written.values() for name in section}
    unknown = sorted(str(name) for name in (set(written) - sections) | (present - set(SECTION_OF)))
    if unknown:
        raise ValueError(f"{path} sets {', '.join(unknown)}, which this version does not know; resume with the version that wrote it")
    absent = [name for name in SECTION_OF if name not in present | NEUTRAL_FIELDS | set(accepted)]
    if absent:
        raise ValueError(
            f"{path} does not set {', '.join(absent)}: the version that wrote it did not have them yet; resume with that version, or take "
            f"the present values: --allow-changed {' '.join(absent)}"
        )
    return read_yaml(path)


def config_difference(saved: Config, present: Config, accepted: Collection[str]) -> str:
    """A two-column table of the fields that differ and alter what is computed, with the remedy below; ``""`` if there are none.

    ``accepted``: fields that the user allows to differ (``allow_changed``).
    """
    before, now = _flat(saved), _flat(present)
    rows = [
        (name, repr(before[name]), repr(now[name]))
        for name in before
        if name not in accepted and before[name] != now[name] and _alters(name, saved, present)
    ]
    if not rows:
        return ""
    names = " ".join(name for name, _, _ in rows)
    remedy = f"Give the fields their old values, or allow the change: --allow-changed {names}, or begin anew: --resume never"
    return f"{two_columns('field', rows)}\n{remedy}, or another --run-dir"


def two_columns(head: str, rows: list[tuple[str, str, str]]) -> str:
    """Rows of (name, value in the checkpoint, present value) as a table of text."""
    table = [(head, "in the checkpoint", "now"), *rows]
    widths = [max(len(row[column]) for row in table) for column in (0, 1)]
    return "\n".join(f"  {name:<{widths[0]}}  {before:<{widths[1]}}  {now}" for name, before, now in table)


def _alters(name: str, saved: Config, present: Config) -> bool:
    if name == "train_iters":  # the decay is spread over the whole run; a constant learning rate goes on as long as one likes
        return {saved.optimizer.lr_decay_style, present.optimizer.lr_decay_style} != {"constant"}
    return name not in NEUTRAL_FIELDS


def _flat(config: Config) -> dict[str, object]:
    """Flat field name -> value, in a form in which equal meaning is equal."""
    values = {name: getattr(getattr(config, section), name) for name, section in SECTION_OF.items()}
    for name in PATHS:
        if values[name] is not None:
            values[name] = os.path.normpath(values[name])
    values["vllm_overrides"] = {key: text for key, text in values["vllm_overrides"].items() if key not in NEUTRAL_ENGINE_ARGUMENTS}
    return values
