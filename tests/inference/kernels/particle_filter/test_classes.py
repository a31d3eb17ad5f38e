"""Classes, grids and rejuvenation of the particle filter against sums over all classes and
partitions of a few rows.
"""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import plate
from scipy import stats
from scipy.special import logsumexp

from inference import ParticleFilter, Program
from inference.distributions import CRP, Missing
from inference.kernels.particle_filter import kernel as particle_filter
from inference.kernels.particle_filter import particles
from inference.kernels.particle_filter.particles import filter_row, join
from tests.inference import replicates
from tests.inference.partitions import Mixture, bernoulli, poisson, total_variation
from tests.inference.replicates import (
    answers,
    check_evidence,
    filtered,
    log_evidence,
    predictive,
    read,
    table,
    with_settings,
)
from zoo.aclass import Axes, beta_bernoulli

pytestmark = pytest.mark.usefixtures("x64")
sample = numpyro.sample

RUNS = 4000
RNG = np.random.default_rng(1)
X = (RNG.random((6, 5)) < np.array([0.1, 0.9, 0.1, 0.9, 0.1, 0.5])[:, None]).astype(float)
X[1, 2] = X[4, 0] = np.nan
SEEN = np.array([0, 1, 0, 1, 0, 0])
LATER = np.array([0, 1, 0, 1, -1, -1])  # the filters of the classes are joined before the fifth row
FIRST = np.array([-1, 1, 0, -1, 0, 1])
SHARES = (0.3, 0.7)


def with_shares(x, y, shares=None):
    """AClass whose classes have fixed probabilities, or no prior."""
    if shares is not None:
        with plate("row", len(x)):
            y = sample(
                "y", dist.Categorical(jnp.array(shares)), obs=jnp.maximum(y, 0), obs_mask=y >= 0
            )
    z = sample("z", CRP(1.5, len(x), labels=y, num_classes=2))
    at = (
        plate("class", 2, dim=-3),
        plate("group", len(x), dim=-2),
        plate("row", len(x), dim=-2),
        plate("feature", x.shape[1], dim=-1),
    )
    beta_bernoulli(x, Axes(*at, (y, z)))


MIXTURE = Mixture(bernoulli, alpha=1.5, num_classes=2, gamma=(2.0, 2.0))
PRIORS = {  # of the classes: the mixture, and the model
    "dirichlet": (MIXTURE, lambda y, x=X: table(x, y, 2, alpha=1.5, gamma=2.0)),
    "fixed": (
        Mixture(bernoulli, alpha=1.5, num_classes=2, shares=SHARES),
        lambda y, x=X: Program(with_shares, x, y, SHARES),
    ),
    "none": (
        Mixture(bernoulli, alpha=1.5, num_classes=2, gamma=None),
        lambda y, x=X: Program(with_shares, x, y),
    ),
}


@cache
def known(prior="dirichlet"):
    """A filter that has read the model."""
    return read(PRIORS[prior][1](SEEN))


def check_labelled(prior="dirichlet"):
    """Filters side by side: evidence, and density of class and row, with room for every
    partition of a class.
    """
    mixture, model = PRIORS[prior]
    this, program = with_settings(known(prior), num_particles=16), model(SEEN)
    states = filtered(this, program)
    assert abs(log_evidence(states)[0] - mixture.log_evidence(X, SEEN)) < 1e-10
    wanted = [mixture.log_predictive(X, row, SEEN) for row in X[:2]]
    np.testing.assert_allclose(predictive(this, states, program)[0, :2], wanted, rtol=1e-10)


@pytest.mark.parametrize(
    "prior",
    [
        "dirichlet",
        pytest.param("fixed", marks=pytest.mark.slow),
        pytest.param("none", marks=pytest.mark.slow),
    ],
)
def test_labelled_rows_are_exact(prior):
    check_labelled(prior)


