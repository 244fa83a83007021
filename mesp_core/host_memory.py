"""Host memory that is free, and still the process's."""

from __future__ import annotations

import ctypes
import sys


def return_free_memory() -> None:
    """Asks glibc to give what is free back to the system; elsewhere does nothing.

    A compiler leaves much behind: LLVM needs about 100 MB for a block's backward pass, in pieces so
    small that glibc keeps them for reuse, in the footprint of the whole run.
    """
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
