"""Text <-> token ids, once, for every part of the system.

Where it stands: prompts are tokenised here before the first iteration (``prompts.py``), responses are decoded here for the
reward; between the two only ids travel, so that no text is ever encoded a second time. Two implementations: folders in
Hugging Face format go through transformers, sentencepiece ``.model`` files through the sentencepiece library itself,
because transformers reading a bare ``.model`` gives other ids (prefix space, newlines, BOS).

One rule for BOS: the library's own "add special tokens" is always off. A plain prompt begins with BOS where
``data.add_bos`` says so and the tokenizer has one; a chat prompt has exactly what its template writes.

Left out: padding (told by lengths, never by an id) and the comparison of ids at an export.
"""

from __future__ import annotations

import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ppo.config import Config

if TYPE_CHECKING:
    from megatron_ppo.types import Prompt

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
"""One turn of a chat: ``{"role": ..., "content": ...}``."""

_COMPARED_PROMPTS = 32

PHANTOM = "\N{REPLACEMENT CHARACTER}"
"""What an id without a token decodes to. Visible, so that ``4`` + phantom + ``2`` is not taken for 42."""

_CORPUS = (
    "Hello world",
    " two  spaces",
    "line\nbreak\n\n",
    "x = 1,234.5 + y",
    "\u00e9t\u00e9 \u4f60\u597d",
    "<think> tab\t</think>",
)


