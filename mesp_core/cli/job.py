"""What a fine-tuning run works on: the model, the text and the adapter it starts from."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesp_core.adapters import assign
from mesp_core.batch import Batch
from mesp_core.cli.output import say
from mesp_core.cli.resume import changed, configured, last_iteration, saved_adapter
from mesp_core.data import Batches, Corpus, load_corpus
from mesp_core.errors import MespError
from mesp_core.files.tokenizer import Tokenizer
from mesp_core.lora import LoraConfig
from mesp_core.methods import reason_against
from mesp_core.model import Model, load_model

_PROMPT_TOKENS = 12


@dataclass
class Job:
    """Everything that a run has opened."""

    options: argparse.Namespace
    folder: Path
    model: Model
    tokenizer: Tokenizer
    corpus: Corpus
    start: int

    @property
    def validation(self) -> list[Batch]:
        return self._fixed(self.corpus.valid, self.options.val_batches)

    @property
    def test(self) -> list[Batch]:
        return self._fixed(self.corpus.test, self.options.test_batches)

    def _fixed(self, rows: list[list[int]], count: int) -> list[Batch]:
        return Batches(rows, self.options.batch_size).fixed(count) if rows else []

    @property
    def prompt(self) -> str:
        """The first words of text that is not trained on, where there is any."""
        row = (self.corpus.valid or self.corpus.train)[0]
        return self.tokenizer.decode(row[:_PROMPT_TOKENS], skip_special_tokens=True)


def open_job(options: argparse.Namespace, folder: Path) -> Job:
    if options.resume_adapter_file is None:
        model, start = open_model(options, changed(LoraConfig(), _asked(options))), 0
    else:
        path = Path(options.resume_adapter_file)
        saved, tensors = saved_adapter(path)
        model = open_model(options, configured(saved, tensors, _asked(options)))
        assign(model, tensors, path)
        start = last_iteration([folder, path if path.is_dir() else path.parent])
        say(f"Starting from {path}: its weights, a new optimizer.")
    reason = reason_against(model.backend, options.method, options.head)
    if reason is not None:
        raise MespError(reason)
    tokenizer = model.checkpoint.tokenizer()
    splits = ("train", "valid", "test") if options.test else ("train", "valid")
    corpus = open_corpus(options, model, tokenizer, splits)
    return Job(options, folder, model, tokenizer, corpus, start)


def open_corpus(
    options: argparse.Namespace, model: Model, tokenizer: Tokenizer, splits: Collection[str]
) -> Corpus:
    """The text of these splits, every id of which the model knows. Warns of what was left out.

    Raises MespError when the test split is wanted and there is none.
    """
    corpus = load_corpus(options.data, tokenizer, options.max_seq_length, splits)
    if "test" in splits and not corpus.test:
        where = "name its folder with --data"
        if options.data is not None:
            where = f"no records in {Path(options.data) / 'test.jsonl'}"
        raise MespError(f"--test needs a test set: {where}")
    corpus.check_vocabulary(model.config.vocab)
    notes = list(corpus.notes)
    longest = max(len(row) - 1 for row in (*corpus.train, *corpus.valid, *corpus.test))
    if longest > model.config.max_positions:
        notes.append(
            f"there are rows of {longest} tokens, and the model was made for "
            f"{model.config.max_positions}; lower --max-seq-length"
        )
    for note in notes:
        say(f"mesp: warning: {note}", error=True)
    return corpus


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    """Fields of LoraConfig that were asked for, or the scale."""
    names = {"target_modules": "targets", "lora_dtype": "dtype"}
    asked: dict[str, Any] = {names.get(key) or key: value for key, value in options.lora.items()}
    if "targets" in asked:
        asked["targets"] = tuple(name for part in asked["targets"] for name in part.split(","))
    if options.num_layers > 0:
        asked["layers"] = options.num_layers
    return asked


def open_model(
    options: argparse.Namespace, lora: LoraConfig | None, adapter: str | None = None
) -> Model:
    return load_model(
        options.model,
        backend=options.backend,
        lora=lora,
        adapter=adapter,
        dtype=options.dtype,
        residency=options.residency,
        seed=options.seed,
    )