def check_unlabelled(prior="dirichlet", num_particles=1000):
    """One filter over class and group from the first row on, with room for every answer."""
    mixture, model = PRIORS[prior]
    this, program = with_settings(known(prior), num_particles=num_particles), model(FIRST)
    states, exact = filtered(this, program), mixture.answers(X, FIRST)
    assert abs(log_evidence(states)[0] - exact.log_evidence) < 1e-10
    assert total_variation(exact, *answers(states)) < 1e-10
    np.testing.assert_allclose(
        predictive(this, states, program)[0, 0], mixture.log_predictive(X, X[0], FIRST), rtol=1e-10
    )


@pytest.mark.slow
@pytest.mark.parametrize("prior", ["dirichlet", pytest.param("fixed", marks=pytest.mark.slow)])
def test_unlabelled_rows_are_exact(prior):
    check_unlabelled(prior)


def check_joined(resampling="optimal"):
    """Labelled rows first: the evidence is unbiased and the runs together have the posterior of
    class and group.
    """
    this, program = (
        with_settings(known(), resampling, num_particles=4),
        PRIORS["dirichlet"][1](LATER),
    )
    states, exact = filtered(this, program, RUNS), MIXTURE.answers(X, LATER)
    check_evidence(states, exact.log_evidence)
    assert total_variation(exact, *answers(states)) < 0.025


SCHEMES = pytest.mark.parametrize("resampling", ["optimal", "multinomial", "systematic"])


@SCHEMES
@pytest.mark.slow
def test_unlabelled_rows_after_labelled_ones(resampling):
    check_joined(resampling)


def check_rejuvenated(y, resampling="optimal", alpha=1.5):
    """Redrawn past rows leave the evidence unbiased and the posterior as it is."""
    this = with_settings(known(), resampling, num_particles=4, rejuvenate=2)
    states, exact = filtered(this, PRIORS["dirichlet"][1](y), RUNS), MIXTURE.answers(X, y)
    check_evidence(states, exact.log_evidence)
    assert total_variation(exact, *answers(states)) < 0.025


@pytest.mark.slow
@pytest.mark.parametrize(
    ("y", "resampling"),
    [(FIRST, "optimal"), (LATER, "optimal"), (FIRST, "multinomial")],
    ids=["optimal", "joined", "multinomial"],
)
def test_rejuvenation_keeps_evidence_and_posterior(y, resampling):
    check_rejuvenated(y, resampling)


GRID = {"alpha": np.array([0.3, 1.0, 4.0]), "beta": np.array([0.2, 0.9])}


def check_grid():
    """Latent alpha and beta: a mixture over the points, weighted by prior density times spacing."""
    component = partial(beta_bernoulli, beta=dist.Gamma(2.0, 4.0))
    program = table(X[:5], component=component, alpha=dist.Gamma(1.5, 1.0))
    states = filtered(read(program, num_particles=52, grid=GRID), program)
    weight = np.outer(
        stats.gamma.pdf(GRID["alpha"], 1.5) * np.array([0.7, 1.85, 3.0]),
        stats.gamma.pdf(GRID["beta"], 2.0, scale=0.25) * np.array([0.7, 0.7]),
    )
    each = [
        Mixture(partial(bernoulli, ones=b, zeros=b), alpha=a).answers(X[:5])
        for a in GRID["alpha"]
        for b in GRID["beta"]
    ]
    log_joint = np.log(weight / weight.sum()).ravel()[:, None] + np.array(
        [exact.log_joint for exact in each]
    )
    assert abs(log_evidence(states)[0] - logsumexp(log_joint)) < 1e-10
    np.testing.assert_allclose(
        states.log_prior[0] + states.log_evidence[0], logsumexp(log_joint, axis=1), rtol=1e-10
    )
    assert (
        total_variation(replace(each[0], log_joint=logsumexp(log_joint, axis=0)), *answers(states))
        < 1e-10
    )


@pytest.mark.slow
def test_latent_scalars_are_summed_over_the_grid():
    check_grid()


ONES = np.array([[1.0, 2.0, 3.0, 4.0, 5.0], [5.0, 4.0, 3.0, 2.0, 1.0]])


def by_class_and_feature(x, at):
    with at.classes, at.groups, at.features:
        p = sample("p", dist.Beta(ONES[:, None], 2.0))
    with at.rows, at.features:
        return sample("x", Missing(dist.Bernoulli(p[at.z])), obs=x)


