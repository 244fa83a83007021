"""The packaged model, exported, with an adapter: mlx-lm, PEFT and we agree."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mesp_core import LoraConfig, available_backends, save_adapter
from mesp_core.export import export_base
from tests.adapters.tiny_llama import (
    adapted,
    difference,
    mlx_lm_logits,
    our_logits,
    peft_logits,
)

TEXT = "The assert statement is a convenient way to insert debugging assertions into a program."


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_smollm2_exported_with_an_adapter_is_the_same_in_mlx_lm_and_peft(tmp_path: Path) -> None:
    reason = available_backends().get("mlx", "it is not installed")
    assert reason is None, f"this test needs the MLX backend: {reason}"
    model = adapted(Path("smollm2-135m"), LoraConfig(rank=8, alpha=16.0), backend="mlx")
    # Small enough that the text model still works, large enough to be seen.
    for name, array in model.parameters.items():
        model.parameters[name] = array * 0.1
    tokens = model.checkpoint.tokenizer().encode(TEXT)
    ours = our_logits(model, tokens)
    base, folder = tmp_path / "base", tmp_path / "adapter"
    try:
        export_base("smollm2-135m", base)
        save_adapter(model, folder / "mlx", format="mlx-lm")
        save_adapter(model, folder / "peft", format="peft")
        without = peft_logits(base, None, tokens)
        peft = peft_logits(base, folder / "peft", tokens)
        mlx_lm = mlx_lm_logits(base, folder / "mlx", tokens)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    assert difference(without, peft) > 0.02
    assert difference(ours, peft) < 1e-3
    assert difference(mlx_lm, peft) < 1e-3
