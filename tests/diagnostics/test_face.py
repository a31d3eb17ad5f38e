"""The package's face: light, complete, and the same whatever was imported before."""

import subprocess
import sys

import pytest

import diagnostics

CODE = """
import sys
import diagnostics
heavy = {"numpy", "xarray", "arviz", "matplotlib", "pandas", "jax"} & set(sys.modules)
assert not heavy, heavy
from diagnostics import compare, report
assert type(report).__name__ == type(compare).__name__ == "function"
heavy = {"arviz", "matplotlib", "sklearn", "jax"} & set(sys.modules)
assert not heavy, heavy
"""


def test_import_is_light():
    found = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr


def test_every_name_is_there():
    assert dir(diagnostics) == sorted(diagnostics.__all__)
    for name in diagnostics.__all__:
        assert getattr(diagnostics, name).__name__.split(".")[-1] == name
    with pytest.raises(AttributeError, match="no attribute 'plot_nothing'"):
        _ = diagnostics.plot_nothing
