"""A GGUF file as a folder in Hugging Face format: weights unpacked by transformers, tokenizer and config rebuilt from the file.

Stands beside ``conversion.py``, which goes on with the folder. transformers holds the whole model in memory meanwhile: there is no
streaming here. Left out: GGUF as a target.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

PACKAGES = ("transformers", "gguf", "accelerate")


def unpack_gguf(file: Path, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write ``folder``: config.json, weights in ``dtype`` (float32 holds what the file holds, unrounded), tokenizer.

    ``ValueError`` where a package is missing, or transformers cannot read the file.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"a GGUF file is read by the packages {', '.join(PACKAGES)}; install {', '.join(missing)}")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    place = str(file.parent.resolve())  # a bare name would be looked up on the hub
    try:
        network = AutoModelForCausalLM.from_pretrained(
            place, gguf_file=file.name, dtype=dtype, quantization_config=GgufConfig(dequantize=True), local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=file.name, local_files_only=True)
    except (ValueError, OSError, KeyError, NotImplementedError, ImportError) as error:
        raise ValueError(f"transformers cannot read {file}: {error}") from error
    for owner, name in ((network, "hf_quantizer"), (network.config, "quantization_config")):
        if hasattr(owner, name):
            delattr(owner, name)  # the weights are plain now
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