@pytest.mark.slow
def test_priors_by_class_and_feature_are_followed():
    mixture = Mixture(
        lambda x, c: bernoulli(x, ONES[c], 2.0), by_class=True, num_classes=2, gamma=(1.0, 1.0)
    )
    program = table(X[:5], FIRST[:5], 2, component=by_class_and_feature)
    states = filtered(read(program, num_particles=300), program)
    exact = mixture.answers(X[:5], FIRST[:5])
    assert abs(log_evidence(states)[0] - exact.log_evidence) < 1e-10
    assert total_variation(exact, *answers(states)) < 1e-10


def counts(numbers):
    """No classes, one feature, other names."""
    crowd = sample("crowd", CRP(0.7, len(numbers)))
    with plate("crowds", len(numbers)):
        pace = sample("pace", dist.Gamma(2.0, 0.5))
    with plate("person", len(numbers)):
        sample("number", Missing(dist.Poisson(pace[crowd])), obs=numbers)


@pytest.mark.slow
def test_a_model_without_classes_is_followed():
    numbers = np.array([1.0, 12.0, np.nan, 2.0, 9.0])
    program = Program(counts, numbers)
    states = filtered(read(program, num_particles=52), program)
    exact = Mixture(partial(poisson, shape=2.0, rate=0.5), alpha=0.7).answers(numbers[:, None])
    assert abs(log_evidence(states)[0] - exact.log_evidence) < 1e-10
    assert total_variation(exact, *answers(states)) < 1e-10


# One slip at a time, each fails a check above at its own sample size.


def classes_not_counted(patch):
    step = ParticleFilter.step

    def slip(self, key, state, *given):
        new, report = step(self, key, state, *given)
        return new._replace(class_count=state.class_count), report

    patch.setattr(ParticleFilter, "step", slip)


def classes_without_prior(patch):
    patch.setattr(particles, "log_class", lambda rules, weights, count: jnp.zeros_like(count))


def labels_ignored(patch):
    def slip(*before_and_row):
        *before, label, rng_key = before_and_row
        return filter_row(*before, jnp.full_like(label, -1), rng_key)

    patch.setattr(particle_filter, "filter_row", slip)


def paired_in_order(patch):
    patch.setattr(random, "permutation", lambda key, link: link)


def joined_once(patch):
    """What is drawn twice for the joint filter counts once."""

    def slip(rules, groups, key):
        joint, link = join(rules, groups, key)
        live = jnp.where(joint.log_weight > -jnp.inf, 0.0, -jnp.inf)
        return joint._replace(log_weight=live - jax.nn.logsumexp(live)), link

    patch.setattr(replicates, "join", slip)


def links_forgotten(patch):
    joined = particles.joined_genealogy
    order = lambda link: jnp.broadcast_to(jnp.arange(4, dtype=link.dtype), link.shape)
    slip = lambda genealogy, link, row: joined(genealogy, order(link), row)
    patch.setattr(particles, "joined_genealogy", slip)


def redrawn_beside_itself(patch):
    """A row is not taken out of its group before its group is drawn anew."""
    place = particles.place

    def slip(rules, groups, table, chosen, x, change):
        return groups if change < 0 else place(rules, groups, table, chosen, x, change)

    patch.setattr(particles, "place", slip)


def flat_grid(patch):
    points_of = particle_filter.grid_of
    patch.setattr(
        particle_filter,
        "grid_of",
        lambda *given: (points_of(*given)[0], jnp.full(6, -jnp.log(6.0))),
    )


SLIPS = {
    "classes not counted": (classes_not_counted, check_labelled),
    "classes without prior": (classes_without_prior, check_unlabelled),
    "labels ignored": (labels_ignored, check_unlabelled),
    "paired in order": (paired_in_order, check_joined),
    "joined once": (joined_once, check_joined),
    "links forgotten": (links_forgotten, check_joined),
    "redrawn beside itself": (redrawn_beside_itself, partial(check_rejuvenated, FIRST)),
    "flat grid": (flat_grid, check_grid),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_is_seen(name, monkeypatch):
    slip, check = SLIPS[name]
    slip(monkeypatch)
    with pytest.raises(AssertionError):
        check()
