"""Products of float32 matrices are whole, on whatever device, unless somebody asked for less."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import inference  # noqa: F401 (which asks for it)


def test_products_of_matrices_are_whole():
    [product] = jax.make_jaxpr(jnp.dot)(jnp.ones((2, 2)), jnp.ones((2, 2))).eqns
    assert set(product.params["precision"]) == {jax.lax.Precision.HIGHEST}


@pytest.mark.parametrize(
    ("asked", "found"),
    [({}, "highest"), ({"JAX_DEFAULT_MATMUL_PRECISION": "tensorfloat32"}, "tensorfloat32")],
)
def test_what_was_asked_for_is_left(asked, found):
    told = "import inference, jax; print(jax.config.jax_default_matmul_precision)"
    command = {
        "args": [sys.executable, "-c", told],
        "env": os.environ | asked,
        "cwd": Path(__file__).parents[3],
    }
    assert (
        subprocess.run(**command, check=True, capture_output=True, text=True).stdout.strip()
        == found
    )
