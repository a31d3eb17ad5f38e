"""Births against the model's own log joint, and walks to them and back against an integral."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from inference.kernels.conditional_gibbs.crossed_births import (
    Component,
    EntrySums,
    _component,
    anneal,
    mean_field,
    schedule,
    sums_over,
)
from inference.kernels.conditional_gibbs.crossed_components import Tilted
from tests.inference.crossed import CASES, drawn

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("x64", "numpyro_promotion")]


def given_rows(s, u, prior, sums):
    """Column factors given rows and amplitude."""
    product, square = sums[1](u, u * u)
    return prior.v.times(s * product, s * s * square)


def birth(name, k=1):
    """A component that is off, the priors of its parts, its odds, and sums over the entries
    without it.
    """
    program, crossed, values, (response, weight, eta), _ = drawn(name)
    priors = crossed.priors(program, values)
    old, prior, odds = _component(crossed, crossed.components, program, values, k, priors)
    assert not old.is_on
    index = [jnp.asarray(program.arguments[side.index]) for side in crossed.sides]
    return (
        old.parts,
        prior,
        odds,
        sums_over([side.size for side in crossed.sides], index, response - eta, weight),
    )


def check_evidence(name):
    """log_joint(there, v) - log_joint(not there, v) = odds + evidence + log p(v given the others) -
    log p(v), at any v; the evidence is what a walk of one step adds up, and the density of the
    guess.
    """
    _, crossed, values, _, joint = drawn(name)
    old, prior, odds, sums = birth(name)
    switch, _, (_, right) = crossed.components
    start = mean_field(old.s, old.u, prior, sums)
    noise = random.normal(random.key(0), (1, len(old.u) + len(old.v)))
    _, gain, _ = anneal(noise, old.s, old.u, jnp.array([0.0, 1.0]), start, prior, sums)
    evidence = gain + jnp.sum(start.u.log_prob(old.u) - prior.u.log_prob(old.u))
    given = given_rows(old.s, old.u, prior, sums)
    for key in random.split(random.key(5), 3):
        v = random.normal(key, old.v.shape)
        at = lambda on, v=v: joint(
            {**values, switch: values[switch].at[1].set(on), right: values[right].at[:, 1].set(v)}
        )
        told = odds + evidence + jnp.sum(given.log_prob(v) - prior.v.log_prob(v))
        np.testing.assert_allclose(told, at(1) - at(0), rtol=1e-8)


@pytest.mark.parametrize("name", CASES)
def test_the_evidence_of_a_birth_is_a_ratio_of_log_joints(name):
    check_evidence(name)


@pytest.mark.parametrize("name", CASES)
def test_priors_of_a_component_are_the_models(name):
    program, crossed, values, *_ = drawn(name)
    old, prior, *_ = birth(name)
    terms = program.log_probs(values)
    for part, site in zip(
        ("s", "u", "v"), (crossed.components.amplitude, *crossed.components.factors), strict=True
    ):
        np.testing.assert_allclose(
            getattr(prior, part).log_prob(getattr(old, part)), terms[site][..., 1], rtol=1e-8
        )


call = EntrySums.__call__


@pytest.mark.parametrize(
    "planted",
    [
        lambda self, x, *rest: call(self._replace(weight=0 * self.weight + 1), x, *rest),
        lambda self, x, *rest: call(self._replace(other=jnp.roll(self.other, 1)), x, *rest),
        lambda self, x, *rest: call(self._replace(product=jnp.abs(self.product)), x, *rest),
    ],
    ids=["weight forgotten", "column for row", "sign lost"],
)
def test_a_wrong_evidence_is_seen(planted, monkeypatch):
    monkeypatch.setattr(EntrySums, "__call__", planted)
    with pytest.raises(AssertionError):
        check_evidence("renamed")


S, START = 1.3, np.array([1.0, -0.5])


@cache
def tiny():
    """Two rows and three columns: priors, sums, and a grid of rows with the posterior density,
    not normalised, and the size of cells.
    """
    prior = Component(
        None,
        Tilted(jnp.array([0.3, 0.0]), jnp.array([3.0, 2.0])),
        Tilted(jnp.array([0.0, 0.5, 0.0]), jnp.full(3, 2.0)),
    )
    index, residual = (
        [jnp.array([0, 0, 0, 1, 1]), jnp.array([0, 1, 2, 0, 2])],
        jnp.array([1.0, -0.5, 0.2, 0.8, -0.3]),
    )
    sums = sums_over((2, 3), index, residual, jnp.array([2.0, 1.0, 1.0, 3.0, 1.0]))
    axis = jnp.linspace(-4.0, 4.0, 321)
    u = jnp.stack(jnp.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    given = jax.vmap(
        lambda u: (
            jnp.sum(given_rows(S, u, prior, sums).log_mass() - prior.v.log_mass())
            + jnp.sum(prior.u.log_prob(u))
        )
    )
    return prior, sums, u, np.exp(given(u)), float(axis[1] - axis[0])


def check_walk(is_dying, num_walks=20_000):
    """Walks from the guess weigh the integral of the posterior on average, walks back from the
    posterior its inverse.
    """
    prior, sums, cells, density, width = tiny()
    start = mean_field(jnp.array(S), jnp.array(START), prior, sums)
    key, jitter = random.split(random.key(2))
    if is_dying:
        u = cells[random.choice(key, len(cells), (num_walks,), p=density / density.sum())]
        u = u + width * random.uniform(jitter, u.shape, minval=-0.5, maxval=0.5)
    else:
        u = start.u.at(random.normal(key, (num_walks, 2)))
    times = schedule(jnp.array(is_dying), 10, float)
    gain = jax.jit(
        jax.vmap(lambda noise, u: anneal(noise, jnp.array(S), u, times, start, prior, sums)[1])
    )
    weight = np.exp(gain(random.normal(random.key(3), (num_walks, 10, 5)), u))
    evidence, error = density.sum() * width**2, weight.std() / np.sqrt(num_walks)
    assert error < 0.02 * weight.mean()
    assert abs(weight.mean() - (1 / evidence if is_dying else evidence)) < 4 * error


@pytest.mark.parametrize("is_dying", [False, True], ids=["birth", "death"])
def test_walks_weigh_the_evidence(is_dying):
    check_walk(is_dying)


mixed, moved, mass = Tilted.mixed, Tilted.overrelaxed, Tilted.log_mass


@pytest.mark.parametrize("is_dying", [False, True], ids=["birth", "death"])
@pytest.mark.parametrize(
    ("method", "planted"),
    [
        ("mixed", lambda self, other, share: mixed(self, other, 1 - share)),
        (
            "overrelaxed",
            lambda self, noise, x, correlation: (
                self.at(noise) + correlation * (x - self.p / self.q)
            ),
        ),
        ("log_mass", lambda self: mass(self) + jnp.log(self.q) / 2),
    ],
    ids=["steps at the time of the other end", "steps too long", "no determinant"],
)
def test_wrong_walks_are_seen(is_dying, method, planted, monkeypatch):
    tiny()
    monkeypatch.setattr(Tilted, method, planted)
    with pytest.raises(AssertionError):
        check_walk(is_dying)


def test_walks_keep_in_float32_what_they_weigh():
    """4000 items: the same sum to a tenth of a nat."""
    rng = np.random.default_rng(0)
    index = [jnp.asarray(rng.integers(0, size, 40_000)) for size in (3000, 1000)]
    found = []
    for dtype in (np.float64, np.float32):
        residual, u = (
            jnp.asarray(np.random.default_rng(1).normal(size=size), dtype)
            for size in (40_000, 3000)
        )
        prior = Component(
            None, *(Tilted(jnp.zeros(size, dtype), jnp.ones(size, dtype)) for size in (3000, 1000))
        )
        sums, s = (
            sums_over((3000, 1000), index, residual, jnp.ones_like(residual)),
            jnp.asarray(0.2, dtype),
        )
        start = mean_field(s, u, prior, sums)
        found.append(
            anneal(
                random.normal(random.key(0), (1, 4000), dtype),
                s,
                start.u.p / start.u.q,
                jnp.linspace(0, 1, 2, dtype=dtype),
                start,
                prior,
                sums,
            )[1]
        )
        assert found[-1].dtype == dtype
    assert abs(found[0]) > 1
    assert abs(found[1] - found[0]) < 0.1
