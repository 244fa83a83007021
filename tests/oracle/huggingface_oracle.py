"""Loss and LoRA gradients by transformers, PEFT and torch's autograd: code that nobody here wrote.

transformers computes norms, RoPE tables and the softmax in float32 whatever the model's dtype.
``without_float32_casts`` lifts that, so that a float64 model is float64 throughout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import modeling_rope_utils
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from tests.oracle.tiny_models import ALPHA, RANK

_MODULES = (modeling_llama, modeling_mistral, modeling_qwen2, modeling_qwen3, modeling_rope_utils)


@dataclass(frozen=True)
class OracleResult:
    """loss: Σ weight · cross-entropy / tokens; tokens: targets that count; gradients: by our
    names, lora_a [in, R] and lora_b [R, out]."""

    loss: float
    tokens: int
    gradients: dict[str, np.ndarray]


class _WideTorch:
    """The torch namespace, where float32 means float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def without_float32_casts() -> Iterator[None]:
    """Inside, the model code of transformers casts to float64 wherever it says float32."""
    with ExitStack() as stack:
        for module in _MODULES:
            stack.enter_context(patch.object(module, "torch", _WideTorch()))
        stack.enter_context(patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield


class Oracle:
    """One saved model with one adapter.

    dtype: of the frozen weights and activations. lora_dtype: of A and B, ``dtype`` by default.
    lifted: whether the casts to float32 are lifted, which needs float64.
    """

    def __init__(
        self,
        folder: Path,
        adapter: Mapping[str, np.ndarray],
        *,
        dtype: str = "float64",
        lora_dtype: str | None = None,
        lifted: bool = True,
    ) -> None:
        self.lifted = lifted
        base = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
        if lifted:
            _recompute_frequencies(base)
        lora = LoraConfig(
            r=RANK,
            lora_alpha=ALPHA,  # type: ignore[arg-type]
            target_modules=sorted({name.split(".")[-2] for name in adapter}),
            lora_dropout=0.0,
            bias="none",
        )
        self.model = get_peft_model(base, lora, autocast_adapter_dtype=False)
        self.parameters = _named_parameters(self.model)
        assert self.parameters.keys() == adapter.keys()
        for name, parameter in self.parameters.items():
            value = torch.from_numpy(adapter[name].T.copy())
            assert value.shape == parameter.shape
            parameter.data = value.to(getattr(torch, lora_dtype or dtype))

    def loss(self, sequences: Sequence[Sequence[int]], prompts: Sequence[int]) -> torch.Tensor:
        """Each sequence by itself; the sum of its targets' cross-entropies over their number.

        prompts: how many leading ids of each sequence are never a target.
        """
        with without_float32_casts() if self.lifted else nullcontext():
            parts = [
                self._summed(ids, prompt) for ids, prompt in zip(sequences, prompts, strict=True)
            ]
        return torch.stack(parts).sum() / target_count(sequences, prompts)

    def _summed(self, ids: Sequence[int], prompt: int) -> torch.Tensor:
        logits = self.model(input_ids=torch.tensor([ids[:-1]]), use_cache=False).logits[0]
        if logits.dtype == torch.bfloat16:
            logits = logits.to(torch.float32)
        first = max(prompt - 1, 0)
        targets = torch.tensor(ids[1:])[first:]
        return torch.nn.functional.cross_entropy(logits[first:], targets, reduction="sum")

    def loss_and_gradients(
        self, sequences: Sequence[Sequence[int]], prompts: Sequence[int]
    ) -> OracleResult:
        """The loss and its gradients by torch's autograd, as float64 values."""
        names = list(self.parameters)
        loss = self.loss(sequences, prompts)
        found = torch.autograd.grad(loss, [self.parameters[name] for name in names])
        gradients = {
            name: gradient.to(torch.float64).numpy().T
            for name, gradient in zip(names, found, strict=True)
        }
        return OracleResult(loss.item(), target_count(sequences, prompts), gradients)


def target_count(sequences: Sequence[Sequence[int]], prompts: Sequence[int]) -> int:
    """How many targets count: of n ids with a prompt of p, those from the p-th on, not the 0th."""
    return sum(len(ids) - max(prompt, 1) for ids, prompt in zip(sequences, prompts, strict=True))


def central_difference(
    oracle: Oracle,
    name: str,
    index: tuple[int, int],
    sequences: Sequence[Sequence[int]],
    prompts: Sequence[int],
    step: float = 1e-4,
) -> float:
    """∂loss/∂parameter[index], our layout, from four losses: the error is of the fourth order."""
    row, column = index
    entry = oracle.parameters[name].data[column]
    losses = {}
    original = entry[row].item()
    with torch.no_grad():
        for offset in (-2, -1, 1, 2):
            entry[row] = original + offset * step
            losses[offset] = oracle.loss(sequences, prompts).item()
        entry[row] = original
    assert all(math.isfinite(loss) for loss in losses.values())
    near, far = losses[1] - losses[-1], losses[2] - losses[-2]
    return (8.0 * near - far) / (12.0 * step)


def _recompute_frequencies(model: Any) -> None:
    """RoPE's inverse frequencies again, in float64 from the start."""
    with without_float32_casts():
        rotary = model.model.rotary_emb
        compute = rotary.compute_default_rope_parameters
        if rotary.rope_type != "default":
            compute = modeling_rope_utils.ROPE_INIT_FUNCTIONS[rotary.rope_type]
        frequencies, rotary.attention_scaling = compute(model.config)
        assert frequencies.dtype == torch.float64
        rotary.inv_freq = frequencies


def _named_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """PEFT's trainable parameters by our names; lora_A is [R, in] and lora_B [out, R] there."""
    named = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            stem, _, factor = name.removesuffix(".default.weight").rpartition(".")
            named[f"{stem.removeprefix('base_model.model.')}.{factor.lower()}"] = parameter
    return named
