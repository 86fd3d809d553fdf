from __future__ import annotations

import logging
from pathlib import Path

import pytest
import sentencepiece
from toy_tokenizers import (
    BOS,
    EOS,
    HE,
    HELLO,
    LLO,
    NUM_TOKENS,
    PAD,
    TEMPLATE_WITH_BOS,
    TEMPLATE_WITHOUT_BOS,
    make_bpe_tokenizer,
    make_sentencepiece_model,
    write_json,
)

from megatron_ppo.config import Config
from megatron_ppo.tokenizer import (
    PHANTOM,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    check_same_tokenizer,
    check_vocabulary,
    load_tokenizer,
    refuse_remote_code,
    stop_token_ids,
)
from megatron_ppo.types import Prompt

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bpe_tokenizer(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sentencepiece_model(tmp_path_factory.mktemp("sp"))


def load(path: Path, **fields: object) -> Tokenizer:
    return load_tokenizer(Config().replace(model_path=str(path), **fields))


def test_b73_chat_without_template_names_tokenizer_and_key(plain: Path) -> None:
    tokenizer = load(plain)
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match=r"data\.chat_template") as raised:
        tokenizer.apply_chat_template(MESSAGES)
    assert str(plain) in str(raised.value)


def test_b73_template_file_is_used_and_wins(tmp_path: Path) -> None:
    folder = make_bpe_tokenizer(tmp_path / "own", chat_template=TEMPLATE_WITH_BOS)
    assert load(folder).apply_chat_template(MESSAGES) == "<s>[user]hello</s>[assistant]"
    (tmp_path / "other.jinja").write_text("Q: {{ messages[0].content }} A:")
    assert load(folder, chat_template=str(tmp_path / "other.jinja")).apply_chat_template(MESSAGES) == "Q: hello A:"
    with pytest.raises(ValueError, match=r"data\.chat_template: cannot read"):
        load(folder, chat_template=str(tmp_path / "missing.jinja"))


def test_b74_exactly_one_bos(tmp_path: Path, plain: Path) -> None:
    tokenizer = load(plain)
    assert tokenizer.encode("hello", add_bos=True) == [BOS, HELLO]
    assert tokenizer.encode("<s>hello", add_bos=True) == [BOS, HELLO]
    assert tokenizer.encode("hello", add_bos=False) == [HELLO]
    assert tokenizer.encode("", add_bos=True) == [BOS]
    for template, count in ((TEMPLATE_WITH_BOS, 1), (TEMPLATE_WITHOUT_BOS, 0)):
        chat = load(make_bpe_tokenizer(tmp_path / str(count), chat_template=template))
        ids = chat.encode_chat(chat.apply_chat_template(MESSAGES))
        assert ids.count(BOS) == count
        assert ids.count(EOS) == 1
        assert chat.encode("hello", add_bos=True) == [BOS, HELLO]
    without = load(make_bpe_tokenizer(tmp_path / "without", bos=False))
    assert without.bos_token_id is None
    assert without.encode("hello", add_bos=True) == [HELLO]


def test_b36_decoding_does_not_round_trip_and_special_tokens_survive(plain: Path) -> None:
    """The reason why ids are never re-encoded: this text has another shortest encoding."""
    tokenizer = load(plain)
    assert tokenizer.decode([HE, LLO]) == "hello"
    assert tokenizer.encode("hello", add_bos=False) == [HELLO]
    assert tokenizer.decode([HE, EOS, LLO, PAD], skip_special_tokens=False) == "he</s>llo<pad>"
    assert tokenizer.decode([HE, LLO, EOS]) == "hello"


@pytest.mark.parametrize("phantom", [NUM_TOKENS, 10**6, -1])
def test_b77_phantom_ids_decode_visibly(plain: Path, phantom: int) -> None:
    tokenizer = load(plain)
    assert tokenizer.vocab_size == NUM_TOKENS
    assert tokenizer.decode([HE, phantom, LLO]) == f"he{PHANTOM}llo"
    assert tokenizer.decode([phantom]) == PHANTOM
    assert tokenizer.decode([]) == ""


def test_b34_b77_stop_ids_are_the_union_with_a_warning(plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = load(plain)
    config = Config()
    write_json(tmp_path / "config.json", {"eos_token_id": [EOS], "bos_token_id": BOS})
    with caplog.at_level(logging.WARNING):
        assert stop_token_ids(tokenizer, tmp_path, config) == {EOS}
        assert stop_token_ids(tokenizer, tmp_path, config.replace(stop_token_ids=[9])) == {EOS, 9}
    assert not caplog.records
    write_json(tmp_path / "config.json", {"eos_token_id": 5, "bos_token_id": 7})
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [EOS, 6]})
    with caplog.at_level(logging.WARNING):
        assert stop_token_ids(tokenizer, tmp_path, config.replace(stop_token_ids=[9])) == {EOS, 5, 6, 9}
    assert [record.message.partition(" ")[0] for record in caplog.records] == ["eos_token_id", "bos_token_id"]
    write_json(tmp_path / "generation_config.json", {"eos_token_id": "</s>"})
    with pytest.raises(ValueError, match="not a token id"):
        stop_token_ids(tokenizer, tmp_path, config)


