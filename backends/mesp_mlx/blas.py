"""Which BLAS multiplies on a CPU.

MLX's Linux wheel is linked against the reference BLAS, some 25 to 60 times slower than OpenBLAS.
An OpenBLAS of the system, loaded with its symbols global before MLX is first imported, takes its
place; without one, products go through NumPy's own OpenBLAS on views of MLX's memory.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Blas:
    """name: what multiplies; through_numpy: products go to ``numpy.matmul``; reason: why."""

    name: str
    through_numpy: bool
    reason: str


def choose_blas() -> Blas:
    """Loads a system OpenBLAS when that can still help, and says what will multiply.

    Must be called before ``mlx.core`` is imported for the system's OpenBLAS to be used. On macOS
    MLX uses Accelerate, and there is nothing to choose.
    """
    if sys.platform != "linux":
        return Blas("Accelerate", False, "the system's own BLAS")
    if "mlx.core" in sys.modules:
        return Blas("NumPy's OpenBLAS", True, "MLX was imported before this backend was made")
    path = ctypes.util.find_library("openblas")
    if path is None:
        return Blas("NumPy's OpenBLAS", True, "no system OpenBLAS was found")
    try:
        library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        return Blas("NumPy's OpenBLAS", True, f"{path} does not load: {error}")
    if not hasattr(library, "cblas_sgemm"):
        return Blas("NumPy's OpenBLAS", True, f"{path} has no cblas_sgemm")
    return Blas(path, False, "a system OpenBLAS, loaded before MLX")
