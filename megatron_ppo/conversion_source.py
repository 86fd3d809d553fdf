"""What ``convert`` was given: told from the files alone, before any of them is opened, and refused with a remedy where it cannot be used.

    hf          folder with config.json and safetensors
    gguf        one .gguf file
    checkpoint  a folder of ours: an iteration of a run, or what convert has made (a run folder stands for its newest iteration)
    torch_dist  a bare distributed checkpoint of megatron-core, as Megatron-LM saves it

Pickled weights of any kind are never opened. A checkpoint's files are compared with its manifest, and its pickles scanned, by
``check_source``; what the tensors are is ``megatron_store.py``'s and ``hf_checkpoint.py``'s.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_ppo.checkpoint import check_checkpoint, read_config
from megatron_ppo.megatron_store import GONE
from megatron_ppo.unsafe_pickle import METADATA_GLOBALS, check_pickle, check_torch_dist_folder

Kind = Literal["hf", "gguf", "checkpoint", "torch_dist"]
Role = Literal["actor", "critic", "reward"]

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
STORE = "megatron"
"""The torch_dist folder within a checkpoint."""
SIDECARS = "hf"
"""The folder within a converted checkpoint that holds config.json and tokenizer."""


@dataclass(frozen=True)
class Source:
    """What is to be converted."""

    kind: Kind
    path: Path

    @property
    def is_megatron(self) -> bool:
        """Whether it is a distributed checkpoint."""
        return self.kind in ("checkpoint", "torch_dist")

    @property
    def store(self) -> Path:
        """The torch_dist folder of a distributed checkpoint."""
        return self.path / STORE if self.kind == "checkpoint" else self.path

    def __str__(self) -> str:
        names = {"hf": "Hugging Face folder", "gguf": "GGUF file", "checkpoint": "checkpoint", "torch_dist": "distributed checkpoint"}
        return f"{names[self.kind]} {self.path}"


def find_source(path: Path) -> Source:
    """``ValueError`` where the path is nothing that can be converted, with the reason and what to do."""
    if path.is_file():
        return _of_file(path)
    if not path.is_dir():
        raise ValueError(f"--source {path} does not exist")
    _refuse_old_megatron(path)
    if (path / "config.json").is_file():
        return Source("hf", path)
    if (path / "COMPLETE").is_file() or (path / STORE).is_dir():
        return _of_checkpoint(path)
    if path.name == "fsdp" and (path.parent / "COMPLETE").is_file():
        return _of_checkpoint(path.parent)
    if (path / "metadata.json").is_file() or (path / ".metadata").is_file():
        return Source("torch_dist", path)
    for root in (path / "checkpoints", path):
        if root.is_dir():
            newest = _newest(root)
            if newest is not None:
                return _of_checkpoint(newest)
    if (path / "checkpoints").is_dir() or (path / "config.yaml").is_file():
        raise ValueError(f"{path} is a run folder without a checkpoint; the run has saved none yet (--save-interval)")
    raise ValueError(
        f"{path} is none of these: a folder in Hugging Face format (config.json, *.safetensors), a checkpoint of a run, a run folder, "
        f"a distributed checkpoint of megatron-core (metadata.json, *.distcp){_hint(path.iterdir())}"
    )


def _of_checkpoint(path: Path) -> Source:
    if (path / "fsdp").is_dir() and not (path / STORE).is_dir():
        raise ValueError(
            f"{path} was written by backend fsdp, whose checkpoints are not read here: let the run export its actor, by going on with the "
            "same command and --save-hf-interval 0, which leaves a Hugging Face folder hf in the run folder"
        )
    return Source("checkpoint", path)


def _of_file(path: Path) -> Source:
    if path.suffix == ".gguf":
        return Source("gguf", path)
    if path.suffix in PICKLES:
        raise ValueError(f"{path} is a pickle, which can run code when it is opened, and is refused; {_PICKLE_REMEDY}")
    if path.suffix in (".nemo", ".tar", ".tgz", ".zip", ".gz"):
        raise ValueError(f"{path} is an archive, and none is unpacked here; {_PICKLE_REMEDY}")
    raise ValueError(f"{path} is a file; name the folder that holds it (or a .gguf file)")


_PICKLE_REMEDY = (
    "in a place that you trust, write it in Hugging Face format with safetensors (save_pretrained of transformers, or the exporter of the "
    "program that made it) and convert that folder"
)


def _refuse_old_megatron(path: Path) -> None:
    """Megatron-LM's folders of one pickle a rank, wherever in its own tree the user points."""
    tracker = path / "latest_checkpointed_iteration.txt"
    iterations = sorted(path.glob("iter_*")) + ([path / "release"] if (path / "release").is_dir() else [])
    distributed = [folder for folder in iterations if (folder / "metadata.json").is_file()]
    if tracker.is_file() and distributed:
        raise ValueError(
            f"{path} is a save folder of Megatron-LM; name the iteration that is meant, e.g. --source {distributed[-1]} --hf-folder FOLDER"
        )
    old = [folder for base in (path, *iterations) for folder in sorted(base.glob("mp_rank_*"))[:1]]
    pickles = [file for base in (path, *old) for name in ("model_optim_rng.pt", "model_rng.pt") if (file := base / name).is_file()]
    if old or pickles or tracker.is_file():
        found = (old or pickles or [tracker])[0]
        raise ValueError(
            f"{path} is in Megatron-LM's older format ({found.relative_to(path)}), which is refused: its files are pickles, which can run "
            "code when they are opened, and are cut for one tensor and pipeline size. Let Megatron-LM rewrite it, in a place that you "
            "trust: start its training script as for this checkpoint with --ckpt-convert-format torch_dist --ckpt-convert-save NEW_FOLDER, "
            "then name NEW_FOLDER/iter_N here, and the model's config.json and tokenizer with --hf-folder"
        )


