r"""Function rewards: what a response is worth, computed from its text.

Where it stands: on the rollout mesh, after sampling and before the trajectories are put on the bus; ``reward_pool.py`` runs
these functions. This module imports nothing heavy, so that a worker process of the pool starts in a fraction of a second.

A reward of the user's own is ``module:function`` or ``path/to/file.py:function`` with the signature

    def my_reward(sample: RewardInput) -> float: ...

It runs in the processes of the pool, under ``data.reward_timeout_s``; an exception, a timeout or a result that is not a
finite number scores 0.0 and is counted.

Model output is data and is never evaluated as code: numbers are read by a regular expression and compared as fractions;
other expressions go through a LaTeX grammar (math-verify's, its Python-syntax parser left out), after a look that refuses
towers of powers and the like.

Left out: reward models (the training mesh computes those) and KL penalties (``experience.py``).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import math
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from types import ModuleType

LENGTH_SCALE = 100
"""Tokens that cost one point under the ``length`` reward."""

_MATH_MEMORY_BYTES = 2**30
_MAX_EXPRESSION = 400
_MAX_DIGITS = 50
_MAX_DEPTH = 10
_MATH_CPU_LIMIT_S = 1.5


@dataclass(frozen=True)
class RewardInput:
    """What a reward function sees of one response."""

    prompt: str
    """Text of the prompt, after the chat template."""
    response: str
    """Text of the response, special tokens left out."""
    answer: str | None = None
    """The reference answer of the data file (``data.data_columns``)."""
    columns: Mapping[str, object] = field(default_factory=dict)
    """The other columns of the prompt's row."""
    num_response_tokens: int = 0
    """Tokens of the response, end-of-sequence token included."""
    truncated: bool = False
    """True where the response was cut off at a length limit."""


RewardFunction = Callable[[RewardInput], float]


class RewardTimeout(Exception):
    """A reward function may raise this to give a response up; it scores and counts like one that the pool had to stop."""


@dataclass(frozen=True)
class Reward:
    """A reward function and what may be expected of it."""

    name: str
    function: RewardFunction
    cannot_hang: bool = False
    """True: linear in the text and free of foreign code, so that it may run in the caller's process, without a time limit."""
    needs_answer: bool = False
    """True: every prompt must have a reference answer."""
    imports: tuple[str, ...] = ()
    """Modules that a worker imports before its first sample, so that they are not charged to that sample's time limit."""
    memory_limit_bytes: int | None = None
    """Address space that a worker process may use; None: no limit (code of the user's own may map what it likes)."""


def exact_match(sample: RewardInput) -> float:
    """1 where the response is the answer, surrounding white space aside; 0 otherwise."""
    return float(sample.response.strip() == _answer(sample).strip())


def token_accuracy(sample: RewardInput) -> float:
    """Share of right symbols: response and answer are split at white space and compared position by position.

    right / max(number of the answer's symbols, number of the response's): missing and surplus symbols both count as wrong.
    1 for two empty texts.
    """
    response, answer = sample.response.split(), _answer(sample).split()
    right = sum(ours == theirs for ours, theirs in zip(response, answer, strict=False))
    return right / max(len(response), len(answer)) if response or answer else 1.0


def length(sample: RewardInput) -> float:
    """Shorter is better: minus the number of response tokens / 100."""
    return -sample.num_response_tokens / LENGTH_SCALE


def format_reward(sample: RewardInput) -> float:
    """1 where the response is ``<think>...</think>`` and then an answer, both with text in them and each tag once; 0 otherwise.

    The opening tag may stand at the end of the prompt instead, as some chat templates have it.
    """
    response = sample.response.strip()
    if sample.prompt.rstrip().endswith("<think>"):
        response = "<think>" + response
    if response.count("<think>") != 1 or response.count("</think>") != 1 or not response.startswith("<think>"):
        return 0.0
    thought, _, answer = response.removeprefix("<think>").partition("</think>")
    return float(bool(thought.strip()) and bool(answer.strip()))


def math_reward(sample: RewardInput) -> float:
    r"""1 where the response's final answer equals the reference, as a number or as an expression; 0 otherwise.

    Final answer (``extract_answer``), of the response only: the content of the last ``\boxed{}`` or what follows the last
    ``####``, whichever stands last; without either, the last plain number. The reference may carry a ``####`` or a box
    itself.
    """
    answer = _answer(sample)
    reference = extract_marked(answer)
    reference = answer.strip() if reference is None else reference
    prediction = extract_answer(sample.response)
    return float(prediction is not None and is_equivalent(reference, prediction))


