"""Generation with a Hugging Face model: continuous batching over a key-value cache (step 2 of an iteration, ``rollout_backend = hf``).

    waiting requests --admit--> prefill: right-padded, causal, each distinct prompt once
                                     |  keys and values are moved so that every row ends in the same column
                                     v
    rows of the batch   . . p p p r r |  one new column a step; rows that have ended leave, and waiting requests take their places
                        p p p p r r r |

Rows end together, so that the distance of two columns is the distance of their tokens: sliding windows hold, and one number says how long
the cache is. A response depends on its prompt, its seed and the weights; the rows beside it change the order of floating-point sums only.
Left out: paging, prefix caching between calls, models that keep something else than keys and values (refused by ``check_generates``).
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from megatron_ppo.roles.hf_heads import hidden_and_logits
from megatron_ppo.roles.sampling import draw_rows
from megatron_ppo.types import Completion, Sampling

MAX_NUM_SEQS = 256
"""Rows that are sampled at the same time where nothing else is said: vLLM's default for offline use."""
PREFILL_TOKENS = 8192
"""Padded tokens of prompts in one forward pass."""
_ROOM = 64
"""Columns by which a full cache grows."""
_LEAVE_FRACTION = 8
"""Rows that have ended stay until they are this part (1 / n) of the batch: moving the cache costs about as much as a step."""


