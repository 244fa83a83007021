"""The oracle is right by itself: against differences of its own loss, and against its casts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from mesp_reference.check.compare import assert_close
from mesp_reference.check.tolerances import CASTS_TO_FLOAT32
from tests.oracle.huggingface_oracle import Oracle, central_difference, without_float32_casts
from tests.oracle.tiny_models import CASES, random_adapter

Saved = Callable[[str], Path]


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_differences_of_the_loss(
    case: str, saved: Saved, sequences: list[list[int]], prompts: list[int]
) -> None:
    folder, sequences, prompts = saved(case), sequences[:2], prompts[:2]
    oracle = Oracle(folder, random_adapter(folder))
    result = oracle.loss_and_gradients(sequences, prompts)
    names = [name for name in result.gradients if ".layers.1." in name]
    assert len(names) == 14
    for name in names:
        gradient = result.gradients[name]
        row, column = divmod(int(np.abs(gradient).argmax()), gradient.shape[1])
        difference = central_difference(oracle, name, (row, column), sequences, prompts)
        assert difference == pytest.approx(gradient[row, column], rel=1e-8), name


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_casts_to_float32_are_all_that_was_lifted(
    case: str, dtype: str, saved: Saved, sequences: list[list[int]], prompts: list[int]
) -> None:
    folder = saved(case)
    adapter = random_adapter(folder, "float32")
    lifted = Oracle(folder, adapter).loss_and_gradients(sequences, prompts)
    plain = Oracle(folder, adapter, dtype=dtype, lifted=False).loss_and_gradients(
        sequences, prompts
    )
    assert plain.loss != lifted.loss
    assert plain.loss == pytest.approx(lifted.loss, rel=CASTS_TO_FLOAT32)
    assert plain.gradients.keys() == lifted.gradients.keys()
    for name, expected in lifted.gradients.items():
        assert_close(plain.gradients[name], expected, CASTS_TO_FLOAT32, name=name)


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_float32_inside(case: str, saved: Saved) -> None:
    """Every module's output in a lifted float64 pass, and its low bits are in use."""
    oracle = Oracle(saved(case), random_adapter(saved(case)))
    seen: list[torch.Tensor] = []

    def keep(_module: torch.nn.Module, _inputs: object, output: object) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        seen.extend(value.detach() for value in outputs if isinstance(value, torch.Tensor))

    for module in oracle.model.modules():
        module.register_forward_hook(keep)
    with torch.no_grad():
        oracle.loss([[1, 2, 3, 4, 5, 6]], [0])
    assert len(seen) > 50
    assert {value.dtype for value in seen} == {torch.float64}
    head_dim = oracle.model.base_model.model.model.layers[0].self_attn.head_dim
    tables = [value for value in seen if value.shape[-1] == head_dim]
    assert all((value.to(torch.float32).double() != value).any() for value in tables)


def test_the_casts_come_back(saved: Saved) -> None:
    float32 = torch.ones(2).half().float().dtype
    with without_float32_casts():
        assert torch.ones(2).half().float().dtype == torch.float64
    assert torch.ones(2).half().float().dtype == float32 == torch.float32
    model = AutoModelForCausalLM.from_pretrained(saved("llama"), dtype=torch.float64)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
