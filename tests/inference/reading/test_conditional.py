"""Every family against its closed form, on a model and on the same model renamed."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random

from inference.program.program import Program
from inference.reading.conditional import BlockNormal, ByColumn, conditional, draw, identify
from tests.by_numpy import by_numpy
from tests.inference.conjugate import (
    COLUMNS,
    MATRIX,
    RNG,
    ROWS,
    Y,
    each_case,
    factors,
    left_closed,
    mixture,
    precision_closed,
    scales,
)

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")


def start(program):
    """Values to condition on, and several values of every site to compare densities at."""
    draw_initial = by_numpy(program.draw_initial)
    draws = [draw_initial(key) for key in random.split(random.key(1), 3)]
    return draws[0], draws


def conditional_at(program, site, values, family, column=None):
    """Compiled: the conditional, and its residual."""
    return by_numpy(lambda values: conditional(program, site, values, family, column=column))(
        values
    )


def assert_same_density(found, wanted, points):
    log_probs = [by_numpy(each.log_prob) for each in (found, wanted)]
    for point in points:
        np.testing.assert_allclose(
            *(log_prob(point) for log_prob in log_probs), rtol=1e-8, atol=1e-8
        )


@pytest.mark.slow_after(2)
@each_case
def test_conditional_equals_closed_form(case):
    program = Program(case.model)
    values, draws = start(program)
    family = identify(program, case.site, values, random.key(2))
    found, residual = conditional_at(program, case.site, values, family)
    points = [point[case.site] for point in draws]
    assert family.name == case.family
    assert residual < 1e-10
    assert found.shape() == program.sites[case.site].shape
    assert_same_density(found, case.closed(values, 0.0), points)
    with pytest.raises(AssertionError):
        assert_same_density(found, case.closed(values, 0.1), points)


@pytest.mark.slow
@each_case
def test_conditional_does_not_know_the_names(case):
    renamed = numpyro.handlers.scope(case.model, prefix="new")
    values, draws = start(Program(case.model))
    other = {f"new/{name}": value for name, value in values.items()}
    site = f"new/{case.site}"
    family = identify(Program(renamed), site, other, random.key(2))
    found, _ = conditional(Program(renamed), site, other, family)
    assert family.name == case.family
    assert_same_density(found, case.closed(values, 0.0), [point[case.site] for point in draws])


@pytest.mark.slow
@each_case
def test_conditional_under_vmap(case):
    program = Program(case.model)
    values, draws = start(program)
    family = identify(program, case.site, values, random.key(2))
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *draws)
    density = jax.vmap(
        lambda at: conditional(program, case.site, at, family)[0].log_prob(values[case.site])
    )
    wanted = jnp.stack([case.closed(point, 0.0).log_prob(values[case.site]) for point in draws])
    np.testing.assert_allclose(density(batch), wanted, rtol=1e-8, atol=1e-8)


def test_event_dims_are_kept():
    def model():
        numpyro.sample("x", dist.Normal(jnp.zeros((2, 3)), 1.0).to_event(1))

    program = Program(model)
    values = {"x": jnp.ones((2, 3))}
    found, _ = conditional_at(program, "x", values, identify(program, "x", values, random.key(0)))
    assert (found.batch_shape, found.event_shape) == ((2,), (3,))


@pytest.mark.slow
def test_all_elements_of_a_matrix_jointly():
    maps = RNG.normal(size=(ROWS, 6))

    def model():
        with numpyro.plate("a", 2, dim=-2), numpyro.plate("b", 3, dim=-1):
            weight = numpyro.sample("weight", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(maps @ weight.ravel(), 0.5).to_event(1), obs=Y)

    program, values = Program(model), {"weight": jnp.ones((2, 3))}
    family = identify(program, "weight", values, random.key(0))
    found, _ = conditional_at(program, "weight", values, family)
    precision = np.eye(6) + maps.T @ maps / 0.25
    wanted = dist.MultivariateNormal(
        np.linalg.solve(precision, maps.T @ Y / 0.25), precision_matrix=precision
    )
    assert family == BlockNormal(whole=True)
    assert found.shape() == (2, 3)
    assert jnp.allclose(found.log_prob(values["weight"]), wanted.log_prob(jnp.ones(6)))


def binary_factors():
    features = np.array([[1.0, 0.5, -1.0, 2.0], [0.3, -1.0, 1.0, 0.7], [2.0, 1.0, 0.0, -0.4]])
    with numpyro.plate("row", ROWS, dim=-2):
        with numpyro.plate("feature", 3, dim=-1):
            owns = numpyro.sample("owns", dist.Bernoulli(0.3))
        with numpyro.plate("column", COLUMNS, dim=-1):
            numpyro.sample("matrix", dist.Normal(owns @ features, 0.5), obs=MATRIX)


def test_binary_columns_that_depend_on_each_other_take_turns():
    program = Program(binary_factors)
    values, _ = start(program)
    family = identify(program, "owns", values, random.key(0))
    assert isinstance(family, ByColumn)
    log_joint = by_numpy(lambda owns: program.log_joint({"owns": owns}))
    for column in range(3):
        found, residual = conditional_at(program, "owns", values, family, column=column)
        joint = [log_joint(values["owns"].at[4, column].set(on)) for on in (0, 1)]
        assert residual < 1e-10
        assert jnp.allclose(found.logits[4], joint[1] - joint[0])


def test_labels_that_depend_on_each_other_take_turns():
    def model():
        with numpyro.plate("row", 3):
            label = numpyro.sample("label", dist.Bernoulli(0.5))
        numpyro.sample("total", dist.Normal(label @ jnp.array([1.0, 2.0, 4.0]), 1.0), obs=3.0)

    program, values = Program(model), {"label": jnp.array([1, 0, 1])}
    family = identify(program, "label", values, random.key(0))
    found, _ = conditional_at(program, "label", values, family, column=1)
    assert isinstance(family, ByColumn)
    assert jnp.allclose(found.logits, ((3 - 5) ** 2 - (3 - 7) ** 2) / 2)


def test_a_sweep_by_column_keeps_the_posterior():
    program = Program(binary_factors)
    family = identify(program, "owns", start(program)[0], random.key(0))
    rows = jnp.array(list(product((0, 1), repeat=3)))
    with_first = lambda row: program.log_joint({"owns": jnp.zeros((ROWS, 3), int).at[0].set(row)})
    posterior = by_numpy(lambda rows: jax.nn.softmax(jax.lax.map(with_first, rows)))(rows)

    def sweep(values, key):
        owns, residual = draw(key, program, "owns", {"owns": values}, family)
        return owns, (owns[0] @ jnp.array([4, 2, 1]), residual)

    _, (codes, residuals) = by_numpy(
        lambda: jax.lax.scan(sweep, jnp.zeros((ROWS, 3), int), random.split(random.key(3), 20_000))
    )()
    frequency = jnp.bincount(codes, length=8) / 20_000
    assert residuals.max() < 1e-10
    assert jnp.abs(frequency - posterior).max() < 0.02


def test_draws_have_the_shape_and_type_of_the_site():
    program = Program(mixture)
    values, _ = start(program)
    family = identify(program, "which", values, random.key(0))
    drawn, _ = by_numpy(lambda key: draw(key, program, "which", values, family))(random.key(0))
    assert (drawn.shape, drawn.dtype) == (values["which"].shape, values["which"].dtype)


def test_scales_and_masks_are_respected():
    seen = np.arange(ROWS) < 4

    def model():
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
        with (
            numpyro.plate("row", ROWS),
            numpyro.handlers.scale(scale=2.0),
            numpyro.handlers.mask(mask=seen),
        ):
            numpyro.sample("y", dist.Normal(mean, 1.0), obs=Y)

    program, values = Program(model), {"mean": jnp.array(0.3)}
    found, _ = conditional_at(
        program, "mean", values, identify(program, "mean", values, random.key(0))
    )
    assert jnp.allclose(found.loc, 2 * Y[seen].sum() / 9)
    assert jnp.allclose(found.scale, 1 / 3)


@pytest.mark.slow
def test_a_bounded_site_may_be_pulled_far_across_its_bound():
    def model():
        level = numpyro.sample("level", dist.HalfNormal(2.0))
        numpyro.sample("y", dist.Normal(level, 0.01), obs=-10.0)

    program, values = Program(model), {"level": jnp.array(0.5)}
    family = identify(program, "level", values, random.key(0))
    drawn = jax.vmap(lambda key: draw(key, program, "level", values, family)[0])(
        random.split(random.key(1), 4000)
    )
    assert abs(drawn.mean() * 1e5 - 1) < 5 / 4000**0.5  # exponential with rate 10 / 0.01^2


@pytest.mark.parametrize("where", [1e-6, 1e-3, 1e3, 1e6])
def test_reading_is_exact_wherever_the_site_is(where):
    program = Program(scales)
    values = {**start(program)[0], "precision": jnp.array(where)}
    found, _ = conditional_at(
        program,
        "precision",
        values,
        identify(program, "precision", start(program)[0], random.key(0)),
    )
    wanted = precision_closed(values, 0.0)
    np.testing.assert_allclose(
        (found.concentration, found.rate), (wanted.concentration, wanted.rate), rtol=1e-8
    )


@pytest.mark.slow
def test_float32_is_enough_where_the_sums_are_not_long():
    with jax.enable_x64(False):
        program = Program(factors, MATRIX.astype(np.float32))
        values, draws = start(program)
        family = identify(program, "left", values, random.key(2))
        found, residual = conditional(program, "left", values, family)
        assert residual < 1e-5
        for point in draws:
            np.testing.assert_allclose(
                found.log_prob(point["left"]),
                left_closed(values, 0.0).log_prob(point["left"]),
                rtol=1e-4,
            )