def generate(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int], *, max_num_seqs: int = MAX_NUM_SEQS
) -> list[Completion]:
    """One response to each prompt, in order. At most ``max_num_seqs`` rows are in the batch at a time.

    A response ends at an id of ``sampling.stop_token_ids``, which belongs to it, or at ``max_response_length``. Every request has its own
    generator and uses up one number of it a token. Log-probs are as ``draw_rows`` gives them.
    """
    requests = [_request(prompt, sampling, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
    waiting, batch = deque(requests), _Batch(model)
    while waiting or batch.rows:
        if batch.has_left():
            batch.drop_ended()
            continue
        if waiting and len(batch.rows) < max_num_seqs:
            admitted = [waiting.popleft() for _ in range(min(max_num_seqs - len(batch.rows), len(waiting)))]
            logits = batch.admit(admitted)
        else:
            admitted, logits = batch.rows, batch.step()
        _add_tokens(admitted, logits, sampling)
    return [Completion(r.response, r.log_probs, truncated=not r.is_stopped) for r in requests]


def check_generates(model: PreTrainedModel) -> None:
    """``ValueError`` for a model whose cache is not keys and values alone, or that finds a token's place by itself."""
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        raise ValueError(
            f"{model.config.model_type} models take no positions of tokens: rollout_backend = hf cannot batch them; "
            "use rollout_backend = vllm"
        )
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    other = sorted({type(layer).__name__ for layer in DynamicCache(config=model.config).layers if type(layer) not in plain})
    if other:
        raise ValueError(
            f"{model.config.model_type} models keep more than keys and values of the tokens before ({', '.join(other)}): "
            "rollout_backend = hf cannot batch them; use rollout_backend = vllm"
        )


@dataclass
class _Request:
    """A response on its way."""

    prompt: tuple[int, ...]
    uniforms: Tensor
    """[max_response_length] float64 on the CPU, one a token."""
    response: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    is_stopped: bool = False

    @property
    def is_open(self) -> bool:
        """Whether another token is wanted."""
        return not self.is_stopped and len(self.response) < len(self.uniforms)


def _request(prompt: Sequence[int], sampling: Sampling, seed: int) -> _Request:
    generator = torch.Generator().manual_seed(int(seed))
    return _Request(tuple(prompt), torch.rand(sampling.max_response_length, dtype=torch.float64, generator=generator))


def _add_tokens(requests: Sequence[_Request], logits: Tensor, sampling: Sampling) -> None:
    """Draw the next token of those that are open; ``logits`` [n, V] are of all."""
    rows = [row for row, request in enumerate(requests) if request.is_open]
    if len(rows) < len(requests):
        logits = logits[rows]
    drawing = [requests[row] for row in rows]
    numbers = [request.uniforms[len(request.response)] for request in drawing]
    for request, token, log_prob in zip(drawing, *draw_rows(logits, sampling, torch.stack(numbers)), strict=True):
        request.response.append(token)
        request.log_probs.append(log_prob)
        request.is_stopped = token in sampling.stop_token_ids


class _Batch:
    """The rows that are being sampled, and their cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.rows: list[_Request] = []
        self._model = model
        self._device = model.get_input_embeddings().weight.device
        self._cache = Cache(layer_class_to_replicate=_Layer)
        self._lengths = torch.zeros(0, dtype=torch.int64)
        """[n] tokens of each row that are in the cache: all but the one drawn last."""

    def has_left(self) -> bool:
        """Whether enough rows have ended for the others to move together."""
        ended = sum(not request.is_open for request in self.rows)
        return ended > 0 and ended * _LEAVE_FRACTION >= len(self.rows)

    def drop_ended(self) -> None:
        """Rows that have ended leave, and columns that none of the others needs go with them."""
        kept = [row for row, request in enumerate(self.rows) if request.is_open]
        self.rows = [self.rows[row] for row in kept]
        lengths, width = self._lengths[kept], self._cache.get_seq_length()
        self._lengths = lengths
        if kept:
            starts = torch.full((len(kept),), width - int(lengths.max()))
            self._move(self._cache, torch.tensor(kept), starts, int(lengths.max()))
        else:
            self._cache = Cache(layer_class_to_replicate=_Layer)

    def admit(self, requests: Sequence[_Request]) -> Tensor:
        """Take requests into the batch: logits [n, V] of their first tokens."""
        distinct = list(dict.fromkeys(request.prompt for request in requests))
        logits = []
        for prompts in _passes(distinct):
            new, outcome = self._prefill(prompts)
            numbers = {prompt: row for row, prompt in enumerate(prompts)}
            joining = [request for request in requests if request.prompt in numbers]
            self._join(new, joining, torch.tensor([numbers[request.prompt] for request in joining]))
            logits += [outcome[numbers[request.prompt]] for request in joining]
        order = {id(request): place for place, request in enumerate(self.rows[len(self.rows) - len(requests) :])}
        return torch.stack([logits[order[id(request)]] for request in requests])

    def step(self) -> Tensor:
        """Logits [n, V] of every row's next token; those of rows that have ended mean nothing."""
        ids = torch.tensor([[request.response[-1]] for request in self.rows], device=self._device)
        is_open = torch.tensor([request.is_open for request in self.rows])
        positions = torch.where(is_open, self._lengths, 0).to(self._device)[:, None]  # one that has ended may be at the model's last
        self._lengths = self._lengths + 1
        width = self._cache.get_seq_length() + 1
        mask = None
        if int(self._lengths.min()) < width:
            mask = (torch.arange(width) >= width - self._lengths[:, None]).to(self._device)
        return self._logits(ids, self._cache, lambda hidden: hidden[:, -1:], attention_mask=mask, position_ids=positions)

    def _prefill(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Cache, Tensor]:
        """Cache, right-padded, and logits [n, V] after the last token of each prompt. Causal attention does not see the padding."""
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        longest = int(lengths.max())
        ids = torch.tensor([[*prompt, *([0] * (longest - len(prompt)))] for prompt in prompts], device=self._device)
        cache = Cache(layer_class_to_replicate=_Layer)
        return cache, self._logits(ids, cache, lambda hidden: hidden[torch.arange(len(prompts)), lengths - 1, None])

    def _join(self, new: Cache, requests: Sequence[_Request], prompt_rows: Tensor) -> None:
        """Rows of a prefilled cache, one a request, below those of the batch."""
        lengths = torch.tensor([len(request.prompt) for request in requests])
        old_width = self._cache.get_seq_length()
        width = max(old_width, int(lengths.max()))
        self._move(new, prompt_rows, lengths - width, width)
        if self.rows and old_width < width:
            rows = torch.arange(len(self.rows))
            self._move(self._cache, rows, torch.full_like(rows, old_width - width), width)
        if self.rows:
            for own, other in zip(self._cache.layers, new.layers, strict=True):
                own.add_rows(other)
        else:
            self._cache = new
        self.rows = [*self.rows, *requests]
        self._lengths = torch.cat([self._lengths, lengths])

    def _move(self, cache: Cache, rows: Tensor, starts: Tensor, width: int) -> None:
        """Cut the cache anew: row i takes ``width`` columns of the old row ``rows[i]`` from its column ``starts[i]`` on.

        Columns before the first repeat it, so that what the mask hides is finite. There is room for as many steps as a full cache gets.
        """
        columns = (starts[:, None] + torch.arange(width + _ROOM)).clamp(min=0, max=cache.get_seq_length() - 1)
        for layer in cache.layers:
            layer.pick(rows.to(self._device), columns.to(self._device), width)

    def _logits(self, ids: Tensor, cache: Cache, pick: Callable[[Tensor], Tensor], **options: Any) -> Tensor:
        """[n, V] of what ``pick`` takes of the hidden states; ``ids`` are added to the cache."""
        _, logits = hidden_and_logits(self._model, pick=pick, input_ids=ids, past_key_values=cache, use_cache=True, **options)
        return logits[:, 0]


def _passes(prompts: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Prompts of each prefill, those of like length together."""
    passes: list[list[tuple[int, ...]]] = []
    for prompt in sorted(prompts, key=len, reverse=True):
        if passes and len(passes[-1][0]) * (len(passes[-1]) + 1) <= PREFILL_TOKENS:
            passes[-1].append(prompt)
        else:
            passes.append([prompt])
    return passes


class _Layer(DynamicLayer):
    """Keys and values of one layer, [n, heads, columns, head_dim]: views of buffers with room for more, so that a step copies nothing."""

    keys: Tensor
    values: Tensor
    _key_buffer: Tensor
    _value_buffer: Tensor

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add columns; all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._set(key_states, value_states)
            return self.keys, self.values
        length, stop = self.keys.shape[2], self.keys.shape[2] + key_states.shape[2]
        if stop > self._key_buffer.shape[2]:
            self._key_buffer, self._value_buffer = (_grown(x, stop + _ROOM) for x in (self.keys, self.values))
        self._key_buffer[:, :, length:stop] = key_states
        self._value_buffer[:, :, length:stop] = value_states
        self.keys, self.values = self._key_buffer[:, :, :stop], self._value_buffer[:, :, :stop]
        return self.keys, self.values

    def pick(self, rows: Tensor, columns: Tensor, width: int) -> None:
        """Row i, column j becomes the present row ``rows[i]``, column ``columns[i, j]``; columns from ``width`` on are room."""
        self._set(*(x.transpose(1, 2)[rows[:, None], columns].transpose(1, 2) for x in (self.keys, self.values)))
        self.keys, self.values = self.keys[:, :, :width], self.values[:, :, :width]

    def add_rows(self, other: _Layer) -> None:
        """The rows of another layer with as many columns, below the own."""
        self._set(torch.cat([self.keys, other.keys]), torch.cat([self.values, other.values]))

    def _set(self, keys: Tensor, values: Tensor) -> None:
        self.keys = self._key_buffer = keys
        self.values = self._value_buffer = values


def _grown(states: Tensor, num_columns: int) -> Tensor:
    """A buffer of ``num_columns`` columns that begins with ``states``."""
    rows, heads, length, size = states.shape
    buffer = states.new_zeros(rows, heads, num_columns, size)
    buffer[:, :, :length] = states
    return buffer
