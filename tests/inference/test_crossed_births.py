"""Births against the model's own log joint, and their proposal against an integral."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from inference.kernels import _crossed_births
from inference.kernels._crossed_births import _component, _Proposal
from inference.kernels._crossed_components import Tilted
from tests.inference.crossed import CASES, drawn

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("x64", "numpyro_promotion")]


def birth(name, k=1):
    """A component that is off, the priors of its parts, its odds, and what the entries are without it."""
    program, crossed, values, (response, weight, eta), _ = drawn(name)
    old, prior, odds = _component(crossed, crossed.components, program, values, k)
    assert not old.is_on
    return old, prior, odds, [jnp.asarray(program.arguments[side.index]) for side in crossed.sides], response - eta, weight


def check_evidence(name):
    """log_joint(there, v) - log_joint(not there, v) = odds + evidence + log q(v) - log prior(v), at any v."""
    _, crossed, values, _, joint = drawn(name)
    old, prior, odds, index, residual, weight = birth(name)
    switch, _, (_, right) = crossed.components
    given = prior.v.given(old.s * old.u[index[0]], index[1], residual, weight)
    evidence = jnp.sum(given.log_mass() - prior.v.log_mass())
    for key in random.split(random.key(5), 3):
        v = random.normal(key, old.v.shape)
        at = lambda on, v=v: joint({**values, switch: values[switch].at[1].set(on), right: values[right].at[:, 1].set(v)})
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
    for part, site in zip(("s", "u", "v"), (crossed.components.amplitude, *crossed.components.factors), strict=True):
        np.testing.assert_allclose(getattr(prior, part).log_prob(getattr(old, part)), terms[site][..., 1], rtol=1e-8)


given = Tilted.given


@pytest.mark.parametrize(
    "planted",
    [
        lambda self, x, index, residual, weight: given(self, x, index, residual, weight * 0 + 1),
        lambda self, x, index, residual, weight: given(self, x, jnp.roll(index, 1), residual, weight),
        lambda self, x, index, residual, weight: given(self, jnp.abs(x), index, residual, weight),
    ],
    ids=["weight forgotten", "column for row", "sign lost"],
)
def test_a_wrong_evidence_is_seen(planted, monkeypatch):
    monkeypatch.setattr(Tilted, "given", planted)
    with pytest.raises(AssertionError):
        check_evidence("renamed")


def check_proposal():
    """Two rows and an amplitude: the density integrates to 1, and draws have its moments."""
    prior_u, prior_v = Tilted(jnp.array([0.3, 0.0]), jnp.array([3.0, 2.0])), Tilted(jnp.zeros(3), jnp.full(3, 2.0))
    index, residual = [np.array([0, 0, 0, 1, 1]), np.array([0, 1, 2, 0, 2])], jnp.array([1.0, -0.5, 0.2, 0.8, -0.3])
    prior = _crossed_births._One(False, None, prior_u, prior_v)
    proposal = _Proposal.at(random.key(0), prior, index, residual, jnp.array([2.0, 1.0, 1.0, 3.0, 1.0]))
    s, u = jax.jit(jax.vmap(proposal.draw))(random.split(random.key(1), 10_000))
    t, x = jnp.linspace(-2.2, 2.2, 61), jnp.linspace(-4.0, 4.0, 141)  # logarithm of the amplitude; row factors
    grid = [axis.ravel() for axis in jnp.meshgrid(proposal.size * jnp.exp(t), x, x, indexing="ij")]
    # One amplitude after the other: XLA's compiler for CPUs (jaxlib 0.12.0.1) mixes up logarithms of long arrays.
    at = lambda s: jax.vmap(lambda u: proposal.log_prob(s, u))(jnp.stack(jnp.meshgrid(x, x, indexing="ij"), -1).reshape(-1, 2))
    density = jnp.exp(jax.lax.map(at, proposal.size * jnp.exp(t))).ravel() * grid[0] * (t[1] - t[0]) * (x[1] - x[0]) ** 2
    np.testing.assert_allclose(density.sum(), 1.0, rtol=1e-6)
    for f in (lambda s, a, b: jnp.log(s), lambda s, a, b: s, lambda s, a, b: a, lambda s, a, b: a * b, lambda s, a, b: s * a * a):
        found = f(s, *u.T)
        assert abs(found.mean() - density @ f(*grid)) < 5 * found.std() / np.sqrt(len(found))


def test_the_density_of_a_proposal_is_that_of_its_draws():
    check_proposal()


propose, density_of = _Proposal.draw, _Proposal.log_prob


@pytest.mark.parametrize(
    ("method", "planted"),
    [
        ("log_prob", lambda self, s, u: density_of(self, s, u) + jnp.log(s)),
        ("log_prob", lambda self, s, u: density_of(self, s, u) + jnp.log(2)),
        ("draw", lambda self, key: (propose(self, key)[0] * 1.05, propose(self, key)[1])),
        ("draw", lambda self, key: (propose(self, key)[0], jnp.abs(propose(self, key)[1]))),
    ],
    ids=["amplitude for its logarithm", "one sign", "longer", "all positive"],
)
def test_a_wrong_density_of_a_proposal_is_seen(method, planted, monkeypatch):
    monkeypatch.setattr(_Proposal, method, planted)
    with pytest.raises(AssertionError):
        check_proposal()
