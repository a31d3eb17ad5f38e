"""Code that is compiled for a call or two."""

import jax
import jax.numpy as jnp
import numpy as np

from inference._once import once


def test_data_are_arguments_of_the_code_and_not_its_constants(monkeypatch):
    texts, whole = [], jax.stages.Lowered.compile
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda self, **options: (texts.append(self.as_text()), whole(self, **options))[1])
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
            np.testing.assert_array_equal(once(function, jnp.ones(3))(jnp.ones(3)), function(jnp.ones(3)))
