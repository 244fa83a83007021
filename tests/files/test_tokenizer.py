"""Tokenizers: known ids, round trips, and the same ids in transformers and mlx-lm."""

from __future__ import annotations

import json
import time

import pytest

from mesp_core.errors import MespError, UnsupportedError
from mesp_core.files.checkpoint import open_checkpoint
from mesp_core.files.gguf_tokenizer import tokenizer_from_gguf
from mesp_core.files.tokenizer import tokenizer_from_folder

TEXTS = (
    "Hello world",
    "def f(x):\n    return x + 12345\n",
    "naïve café, 東京 🙂 and e\u0301",
    "  two  spaces\t\ttabs\r\n\r\nend ",
    "I'll say it's DON'T",
    "<|im_start|>user\nHi<|im_end|>\n",
    "",
)


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint("smollm2-135m")


@pytest.fixture(scope="module")
def smollm2(checkpoint):
    return checkpoint.tokenizer()


def test_known_ids(smollm2):
    assert smollm2.encode("Hello world") == [19556, 905]
    # Every digit is a token of its own.
    assert smollm2.encode("x 123") == [104, 216, 33, 34, 35]
    assert smollm2.encode("<|im_start|>user<|im_end|>") == [1, 4093, 2]
    assert smollm2.eos_id == 2
    assert "im_start" in smollm2.chat_template


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(smollm2, text):
    assert smollm2.decode(smollm2.encode(text)) == text


def test_opens_quickly():
    start = time.perf_counter()
    checkpoint = open_checkpoint("smollm2-135m")
    checkpoint.tokenizer()
    assert time.perf_counter() - start < 1.5


def test_saved_tokenizer_in_transformers(checkpoint, smollm2, tmp_path):
    transformers = pytest.importorskip("transformers", reason="reads the saved tokenizer")
    smollm2.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(checkpoint.config.to_huggingface()))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = smollm2.encode(text)
        assert theirs(text, add_special_tokens=False).input_ids == ids
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == smollm2.eos_id
    messages = [{"role": "user", "content": "Hi"}]
    assert "<|im_start|>user\nHi<|im_end|>" in theirs.apply_chat_template(messages, tokenize=False)


def test_saved_tokenizer_here(smollm2, tmp_path):
    smollm2.save(tmp_path)
    again = tokenizer_from_folder(tmp_path, {})
    assert [again.encode(text) for text in TEXTS] == [smollm2.encode(text) for text in TEXTS]
    assert (again.eos_id, again.chat_template) == (smollm2.eos_id, smollm2.chat_template)


def test_a_folder_cannot_shorten_texts_or_hide_its_template(smollm2, tmp_path):
    smollm2.save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    again = tokenizer_from_folder(tmp_path, {"eos_token_id": [2, 0]})
    assert again.encode(TEXTS[1]) == smollm2.encode(TEXTS[1])
    assert (again.eos_id, again.chat_template) == (2, "{{ messages }}")


def metadata(pre: str, **changes) -> dict:
    """Byte tokens, two merges, and one control token."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*sorted(ByteLevel.alphabet()), "12", "123", "<s>", "<tool>"]
    kinds = [1] * (len(tokens) - 2) + [3, 4]
    base = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["1 2", "12 3"],
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
    }
    return {key: value for key, value in (base | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["123", "4"]),
        ("default", ["123", "4"]),
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
    ],
)
def test_splitting_of_digits(tmp_path, pre, words):
    tokenizer = tokenizer_from_gguf(metadata(pre), tmp_path)
    assert [tokenizer.decode([i]) for i in tokenizer.encode("1234")] == words
    ids = tokenizer.encode("a<tool>b<s>")
    assert [tokenizer.decode([i]) for i in ids] == ["a", "<tool>", "b", "<s>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool>b"
    assert tokenizer.eos_id is None


def test_qwen2_composes_characters(tmp_path):
    tokenizer = tokenizer_from_gguf(metadata("qwen2"), tmp_path)
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


@pytest.mark.parametrize(("pre", "added"), [("llama-bpe", 1), ("qwen2", 0)])
def test_beginning_of_sequence_only_when_asked(tmp_path, pre, added):
    tokenizer = tokenizer_from_gguf(metadata(pre), tmp_path)
    plain = tokenizer.encode("hi")
    assert tokenizer.decode(plain) == "hi"
    with_special = tokenizer.encode("hi", add_special_tokens=True)
    bos = [tokenizer.backend_tokenizer.token_to_id("<s>")]
    assert with_special == bos * added + plain


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer.ggml.model": "llama"},
        {"tokenizer.ggml.pre": "tekken"},
        {"tokenizer.ggml.pre": [3]},
    ],
)
def test_kinds_we_lack(tmp_path, changes):
    with pytest.raises(UnsupportedError, match="use the Hugging Face folder"):
        tokenizer_from_gguf(metadata("qwen2", **changes), tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer.ggml.tokens": None},
        {"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]},
        {"tokenizer.ggml.token_type": [1, 2]},
        {"tokenizer.ggml.merges": ["no such"]},
        {"tokenizer.ggml.merges": [1, 2]},
    ],
)
def test_damaged_metadata(tmp_path, changes):
    with pytest.raises(MespError):
        tokenizer_from_gguf(metadata("qwen2", **changes), tmp_path)


def test_folder_without_or_with_a_damaged_tokenizer(tmp_path):
    with pytest.raises(MespError, match=r"no tokenizer\.json; write one"):
        tokenizer_from_folder(tmp_path, {})
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(MespError, match="not a valid tokenizer"):
        tokenizer_from_folder(tmp_path, {})


def test_unwritable_folder(smollm2, tmp_path):
    with pytest.raises(MespError, match="cannot write the tokenizer"):
        smollm2.save(tmp_path / "missing")
