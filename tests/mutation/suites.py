"""Which tests judge which module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

#: Arguments of pytest. A mutant that survives one stage meets the next; the quick judge is first.
Stage = tuple[str, ...]


@dataclass(frozen=True)
class Suite:
    """modules: a glob of files; stages: the judges of a file, by its stem."""

    modules: str
    stages: Callable[[str], tuple[Stage, ...]]


_CONFORMANCE = "tests/conformance"
_EXACT = ("--subjects", "numpy-float64,numpy-float16", "-k", "not mlx and not torch and not jax")
_EAGER = ("--subjects", "numpy,numpy-readonly,strict,mlx,mlx-cpu,torch", "-k", "not jax")
#: Generated batches say nothing that the other judges do not, and take longer than all of them.
_REST = (*_EXACT[:3], f"{_EXACT[3]} and not test_properties")
_JAX = ("--subjects", "jax-jit-float32", "-k", "jax")
_MEMORY = ("tests/memory/test_nothing_large_is_made.py",)
_WHOLE = ("tests/oracle/test_whole_model.py", "-k", "numpy_float64")

#: The file of the matrix that is about a module, where it is not named like it.
_ABOUT = {
    "activation": "gated_mlp",
    "cross_entropy": "ends",
    "embedding": "ends",
    "frozen_linear": "linear",
    "frozen_matrix": "linear",
    "head": "ends",
    "host_matrix": "linear",
    "host_words": "dropout",
    "quantization": "linear",
    "loops": "linear",
    "precision": "linear",
}

#: The file of a backend's own tests that is about a module of it.
_ABOUT_BACKEND = {
    ("torch", "decoding"): "matrices",
    ("torch", "flash"): "attention",
    ("torch", "matrices"): "matrices",
    ("torch", "bridge"): "bridge",
    ("torch", "torch_backend"): "backend",
    ("mlx", "bridge"): "bridge",
    ("jax", "bridge"): "bridge",
    ("jax", "jax_backend"): "backend",
    ("jax", "loops"): "loops",
    ("jax", "matrices"): "matrices",
    ("jax", "quantized"): "matrices",
    ("jax", "programs"): "programs",
    ("jax", "pytrees"): "programs",
}


def _about(stem: str) -> str:
    return f"{_CONFORMANCE}/test_{_ABOUT.get(stem, stem)}.py"


def _core(stem: str) -> tuple[Stage, ...]:
    return (
        (_about(stem), f"{_CONFORMANCE}/test_defaults.py", *_EXACT),
        (_about(stem), *_EAGER),
        (_CONFORMANCE, *_REST),
        _MEMORY,
        _WHOLE,
        # What only a traced loop notices.
        *(((_about(stem), *_JAX),) if stem in ("attention", "loops") else ()),
    )


def _eager_backend(name: str, subjects: str) -> Callable[[str], tuple[Stage, ...]]:
    def stages(stem: str) -> tuple[Stage, ...]:
        about = _ABOUT_BACKEND.get((name, stem))
        quick = (f"tests/{name}/test_{about}.py",) if about else ()
        matrix = (_CONFORMANCE, "--subjects", subjects, "-k", f"{name} and not test_properties")
        return (
            *((quick,) if quick else ()),
            matrix,
            (f"tests/{name}",),
            ("tests/oracle/test_whole_model.py", "-k", name),
        )

    return stages


def _jax_backend(stem: str) -> tuple[Stage, ...]:
    about = _ABOUT_BACKEND.get(("jax", stem))
    quick = (f"tests/jax/test_{about}.py",) if about else ()
    return (*((quick,) if quick else ()), (_CONFORMANCE, *_JAX), ("tests/jax",))


SUITES = (
    Suite("mesp_core/formulas/*.py", _core),
    Suite("mesp_core/block.py", _core),
    Suite("mesp_core/head.py", _core),
    Suite("mesp_core/host_matrix.py", _core),
    Suite("mesp_core/host_words.py", _core),
    Suite("mesp_core/methods/mesp.py", lambda stem: (_WHOLE, _MEMORY, ("tests/training",))),
    Suite("backends/mesp_torch/*.py", _eager_backend("torch", "torch")),
    Suite("backends/mesp_mlx/*.py", _eager_backend("mlx", "mlx,mlx-cpu")),
    Suite("backends/mesp_jax/*.py", _jax_backend),
)
