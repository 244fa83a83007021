"""Tiny llamas made by transformers, and every reader's logits over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mesp_core import Batch, LoraConfig, Model, load_model, logits

TOKENS = [3, 17, 29, 5, 11, 2, 23, 8, 19]


def write_llama(folder: Path, **sizes: Any) -> Path:
    """A random llama with a tokenizer of single words, as transformers saves it."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=31,
        num_hidden_layers=3,
        intermediate_size=sizes.pop("intermediate_size", 26),
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        **sizes,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {"<s>": 0, "</s>": 1} | {f"w{place}": place for place in range(2, 31)}
    words_tokenizer = Tokenizer(models.WordLevel(words, unk_token="</s>"))
    words_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words_tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


def adapted(base: Path, lora: LoraConfig, seed: int = 1, backend: str = "numpy") -> Model:
    """A model over ``base`` whose A and B are random and not zero."""
    model = load_model(base, backend=backend, lora=lora)
    generator = np.random.default_rng(seed)
    for name, array in model.parameters.items():
        values = generator.normal(scale=0.3, size=array.shape)
        model.parameters[name] = model.backend.from_numpy(values, lora.dtype)
    return model


def our_logits(model: Model, tokens: list[int] = TOKENS) -> np.ndarray:
    batch = Batch.from_sequences([[*tokens, 0]])
    return model.backend.to_numpy(logits(model, batch))


def peft_logits(base: Path, adapter: Path | None, tokens: list[int] = TOKENS) -> np.ndarray:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(torch.tensor([tokens])).logits[0].numpy()


def mlx_lm_logits(base: Path, adapter: Path | None, tokens: list[int] = TOKENS) -> np.ndarray:
    import mlx.core as mx
    from mlx_lm.utils import load

    path = None if adapter is None else str(adapter)
    model, _ = load(str(base), adapter_path=path)[:2]
    return np.array(model(mx.array([tokens]))[0].astype(mx.float32))


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """‖found − expected‖ / ‖expected‖; NaN, which fails every bound, if anything is NaN."""
    assert found.shape == expected.shape
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
