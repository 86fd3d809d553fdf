"""Small tokenizers for tests, written to a folder the way the real ones are: byte-level BPE for transformers, and sentencepiece."""

from __future__ import annotations

import json
from pathlib import Path

import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = 0, 1, 2
NUM_TOKENS = 263
"""3 special tokens, 256 bytes, 4 merges."""
HE, LLO, HELLO = 259, 261, 262

TEMPLATE_WITH_BOS = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TEMPLATE_WITHOUT_BOS = TEMPLATE_WITH_BOS.removeprefix("{{ bos_token }}")


def make_bpe_tokenizer(folder: Path, *, bos: bool = True, chat_template: str | None = None) -> Path:
    """Byte-level BPE: <s> 0, </s> 1, <pad> 2, the bytes, and merges by which he + llo (259, 261) decodes to what encodes as hello (262)."""
    words = ["<s>", "</s>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "llo", "hello"]
    core = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    special = {"eos_token": "</s>", "pad_token": "<pad>"} | ({"bos_token": "<s>"} if bos else {})
    fast = PreTrainedTokenizerFast(tokenizer_object=core, **special)
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return folder


def make_sentencepiece_model(folder: Path) -> Path:
    """``tokenizer.model`` trained on a few sentences, with bytes to fall back on and a piece ``[INST]`` of the user's."""
    folder.mkdir(parents=True, exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["hello world", "the quick brown fox", "jumps over the lazy dog", "one two three 123"] * 20),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=330,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return folder / "tokenizer.model"


def write_json(file: Path, content: object) -> None:
    """``content`` as JSON, parents made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))
