"""A Normal vector with the sum over its numbers outermost, against NumPyro's."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.distributions.util import validate_sample

from inference.distributions import DiagonalNormal
from tests.by_numpy import by_numpy

pytestmark = pytest.mark.usefixtures("x64", "ranks")

SHAPES = {  # of the value, the location and the scale
    "one vector": ((3,), (3,), (3,)),
    "rows of one": ((7, 3), (3,), (3,)),
    "rows of clusters": ((7, 1, 3), (4, 3), (4, 3)),
    "a scale for all": ((7, 1, 3), (4, 3), ()),
    "a cluster for each row": ((7, 3), (7, 3), (1, 3)),
    "one vector in each cluster": ((3,), (4, 3), (4, 3)),
    "one feature": ((7, 1, 1), (4, 1), (4, 1)),
    "plates of plates": ((2, 1, 7, 1, 3), (5, 1, 4, 3), (4, 3)),
}


@pytest.fixture
def ranks():
    """NumPyro's own density adds rows to vectors."""
    with jax.numpy_rank_promotion("allow"):
        yield


def of(name: str, make):
    """The density and what it depends on, for numbers of the given shapes."""
    keys = random.split(random.key(0), 3)
    value, loc, log_scale = (
        np.asarray(random.normal(key, shape)) for key, shape in zip(keys, SHAPES[name], strict=True)
    )
    return by_numpy(lambda value, loc, log_scale: make(loc, jnp.exp(log_scale)).log_prob(value)), (
        value,
        loc,
        log_scale,
    )


def ours_and_numpyros(name: str):
    return of(name, DiagonalNormal)[0], *of(
        name, lambda loc, scale: dist.Normal(loc, scale).to_event(1)
    )


@pytest.mark.parametrize("name", SHAPES, ids=SHAPES)
def test_the_density_is_that_of_independent_normals(name):
    ours, numpyros, given = ours_and_numpyros(name)
    assert ours(*given).shape == numpyros(*given).shape
    np.testing.assert_allclose(ours(*given), numpyros(*given), rtol=1e-12)


@pytest.mark.parametrize("name", SHAPES, ids=SHAPES)
def test_so_are_its_derivatives(name):
    ours, numpyros, given = ours_and_numpyros(name)
    slopes = by_numpy(
        lambda *given: [jax.jacobian(each, (0, 1, 2))(*given) for each in (ours, numpyros)]
    )(*given)
    for mine, theirs in zip(*slopes, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-12)


def test_a_density_without_the_widths_is_seen():
    """The planted bug: quadratic terms alone."""

    class Narrow(DiagonalNormal):
        @validate_sample
        def log_prob(self, value):
            return super().log_prob(value) + jnp.log(self.base_dist.scale).sum(-1)

    wrong, given = of("rows of clusters", Narrow)
    right, _ = of("rows of clusters", DiagonalNormal)
    assert float(jnp.abs(wrong(*given) - right(*given)).min()) > 1e-3


def test_it_can_be_mapped_over_and_expanded():
    ours, numpyros, (value, loc, log_scale) = ours_and_numpyros("rows of clusters")
    many = np.stack([loc, 2 * loc])
    np.testing.assert_allclose(
        jax.vmap(ours, (None, 0, None))(value, many, log_scale),
        jax.vmap(numpyros, (None, 0, None))(value, many, log_scale),
        rtol=1e-12,
    )
    wide, expected = by_numpy(
        lambda loc, value: [
            make.expand((5, 2)).log_prob(value)
            for make in (DiagonalNormal(loc, 1.0), dist.Normal(loc, 1.0).to_event(1))
        ]
    )(loc[0], value[0, 0])
    np.testing.assert_allclose(wide, expected, rtol=1e-12)


def test_distributions_go_through_compiled_functions():
    made = by_numpy(lambda scale: DiagonalNormal(jnp.zeros(3), scale))(2.0)
    np.testing.assert_allclose(
        made.log_prob(jnp.ones(3)),
        dist.Normal(0.0, 2.0).expand((3,)).to_event(1).log_prob(jnp.ones(3)),
        rtol=1e-12,
    )


def test_draws_have_its_moments():
    draw = lambda key: DiagonalNormal(jnp.array([1.0, -2.0]), jnp.array([0.5, 3.0])).sample(
        key, (100_000,)
    )
    drawn = np.asarray(by_numpy(draw)(random.key(0)))
    np.testing.assert_allclose(drawn.mean(0), [1, -2], atol=0.05)
    np.testing.assert_allclose(np.cov(drawn.T), [[0.25, 0], [0, 9]], atol=0.15)


def test_widths_below_zero_are_refused():
    with pytest.raises(ValueError, match="scale"):
        DiagonalNormal(jnp.zeros(2), jnp.array([1.0, -1.0]), validate_args=True)