def _newest(root: Path) -> Path | None:
    """The checkpoint that ``latest`` names, or the last one. Nothing in the folder is changed: a run may be at work in it."""
    latest = root / "latest"
    name = latest.read_text(encoding="utf-8", errors="replace").strip() if latest.is_file() else ""
    if name and not re.fullmatch(r"iter_\d+", name):
        raise ValueError(f"{latest} holds {name[:80]!r}, not the name of a checkpoint; name the checkpoint itself")
    numbered = sorted((int(path.name[5:]), path) for path in root.glob("iter_*") if re.fullmatch(r"iter_\d+", path.name))
    if name:
        return root / name
    return numbered[-1][1] if numbered else None


def _hint(files: Iterable[Path]) -> str:
    """What else the folder may have been meant to be."""
    found = sorted(files)
    gguf = [path for path in found if path.suffix == ".gguf"]
    pickles = [path.name for path in found if path.suffix in PICKLES]
    if gguf:
        return f"; name the file itself: --source {gguf[0]}"
    if pickles:
        return f". It holds pickles ({', '.join(pickles[:3])}), which can run code when they are opened; {_PICKLE_REMEDY}"
    return ""


def check_source(source: Source) -> None:
    """Before anything of a distributed checkpoint is opened: it is what was written, and its pickles hold nothing but tensors.

    Of Megatron-LM's folders only what is read here is looked at: its ``common.pt`` holds its arguments, as a pickle.
    ``ValueError`` naming file and fault.
    """
    try:
        if source.kind == "checkpoint":
            check_checkpoint(source.path)
            check_torch_dist_folder(source.store)
        elif (source.store / ".metadata").is_file():
            check_pickle(source.store / ".metadata", METADATA_GLOBALS)
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename} is gone: {GONE}") from error


def sidecar_folder(source: Source, role: Role, named: Path | None) -> Path:
    """Where config.json and tokenizer of a distributed checkpoint are. ``ValueError`` where they cannot be found."""
    if named is not None:
        folder, origin = named, "--hf-folder"
    elif (source.path / SIDECARS).is_dir():
        folder, origin = source.path / SIDECARS, "the checkpoint"
    elif source.kind == "checkpoint":
        model = read_config(source.path).model
        path = {"actor": model.model_path, "critic": model.critic_path or model.model_path, "reward": model.reward_model_path}[role]
        if path is None:
            raise ValueError(f"{source} has no reward model")
        folder, origin = Path(path), f"{source.path / 'config.yaml'}"
    else:
        raise ValueError(f"{source} does not say which model it is: name a folder with config.json and tokenizer by --hf-folder")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{origin} names {folder}, which holds no config.json; say where config.json and tokenizer are by --hf-folder")
    return folder
