from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections import Counter
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from toy_tokenizers import BOS, EOS, HELLO, TEMPLATE_WITH_BOS, make_bpe_tokenizer, make_sentencepiece_model

from megatron_ppo.config import Config
from megatron_ppo.prompts import PromptSampler, PromptSet, expand, load_prompts, request_seed, shard
from megatron_ppo.tokenizer import Tokenizer, load_tokenizer
from megatron_ppo.types import Prompt

BAD_FILE = """{"prompt": "hello", "answer": "a", "level": 3}
{"prompt": "hel

{"answer": "b"}
{"prompt": null}
{"prompt": "he", "answer": 42}
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(Config().replace(model_path=str(make_bpe_tokenizer(tmp_path_factory.mktemp("tok")))))


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = make_bpe_tokenizer(tmp_path_factory.mktemp("chat"), chat_template=TEMPLATE_WITH_BOS)
    return load_tokenizer(Config().replace(model_path=str(folder)))


def write(folder: Path, *rows: object, name: str = "data.jsonl") -> Config:
    file = folder / name
    file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return Config().replace(prompt_data=str(file))


def test_b75_strict_names_every_bad_line(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = write(tmp_path, BAD_FILE)
    with pytest.raises(ValueError, match="3 bad lines") as raised:
        load_prompts(config, tokenizer)
    for line in (2, 4, 5):
        assert f"data.jsonl:{line}: " in str(raised.value)
    for line in (1, 3, 6):
        assert f"data.jsonl:{line}: " not in str(raised.value)


def test_b75_lenient_counts_them(tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    config = write(tmp_path, BAD_FILE).replace(strict_data=False)
    with caplog.at_level(logging.WARNING):
        found = load_prompts(config, tokenizer)
    assert found.num_bad == 3
    assert "data.jsonl:2" in caplog.text
    assert found.prompts == (
        Prompt(0, (BOS, HELLO), "hello", "a", {"level": 3}),
        Prompt(5, (BOS, 259), "he", "42", {}),
    )


def test_b75_same_rows_in_another_process(tmp_path: Path) -> None:
    model = str(make_sentencepiece_model(tmp_path))  # importing transformers would take long
    config = write(tmp_path, BAD_FILE).replace(strict_data=False, model_path=model)
    program = (
        "from megatron_ppo.config import Config; from megatron_ppo.prompts import *; from megatron_ppo.tokenizer import load_tokenizer\n"
        f"c = Config().replace(prompt_data={config.data.prompt_data!r}, strict_data=False, model_path={model!r})\n"
        "print(load_prompts(c, load_tokenizer(c)).fingerprint, PromptSampler(9, 4, 1).rows(5), request_seed(1, 2, 3, 4))"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    ours = load_prompts(config, load_tokenizer(config)).fingerprint, PromptSampler(9, 4, 1).rows(5), request_seed(1, 2, 3, 4)
    assert other.stdout.strip() == " ".join(map(str, ours))
    assert PromptSet(()).fingerprint != ours[0]


@pytest.mark.parametrize("line", ["[1]", '"text"', "{", '{"prompt": 5}', '{"prompt": []}', '{"prompt": ["hi"]}', '{"prompt": "\\ud800"}'])
def test_b75_other_kinds_of_bad_lines(tmp_path: Path, tokenizer: Tokenizer, line: str) -> None:
    config = write(tmp_path, {"prompt": "hello"}, line + "\n")
    with pytest.raises(ValueError, match=r"data\.jsonl:2: "):
        load_prompts(config, tokenizer)
    assert load_prompts(config.replace(strict_data=False), tokenizer).num_bad == 1


def test_b75_bytes_that_are_not_utf8(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = write(tmp_path, {"prompt": "hello"})
    Path(config.data.prompt_data).write_bytes(b'\xef\xbb\xbf{"prompt": "hello"}\r\n{"prompt": "\xff"}\r\n')
    with pytest.raises(ValueError, match=r"1 bad lines[^:]*:\s+\S*data\.jsonl:2: "):
        load_prompts(config, tokenizer)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_b75_empty_file(tmp_path: Path, tokenizer: Tokenizer, content: str) -> None:
    with pytest.raises(ValueError, match="no usable prompt"):
        load_prompts(write(tmp_path, content), tokenizer)
    with pytest.raises(ValueError, match="no usable prompt: 1 bad"):
        load_prompts(write(tmp_path, content, "{\n").replace(strict_data=False), tokenizer)


def test_files_that_are_no_data(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="there is no file"):
        load_prompts(Config().replace(prompt_data=str(tmp_path / "none.jsonl")), tokenizer)
    with pytest.raises(ValueError, match=r"\.csv"):
        load_prompts(write(tmp_path, "x", name="data.csv"), tokenizer)
    with pytest.raises(ValueError, match="not readable as Parquet"):
        load_prompts(write(tmp_path, "not parquet", name="data.parquet"), tokenizer)


def test_b75_parquet_gives_what_jsonl_gives(tmp_path: Path, chat_tokenizer: Tokenizer) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": text}], "answer": answer, "level": 1} for text, answer in (("hello", "a"), ("he", None))
    ]
    config = write(tmp_path, *rows)
    file = tmp_path / "data.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), file)
    from_parquet = load_prompts(config.replace(prompt_data=str(file)), chat_tokenizer)
    assert from_parquet == load_prompts(config, chat_tokenizer)
    assert from_parquet.prompts[0].text == "<s>[user]hello</s>[assistant]"
    parquet.write_table(pa.Table.from_pylist([*rows, rows[0] | {"prompt": None}]), file)
    with pytest.raises(ValueError, match=r"data\.parquet: row 2: "):
        load_prompts(config.replace(prompt_data=str(file)), chat_tokenizer)


def test_b74_chat_and_plain_prompts_have_one_bos(tmp_path: Path, chat_tokenizer: Tokenizer) -> None:
    config = write(tmp_path, {"prompt": [{"role": "user", "content": "hello"}]}, {"prompt": "hello"}, {"prompt": "<s>hello"})
    chat, plain, written = load_prompts(config, chat_tokenizer).prompts
    assert chat.token_ids.count(BOS) == 1
    assert plain.token_ids == written.token_ids == (BOS, HELLO)
    assert load_prompts(config.replace(add_bos=False), chat_tokenizer).prompts[1].token_ids == (HELLO,)


def test_b73_missing_template_is_no_bad_line(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Lenient reading does not turn a fault of the set-up into an empty file."""
    config = write(tmp_path, {"prompt": [{"role": "user", "content": "hello"}]}, {"prompt": "hello"}).replace(strict_data=False)
    with pytest.raises(ValueError, match=r"data\.chat_template"):
        load_prompts(config, tokenizer)


