"""Stored weights decoded by torch's kernels: the values of ``StoredMatrix.decode``, bit for bit.

NumPy takes 1.65 ns a 4-bit weight; this takes 1.1 on one thread, and less on more. Passes over
short runs are what costs, so groups are copied as items of a whole group's bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mesp_core.formulas.frozen_matrix import DenseMatrix
from mesp_core.host_matrix import HostMatrix
from mesp_core.stored_matrix import StoredMatrix

#: Weights decoded at a time: bounds the temporaries, two and a half bytes a weight.
_CHUNK_WEIGHTS = 1 << 19


@dataclass(frozen=True)
class TorchHostMatrix(HostMatrix):
    """A matrix in host memory or in a mapped file, whose tiles torch decodes."""

    def dense(self) -> DenseMatrix:
        dtype = torch.float64 if self.dtype == np.float64 else torch.float32
        values = torch.empty(self.shape, dtype=dtype)
        decode(self.stored, values)
        return DenseMatrix(values, self.runtime.xp, self.runtime.loops)


def host_tensor(values: np.ndarray) -> torch.Tensor:
    """The same bytes as a tensor on the host, nothing copied; uint16 holds bfloat16.

    What may not be written, as views of a mapped file, goes through DLPack: ``torch.from_numpy``,
    which is quicker, warns of it. Nothing here writes into one.
    """
    tensor = torch.from_numpy(values) if values.flags.writeable else torch.from_dlpack(values)
    return tensor.view(torch.bfloat16) if values.dtype == np.uint16 else tensor


def decode(stored: StoredMatrix, out: torch.Tensor) -> None:
    """Writes the values, dense, into ``out`` [out, in], contiguous, float32 or float64."""
    if stored.quantized and stored.bits not in (4, 8):
        stored.decode(out=out.numpy())
        return
    rows, width = stored.shape
    step = max(1, _CHUNK_WEIGHTS // max(1, width))
    for lo in range(0, rows, step):
        hi = min(lo + step, rows)
        if stored.values is not None:
            out[lo:hi].copy_(host_tensor(_rows(stored, stored.values, lo, hi)))
        else:
            _dequantize(stored, lo, hi, out[lo:hi])


def _dequantize(stored: StoredMatrix, lo: int, hi: int, out: torch.Tensor) -> None:
    """(code − zero) · scale + bias of rows [lo, hi) into ``out``."""
    assert stored.codes is not None and stored.scales is not None
    rows, groups = hi - lo, stored.codes.shape[1]
    codes = _side_by_side(_rows(stored, stored.codes, lo, hi))
    values = out.view(rows, groups, stored.group)
    if stored.bits == 4:
        codes = _halves(codes) if stored.order == "halves" else _stream(codes)
    values.copy_(codes.view(values.shape))
    if stored.zero:
        values.sub_(stored.zero)
    values.mul_(_by_group(_rows(stored, stored.scales, lo, hi), out.dtype))
    if stored.biases is not None:
        values.add_(_by_group(_rows(stored, stored.biases, lo, hi), out.dtype))


def _rows(stored: StoredMatrix, part: np.ndarray, lo: int, hi: int) -> np.ndarray:
    """Logical rows [lo, hi) of one of the stored arrays."""
    return part[lo:hi] if stored.row_order is None else part[stored.row_order[lo:hi]]


def _side_by_side(codes: np.ndarray) -> torch.Tensor:
    """Codes [rows, groups, bytes] without what lies between the groups in the file."""
    whole = codes.view(f"V{codes.shape[-1]}")
    return host_tensor(np.ascontiguousarray(whole).view(codes.dtype))


def _halves(codes: torch.Tensor) -> torch.Tensor:
    """Bytes [rows, groups, n] to int8 [rows, groups, 2n]: all low nibbles, then all high ones."""
    rows, groups, length = codes.shape
    both = np.empty((rows, groups, 2), f"V{length}")
    for half, nibbles in enumerate((codes & 0x0F, codes >> 4)):
        both[:, :, half] = nibbles.numpy().view(both.dtype)[:, :, 0]
    return host_tensor(both.view(np.int8))


def _stream(codes: torch.Tensor) -> torch.Tensor:
    """Bytes [rows, groups, n] to int8 [rows, groups, 2n]: each byte's low nibble, then its high
    one; on a little-endian machine a 16-bit integer holds both in that order."""
    wide = codes.to(torch.int16)
    return ((wide & 0x0F) | ((wide & 0xF0) << 4)).view(torch.int8)


def _by_group(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return host_tensor(values).to(dtype).unsqueeze(-1)
