"""Which source was measured: a hash of the package that is really imported, kept in every result.

``provenance`` compares it with the commit that a result is filed under.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path

#: What is measured; early commits lack some.
PACKAGES = ("mesp_core", "mesp_jax", "mesp_mlx", "mesp_torch")


def source_hash(files: Iterable[tuple[str, bytes]]) -> int:
    """48 bits, which a float holds exactly, of names and contents. files: (``mesp_core/lora.py``,
    its bytes), in any order."""
    digest = hashlib.sha256()
    for name, content in sorted(files):
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return int.from_bytes(digest.digest()[:6], "big")


def imported_files() -> Iterable[tuple[str, bytes]]:
    """Every module of the packages that an import finds."""
    for package in PACKAGES:
        found = importlib.util.find_spec(package)
        if found is None or found.origin is None:
            continue
        folder = Path(found.origin).parent
        for path in folder.rglob("*.py"):
            yield f"{package}/{path.relative_to(folder).as_posix()}", path.read_bytes()


class Source:
    version = "1"
    timeout = 60

    def track_source_hash(self) -> int:
        return source_hash(imported_files())

    track_source_hash.unit = "hash"
    track_source_hash.pretty_name = "Hash of the source that was measured"
