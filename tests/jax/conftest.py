"""One backend for all tests of this folder, so that what one compiles others find."""

from __future__ import annotations

import pytest

from mesp_core.backend import TileSizes
from mesp_jax.jax_backend import JaxBackend

#: The smallest dense tile is 128 rows; 200 tokens are four query tiles, the last one shorter.
SMALL = TileSizes(weights=1, query=64, key=64, tokens=96)


@pytest.fixture(scope="session")
def backend() -> JaxBackend:
    return JaxBackend("cpu", tiles=SMALL)