def test_b77_vocabularies_of_different_size(plain: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = load(plain)
    prompts = [Prompt(0, (BOS, HE), "he"), Prompt(4, (HELLO,), "hello")]
    check_vocabulary(tokenizer, prompts, 512)
    check_vocabulary(tokenizer, prompts, NUM_TOKENS)
    assert not caplog.records
    with pytest.raises(ValueError, match=f"prompt 4 has token id {HELLO}.*vocab_size is {HELLO}"):
        check_vocabulary(tokenizer, prompts, HELLO)
    with caplog.at_level(logging.WARNING):
        check_vocabulary(tokenizer, prompts[:1], HELLO)
    assert "has 263 tokens, the model 262" in caplog.text
    with pytest.raises(ValueError, match=r"end-of-sequence ids \[1\] cannot be sampled"):
        check_vocabulary(tokenizer, [], 1)


def test_sentencepiece_ids_are_the_librarys(model_file: Path) -> None:
    tokenizer = load(model_file)
    library = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    assert isinstance(tokenizer, SentencePieceTokenizer)
    assert isinstance(load(model_file.parent), SentencePieceTokenizer)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (library.bos_id(), {library.eos_id()})
    for text in ("hello world", " two  spaces", "line\n\nbreak", "<s>hello", "été"):
        assert tokenizer.encode(text, add_bos=False) == library.encode(text)
        assert tokenizer.encode(text, add_bos=True) == [library.bos_id(), *library.encode(text)]
        assert tokenizer.decode(library.encode(text)) == text
    ids = library.encode("hello")
    assert tokenizer.decode([*ids, tokenizer.vocab_size, *ids]) == f"hello{PHANTOM}hello"
    assert tokenizer.decode([*ids, library.eos_id()]) == "hello"
    assert tokenizer.decode([*ids, library.eos_id()], skip_special_tokens=False) == "hello</s>"


def test_b74_sentencepiece_chat_has_one_bos(model_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.chat_template"):
        load(model_file).apply_chat_template(MESSAGES)
    (tmp_path / "t.jinja").write_text(TEMPLATE_WITH_BOS)
    tokenizer = load(model_file, chat_template=str(tmp_path / "t.jinja"))
    text = tokenizer.apply_chat_template(MESSAGES)
    assert text == "<s>[user]hello</s>[assistant]"
    library = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    assert tokenizer.encode_chat(text) == [
        library.bos_id(),
        *library.encode("[user]hello"),
        library.eos_id(),
        *library.encode("[assistant]"),
    ]


def test_template_is_sandboxed(model_file: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}")
    with pytest.raises(Exception, match=r"unsafe|not safely callable"):
        load(model_file, chat_template=str(tmp_path / "t.jinja")).apply_chat_template(MESSAGES)


def test_folder_without_tokenizer_json_must_agree_with_its_model_file(model_file: Path, tmp_path: Path) -> None:
    """transformers would convert the .model itself, and other ids would come of it."""
    (tmp_path / "tokenizer.model").write_bytes(model_file.read_bytes())
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"})
    with pytest.raises(ValueError, match=r"differently from sentencepiece.*model\.tokenizer_path"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["missing", "empty", "not a model"])
def test_what_is_no_tokenizer_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.model"
    if kind == "empty":
        path = tmp_path
    elif kind == "not a model":
        path.write_text("no")
    with pytest.raises(ValueError) as raised:
        load(path)
    assert str(path) in str(raised.value)


def test_tokenizer_path_wins_over_model_path(plain: Path) -> None:
    tokenizer = load_tokenizer(Config().replace(model_path="/nowhere", tokenizer_path=str(plain)))
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    assert tokenizer.name == str(plain)


def test_b110_code_in_the_folder_runs_only_when_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_bpe_tokenizer(tmp_path / "tok")
    marker = tmp_path / "MARKER"
    (folder / "tokenization_x.py").write_text(
        "from pathlib import Path\n"
        "from transformers import PreTrainedTokenizerFast\n"
        f"Path({str(marker)!r}).touch()\n"
        "class XTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    content = {"tokenizer_class": "XTokenizer", "auto_map": {"AutoTokenizer": [None, "tokenization_x.XTokenizer"]}}
    write_json(folder / "tokenizer_config.json", content | {"bos_token": "<s>", "eos_token": "</s>"})
    with pytest.raises(ValueError, match=r"--trust-remote-code"):
        load(folder)
    assert not marker.exists()
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    assert load(folder, trust_remote_code=True).encode("hello", add_bos=False) == [HELLO]
    assert marker.exists()


def test_b110_model_config_is_looked_at_too(tmp_path: Path) -> None:
    refuse_remote_code(tmp_path, False)
    write_json(tmp_path / "config.json", {"model_type": "llama"})
    refuse_remote_code(tmp_path, False)
    write_json(tmp_path / "config.json", {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}})
    refuse_remote_code(tmp_path, True)
    with pytest.raises(ValueError, match=r"config\.json.*--trust-remote-code"):
        refuse_remote_code(tmp_path, False)


def test_b78_a_reward_model_with_another_tokenizer_is_refused(plain: Path, model_file: Path, tmp_path: Path) -> None:
    """It reads the policy's ids. The same tokenizer in another folder is right, and so is a folder that has none."""
    tokenizer, prompts = load(plain), [Prompt(0, (1,), "hello world")]
    same = make_bpe_tokenizer(tmp_path / "same", chat_template=TEMPLATE_WITH_BOS)
    (tmp_path / "none").mkdir()
    for folder in (same, tmp_path / "none"):
        check_same_tokenizer(tokenizer, folder, prompts, Config())
    with pytest.raises(ValueError, match="has another tokenizer than") as error:
        check_same_tokenizer(tokenizer, model_file.parent, prompts, Config())
    assert str(model_file.parent) in str(error.value) and str(plain) in str(error.value)
