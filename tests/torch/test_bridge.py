"""Every component as a function of torch's autograd, with MeSP's backward pass inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

import mesp_core as mesp
import mesp_torch
from mesp_core.bridge_kernels import Kernel, Quantized
from mesp_core.formulas.lora_linear import Projection
from mesp_reference.quantization import quantize
from mesp_torch.bridge import apply

N, D, F, R, V = 7, 6, 10, 3, 11

Case = tuple[Callable[..., torch.Tensor], list[torch.Tensor]]


def draw(*shape: int, seed: int = 0, grad: bool = True) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 100 * sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(grad)


def frozen(*shape: int, seed: int = 0) -> torch.Tensor:
    return draw(*shape, seed=seed, grad=False)


def packed(rows: int, width: int) -> tuple[Quantized, torch.Tensor]:
    """A 4-bit matrix in groups of 32, and its values."""
    words, scales, biases = quantize(frozen(rows, width).numpy(), 32, 4)
    codes = torch.from_numpy(np.ascontiguousarray(words).astype("<u4").view(np.uint8))
    quantized = Quantized(codes, torch.from_numpy(scales), torch.from_numpy(biases), 4, 32)
    identity = torch.eye(width, dtype=torch.float64)
    return quantized, mesp_torch.frozen_linear(identity, quantized).T.contiguous()


def embedding() -> Case:
    tokens = torch.tensor([3, 1, 3, 0])
    return lambda table: mesp_torch.embedding(tokens, table), [draw(V, D)]


def rms_norm() -> Case:
    return lambda x, w: mesp_torch.rms_norm(x, w, eps=1e-3, plus_one=True), [draw(2, N, D), draw(D)]


def rope() -> Case:
    cos, sin = frozen(N, 2), frozen(N, 2, seed=1)
    return lambda x: mesp_torch.rope(x, cos, sin, interleaved=True), [draw(N, 3, 5)]


def attention(**options: Any) -> Case:
    segment = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    inputs = [draw(N, 4, 5), draw(N, 2, 5), draw(N, 2, 5, seed=1)]
    return lambda q, k, v: mesp_torch.attention(q, k, v, segment=segment, **options), inputs


def frozen_linear() -> Case:
    weight, bias = frozen(F, D), frozen(F)
    return lambda x: mesp_torch.frozen_linear(x, weight, bias), [draw(2, 3, D)]


def lora_linear(**options: Any) -> Case:
    weight, bias = frozen(F, D), frozen(F)

    def call(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return mesp_torch.lora_linear(x, weight, a, b, bias=bias, scale=0.7, **options)

    return call, [draw(2, 3, D), draw(D, R), draw(R, F)]


def lora_linear_4bit() -> Case:
    weight, _ = packed(5, 64)
    return lambda x, a, b: mesp_torch.lora_linear(x, weight, a, b), [
        draw(N, 64), draw(64, R), draw(R, 5),
    ]  # fmt: skip


def gated_mlp() -> Case:
    weights = frozen(F, D), frozen(F, D, seed=1), frozen(D, F)
    bias = frozen(D)

    def call(x: torch.Tensor, *factors: torch.Tensor) -> torch.Tensor:
        a_gate, b_gate, a_down, b_down = factors
        gate = Projection(weights[0], None, a_gate, b_gate, 0.7)
        down = Projection(weights[2], bias, a_down, b_down, 1.3)
        return mesp_torch.gated_mlp(x, gate, Projection(weights[1]), down)

    return call, [draw(N, D), draw(D, R), draw(R, F), draw(F, R), draw(R, D)]


def linear_cross_entropy() -> Case:
    weight, targets = frozen(V, D), torch.arange(N) % V
    weights = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.5, 1.0, 0.0], dtype=torch.float64)
    return lambda x: mesp_torch.linear_cross_entropy(x, weight, targets, weights), [draw(N, D)]


CASES: dict[str, Callable[[], Case]] = {
    "embedding": embedding,
    "rms_norm": rms_norm,
    "rope": rope,
    "attention": attention,
    "attention_window": lambda: attention(window=2),
    "attention_softcap": lambda: attention(softcap=0.9, scale=0.3),
    "frozen_linear": frozen_linear,
    "lora_linear": lora_linear,
    "lora_linear_dropout": lambda: lora_linear(dropout=0.4, seed=5, step=2),
    "lora_linear_4bit": lora_linear_4bit,
    "gated_mlp": gated_mlp,
    "linear_cross_entropy": linear_cross_entropy,
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_finite_differences(case: str) -> None:
    function, inputs = CASES[case]()
    assert gradcheck(function, inputs)


@pytest.mark.parametrize("case", CASES)
def test_a_gradient_only_for_what_asks(case: str) -> None:
    function, inputs = CASES[case]()
    for place, kept in enumerate(inputs):
        given = [a.detach().requires_grad_(i == place) for i, a in enumerate(inputs)]
        function(*given).sum().backward()
        assert given[place].grad is not None and given[place].grad.shape == kept.shape
        assert all(a.grad is None for i, a in enumerate(given) if i != place)


@pytest.mark.parametrize("case", CASES)
def test_without_grad_mode_there_is_no_graph(case: str) -> None:
    function, inputs = CASES[case]()
    with torch.no_grad():
        plain = function(*inputs)
    assert plain.grad_fn is None and not plain.requires_grad
    out = function(*inputs)
    assert out.requires_grad
    assert torch.equal(out, plain)
    assert not function(*(a.detach() for a in inputs)).requires_grad


def test_values_are_those_of_plain_torch() -> None:
    """Against torch's own autograd, where finite differences would see a factor but not a use."""
    x, a, b, w = draw(N, D), draw(D, R), draw(R, F), frozen(F, D)
    ours = mesp_torch.lora_linear(x, w, a, b, scale=0.7)
    true = x @ w.T + 0.7 * (x @ a) @ b
    torch.testing.assert_close(ours, true, rtol=1e-13, atol=1e-13)
    upstream = frozen(N, F, seed=3)
    for mine, other in zip(
        torch.autograd.grad(ours, (x, a, b), upstream),
        torch.autograd.grad(true, (x, a, b), upstream),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_come_in_the_dtype_of_what_they_belong_to(dtype: torch.dtype) -> None:
    function, inputs = attention()
    given = [a.detach().to(dtype).requires_grad_() for a in inputs]
    out = function(*given)
    assert out.dtype == dtype
    out.float().sum().backward()
    assert [a.grad.dtype for a in given if a.grad is not None] == [dtype] * 3


def test_a_frozen_input_that_requires_a_gradient_is_refused() -> None:
    x, weight = draw(N, D), draw(F, D)
    with pytest.raises(mesp.MespError, match="frozen"):
        mesp_torch.frozen_linear(x, weight)
    with torch.no_grad():
        assert mesp_torch.frozen_linear(x, weight).shape == (N, F)


def test_arrays_of_another_library_are_refused() -> None:
    with pytest.raises(mesp.MespError, match="two libraries"):
        mesp_torch.rms_norm(draw(N, D), np.ones(D))


def test_what_was_saved_may_not_be_written_before_the_backward_pass() -> None:
    function, inputs = lora_linear()
    factor = inputs[1].detach().clone().requires_grad_()
    out = function(inputs[0], factor, inputs[2])
    with torch.no_grad():
        factor += 1.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


class Adapted(torch.nn.Module):
    """A tiny model as a user would write one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", frozen(D, D).float())
        self.register_buffer("head", frozen(V, D).float())
        self.norm = torch.nn.Parameter(torch.ones(D))
        self.lora_a = torch.nn.Parameter(frozen(D, R, seed=4).float())
        self.lora_b = torch.nn.Parameter(torch.zeros(R, D))

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = mesp_torch.rms_norm(torch.tanh(x), self.norm)
        x = x + mesp_torch.lora_linear(x, self.weight, self.lora_a, self.lora_b, scale=2.0)
        return mesp_torch.linear_cross_entropy(x, self.head, targets)


def test_inside_a_module_an_optimizer_learns() -> None:
    model, x, targets = Adapted(), frozen(N, D).float(), torch.arange(N) % V
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(x, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


def test_autocast_around_a_module_keeps_the_kernels_exact() -> None:
    model, x, targets = Adapted(), frozen(N, D).float(), torch.arange(N) % V
    plain = model(x, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = model(x, targets)
    assert torch.equal(plain, inside)


class Doubled(Kernel):
    """2x, which writes down whether a backward pass was said to follow."""

    differentiable = (True,)

    def __init__(self) -> None:
        self.told: list[bool] = []

    def forward(self, backend: Any, *inputs: Any, gradient: bool) -> Any:
        self.told.append(gradient)
        return 2.0 * inputs[0], ()

    def backward(self, backend: Any, dout: Any, saved: Any, *inputs: Any) -> Any:
        return (2.0 * dout,)


def test_a_backward_pass_is_prepared_only_where_one_can_follow() -> None:
    kernel, x = Doubled(), torch.ones(3)
    assert apply(kernel, x).tolist() == [2.0] * 3 and kernel.told == [False]
    x.requires_grad_()
    with torch.no_grad():
        apply(kernel, x)
    assert kernel.told == [False, False]
    apply(kernel, x).sum().backward()
    assert x.grad.tolist() == [2.0] * 3 and kernel.told == [False, False, True]


def test_tensors_of_two_devices_are_refused() -> None:
    with pytest.raises(mesp.MespError, match="lie on cpu and meta"):
        mesp_torch.rms_norm(torch.ones(2, 3), torch.ones(3, device="meta"), eps=1e-5)
