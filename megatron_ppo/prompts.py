"""Prompts: from a data file to token ids, and which of them an iteration takes.

Where it stands: the file is read and tokenised once, before the first iteration, by every rank that needs it; the result
depends on the file and the configuration alone, so all ranks hold the same rows (``PromptSet.fingerprint`` lets them prove
it). ``PromptSampler`` then names the rows of an iteration as a pure function of seed and iteration: nothing to save,
nothing to restore, no topology.

Left out: responses, rewards, and any second tokenisation.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megatron_ppo.config import Config
from megatron_ppo.rewards import needs_answer
from megatron_ppo.tokenizer import Tokenizer
from megatron_ppo.types import Prompt

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SHOWN_FAULTS = 5


@dataclass(frozen=True)
class PromptSet:
    """The usable prompts of a file, in file order, and what was done to the others."""

    prompts: tuple[Prompt, ...]
    num_bad: int = 0
    """Lines left out because they could not be read (``data.strict_data=False``). Blank lines are not counted."""
    num_filtered: int = 0
    """Prompts left out because they are too long (``rollout.prompt_overflow="filter"``)."""
    num_truncated: int = 0
    """Prompts cut to the limit (``rollout.prompt_overflow`` "left" or "right")."""

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def fingerprint(self) -> str:
        """Hash of ids and tokens: equal on two ranks if and only if they hold the same rows."""
        digest = hashlib.blake2b(digest_size=16)
        for prompt in self.prompts:
            digest.update(f"{prompt.prompt_id}:{','.join(map(str, prompt.token_ids))};".encode())
        return digest.hexdigest()


class PromptSampler:
    """Which prompts an iteration takes: shuffled epochs, chained, each prompt once in an epoch.

    Where an epoch ends inside an iteration the next one goes on, and prompts that this iteration already has move behind
    its end, so that no iteration holds a prompt twice (two groups of one id would be sampled with the same seeds). For that
    reason ``prompts_per_iteration`` may not exceed the number of prompts.
    """

    def __init__(self, num_prompts: int, prompts_per_iteration: int, seed: int) -> None:
        if not 0 < prompts_per_iteration <= num_prompts:
            raise ValueError(
                f"rollout.prompts_per_iteration = {prompts_per_iteration}, but the file has {num_prompts} usable prompts and "
                "an iteration takes each at most once: lower it (and raise rollout.samples_per_prompt to keep the batch "
                "size), or add prompts"
            )
        self._num_prompts = num_prompts
        self._size = prompts_per_iteration
        self._seed = seed
        self._cached: tuple[int, list[int]] | None = None

    def rows(self, iteration: int) -> list[int]:
        """[prompts_per_iteration] positions in ``PromptSet.prompts``, in the order of the iteration (counted from 0)."""
        if iteration < 0:
            raise ValueError(f"iterations are counted from 0, not {iteration}")
        epoch, start = divmod(iteration * self._size, self._num_prompts)
        rows = self._epoch(epoch)[start : start + self._size]
        missing = self._size - len(rows)
        return rows + self._epoch(epoch + 1)[:missing] if missing else rows

    def _epoch(self, epoch: int) -> list[int]:
        """Order of one epoch. Its head depends on the tail of the epoch before, and that tail on nothing else if they
        cannot overlap."""
        if self._cached is not None and self._cached[0] == epoch:
            return self._cached[1]
        independent = self._num_prompts >= 2 * self._size
        if self._cached is not None and (self._cached[0] == epoch - 1 or (not independent and self._cached[0] < epoch)):
            current, order = self._cached
        else:
            current = max(0, epoch - 1) if independent else 0
            order = self._shuffled(current)
        while current < epoch:
            current += 1
            order = self._continued(order, current)
        self._cached = (epoch, order)
        return order

    def _continued(self, previous: list[int], epoch: int) -> list[int]:
        """Order of ``epoch`` such that the iteration which it shares with ``previous`` has no row twice."""
        shared = (epoch * self._num_prompts) % self._size  # rows at the end of `previous` that are in the shared iteration
        taken = set(previous[len(previous) - shared :])
        order = self._shuffled(epoch)
        head = order[: self._size]
        return [row for row in head if row not in taken] + [row for row in head if row in taken] + order[self._size :]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(self._num_prompts))
        random.Random(_hash("epoch", self._seed, epoch)).shuffle(order)
        return order


def load_prompts(config: Config, tokenizer: Tokenizer) -> PromptSet:
    """Read and tokenise ``data.prompt_data`` (.jsonl, .json, .ndjson or .parquet); the rows depend on nothing but file and
    config.

    A prompt is a string, or a list of chat messages that goes through the chat template. ``Prompt.prompt_id`` is the row in
    the file, counted from 0 (for JSONL the line; bad lines keep their number). Bad lines (no JSON object, no prompt, no
    answer although a built-in reward needs one) are a ``ValueError`` with file:line under ``data.strict_data``, and counted
    otherwise; blank lines are nothing. Prompts longer than ``rollout.max_prompt_length`` follow
    ``rollout.prompt_overflow``. No usable prompt at all is a ``ValueError``.
    """
    path = Path(config.data.prompt_data)
    prompts: list[Prompt] = []
    faults: list[str] = []
    num_filtered = num_truncated = 0
    for row, place, content in _read_rows(path):
        try:
            prompt = _make_prompt(row, content, config, tokenizer)
        except _BadLine as fault:
            faults.append(f"{place}: {fault}")
            continue
        fitted = _fit(prompt, place, config)
        num_filtered += fitted is None
        if fitted is not None:
            num_truncated += fitted is not prompt
            prompts.append(fitted)
    _report(faults, path, strict=config.data.strict_data)
    if not prompts:
        raise ValueError(
            f"{path} has no usable prompt: {len(faults)} bad lines, {num_filtered} prompts longer than "
            f"rollout.max_prompt_length = {config.rollout.max_prompt_length}"
        )
    if num_filtered or num_truncated:
        logger.warning(
            "%s: of prompts longer than %d tokens, %d were left out and %d cut",
            path,
            config.rollout.max_prompt_length,
            num_filtered,
            num_truncated,
        )
    return PromptSet(tuple(prompts), num_bad=len(faults), num_filtered=num_filtered, num_truncated=num_truncated)


def request_seed(run_seed: int, iteration: int, prompt_id: int, sample_index: int) -> int:
    """Seed of one sampling request, in [0, 2**31): independent of topology, batch and history."""
    return _hash("request", run_seed, iteration, prompt_id, sample_index)


def expand(prompts: Sequence[Prompt], samples_per_prompt: int) -> list[tuple[Prompt, int]]:
    """(prompt, sample_index) of every request, prompt-major: A0 A1 A2 B0 B1 B2."""
    return [(prompt, sample_index) for prompt in prompts for sample_index in range(samples_per_prompt)]


def shard(items: Sequence[T], num_replicas: int, replica: int) -> list[T]:
    """Part of ``replica``: contiguous, in order, sizes differing by at most one (larger first, some may be empty).

    Shard prompts, not expanded requests: a prompt's samples then stay together.
    """
    if not 0 <= replica < num_replicas:
        raise ValueError(f"replica {replica} is not one of {num_replicas}")
    size, larger = divmod(len(items), num_replicas)
    start = replica * size + min(replica, larger)
    return list(items[start : start + size + (replica < larger)])


class _BadLine(ValueError):
    """One line of the data file cannot become a prompt."""


def _read_rows(path: Path) -> Iterator[tuple[int, str, object]]:
    """(row, place for messages, content) of every row; content is an undecodable line's ``_BadLine`` where there is one."""
    if not path.is_file():
        raise ValueError(f"data.prompt_data: there is no file {str(path)!r}")
    if path.suffix in (".jsonl", ".json", ".ndjson"):
        return _read_jsonl(path)
    if path.suffix in (".parquet", ".pq"):
        return _read_parquet(path)
    raise ValueError(f"data.prompt_data: {path} must end with .jsonl, .json, .ndjson, .parquet or .pq, not {path.suffix!r}")


