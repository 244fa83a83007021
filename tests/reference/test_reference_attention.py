"""Attention against finite differences and against the sum written out."""

import itertools
import math

import numpy as np
import pytest

from mesp_reference.attention import attention_backward, attention_forward, visible_keys
from mesp_reference.finite_differences import gradient_errors, relative_error
from mesp_reference.ragged import segment_and_position

H, K, E = 6, 2, 5
STARTS = np.array([0, 3, 4, 9])
N = 9
OPTIONS = {
    "plain": {},
    "window": {"window": 2},
    "softcap": {"softcap": 0.7},
    "all": {"window": 3, "softcap": 1.3, "scale": 0.9},
}


def tensors(seed):
    generator = np.random.default_rng(seed)
    return tuple(generator.standard_normal((N, heads, E)) for heads in (H, K, K, H))


def test_segment_and_position():
    segment, position = segment_and_position(STARTS)
    assert segment.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 2]
    assert position.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4]


def test_visible_keys():
    segment, position = segment_and_position(np.array([0, 3, 4]))
    plain = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]]
    assert visible_keys(segment, position).astype(int).tolist() == plain
    windowed = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
    assert visible_keys(segment, position, 2).astype(int).tolist() == windowed


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_backward(options):
    q, k, v, dout = tensors(10)
    where = segment_and_position(STARTS)

    def loss(q, k, v):
        return np.sum(dout * attention_forward(q, k, v, *where, **options)[0])

    _, saved = attention_forward(q, k, v, *where, **options)
    assert max(gradient_errors(loss, [q, k, v], attention_backward(dout, saved))) < 1e-9


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_forward_is_the_sum_written_out(options):
    q, k, v, _ = tensors(11)
    out, saved = attention_forward(q, k, v, *segment_and_position(STARTS), **options)
    scale, cap = options.get("scale", 1 / math.sqrt(E)), options.get("softcap")
    window = options.get("window", N)
    for start, stop in itertools.pairwise(STARTS):
        for i in range(start, stop):
            for h in range(H):
                head = h // (H // K)
                keys = range(max(start, i - window + 1), i + 1)
                scores = [scale * float(q[i, h] @ k[j, head]) for j in keys]
                if cap is not None:
                    scores = [cap * math.tanh(score / cap) for score in scores]
                total = sum(math.exp(score) for score in scores)
                expected = np.zeros(E)
                for score, j in zip(scores, keys, strict=True):
                    expected += math.exp(score) / total * v[j, head]
                assert relative_error(out[i, h], expected) < 1e-13
                assert saved.log_sum_exp[i, h] == pytest.approx(math.log(total), abs=1e-13)


def test_no_sequence_sees_another():
    q, k, v, dout = tensors(12)
    where = segment_and_position(STARTS)
    out, saved = attention_forward(q, k, v, *where)
    only_last = np.where(where[0][:, None, None] == 2, dout, 0.0)
    for gradient in attention_backward(only_last, saved):
        assert np.all(gradient[:4] == 0.0)
        assert np.all(np.any(gradient[5:] != 0.0, axis=(1, 2)))
    alone, _ = attention_forward(q[4:], k[4:], v[4:], *segment_and_position(np.array([0, 5])))
    assert relative_error(out[4:], alone) < 1e-14


def test_large_scores_do_not_overflow():
    q, k, v, _ = tensors(13)
    out, _ = attention_forward(1e3 * q, 1e3 * k, v, *segment_and_position(STARTS))
    assert np.all(np.isfinite(out))
