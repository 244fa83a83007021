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

_EXACT_METHODS = ("tests/methods/test_exact_methods.py", "-k", "not jax and not mlx")
_MEZO = ("tests/methods/test_mezo.py", *_EXACT_METHODS)
_METHODS = ("tests/methods", "tests/training")

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

#: The files that are about a module of a backend: of its own tests, or of the matrix.
_ABOUT_BACKEND = {
    "torch": {
        "activations": "conformance/test_gated_mlp",
        "autodiff": "methods/test_pieces",
        "bridge": "torch/test_bridge",
        "decoding": "torch/test_matrices",
        "fast": "conformance/test_rms_norm conformance/test_lora_linear conformance/test_defaults",
        "flash": "torch/test_attention",
        "matrices": "torch/test_matrices",
        "namespace": "conformance/test_attention",
        "torch_backend": "torch/test_backend torch/test_matrices",
    },
    "mlx": {
        "activations": "conformance/test_gated_mlp",
        "autodiff": "methods/test_pieces",
        "blas": "mlx/test_backend",
        "bridge": "mlx/test_bridge",
        "fast": "conformance/test_rms_norm conformance/test_defaults",
        "loops": "conformance/test_attention",
        "matrices": "mlx/test_matrices",
        "mlx_backend": "mlx/test_backend",
        "namespace": "mlx/test_namespace",
        "untraced": "mlx/test_bridge",
    },
    "jax": {
        "autodiff": "methods/test_pieces",
        "bridge": "jax/test_bridge",
        "components": "jax/test_components",
        "jax_backend": "jax/test_backend jax/test_components",
        "loops": "jax/test_loops",
        "matrices": "jax/test_matrices",
        "streamed": "jax/test_streamed",
        "namespace": "jax/test_signatures",
        "programs": "jax/test_signatures",
        "pytrees": "jax/test_signatures",
        "quantized": "jax/test_quantized",
    },
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


def _about_backend(name: str, stem: str, matrix: Stage) -> tuple[Stage, ...]:
    """The quick judge of a backend's module, if it has one."""
    about = _ABOUT_BACKEND[name].get(stem)
    if about is None:
        return ()
    files = tuple(f"tests/{file}.py" for file in about.split())
    if files[0].startswith(_CONFORMANCE):
        return ((*files, *matrix),)
    return (files if files[0].startswith(f"tests/{name}") else (*files, "-k", name),)


def _eager_backend(name: str, subjects: str) -> Callable[[str], tuple[Stage, ...]]:
    matrix = ("--subjects", subjects, "-k", f"{name} and not test_properties")
    return lambda stem: (
        *_about_backend(name, stem, matrix),
        # The memory tests start a Python of their own, which would not see the mutant.
        (f"tests/{name}", f"--ignore=tests/{name}/test_memory.py"),
        (_CONFORMANCE, *matrix),
        ("tests/oracle/test_whole_model.py", "-k", name),
    )


#: Of JAX's tests, those that compile little.
_QUICK = ("backend", "components", "loops", "matrices", "quantized", "signatures")


def _jax_backend(stem: str) -> tuple[Stage, ...]:
    return (
        *_about_backend("jax", stem, _JAX),
        tuple(f"tests/jax/test_{name}.py" for name in _QUICK),
        tuple(f"tests/jax/test_{name}.py" for name in ("whole_model", "programs", "bridge")),
    )


SUITES = (
    Suite("mesp_core/formulas/*.py", _core),
    Suite("mesp_core/block.py", _core),
    Suite("mesp_core/head.py", _core),
    Suite("mesp_core/host_matrix.py", _core),
    Suite("mesp_core/host_words.py", _core),
    Suite("mesp_core/host_memory.py", lambda stem: (("tests/jax/test_backend.py",),)),
    Suite("mesp_core/methods/checkpointed.py", lambda stem: (_EXACT_METHODS, _WHOLE, _METHODS)),
    Suite("mesp_core/methods/autodiff.py", lambda stem: (_EXACT_METHODS, _METHODS)),
    Suite("mesp_core/methods/mezo.py", lambda stem: (_MEZO, _METHODS)),
    Suite("backends/mesp_torch/*.py", _eager_backend("torch", "torch")),
    Suite("backends/mesp_mlx/*.py", _eager_backend("mlx", "mlx,mlx-cpu")),
    Suite("backends/mesp_jax/*.py", _jax_backend),
)
