"""The particle filter against all partitions of a few rows: evidence, predictive densities and
posterior, exact or unbiased.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference import ParticleFilter
from inference.distributions import CRP
from inference.kernels.particle_filter import kernel as particle_filter
from inference.kernels.particle_filter import particles
from inference.kernels.particle_filter.particles import filter_row
from inference.maths import resampling as _resampling
from inference.reading.conjugate import counts
from inference.reading.conjugate.table import BetaBernoulli
from tests.inference.partitions import (
    Mixture,
    bernoulli,
    categorical,
    log_crp,
    normal,
    partitions,
    poisson,
    together,
    total_variation,
    wishart,
)
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
from zoo.aclass import (
    beta_bernoulli,
    dirichlet_categorical,
    gamma_poisson,
    mixed,
    normal_inverse_chi2,
    normal_inverse_wishart,
)

pytestmark = pytest.mark.usefixtures("x64")

ALL = 203  # partitions of 6 rows
RUNS = 4000

RNG = np.random.default_rng(0)
# rows of one group look alike, so that partitions differ in what they are worth
GROUP = np.array([0, 1, 0, 1, 2, 0])
HOLES = np.zeros((6, 5), bool)
HOLES[[0, 1, 3, 3, 5], [1, 4, 0, 2, 3]] = True
HOLES[4] = True  # a row of which nothing is known


def holed(x, holes=HOLES):
    return np.where(holes, np.nan, x)


BITS = holed((RNG.random((6, 5)) < np.array([0.1, 0.9, 0.5])[GROUP, None]).astype(float))
CODES = holed((GROUP[:, None] + (RNG.random((6, 5)) < 0.3)) % 3)
COUNTS = holed(RNG.poisson(np.array([2.0, 9.0, 30.0])[GROUP, None], (6, 5)))
REALS = holed(RNG.normal(np.array([-2.0, 1.0, 5.0])[GROUP, None], 1.0, (6, 5)))
PAIRS = holed(
    RNG.normal(np.array([-2.0, 1.0, 5.0])[GROUP, None], 1.0, (6, 3)),
    np.repeat(GROUP[:, None] == 2, 3, 1),
)
THREE = partial(dirichlet_categorical, num_values=3)
MIXED = mixed(
    bits=(slice(0, 2), beta_bernoulli),
    pair=([2, 4], partial(normal_inverse_wishart, kappa=0.5)),
    code=([3], THREE),
    count=([5], gamma_poisson),
)
COLUMNS = np.column_stack([BITS[:, :2], PAIRS[:, 0], CODES[:, 3], PAIRS[:, 1], COUNTS[:, 0]])

FAMILIES = {  # rows, the component, and the density of a group
    "beta_bernoulli": (
        BITS,
        partial(beta_bernoulli, beta=0.3),
        partial(bernoulli, ones=0.3, zeros=0.3),
    ),
    "dirichlet_categorical": (CODES, THREE, partial(categorical, num_values=3)),
    "gamma_poisson": (
        COUNTS,
        partial(gamma_poisson, shape=2.0, rate=0.3),
        partial(poisson, shape=2.0, rate=0.3),
    ),
    "normal_inverse_chi2": (
        REALS,
        partial(normal_inverse_chi2, mean=0.5, nu=3.0),
        partial(normal, mean=0.5, nu=3.0),
    ),
    "normal_inverse_wishart": (
        PAIRS,
        partial(normal_inverse_wishart, kappa=0.2),
        partial(wishart, kappa=0.2),
    ),
    "mixed": (
        COLUMNS,
        MIXED,
        together(
            ([0, 1], bernoulli),
            ([2, 4], partial(wishart, kappa=0.5)),
            ([3], partial(categorical, num_values=3)),
            ([5], poisson),
        ),
    ),
}
# all others by `-m slow`: what is compiled for a family takes seconds
QUICK = ("beta_bernoulli", "mixed")
each_family = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FAMILIES],
)


def test_the_oracle_sums_to_one():
    """Over partitions, and over all data of two rows."""
    for rule in ((None,), (1,), (2,), (3,), (None, 0.4)):
        assert sum(
            np.exp(log_crp(np.bincount(z), 0.7, *rule)) for z in partitions(6)
        ) == pytest.approx(1.0)
    pairs = lambda codes: [
        np.array([[a, b], [c, d]], float)
        for a in codes
        for b in codes
        for c in codes
        for d in codes
    ]
    assert sum(
        np.exp(Mixture(bernoulli).log_evidence(x)) for x in pairs(range(2))
    ) == pytest.approx(1.0)
    assert sum(
        np.exp(Mixture(partial(categorical, num_values=3)).log_evidence(x)) for x in pairs(range(3))
    ) == pytest.approx(1.0)
    column = REALS[:3, :1]
    assert normal(column, nu=3.0) == pytest.approx(wishart(column, nu=3.0))


@cache
def exact_of(name, alpha, most):
    """Rows, the mixture, all answers, a filter of the model, and the model with its rows."""
    x, component, density = FAMILIES[name]
    mixture, program = (
        Mixture(density, alpha=alpha, max_groups=most),
        table(x, component=component, alpha=alpha, max_groups=most),
    )
    return x, mixture, mixture.answers(x), read(program), program


def check_exact(name="beta_bernoulli", alpha=1.5, most=None):
    """With room for every partition: evidence, posterior, and density of a next row, Z(n + 1) /
    Z(n).
    """
    x, mixture, exact, known, program = exact_of(name, alpha, most)
    this = with_settings(known, num_particles=ALL)
    states = filtered(this, program)
    assert abs(log_evidence(states)[0] - exact.log_evidence) < 1e-10
    assert total_variation(exact, *answers(states)) < 1e-10
    wanted = [mixture.log_predictive(x, row) for row in x[[0, 4]]]
    np.testing.assert_allclose(
        predictive(this, states, program)[0, [0, 4]], wanted, rtol=1e-10, atol=1e-10
    )


@pytest.mark.slow_after(1)
@each_family
def test_with_room_for_every_partition_everything_is_exact(name):
    check_exact(name)


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 2, 3])
def test_bounded_partitions_are_exact(most):
    check_exact(most=most)


def check_unbiased(name="beta_bernoulli", resampling="optimal", num_particles=4):
    """E[Z-hat] = Z, and E[Z-hat p-hat(row)] = Z of one row more."""
    x, mixture, exact, known, program = exact_of(name, 1.5, None)
    this = with_settings(known, resampling, num_particles=num_particles)
    states = filtered(this, program, RUNS)
    check_evidence(states, exact.log_evidence)
    ratio = np.exp(
        log_evidence(states) + predictive(this, states, program)[:, 0, 0] - exact.log_evidence
    )
    wanted = np.exp(mixture.log_predictive(x, x[0])[0])
    assert abs(ratio.mean() - wanted) < 3 * ratio.std(ddof=1) / np.sqrt(RUNS)
    return exact, states


@pytest.mark.slow
@each_family
def test_four_particles_are_unbiased(name):
    check_unbiased(name)


def always(monkeypatch):
    """Resampling before every row."""
    monkeypatch.setattr(_resampling, "effective_size", lambda log_weight: jnp.zeros(()))


SCHEMES = pytest.mark.parametrize("resampling", ["multinomial", "systematic"])


@pytest.mark.slow
@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize("resampling", ["multinomial", "systematic"])
def test_other_schemes_are_unbiased_and_find_the_posterior(resampling, forced, monkeypatch):
    if forced:
        always(monkeypatch)
    exact, states = check_unbiased("normal_inverse_chi2", resampling)
    assert total_variation(exact, *answers(states)) < 0.025  # of 16,000 particles


@pytest.mark.slow
@SCHEMES
@each_family
def test_other_schemes_are_unbiased_for_every_family(name, resampling, monkeypatch):
    always(monkeypatch)
    check_unbiased(name, resampling)


# The slips of the paper's pseudo-code, and some of our own: one at a time, each fails a check above
# at its own sample size.


def overwritten(patch):
    """w <- sum of the increments, where it should be multiplied."""

    def slip(rules, groups, *rest):
        even = jnp.where(groups.log_weight > -jnp.inf, -jnp.log(4.0), -jnp.inf)
        return filter_row(rules, groups._replace(log_weight=even), *rest)

    patch.setattr(particle_filter, "filter_row", slip)


def unweighted_average(patch):
    weigh, even = (
        particle_filter.log_classes,
        lambda w: jnp.where(w > -jnp.inf, -jnp.log(jnp.sum(w > -jnp.inf)), w),
    )
    slip = lambda rules, state, rows: weigh(
        rules,
        state._replace(groups=state.groups._replace(log_weight=even(state.groups.log_weight))),
        rows,
    )
    patch.setattr(particle_filter, "log_classes", slip)


def seating(change):
    """The rule of the partition plus a term of (sizes, concentration)."""

    def slip(patch):
        exact_of("beta_bernoulli", 1.5, None)  # a wrong rule would be refused
        rule = CRP.log_seating
        patch.setattr(
            CRP,
            "log_seating",
            lambda self, size: rule(self, size) + change(size, self.concentration),
        )

    return slip


num_open = lambda size: jnp.sum(size > 0, axis=-1, keepdims=True, dtype=size.dtype)
once_a_group = seating(
    lambda size, a: jnp.where(size > 0, 0.0, jnp.log(jnp.maximum(num_open(size), 1)))
)
no_normaliser = seating(lambda size, a: jnp.log(jnp.sum(size, axis=-1, keepdims=True) + a))


def garbled_predictive(patch):
    """(beta + h)^x (beta + t)^(1 - x) without the total."""
    odds = BetaBernoulli.cache
    patch.setattr(
        BetaBernoulli,
        "cache",
        lambda self, hyper: (odds(self, hyper)[0], jnp.log(hyper.concentration0)),
    )


def missing_is_zero(patch):
    patch.setattr(counts, "fill_row", lambda x, dtype: (jnp.nan_to_num(x), jnp.ones_like(x)))


def unknown_rows_do_not_count(patch):
    """A fully missing row leaves the sizes of the groups as they were."""
    place = particles.place

    def slip(rules, groups, table, chosen, x, change):
        is_known = ~jnp.isnan(x["x"]).all()
        change = jnp.where(is_known, change, 0).astype(jnp.int32)
        return place(rules, groups, table, chosen, x, change)

    patch.setattr(particles, "place", slip)


def first_increment_left_out(patch):
    step = ParticleFilter.step

    def slip(self, key, state, *given):
        new, report = step(self, key, state, *given)
        return new._replace(log_evidence=jnp.where(state.seen == 0, 0.0, new.log_evidence)), report

    patch.setattr(ParticleFilter, "step", slip)


def no_ancestors(patch):
    """Particles are told by their last row's neighbours."""
    record = particle_filter.record
    own = lambda parent: jnp.broadcast_to(jnp.arange(ALL, dtype=parent.dtype), parent.shape)
    patch.setattr(
        particle_filter,
        "record",
        lambda genealogy, row, parent, code: record(genealogy, row, own(parent), code),
    )


