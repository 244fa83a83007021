"""Text to train on: read, tokenised, cut into rows of ids, and dealt out in batches."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mesp_core.batch import Batch, check_id
from mesp_core.errors import MespError, UnsupportedError
from mesp_core.files.mapped_file import read_text
from mesp_core.files.tokenizer import Tokenizer

#: One part in so many is held out for validation where the data has no split of its own.
_HELD_OUT = 10

SPLITS = ("train", "valid", "test")

Row = list[int]


@dataclass(frozen=True)
class Corpus:
    """Rows of token ids for each use; notes: what the user should hear about the reading."""

    train: list[Row]
    valid: list[Row]
    test: list[Row] = field(default_factory=list)
    notes: tuple[str, ...] = ()

    def check_vocabulary(self, vocabulary: int) -> None:
        """Raises MespError when a row holds an id that is not below ``vocabulary``, now rather
        than when its batch comes up."""
        for row in (*self.train, *self.valid, *self.test):
            check_id(max(row), vocabulary)


def load_corpus(
    source: str | Path | None,
    tokenizer: Tokenizer,
    max_length: int,
    splits: Collection[str] = SPLITS,
) -> Corpus:
    """Reads and tokenises text.

    source: a ``.txt`` file (its last tenth is held out for validation), a folder of
        ``train.jsonl`` and optionally ``valid.jsonl`` and ``test.jsonl`` with one object with
        ``text`` a line, or None for the documentation topics that come with Python.
    max_length: T, the most tokens of a row. A longer text becomes several rows, each starting
        with the last id of the one before, so that every token is a target exactly once.
    splits: the files of a folder that are read; the others may be missing or broken.
    The end-of-sequence token is added to each text where it is missing. Texts of fewer than two
    ids have nothing to predict: they are left out and counted in ``notes``.
    Raises MespError for missing, empty or malformed data, naming file and line;
    UnsupportedError for a format other than text.
    """
    if max_length < 1:
        raise MespError(f"the maximum sequence length must be at least 1, not {max_length}")
    if source is None:
        return _topics(tokenizer, max_length)
    path = Path(source)
    if path.is_dir():
        return _folder(path, tokenizer, max_length, splits)
    if path.suffix.lower() == ".txt":
        return _text_file(path, tokenizer, max_length)
    if not path.exists():
        raise MespError(f"no data at {path}; give a .txt file or a folder with train.jsonl")
    raise UnsupportedError(f"{path} is neither a .txt file nor a folder with train.jsonl")


def _topics(tokenizer: Tokenizer, max_length: int) -> Corpus:
    """The texts behind Python's own ``help()``; every tenth topic by name is for validation."""
    from pydoc_data.topics import topics

    train: list[Row] = []
    valid: list[Row] = []
    for place, name in enumerate(sorted(topics)):
        rows = windows(encode_text(topics[name], tokenizer), max_length)
        (valid if place % _HELD_OUT == _HELD_OUT - 1 else train).extend(rows)
    return Corpus(train, valid)


def _text_file(path: Path, tokenizer: Tokenizer, max_length: int) -> Corpus:
    text = read_text(path, "utf-8-sig")
    if not text.strip():
        raise MespError(f"{path} holds no text")
    ids = encode_text(text, tokenizer)
    if len(ids) < 2:
        raise MespError(f"{path} has {len(ids)} token(s); next-token training needs at least 2")
    held_out = len(ids) // _HELD_OUT
    if held_out < 2:
        return Corpus(windows(ids, max_length), [], notes=(f"{path} is too short to validate on",))
    return Corpus(windows(ids[:-held_out], max_length), windows(ids[-held_out:], max_length))


def _folder(folder: Path, tokenizer: Tokenizer, max_length: int, splits: Collection[str]) -> Corpus:
    rows: dict[str, list[Row]] = {split: [] for split in SPLITS}
    notes: list[str] = []
    for split in splits:
        path = folder / f"{split}.jsonl"
        if split != "train" and not path.exists():
            continue
        rows[split], skipped = _records(path, tokenizer, max_length)
        if skipped:
            notes.append(f"{path}: {skipped} record(s) of fewer than 2 tokens left out")
    if "valid" in splits and not rows["valid"]:
        notes.append(f"{folder} has no valid.jsonl: training without validation")
    return Corpus(rows["train"], rows["valid"], rows["test"], tuple(notes))