def test_template_that_refuses_a_line(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "t.jinja").write_text("{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}x")
    fussy = load_tokenizer(Config().replace(model_path=tokenizer.name, chat_template=str(tmp_path / "t.jinja")))
    config = write(tmp_path, *[{"prompt": [{"role": role, "content": "hello"}]} for role in ("user", "system")])
    with pytest.raises(ValueError, match=r"data\.jsonl:2: .*user first"):
        load_prompts(config, fussy)


def test_missing_answer_is_a_bad_line_where_the_reward_needs_one(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = write(tmp_path, {"prompt": "hello"})
    assert load_prompts(config.replace(reward="length"), tokenizer).prompts[0].answer is None
    with pytest.raises(ValueError, match=r"data\.jsonl:1: .*'answer'.*math"):
        load_prompts(config.replace(reward="math"), tokenizer)


LONG = "abcdefghij"


@pytest.mark.parametrize(("policy", "kept"), [("left", slice(2, 10)), ("right", slice(0, 8))])
def test_b38_overflow_keeps_one_end(tmp_path: Path, tokenizer: Tokenizer, policy: str, kept: slice) -> None:
    config = write(tmp_path, {"prompt": LONG}, {"prompt": LONG[:8]})
    found = load_prompts(config.replace(max_prompt_length=8, add_bos=False, prompt_overflow=policy), tokenizer)
    ids = tokenizer.encode(LONG, add_bos=False)
    assert len(ids) == 10
    assert [prompt.token_ids for prompt in found.prompts] == [tuple(ids[kept]), tuple(ids[:8])]
    assert (found.num_truncated, found.num_filtered) == (1, 0)


def test_b38_overflow_error_and_filter(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = write(tmp_path, {"prompt": LONG[:8]}, {"prompt": LONG}).replace(max_prompt_length=8, add_bos=False)
    with pytest.raises(ValueError, match=r"prompt 1 has 10 tokens, but rollout\.max_prompt_length is 8"):
        load_prompts(config, tokenizer)
    found = load_prompts(config.replace(prompt_overflow="filter"), tokenizer)
    assert [prompt.prompt_id for prompt in found.prompts] == [0]
    assert found.num_filtered == 1
    with pytest.raises(ValueError, match=r"no usable prompt: 0 bad lines, 2 prompts longer"):
        load_prompts(config.replace(prompt_overflow="filter", max_prompt_length=7), tokenizer)


def test_b43_expansion_is_prompt_major() -> None:
    a, b = Prompt(7, (1,), "a"), Prompt(3, (2,), "b")
    assert expand([a, b], 3) == [(a, 0), (a, 1), (a, 2), (b, 0), (b, 1), (b, 2)]


@given(st.integers(0, 40), st.integers(1, 9))
def test_b43_shards_are_contiguous_and_even(num_items: int, num_replicas: int) -> None:
    items = list(range(num_items))
    parts = [shard(items, num_replicas, replica) for replica in range(num_replicas)]
    assert list(chain.from_iterable(parts)) == items
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_shard_of_no_replica() -> None:
    with pytest.raises(ValueError, match="replica 2 is not one of 2"):
        shard([1], 2, 2)


def test_b84_resumed_sequence_is_the_straight_one() -> None:
    """64 ids, batch 8: each id once an epoch; one that starts at iteration 3 goes on as if never stopped, on any number of replicas."""
    straight = PromptSampler(64, 8, 1)
    sequence = [straight.rows(iteration) for iteration in range(16)]
    for epoch in (sequence[:8], sequence[8:]):
        assert sorted(chain.from_iterable(epoch)) == list(range(64))
    assert sequence[:8] != sequence[8:]
    resumed = PromptSampler(64, 8, 1)
    assert [resumed.rows(iteration) for iteration in range(3, 16)] == sequence[3:]
    for num_replicas in (1, 2, 3):
        assert [list(chain.from_iterable(shard(rows, num_replicas, r) for r in range(num_replicas))) for rows in sequence] == sequence
    assert PromptSampler(64, 8, 2).rows(0) != sequence[0]
    assert sorted(sequence[0]) != sequence[0]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_b84_epochs_that_do_not_divide(data: st.DataObject) -> None:
    """Once an epoch, never twice in an iteration, and the same whether asked in order or out of the blue."""
    num_prompts = data.draw(st.integers(1, 30))
    size = data.draw(st.integers(1, num_prompts))
    sampler = PromptSampler(num_prompts, size, seed=3)
    num_iterations = 4 * num_prompts // size + 3
    sequence = [sampler.rows(iteration) for iteration in range(num_iterations)]
    assert all(len(set(rows)) == size for rows in sequence)
    flat = list(chain.from_iterable(sequence))
    for start in range(0, len(flat) - num_prompts + 1, num_prompts):
        assert sorted(flat[start : start + num_prompts]) == list(range(num_prompts))
    iteration = data.draw(st.integers(0, num_iterations - 1))
    assert PromptSampler(num_prompts, size, seed=3).rows(iteration) == sampler.rows(iteration) == sequence[iteration]


def test_sampler_refuses_more_prompts_than_there_are() -> None:
    with pytest.raises(ValueError, match="prompts_per_iteration = 11, but the file has 10 usable prompts"):
        PromptSampler(10, 11, 0)
    with pytest.raises(ValueError, match="counted from 0"):
        PromptSampler(10, 10, 0).rows(-1)


def test_request_seeds_are_distinct_31_bit_numbers() -> None:
    grid = [(run, iteration, prompt, sample) for run in (1, 2) for iteration in range(10) for prompt in range(50) for sample in range(8)]
    seeds = Counter(request_seed(*key) for key in grid)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert len(seeds) >= len(grid) - 2  # 8,000 draws from 2**31: 0.015 collisions expected
    assert request_seed(1, 23, 4, 5) != request_seed(1, 2, 34, 5)


def test_eos_in_a_prompt_is_an_ordinary_token(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """B34/B35: nothing is cut off or masked at an end-of-sequence id inside the prompt."""
    prompt = load_prompts(write(tmp_path, {"prompt": "he</s>hello"}), tokenizer).prompts[0]
    assert prompt.token_ids == (BOS, 259, EOS, HELLO)