class Tokenizer(ABC):
    """What the system asks of a tokenizer."""

    name: str
    """Path it was loaded from; named in errors."""
    vocab_size: int
    """Largest id + 1; may be smaller than the network's vocabulary (padding rows) but not larger where such ids are used."""
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    chat_template: str | None
    """Jinja text of ``data.chat_template`` where that is set; it wins over the tokenizer's own."""

    @property
    @abstractmethod
    def has_chat_template(self) -> bool:
        """Whether ``apply_chat_template`` can work."""

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        """Ids of a plain text. With ``add_bos`` the list begins with exactly one BOS, where the tokenizer has one."""
        ids = self._encode(text)
        if add_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def apply_chat_template(self, messages: Sequence[Message]) -> str:
        """Text of a chat up to where the assistant's answer begins; ``ValueError`` without a template. Encode it with
        ``encode_chat``."""
        if not self.has_chat_template:
            raise ValueError(
                f"the prompts are chat messages, but the tokenizer {self.name} has no chat template: "
                "set data.chat_template (--chat-template) to a file with a Jinja template, or use plain strings as prompts"
            )
        return self._apply_chat_template(messages)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``. An id without a token (a padding row of the network's vocabulary was sampled) becomes U+FFFD."""
        parts: list[str] = []
        start = 0
        for position, token_id in enumerate(ids):
            if not self._is_known(token_id):
                parts += [self._decode_known(ids[start:position], skip_special_tokens), PHANTOM]
                start = position + 1
        parts.append(self._decode_known(ids[start:], skip_special_tokens))
        return "".join(parts)

    def _decode_known(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._decode(list(ids), skip_special_tokens) if len(ids) else ""

    @abstractmethod
    def encode_chat(self, text: str) -> list[int]:
        """Ids of a rendered chat: special tokens written in the text become their ids, and nothing is added."""

    @abstractmethod
    def _encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def _apply_chat_template(self, messages: Sequence[Message]) -> str: ...

    @abstractmethod
    def _is_known(self, token_id: int) -> bool: ...

    @abstractmethod
    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str: ...


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer folder read by transformers, from the disk only."""

    def __init__(self, folder: Path, *, chat_template: str | None = None, trust_remote_code: bool = False) -> None:
        refuse_remote_code(folder, trust_remote_code)
        from transformers import AutoTokenizer  # costs seconds; a sentencepiece run does without

        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code, local_files_only=True)
        self._known = frozenset(self._tokenizer.get_vocab().values())
        if not self._known:
            raise ValueError(f"the tokenizer {folder} has an empty vocabulary")
        self.name = str(folder)
        self.vocab_size = max(self._known) + 1
        self.bos_token_id = self._tokenizer.bos_token_id
        self.eos_token_ids = _as_ids(self._tokenizer.eos_token_id, f"{folder}: eos_token_id")
        self.chat_template = chat_template

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None or self._tokenizer.chat_template is not None

    def encode_chat(self, text: str) -> list[int]:
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _apply_chat_template(self, messages: Sequence[Message]) -> str:
        return self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=self.chat_template,
            tokenize=False,
            add_generation_prompt=True,
        )

    def _is_known(self, token_id: int) -> bool:
        return token_id in self._known

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


class SentencePieceTokenizer(Tokenizer):
    """A ``.model`` file read by the sentencepiece library.

    In plain text ``<s>`` is three characters, as the library has it; in a rendered chat the control pieces are cut out
    first, and what stands between two of them is encoded by itself (each such part begins with the model's dummy prefix,
    where it has one).
    """

    def __init__(self, model_file: Path, *, chat_template: str | None = None) -> None:
        from sentencepiece import SentencePieceProcessor

        if not model_file.is_file():
            raise ValueError(f"there is no sentencepiece model {model_file}: set model.tokenizer_path to a .model file")
        try:
            self._processor: Any = SentencePieceProcessor(model_file=str(model_file))
        except (OSError, RuntimeError) as error:
            raise ValueError(f"{model_file} is not a sentencepiece model ({error})") from error
        self.name = str(model_file)
        self.vocab_size = self._processor.get_piece_size()
        self.bos_token_id = self._processor.bos_id() if self._processor.bos_id() >= 0 else None
        eos = self._processor.eos_id()
        self.eos_token_ids = frozenset({eos} if eos >= 0 else ())
        self.chat_template = chat_template
        self._control = {self._processor.id_to_piece(i): i for i in range(self.vocab_size) if self._processor.is_control(i)}

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def encode_chat(self, text: str) -> list[int]:
        if not self._control:
            return self._encode(text)
        longest_first = sorted(self._control, key=len, reverse=True)
        ids: list[int] = []
        for part in re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text):
            if part in self._control:
                ids.append(self._control[part])
            elif part:
                ids += self._encode(part)
        return ids

    def _encode(self, text: str) -> list[int]:
        return list(self._processor.encode(text))

    def _apply_chat_template(self, messages: Sequence[Message]) -> str:
        assert self.chat_template is not None
        piece = self._processor.id_to_piece
        return _render(
            self.chat_template,
            messages,
            bos_token="" if self.bos_token_id is None else piece(self.bos_token_id),
            eos_token="".join(piece(i) for i in self.eos_token_ids),
        )

    def _is_known(self, token_id: int) -> bool:
        return 0 <= token_id < self.vocab_size

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        if skip_special_tokens:
            return self._processor.decode(ids)
        pieces = [self._processor.id_to_piece(i) for i in ids]
        text, run = "", list[int]()
        for token_id, piece in zip(ids, pieces, strict=True):
            if piece in self._control:
                text, run = text + (self._processor.decode(run) if run else "") + piece, []
            else:
                run.append(token_id)
        return text + (self._processor.decode(run) if run else "")


def load_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer of a run: ``model.tokenizer_path``, or else ``model.model_path``.

    A ``.model`` file is read by sentencepiece. A folder with tokenizer.json or tokenizer_config.json is read by
    transformers, any other folder by the one ``.model`` file in it. Where transformers would have to convert a ``.model``
    itself (no tokenizer.json), its ids are compared with sentencepiece's on a few texts, and a difference is a
    ``ValueError``.
    """
    path = Path(config.model.tokenizer_path or config.model.model_path)
    template = _read_template(config.data.chat_template)
    if path.is_file() and path.suffix == ".model":
        return SentencePieceTokenizer(path, chat_template=template)
    if not path.is_dir():
        raise ValueError(f"there is no tokenizer at {str(path)!r}: set model.tokenizer_path to a folder or to a sentencepiece .model file")
    model_files = sorted(path.glob("*.model"))
    fast = (path / "tokenizer.json").is_file()
    if fast or (path / "tokenizer_config.json").is_file():
        tokenizer = HuggingFaceTokenizer(path, chat_template=template, trust_remote_code=config.model.trust_remote_code)
        if not fast and len(model_files) == 1:
            _compare_with_sentencepiece(tokenizer, model_files[0])
        return tokenizer
    if len(model_files) != 1:
        raise ValueError(
            f"{path} has neither tokenizer.json nor tokenizer_config.json, and {len(model_files)} .model files instead of one: "
            "set model.tokenizer_path to a folder with a tokenizer, or to a .model file"
        )
    return SentencePieceTokenizer(model_files[0], chat_template=template)


def refuse_remote_code(folder: Path, trust_remote_code: bool) -> None:
    """``ValueError`` where a file of ``folder`` asks to run Python code of its own (``auto_map``) and the flag does not
    allow it."""
    if trust_remote_code:
        return
    for file in ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json"):
        if _read_json(folder / file).get("auto_map"):
            raise ValueError(
                f"{folder / file} asks to run Python code from its own folder (auto_map), which is refused by default: "
                "read that code, then set model.trust_remote_code (--trust-remote-code) to allow it"
            )


def stop_token_ids(tokenizer: Tokenizer, model_folder: Path, config: Config) -> frozenset[int]:
    """Ids that end a response: the end-of-sequence ids of tokenizer, config.json and generation_config.json, and
    ``rollout.stop_token_ids``.

    Where the three sources disagree the union stops, and a warning names them.
    """
    files = {file: _read_json(model_folder / file) for file in ("config.json", "generation_config.json")}
    bos = _as_ids(tokenizer.bos_token_id, f"{tokenizer.name}: bos_token_id")
    for key, own in (("eos_token_id", tokenizer.eos_token_ids), ("bos_token_id", bos)):
        named = {tokenizer.name: own} | {file: _as_ids(content.get(key), f"{file}: {key}") for file, content in files.items()}
        named = {source: ids for source, ids in named.items() if ids}
        if len(set(named.values())) > 1:
            rule = "any of them ends a response" if key == "eos_token_id" else "the tokenizer's is used"
            logger.warning("%s differs: %s; %s", key, {source: sorted(ids) for source, ids in named.items()}, rule)
    from_files = [_as_ids(content.get("eos_token_id"), file) for file, content in files.items()]
    extra = _as_ids(config.rollout.stop_token_ids, "rollout.stop_token_ids")
    return tokenizer.eos_token_ids.union(extra, *from_files)


def check_vocabulary(tokenizer: Tokenizer, prompts: Iterable[Prompt], vocab_size: int) -> None:
    """``ValueError`` where a prompt's or an end-of-sequence id has no row in a network of ``vocab_size`` tokens
    (config.json's, unpadded).

    A tokenizer smaller than the network is usual (padding rows); one with more tokens than the network is a warning while
    no prompt uses them.
    """
    remedy = f"model.tokenizer_path ({tokenizer.name}) belongs to another model"
    for prompt in prompts:
        largest = max(prompt.token_ids, default=0)
        if largest >= vocab_size:
            raise ValueError(f"prompt {prompt.prompt_id} has token id {largest}, but the model's vocab_size is {vocab_size}: {remedy}")
    beyond = sorted(i for i in tokenizer.eos_token_ids if i >= vocab_size)
    if beyond:
        raise ValueError(f"end-of-sequence ids {beyond} cannot be sampled: the model's vocab_size is {vocab_size}: {remedy}")
    if tokenizer.vocab_size > vocab_size:
        sizes = (tokenizer.name, tokenizer.vocab_size, vocab_size)
        logger.warning("%s has %d tokens, the model %d; no prompt uses the surplus", *sizes)


def check_same_tokenizer(tokenizer: Tokenizer, folder: Path, prompts: Sequence[Prompt], config: Config) -> None:
    """``ValueError`` where the network in ``folder`` (a critic, a reward model) was made for other token ids than the policy's.

    It is fed the policy's ids, so a score under another tokenizer would be noise. Ids of the first prompts and a few texts are
    compared; a folder without a tokenizer is taken to share the policy's.
    """
    names = ("tokenizer.json", "tokenizer_config.json")
    if not any((folder / name).is_file() for name in names) and not list(folder.glob("*.model")):
        return
    other = load_tokenizer(config.replace(tokenizer_path=str(folder)))
    for text in [*_CORPUS, *(prompt.text for prompt in prompts[:_COMPARED_PROMPTS])]:
        own, theirs = tokenizer.encode_chat(text), other.encode_chat(text)
        if own != theirs:
            raise ValueError(
                f"{folder} has another tokenizer than {tokenizer.name}: {text!r} is {own[:8]} for the policy and {theirs[:8]} there. "
                "Choose a critic or reward model of the policy's family"
            )


def _compare_with_sentencepiece(tokenizer: HuggingFaceTokenizer, model_file: Path) -> None:
    reference = SentencePieceTokenizer(model_file)
    for text in _CORPUS:
        ours, theirs = tokenizer.encode(text, add_bos=False), reference.encode(text, add_bos=False)
        if ours != theirs:
            raise ValueError(
                f"transformers reads {model_file} differently from sentencepiece: {text!r} becomes {ours} instead of {theirs}. "
                f"Set model.tokenizer_path to {model_file} (and data.chat_template, where the prompts are chats), "
                "or put the tokenizer.json of the model into the folder"
            )


def _render(template: str, messages: Sequence[Message], *, bos_token: str, eos_token: str) -> str:
    """Jinja in its sandbox, with the names and the white-space rules that Hugging Face chat templates are written for."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(template).render(
        messages=[dict(message) for message in messages], add_generation_prompt=True, bos_token=bos_token, eos_token=eos_token
    )


def _read_template(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"data.chat_template: cannot read {file} ({error})") from error


def _read_json(file: Path) -> dict[str, Any]:
    """The object in ``file``; empty where there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, not a JSON object")
    return content


def _as_ids(value: object, what: str) -> frozenset[int]:
    """An id, a list of ids or None, as a set; ``ValueError`` for anything else."""
    values = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in values:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise ValueError(f"{what}: {token_id!r} is not a token id")
    return frozenset(values)