def _read_jsonl(path: Path) -> Iterator[tuple[int, str, object]]:
    with path.open("rb") as file:
        for row, line in enumerate(file):
            if not line.strip():
                continue
            content: object
            try:
                content = json.loads(line.decode("utf-8-sig" if row == 0 else "utf-8"))
            except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
                content = _BadLine(f"not valid JSON ({error})")
            yield row, f"{path}:{row + 1}", content


def _read_parquet(path: Path) -> Iterator[tuple[int, str, object]]:
    import pyarrow
    from pyarrow import parquet

    row = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for content in batch.to_pylist():
                    yield row, f"{path}: row {row}", content
                    row += 1
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: not readable as Parquet after row {row} ({error})") from error


def _make_prompt(row: int, content: object, config: Config, tokenizer: Tokenizer) -> Prompt:
    if isinstance(content, _BadLine):
        raise content
    if not isinstance(content, Mapping):
        raise _BadLine(f"holds a {type(content).__name__}, not an object with columns")
    data = config.data
    prompt_column, answer_column = data.data_columns
    text, token_ids = _tokenise(content.get(prompt_column), config, tokenizer)
    if not token_ids:
        raise _BadLine(f"column {prompt_column!r} has no tokens")
    answer = content.get(answer_column)
    if answer is None and needs_answer(data.reward):
        needs = f"which the reward {data.reward!r} needs (--data-columns PROMPT ANSWER names others)"
        raise _BadLine(f"has no column {answer_column!r}, {needs}")
    columns = {name: value for name, value in content.items() if name not in data.data_columns}
    return Prompt(prompt_id=row, token_ids=tuple(token_ids), text=text, answer=_answer_text(answer), columns=columns)


