"""Compiled code serves every function that computes the same, and no other."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.program.compiling import built, compiled, once

X = jnp.ones(7)


def test_data_are_arguments_of_the_code_and_not_its_constants(monkeypatch):
    texts, whole = [], jax.stages.Lowered.compile
    monkeypatch.setattr(
        jax.stages.Lowered,
        "compile",
        lambda self, **options: (texts.append(self.as_text()), whole(self, **options))[1],
    )
    data = jnp.asarray(np.random.default_rng(0).normal(size=50_000), jnp.float32)
    function = lambda given: {"sums": jax.lax.map(lambda x: jnp.sum(data * x), given["x"])}
    given = {"x": jnp.arange(3, dtype=jnp.float32)}
    found = once(function, given)(given)
    np.testing.assert_allclose(found["sums"], function(given)["sums"], rtol=1e-5, atol=1e-3)
    jax.jit(function).lower(given).compile()
    assert len(texts[0]) < len(data) < len(texts[1])  # the second one holds them


def test_programs_that_leave_out_different_data_are_not_confused():
    one, other = jnp.arange(3.0), 10 + jnp.arange(3.0)

    def first(x):
        _ = other * x
        return one + x

    def second(x):
        found = other + x
        _ = one * x
        return found

    for _ in range(2):
        for function in (first, second):
            np.testing.assert_array_equal(
                once(function, jnp.ones(3))(jnp.ones(3)), function(jnp.ones(3))
            )


@pytest.mark.parametrize(
    "how",
    [once, compiled, lambda function, x: built(function, (x,))],
)
def test_what_is_traced_to_the_same_code_is_not_lowered_again(how, monkeypatch):
    lowered, lower = [], jax.stages.Traced.lower
    monkeypatch.setattr(
        jax.stages.Traced,
        "lower",
        lambda self, **options: (lowered.append(self), lower(self, **options))[1],
    )
    made = lambda factor: lambda x: jnp.cumsum(x) * factor
    for factor, count in ((0.3, 1), (0.3, 1), (0.4, 2)):
        np.testing.assert_allclose(how(made(factor), X)(X), made(factor)(X), rtol=1e-6)
        assert len(lowered) == count


def test_functions_of_the_host_are_not_confused():
    for function in (np.sin, np.cos, np.sin):
        called = lambda x, function=function: jax.pure_callback(function, x, x)
        np.testing.assert_allclose(
            once(called, jnp.ones(3))(jnp.ones(3)), function(np.ones(3)), rtol=1e-6
        )


@pytest.mark.parametrize("how", [once, compiled])
def test_code_within_other_code_is_a_part_of_it(how):
    within = lambda factor: how(lambda x: jnp.cumsum(x) * factor, X)(X)
    np.testing.assert_allclose(jax.jit(within)(2.0), 2.0 * jnp.cumsum(X))
    np.testing.assert_allclose(jax.grad(lambda factor: within(factor)[-1])(2.0), 7.0)


RUN = """
import jax, numpyro, numpyro.distributions as dist
from numpyro.infer import HMC
from inference import Driver
if FOLDER := {folder!r}:
    jax.config.update("jax_compilation_cache_dir", FOLDER)
model = lambda: numpyro.sample("x", dist.Normal())
Driver(HMC(model, num_steps=1), num_warmup=1, num_samples=1, progress_bar=False).run(0)
"""


@pytest.mark.parametrize(
    ("folder", "is_on", "where"),
    [("", "true", "cache"), ("own", "true", "own"), ("", "false", None)],
    ids=["by default", "a folder of one's own", "switched off"],
)
def test_a_run_keeps_its_programs_for_other_processes(tmp_path, folder, is_on, where):
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    environment |= {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HOME": str(tmp_path / "cache"),
        "JAX_ENABLE_COMPILATION_CACHE": is_on,
    }
    code = RUN.format(folder=str(tmp_path / folder) if folder else "")
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, check=True)
    kept = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*-cache")}
    assert kept == ({where} if where else set())