def scheme(name, change):
    """What a scheme returns, changed: (chosen, log weights of the candidates) -> log weights."""

    def slip(patch):
        real = _resampling.SCHEMES[name]

        def wrong(key, log_weight):
            chosen = real(key, log_weight)
            changed = change(chosen, log_weight)
            return chosen._replace(log_weight=changed - jax.nn.logsumexp(changed))

        patch.setitem(_resampling.SCHEMES, name, wrong)

    return slip


weights_kept = scheme(
    "multinomial", lambda chosen, log_weight: jax.nn.logsumexp(log_weight, axis=1)[chosen.parent]
)
all_even = scheme(
    "optimal", lambda chosen, log_weight: jnp.where(chosen.log_weight > -jnp.inf, 0.0, -jnp.inf)
)

by_chance = partial(check_unbiased, "normal_inverse_chi2", "multinomial")
SLIPS = {
    "unweighted average": (unweighted_average, check_exact),
    "weights overwritten": (overwritten, by_chance),
    "new group once for each group": (once_a_group, check_exact),
    "no normaliser": (no_normaliser, check_exact),
    "garbled predictive": (garbled_predictive, check_exact),
    "missing is zero": (missing_is_zero, check_exact),
    "unknown rows do not count": (unknown_rows_do_not_count, check_exact),
    "first increment left out": (first_increment_left_out, check_exact),
    "no ancestors": (no_ancestors, check_exact),
    "weights kept": (lambda patch: (always(patch), weights_kept(patch)), by_chance),
    "all even": (all_even, check_unbiased),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_is_seen(name, monkeypatch):
    slip, check = SLIPS[name]
    slip(monkeypatch)
    with pytest.raises(AssertionError):
        check()
