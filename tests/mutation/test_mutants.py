"""The mutation check itself: what it changes, and that it tells a noticed mutant from another."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.mutation.child import MutatedModule
from tests.mutation.mutants import mutants, mutated
from tests.mutation.run import explained, jobs

SOURCE = """
def f(x, y, *, flag: int = 3, xp):
    '''Nothing in a docstring is changed.'''
    if x < 2 and not flag:
        raise ValueError(f"nor in a message: {x + 1}")
    return -x * xp.matrix_transpose(y) - cast(x, y, xp)
"""


def test_every_operator_sign_factor_and_transpose_is_changed() -> None:
    found = {(m.before, m.after) for m in mutants("m", SOURCE)}
    product = "-x * xp.matrix_transpose(y)"
    assert {
        (product, "-x / xp.matrix_transpose(y)"),
        (product, "-x"),
        (product, "xp.matrix_transpose(y)"),
        ("-x", "x"),
        ("xp.matrix_transpose(y)", "y"),
        ("cast(x, y, xp)", "x"),
        ("x < 2", "x <= 2"),
        ("x < 2", "x < 3"),
        ("not flag", "flag"),
        ("x < 2 and (not flag)", "x < 2 or not flag"),
        (f"{product} - cast(x, y, xp)", f"{product} + cast(x, y, xp)"),
        (f"{product} - cast(x, y, xp)", product),
    } <= found
    assert not [pair for pair in found if "message" in pair[0] or "docstring" in pair[1]]


def test_a_mutant_changes_one_thing_and_has_a_name_of_its_own() -> None:
    original = ast.unparse(ast.parse(SOURCE))
    made = mutants("m", SOURCE)
    assert len({m.name for m in made}) == len(made) > 12
    texts = {mutated(SOURCE, m) for m in made}
    assert original not in texts and len(texts) == len(made)


def test_a_package_keeps_its_modules() -> None:
    for file, inside in (("__init__.py", ["p"]), ("m.py", None)):
        found = MutatedModule("p", Path("p", file), "").find_spec("p", None)
        assert found is not None and found.submodule_search_locations == inside
        assert found.loader.get_filename("p") == f"p/{file}"


def test_explanations_name_mutants_that_exist() -> None:
    names = {job.mutant.name for job in jobs()}
    assert len(names) > 1500
    assert set(explained()) <= names