def _tokenise(prompt: object, config: Config, tokenizer: Tokenizer) -> tuple[str, list[int]]:
    key = config.data.data_columns[0]
    if prompt is None:
        raise _BadLine(f"has no column {key!r} (--data-columns PROMPT ANSWER names others)")
    if isinstance(prompt, str):
        _refuse_surrogates(prompt)
        return prompt, tokenizer.encode(prompt, add_bos=config.data.add_bos)
    messages = _as_messages(prompt, key)
    try:
        text = tokenizer.apply_chat_template(messages)
    except Exception as error:
        if not tokenizer.has_chat_template:
            raise  # a fault of the set-up, not of this line
        raise _BadLine(f"the chat template refuses column {key!r} ({error})") from error
    _refuse_surrogates(text)
    return text, tokenizer.encode_chat(text)


def _refuse_surrogates(text: str) -> None:
    """JSON can escape half a character, which no tokenizer can read."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _BadLine(f"the prompt is not valid Unicode ({error})") from error


def _as_messages(prompt: object, key: str) -> list[Mapping[str, Any]]:
    if not isinstance(prompt, list) or not prompt:
        kind = type(prompt).__name__
        raise _BadLine(f"column {key!r} must be a string or a non-empty list of chat messages, not {kind} {prompt!r:.80}")
    for message in prompt:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or message.get("content") is None:
            raise _BadLine(f"column {key!r}: {message!r:.80} is not a chat message with a role and a content")
    return prompt


def _answer_text(answer: object) -> str | None:
    if answer is None or isinstance(answer, str):
        return answer
    return json.dumps(answer, ensure_ascii=False, default=str)


def _fit(prompt: Prompt, place: str, config: Config) -> Prompt | None:
    """The prompt within ``rollout.max_prompt_length``; None where it is filtered, the same object where it fits."""
    limit, policy = config.rollout.max_prompt_length, config.rollout.prompt_overflow
    length = len(prompt.token_ids)
    if length <= limit:
        return prompt
    if policy == "filter":
        return None
    if policy == "error":
        raise ValueError(
            f"{place}: prompt {prompt.prompt_id} has {length} tokens, but rollout.max_prompt_length is {limit}: "
            "raise it, or set rollout.prompt_overflow to left, right or filter"
        )
    kept = prompt.token_ids[-limit:] if policy == "left" else prompt.token_ids[:limit]
    return Prompt(prompt.prompt_id, kept, prompt.text, prompt.answer, prompt.columns)


def _report(faults: Sequence[str], path: Path, *, strict: bool) -> None:
    if not faults:
        return
    shown = "\n  ".join(faults[:_SHOWN_FAULTS])
    more = f"\n  and {len(faults) - _SHOWN_FAULTS} more" if len(faults) > _SHOWN_FAULTS else ""
    text = f"{len(faults)} bad lines in {path}:\n  {shown}{more}"
    if strict:
        raise ValueError(f"{text}\nmend them, or leave them out with --no-strict-data")
    logger.warning("left out %s", text)


def _hash(*parts: str | int) -> int:
    """31-bit hash of the parts, the same on every machine and in every process."""
    text = ":".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") & (2**31 - 1)
