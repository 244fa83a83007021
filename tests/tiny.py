"""Tiny random models as Hugging Face folders, made by NumPy and a word tokenizer alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from mesp_core.config import ModelConfig
from mesp_core.files.checkpoint import expected_shapes

VOCABULARY = 31
EOS = 2

#: Sizes are pairwise distinct: D 20, H · E 24, K · E 12, F 26.
CONFIG: dict[str, Any] = {
    "hidden_size": 20,
    "num_hidden_layers": 3,
    "intermediate_size": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
}

Tensors = dict[str, np.ndarray]


def write_model(
    folder: Path,
    family: str = "llama",
    *,
    change: Callable[[Tensors], None] | None = None,
    words: int = VOCABULARY,
    **settings: Any,
) -> Path:
    """A model with random float32 weights. change: edits the tensors before they are written;
    words: how many the tokenizer knows; settings: keys of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | {"model_type": family} | settings
    (folder / "config.json").write_text(json.dumps(config))
    generator = np.random.default_rng(3)
    shapes = expected_shapes(ModelConfig.from_huggingface(CONFIG | {"model_type": family}))
    tensors = {
        name: (generator.normal(scale=0.3, size=shape) + ("norm" in name)).astype(np.float32)
        for name, shape in shapes.items()
    }
    if change is not None:
        change(tensors)
    save_file(tensors, folder / "model.safetensors")
    write_tokenizer(folder, words)
    return folder


def write_tokenizer(folder: Path, words: int = VOCABULARY) -> None:
    """Token n is the word ``w{n}``, but for ``</s>``, which is ``EOS``."""
    names = {f"w{number}": number for number in range(words) if number != EOS} | {"</s>": EOS}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))


def text(ids: Sequence[int]) -> str:
    """The text of these ids."""
    return " ".join(f"w{number}" for number in ids)


def sequences(count: int, seed: int = 5, shortest: int = 3, longest: int = 9) -> list[list[int]]:
    """Random rows of ids without ``EOS``."""
    generator = np.random.default_rng(seed)
    return [
        generator.integers(3, VOCABULARY, generator.integers(shortest, longest + 1)).tolist()
        for _ in range(count)
    ]


def counting(count: int, seed: int = 5, longest: int = 9) -> list[list[int]]:
    """Rows that count upwards from a random id: something that can be learnt."""
    generator = np.random.default_rng(seed)
    starts = generator.integers(3, VOCABULARY - longest, count)
    lengths = generator.integers(4, longest + 1, count)
    return [
        list(range(int(lo), int(lo + length))) for lo, length in zip(starts, lengths, strict=True)
    ]


def write_data(folder: Path, **splits: Sequence[Sequence[int]]) -> Path:
    """A data folder of text records: ``write_data(folder, train=rows, valid=rows)``."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        lines = [json.dumps({"text": text(row)}) for row in rows]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return folder