BUILT_IN: dict[str, Reward] = {
    reward.name: reward
    for reward in (
        Reward("exact_match", exact_match, cannot_hang=True, needs_answer=True),
        Reward("token_accuracy", token_accuracy, cannot_hang=True, needs_answer=True),
        Reward("length", length, cannot_hang=True),
        Reward("format", format_reward, cannot_hang=True),
        Reward("math", math_reward, needs_answer=True, imports=("math_verify",), memory_limit_bytes=_MATH_MEMORY_BYTES),
    )
}


def needs_answer(spec: str | None) -> bool:
    """Whether ``data.reward`` names a built-in that compares with a reference answer. Imports nothing."""
    return spec in BUILT_IN and BUILT_IN[spec].needs_answer


def resolve_reward(spec: str) -> Reward:
    """The reward that ``data.reward`` names; ``ValueError`` with the cause where it cannot be imported."""
    if spec in BUILT_IN:
        return BUILT_IN[spec]
    source, separator, name = spec.rpartition(":")
    if not separator or not source or not name:
        raise ValueError(
            f"data.reward: {spec!r} is neither a built-in reward ({', '.join(BUILT_IN)}) nor module:function nor path/to/file.py:function"
        )
    try:
        module = _load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except Exception as error:  # whatever the user's module raises while it is imported
        raise ValueError(f"data.reward: cannot import {source!r} of {spec!r}: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"data.reward: {source!r} has no function {name!r}")
    return Reward(spec, function)


def as_score(value: object) -> float:
    """A reward function's result as a float; ``ValueError`` where it is not a finite number."""
    if not hasattr(type(value), "__float__"):
        raise ValueError(f"the reward is {value!r:.80} ({type(value).__name__}), not a number")
    score = float(value)  # type: ignore[arg-type]
    if not math.isfinite(score):
        raise ValueError(f"the reward is {score}, not a finite number")
    return score


# -- final answers ----------------------------------------------------------------------------------------------------------

_BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d)\.)?", re.ASCII)
_FRACTION = re.compile(r"([+-]?)\\[dt]?frac\s*\{\s*([^{}]+)\}\s*\{\s*([^{}]+)\}")
_BOLD = re.compile(r"(?<![\w*])\*\*([^*\n]+)\*\*(?![\w*])")
_TAG = re.compile(r"</?(?:think|answer)>")
_OUTER = " \t\r\n.,;:!?'\"$%\u20ac\u00a3\\"


def extract_marked(text: str) -> str | None:
    r"""Content of the last ``\boxed{}``, or of the line after the last ``####``, whichever stands last; None without
    either. Linear time."""
    box = _last_box(text)
    hashes = text.rfind("####")
    if box is not None and box[0] > hashes:
        inner = _last_box(box[1])
        return (inner[1] if inner is not None else box[1]).strip()
    if hashes < 0:
        return None
    line = text[hashes + 4 :].lstrip().partition("\n")[0].strip()
    words = line.split(maxsplit=2)
    if len(words) > 1 and words[1][0].isalpha() and parse_number(words[0]) is not None:
        return words[0]  # "42 apples", "42 because ..."
    return line


def extract_answer(response: str) -> str | None:
    """The final answer of a response (see ``math_reward``); None where there is none. Think and answer tags are no part of it."""
    response = _TAG.sub(" ", response)
    marked = extract_marked(response)
    return marked if marked is not None else _last_number(response)


def parse_number(text: str) -> Fraction | None:
    r"""The number that ``text`` is: 42, -1,234.50, $5, 50%, 3/4, \frac{3}{4}; None for anything else. A unit of money or
    percent is dropped."""
    text = _bare(text).replace("\\!", "").replace("\\$", "").replace("-$", "-").replace("\u2212", "-")
    if len(text) > 2 * _MAX_DIGITS:
        return None
    fraction = _FRACTION.fullmatch(text)
    if fraction is not None:
        sign, numerator, denominator = fraction.groups()
        numerator = sign + numerator.strip()
    else:
        numerator, slash, denominator = text.partition("/")
        denominator = denominator if slash else "1"
    top, bottom = _parse_decimal(numerator), _parse_decimal(denominator)
    return top / bottom if top is not None and bottom else None


def is_equivalent(reference: str, prediction: str) -> bool:
    """Whether two final answers say the same: equal texts, equal numbers (exactly, as fractions), or equal expressions by
    math-verify."""
    if not reference.strip() or not prediction.strip():
        return False
    if reference.strip() == prediction.strip():
        return True
    numbers = parse_number(reference), parse_number(prediction)
    if None not in numbers:
        return numbers[0] == numbers[1]
    if _is_costly(reference) or _is_costly(prediction):
        return False
    return _same_expression(reference, prediction)


