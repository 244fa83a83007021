"""Text, rows and batches."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mesp_core import Batch, MespError, UnsupportedError
from mesp_core.data import Batches, encode_text, load_corpus, windows
from mesp_core.files.checkpoint import open_checkpoint
from mesp_core.files.tokenizer import Tokenizer
from tests.tiny import EOS, sequences, text, write_data


@pytest.fixture
def tokenizer(tiny: Path) -> Tokenizer:
    return open_checkpoint(tiny).tokenizer()


def without_end(tokenizer: Tokenizer) -> Tokenizer:
    return Tokenizer(tokenizer.backend_tokenizer, special_tokens={})


def test_the_end_of_sequence_is_added_where_it_is_missing(tokenizer: Tokenizer) -> None:
    assert encode_text("w3 w4", tokenizer) == [3, 4, EOS]
    assert encode_text("w3 </s>", tokenizer) == [3, EOS]
    assert encode_text("w3 w4", without_end(tokenizer)) == [3, 4]


@pytest.mark.parametrize("count", range(2, 14))
def test_windows_make_every_id_but_the_first_a_target_once(count: int) -> None:
    ids = list(range(count))
    rows = windows(ids, 4)
    assert [target for row in rows for target in row[1:]] == ids[1:]
    assert all(2 <= len(row) <= 5 for row in rows)


def test_a_folder_of_text_records(tokenizer: Tokenizer, tmp_path: Path) -> None:
    train, valid, test = sequences(5), sequences(2, seed=6), sequences(3, seed=7)
    corpus = load_corpus(
        write_data(tmp_path, train=train, valid=valid, test=test), tokenizer, max_length=100
    )
    assert corpus.train == [[*row, EOS] for row in train]
    assert corpus.valid == [[*row, EOS] for row in valid]
    assert corpus.test == [[*row, EOS] for row in test]
    assert corpus.notes == ()


def test_line_ends_inside_a_text_do_not_end_a_record(tokenizer: Tokenizer, tmp_path: Path) -> None:
    record = json.dumps({"text": "w3\u2028w4\u0085w5"}, ensure_ascii=False)
    (tmp_path / "train.jsonl").write_text(f"{record}\r\n\r\n{record}\r\n", encoding="utf-8")
    assert len(load_corpus(tmp_path, tokenizer, 100).train) == 2


def test_no_validation_set_is_told(tokenizer: Tokenizer, tmp_path: Path) -> None:
    corpus = load_corpus(write_data(tmp_path, train=sequences(2)), tokenizer, 100)
    assert corpus.valid == [] and "without validation" in corpus.notes[0]


def test_short_records_among_others_are_left_out_and_counted(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    data = write_data(tmp_path, train=[[3, 4], [], [5]], valid=[[3, 4]])
    corpus = load_corpus(data, tokenizer, 100)
    assert corpus.train == [[3, 4, EOS], [5, EOS]]
    assert "1 record(s) of fewer than 2 tokens left out" in corpus.notes[0]


def test_the_last_tenth_of_a_text_file_is_held_out(tokenizer: Tokenizer, tmp_path: Path) -> None:
    ids = [3 + place % 20 for place in range(199)]
    path = tmp_path / "book.txt"
    path.write_text(text(ids))
    corpus = load_corpus(path, tokenizer, 1000)
    assert corpus.train == [ids[:180]]
    assert corpus.valid == [[*ids[180:], EOS]]


def test_a_very_short_text_file_is_trained_on_without_validation(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "note.txt"
    path.write_text("w3 w4 w5")
    corpus = load_corpus(path, tokenizer, 1000)
    assert corpus.train == [[3, 4, 5, EOS]] and corpus.valid == []
    assert "too short" in corpus.notes[0]


def test_python_topics_are_split_by_topic(tokenizer: Tokenizer) -> None:
    from pydoc_data.topics import topics

    # The tiny tokenizer knows no English word: each becomes w0, so that rows only count words.
    corpus = load_corpus(None, tokenizer, 10**6)
    assert len(corpus.train) + len(corpus.valid) == len(topics)
    held_out = [len(topics[name].split()) + 1 for name in sorted(topics)[9::10]]
    assert [len(row) for row in corpus.valid] == held_out
    assert corpus == load_corpus(None, tokenizer, 10**6)


@pytest.mark.parametrize(
    ("lines", "kind", "message"),
    [
        ([], MespError, "train.jsonl has no records"),
        (["", "  "], MespError, "train.jsonl has no records"),
        (['{"text": "w3 w4"}', "{nope"], MespError, "train.jsonl:2: not valid JSON"),
        (
            ['{"text": "w3 w4"}', "[1]"],
            MespError,
            "jsonl:2: a record must be .* not of type list",
        ),
        (['{"text": "w3 w4"}', '{"txt": 1}'], MespError, "train.jsonl:2: .* no string 'text'"),
        (['{"text": 7}'], MespError, "train.jsonl:1: .* no string 'text'"),
        (['{"text": ""}', '{"text": ""}'], MespError, r"train.jsonl:1: the text has 1 token"),
        (["[" * 100_000], MespError, r"train.jsonl:1: not valid JSON \(nested too deeply"),
        (["9" * 5000], MespError, r"train.jsonl:1: not valid JSON \(Exceeds the limit"),
        (['{"text": "w3 \\ud800"}'], MespError, "train.jsonl:1: .*not valid Unicode"),
        (['{"prompt": "a", "completion": "b"}'], UnsupportedError, "'prompt' are not read yet"),
        (['{"messages": []}'], UnsupportedError, "'messages' are not read yet"),
        (['{"text": "w3 w4"}', '{"messages": []}'], UnsupportedError, "jsonl:2: .*'messages'"),
    ],
)
def test_malformed_records_are_named(
    tokenizer: Tokenizer, tmp_path: Path, lines: list[str], kind: type, message: str
) -> None:
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    with pytest.raises(kind, match=message):
        load_corpus(tmp_path, tokenizer, 100)


def test_data_that_is_not_there_or_not_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(MespError, match="no data at"):
        load_corpus(tmp_path / "nowhere", tokenizer, 10)
    with pytest.raises(MespError, match="cannot read"):
        load_corpus(tmp_path / "nowhere.txt", tokenizer, 10)
    with pytest.raises(MespError, match=r"cannot read .*train\.jsonl"):
        load_corpus(tmp_path, tokenizer, 10)
    (tmp_path / "table.csv").write_text("a,b")
    with pytest.raises(UnsupportedError, match=r"neither a \.txt file nor a folder"):
        load_corpus(tmp_path / "table.csv", tokenizer, 10)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(MespError, match="not UTF-8 text"):
        load_corpus(tmp_path / "latin.txt", tokenizer, 10)
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(MespError, match=r"empty\.txt holds no text"):
        load_corpus(tmp_path / "empty.txt", tokenizer, 10)
    (tmp_path / "one.txt").write_text("w3")
    with pytest.raises(MespError, match="has 1 token"):
        load_corpus(tmp_path / "one.txt", without_end(tokenizer), 10)


def rows_of(batch: Any) -> list[tuple[int, ...]]:
    ids = np.split(batch.tokens, batch.starts[1:-1])
    targets = np.split(batch.targets, batch.starts[1:-1])
    return [(*map(int, i), int(t[-1])) for i, t in zip(ids, targets, strict=True)]


def test_case_05_every_row_is_seen_once_an_epoch() -> None:
    rows = sequences(5)
    batches = Batches(rows, 2, seed=1)
    orders = []
    for number in range(3):
        dealt = list(batches.epoch(number))
        assert [len(batch.starts) - 1 for batch in dealt] == [2, 2, 1]
        seen = [row for batch in dealt for row in rows_of(batch)]
        assert Counter(seen) == Counter(map(tuple, rows))
        orders.append(tuple(seen))
    assert len(set(orders)) > 1


def test_case_05_padding_does_not_exist() -> None:
    rows = [[3, 4], [5, 6, 7, 8, 9, 10]]
    (batch,) = Batches(rows, 2).epoch(0)
    assert len(batch.tokens) == sum(len(row) - 1 for row in rows)


def test_a_stream_can_start_anywhere() -> None:
    batches = Batches(sequences(7), 3, seed=2)
    whole = [rows_of(batch) for _, batch in zip(range(9), batches.stream(), strict=False)]
    for start in range(6):
        part = [rows_of(batch) for _, batch in zip(range(3), batches.stream(start), strict=False)]
        assert part == whole[start : start + 3]


def test_rows_keep_their_number_wherever_they_are_dealt() -> None:
    rows = sequences(7)
    for batch in Batches(rows, 3, seed=2).epoch(4):
        assert [tuple(rows[number]) for number in batch.numbers] == rows_of(batch)


def test_an_id_beyond_the_vocabulary_is_found_in_every_split(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    corpus = load_corpus(write_data(tmp_path, train=[[3, 4]], test=[[5, 9]]), tokenizer, 10)
    corpus.check_vocabulary(10)
    with pytest.raises(MespError, match="token id 9 is not below .* size 9"):
        corpus.check_vocabulary(9)


def test_validation_batches_are_the_same_for_every_seed() -> None:
    rows = sequences(7)
    first = [rows_of(batch) for batch in Batches(rows, 2, seed=1).fixed(2)]
    assert first == [rows_of(batch) for batch in Batches(rows, 2, seed=9).fixed(2)]
    everything = [row for batch in Batches(rows, 2).fixed(-1) for row in rows_of(batch)]
    assert Counter(everything) == Counter(map(tuple, rows))


@pytest.mark.parametrize(
    ("sequences", "options", "message"),
    [
        ([], {}, "at least one sequence"),
        ([[3]], {}, "sequence 0 has 1 token"),
        ([[3, 4], []], {}, "sequence 1 has 0 token"),
        ([[[1], [2, 3]]], {}, "sequence 0 must be a flat list of integers"),
        ([[[1, 2], [3, 4]]], {}, "sequence 0 must be a flat list of integers, not int64"),
        ([3, 4], {}, "sequence 0 must be a flat list of integers"),
        ([[3.5, 4.0]], {}, "not float64"),
        ([["a", "b"]], {}, "must be a flat list of integers"),
        ([[3, -1]], {}, "outside 0"),
        ([[3, 2**31]], {}, "outside 0"),
        ([[3, 2**70]], {}, "sequence 0 must be a flat list of integers, not object"),
        ([[3, 4]], {"prompt_lengths": [1, 1]}, "2 prompt lengths for 1 sequences"),
        ([[3, 4]], {"prompt_lengths": [3]}, "prompt length 3 of sequence 0"),
        ([[3, 4]], {"prompt_lengths": [0.5]}, "prompt lengths must be a flat list of integers"),
        ([[3, 4]], {"prompt_lengths": [-1]}, "prompt lengths holds integers outside"),
        ([[3, 4]], {"numbers": [0, 1]}, "2 numbers for 1 sequences"),
        ([[3, 4]], {"numbers": [0.5]}, "numbers must be a flat list of integers"),
        ([[3, 4]], {"numbers": 0}, "numbers must be a flat list of integers"),
    ],
)
def test_what_is_no_batch(sequences: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(MespError, match=message):
        Batch.from_sequences(sequences, **options)