def _records(path: Path, tokenizer: Tokenizer, max_length: int) -> tuple[list[Row], int]:
    """The rows of one file, and how many of its records were too short to have a target."""
    rows: list[Row] = []
    first_short: tuple[int, int] | None = None
    skipped = read = 0
    for number, line in enumerate(read_text(path, "utf-8-sig").split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        text = _text_of(line, where, first=read == 0)
        read += 1
        try:
            ids = encode_text(text, tokenizer)
        except MespError as error:
            raise MespError(f"{where}: {error}") from None
        if len(ids) < 2:
            first_short = first_short or (number, len(ids))
            skipped += 1
            continue
        rows.extend(windows(ids, max_length))
    if rows:
        return rows, skipped
    if first_short is None:
        raise MespError(f"{path} has no records")
    raise MespError(
        f"{path}:{first_short[0]}: the text has {first_short[1]} token(s), and no record has the "
        "2 that next-token training needs"
    )


def _text_of(line: str, where: str, *, first: bool) -> str:
    try:
        record: Any = json.loads(line)
    except RecursionError:
        raise MespError(f"{where}: not valid JSON (nested too deeply)") from None
    except ValueError as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise MespError(f"{where}: not valid JSON ({reason})") from None
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise MespError(f"{where}: a record must be an object with text, not of type {kind}")
    text = record.get("text")
    for other in ("prompt", "messages"):
        # As in mlx-lm, the first record says of what kind all are.
        if other in record and (first or not isinstance(text, str)):
            raise UnsupportedError(
                f"{where}: records with {other!r} are not read yet; give records with 'text'"
            )
    if not isinstance(text, str):
        raise MespError(f"{where}: the record has no string 'text'")
    return text


def encode_text(text: str, tokenizer: Tokenizer) -> Row:
    """Ids of a text with the end-of-sequence token after it, unless it is there or unknown."""
    ids = tokenizer.encode(text)
    end = tokenizer.eos_id
    return ids if end is None or (ids and ids[-1] == end) else [*ids, end]


def windows(ids: Sequence[int], max_length: int) -> list[Row]:
    """Rows of at most ``max_length`` tokens (one id more): every id but the first is a target in
    exactly one of them."""
    return [list(ids[lo : lo + max_length + 1]) for lo in range(0, len(ids) - 1, max_length)]


@dataclass(frozen=True)
class Batches:
    """Rows dealt out in batches: every row once an epoch, the last batch with what is left.

    seed: of the order, which is another one in each epoch.
    """

    rows: Sequence[Row]
    batch_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise MespError(f"the batch size must be at least 1, not {self.batch_size}")
        if not self.rows:
            raise MespError("there are no rows to train on")

    @property
    def per_epoch(self) -> int:
        return -(-len(self.rows) // self.batch_size)

    def epoch(self, number: int) -> Iterator[Batch]:
        """The batches of one epoch."""
        order = np.random.default_rng((self.seed % 2**64, number)).permutation(len(self.rows))
        for lo in range(0, len(order), self.batch_size):
            yield self._batch(order[lo : lo + self.batch_size])

    def stream(self, start: int = 0) -> Iterator[Batch]:
        """Epoch after epoch without end, from batch number ``start`` on."""
        number, skip = divmod(start, self.per_epoch)
        while True:
            for place, batch in enumerate(self.epoch(number)):
                if place >= skip:
                    yield batch
            number, skip = number + 1, 0

    def fixed(self, count: int) -> list[Batch]:
        """The same ``count`` batches every time, whatever the seed; all of them when negative."""
        order = np.random.default_rng(0).permutation(len(self.rows))
        starts = range(0, len(order), self.batch_size)
        chosen = starts if count < 0 else starts[:count]
        return [self._batch(order[lo : lo + self.batch_size]) for lo in chosen]

    def _batch(self, places: np.ndarray) -> Batch:
        return Batch.from_sequences([self.rows[place] for place in places], numbers=places.tolist())