def _answer(sample: RewardInput) -> str:
    if sample.answer is None:
        raise ValueError("the prompt has no reference answer (data.data_columns)")
    return sample.answer


def _last_box(text: str) -> tuple[int, str] | None:
    r"""(position, content) of the ``\boxed{}`` that closes last, with its braces balanced."""
    last: tuple[int, str] | None = None
    open_braces: list[tuple[int, int] | None] = []
    for match in _BOX_OR_BRACE.finditer(text):
        if match[0] == "}":
            opened = open_braces.pop() if open_braces else None
            if opened is not None:
                last = (opened[0], text[opened[1] : match.start()])
        elif match[0].endswith("{") and match[0] != "\\{":
            open_braces.append((match.start(), match.end()) if match[0] != "{" else None)
    return last


def _last_number(text: str) -> str | None:
    """The last word that is a number. A word that has a digit first but is no number (``5x``, ``9**9``) ends the search: an
    expression has no number to be picked out of it."""
    for raw in reversed(_BOLD.sub(r" \1 ", text).split()):
        word = _bare(raw.rpartition("=")[2], "()[]{}")
        if parse_number(word) is not None:
            return word
        if word and not word[0].isalpha() and any(character.isdigit() for character in word):
            return None
    return None


def _bare(text: str, also: str = "") -> str:
    """Without punctuation and units around it; a leading point stays (.5)."""
    return text.rstrip(_OUTER + also).lstrip(_OUTER.replace(".", "") + also)


def _parse_decimal(text: str) -> Fraction | None:
    text = text.strip(" ")
    if not any(character in "0123456789" for character in text) or _NUMBER.fullmatch(text) is None:
        return None
    return Fraction(text.replace(",", "").rstrip("."))


def _is_costly(text: str) -> bool:
    """Whether an expression could take long or much memory: long, long numbers, deep brackets, large or nested powers, large factorials
    and binomials."""
    compact = re.sub(r"\\left|\\right|\s", "", text)
    return (
        len(text) > _MAX_EXPRESSION
        or _depth(text) > _MAX_DEPTH
        or "**" in compact
        or "__" in compact
        or re.search(rf"\d{{{_MAX_DIGITS},}}", compact) is not None
        or re.search(r"\^\{?[+-]?\(?\d{4,}", compact) is not None  # x^{1000}
        or re.search(r"\^[^+\-=,&]*\^", compact) is not None  # a^b^c, a^{b^c}, (a^b)^c
        or (re.search(r"\^\{[^}]*[*\\]", compact) is not None and re.search(r"\^\{[^}]*\d{2}", compact) is not None)
        or re.search(r"\d{3,}[)}\]]*!|!\)*!|!\^|\^\{?[^}]*!", compact) is not None
        or re.search(r"\\[dt]?binom\{?\d{4,}|\\(?:sum|prod|int|lim)(?![a-z])", compact) is not None
    )


def _depth(text: str) -> int:
    """Deepest nesting of brackets; the grammar's time grows steeply with it."""
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _same_expression(reference: str, prediction: str) -> bool:
    """math-verify on LaTeX only: its parser of plain expressions would hand the text to Python's own evaluator.

    Its time limits are off: they count wall-clock seconds and answer "different", so that on a busy machine a right answer would
    silently score 0. Here processor time counts, and running out of it is a ``RewardTimeout``.
    """
    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would print every expression that it gives up
    latex = [LatexExtractionConfig()]
    with _cpu_limit(_MATH_CPU_LIMIT_S):
        gold, target = (
            parse(f"${text.strip().strip('$')}$", latex, fallback_mode="no_fallback", parsing_timeout=None)
            for text in (reference, prediction)
        )
        return bool(gold) and bool(target) and verify(gold, target, timeout_seconds=None)


class _OutOfTime(BaseException):
    """Not an ``Exception``, which the libraries underneath would catch and take for an unreadable expression."""


@contextlib.contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """``RewardTimeout`` after ``seconds`` of this process's own processor time. Main thread only, as signals are."""

    def stop(_signal: int, _frame: object) -> None:
        raise _OutOfTime

    previous = signal.signal(signal.SIGVTALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    except _OutOfTime:
        raise RewardTimeout(f"no decision within {seconds} s of processor time") from None
    finally:
        signal.signal(signal.SIGVTALRM, previous)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    name = f"megatron_ppo_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module
