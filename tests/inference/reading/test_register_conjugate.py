"""Pairs that a user registers: their functions against closed forms, three kernels that follow
them, and wrong ones refused by name.
"""

import doctest
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.stats
from numpyro import sample
from scipy.special import betaln, gammaln, logsumexp

from inference import (
    CollapsedGibbs,
    CoordinateAscent,
    Driver,
    ParticleFilter,
    Program,
    StructureError,
    register_conjugate,
)
from inference.distributions import Missing
from inference.reading.conjugate import table as _table
from inference.reading.conjugate.table import GammaHyper, GammaPoisson, derived
from inference.reading.crp_mixture import read_partition
from inference.reading.stick_mixture.read import read_assignment
from tests.inference.mixtures import columns_of
from tests.inference.partitions import Mixture, codes
from zoo.aclass import aclass
from zoo.iqgme import iqgme

pytestmark = pytest.mark.usefixtures("numpyro_promotion")
in_double = pytest.mark.usefixtures("x64")

SHAPE, RATE = 2.5, 1.5
X = np.array([[0.1, 3.0], [0.2, np.nan], [9.0, 0.4], [7.0, 0.3]])
WAIT = {"concentration": lambda wait: 1.0, "rate": lambda wait: wait}
COUNT = {"concentration": lambda count: count, "rate": lambda count: 1.0}
mean_wait = lambda concentration, rate: rate / (concentration - 1)


@pytest.fixture(autouse=True)
def table(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(_table, "TABLE", dict(_table.TABLE))


def register(statistics=WAIT, rows=None):
    register_conjugate(
        dist.Gamma, dist.Exponential, statistics=statistics, mean=mean_wait, rows=rows
    )


def waits(x, at):
    with at.classes, at.groups, at.features:
        rate = sample("rate", dist.Gamma(SHAPE, RATE))
    with at.rows, at.features:
        return sample("x", Missing(dist.Exponential(rate[at.z])), obs=x)


def waits_by_sticks(x, z, at):
    experts, rows, columns = columns_of(at)
    with experts, columns:
        rate = sample("rate", dist.Gamma(SHAPE, RATE))
    with rows, columns:
        return sample("x", Missing(dist.Exponential(rate[z])), obs=x)


def density(x):
    """Log density of the waits of a group [row, column], rates integrated out."""
    seen, total = (~np.isnan(x)).sum(0), np.nansum(x, 0)
    return (
        gammaln(SHAPE + seen)
        - gammaln(SHAPE)
        + SHAPE * np.log(RATE)
        - (SHAPE + seen) * np.log(RATE + total)
    ).sum()


def program(x=X):
    return Program(aclass, x, np.zeros(len(x), int), num_classes=1, component=waits)


def sticks(x=X):
    return Program(iqgme, x, expert=None, gate=waits_by_sticks, num_experts=3, alpha=0.7)


def test_the_example_of_the_docstring_runs():
    found = doctest.DocTestFinder().find(register_conjugate, "register_conjugate", globs={})
    assert sum(len(each.examples) for each in found) > 5
    assert sum(doctest.DocTestRunner().run(each).failed for each in found) == 0


@in_double
def test_what_is_not_registered_is_refused_with_the_way_into_the_table():
    for read, model in ((read_partition, program()), (read_assignment, sticks())):
        with pytest.raises(
            StructureError,
            match=r"site 'x': Exponential with 'rate' ~ Gamma is not in "
            r".*inference\.register_conjugate",
        ):
            read(model)


GEOMETRIC = {"concentration1": lambda failures: 1.0, "concentration0": lambda failures: failures}
SQUARES = {"concentration": lambda x: 0.5, "rate": lambda x: x**2 / 2}
PREDICTIVES = {  # hyper-parameters, a row, and scipy's own predictive
    "waits": (
        derived(dist.Gamma, dist.Exponential, dist.Exponential, WAIT, mean_wait),
        (2.5, 1.5),
        3.0,
        scipy.stats.lomax(2.5, scale=1.5).logpdf,
    ),
    "failures": (
        derived(
            dist.Beta, dist.GeometricProbs, dist.GeometricProbs, GEOMETRIC, lambda a, b: b / (a - 1)
        ),
        (2.5, 1.5),
        3.0,
        lambda x: betaln(3.5, 1.5 + x) - betaln(2.5, 1.5),
    ),
    "known mean": (
        derived(
            dist.InverseGamma,
            dist.Normal,
            lambda v: dist.Normal(0.0, jnp.sqrt(v)),
            SQUARES,
            lambda a, b: 0.0 * a,
        ),
        (0.8, 1.5),  # the variance has no mean
        3.0,
        scipy.stats.t(1.6, scale=np.sqrt(1.5 / 0.8)).logpdf,
    ),
}


@in_double
@pytest.mark.parametrize("name", PREDICTIVES)
def test_predictive_is_scipys(name):
    pair, numbers, x, wanted = PREDICTIVES[name]
    hyper = pair.hyper(*(jnp.full((1, 2), number) for number in numbers))
    found = jax.jit(pair.log_predictive)(hyper, jnp.array([x, jnp.nan]))
    np.testing.assert_allclose(found, [[wanted(x), 0.0]], rtol=1e-10)


@in_double
def test_what_follows_from_the_densities_is_what_is_written_down_for_counts():
    """A pair derived from densities equals the pair of the table.

    Compared are the means and the divergence under q, and a row's log density, but for how eta and
    base share it.
    """
    pair = derived(dist.Gamma, dist.Poisson, dist.Poisson, COUNT, lambda a, b: a / b)
    hyper, prior = (
        GammaHyper(jnp.array([[3.0, 40.0]]), jnp.array([[2.0, 7.0]])),
        GammaHyper(jnp.full((1, 2), 1.5), jnp.full((1, 2), 0.5)),
    )
    x = jnp.array([[3.0, 0.0], [jnp.nan, 7.0]])

    def told(pair, hyper, prior):
        statistics = pair.statistics(x, prior)
        said = lambda eta: jnp.sum(statistics * eta, (1, 2)) + pair.log_base(x)
        of_rows = said(pair.expected(hyper)), said(pair.natural((hyper[0] / hyper[1],)))
        return (
            of_rows,
            pair.divergence(hyper, prior),
            pair.add(hyper, x[0], 0.5),
            pair.posterior(prior, statistics[:1]),
            pair.mean_row(hyper),
        )

    one, other = jax.jit(
        lambda: (
            told(pair, pair.hyper(*hyper), pair.hyper(*prior)),
            told(GammaPoisson(), hyper, prior),
        )
    )()
    for found, wanted in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-10)


@in_double
def test_a_particle_filter_follows():
    register()
    kernel, model = ParticleFilter(aclass, num_particles=20), program()
    tree = Driver(kernel, num_samples=50, progress_bar=False).run(0, *model.args, **model.kwargs)
    exact = Mixture(density).log_evidence(X)
    assert tree.attrs["log_evidence"] == pytest.approx(exact, abs=1e-9)


def test_collapsed_gibbs_follows():
    """How often each partition is visited."""
    register()
    # JAX keeps arrays that it has seen, in the precision of then
    kernel, model = CollapsedGibbs(aclass), program(X.copy())
    tree = Driver(kernel, num_warmup=50, num_samples=4000, progress_bar=False).run(
        0, *model.args, **model.kwargs
    )
    exact = Mixture(density).answers(X)
    z = np.asarray(tree.posterior["z"])[0]
    shares = [
        np.mean(codes(np.zeros_like(z), z) == codes(np.zeros_like(groups), groups))
        for groups in exact.groups
    ]
    assert sum(shares) == 1.0
    assert np.abs(shares - exact.posterior).sum() / 2 < 0.05


def log_evidence_by_sticks(x, num_groups, alpha):
    """Every assignment written down, sticks and rates integrated out."""
    found = []
    for z in product(range(num_groups), repeat=len(x)):
        count = np.bincount(z, minlength=num_groups)
        after = count[::-1].cumsum()[::-1]
        of_sticks = betaln(1 + count[:-1], alpha + after[1:]) - betaln(1, alpha)
        found.append(
            of_sticks.sum() + sum(density(x[np.array(z) == group]) for group in range(num_groups))
        )
    return logsumexp(found)


@in_double
def test_coordinate_ascent_follows():
    register()
    kernel, model = CoordinateAscent(iqgme), sticks()
    tree = Driver(kernel, num_warmup=100, num_samples=10, progress_bar=False).run(
        0, *model.args, **model.kwargs
    )
    elbo, exact = np.asarray(tree.sample_stats["elbo"])[0], log_evidence_by_sticks(X, 3, 0.7)
    assert np.diff(elbo).min() > -1e-9
    assert exact - 3 < elbo[-1] < exact


WRONG = {
    "twice the wait": {"statistics": WAIT | {"rate": lambda wait: 2 * wait}},
    "half a row": {"statistics": WAIT | {"concentration": lambda wait: 0.5}},
    "twice the rate": {"rows": lambda rate: dist.Exponential(2 * rate)},
}


@in_double
@pytest.mark.parametrize("name", WRONG)
def test_a_pair_with_one_wrong_term_is_refused_by_the_name_of_the_site(name):
    register(**WRONG[name])
    with pytest.raises(StructureError, match="site 'x': .* misses the conjugate one by"):
        read_partition(program())
    with pytest.raises(StructureError, match="site 'x' .Exponential.: .* misses that by"):
        read_assignment(sticks())
    register()
    assert read_partition(program()).blocks[0].site == "x"
    assert read_assignment(sticks()).columns[0].site == "x"


@in_double
def test_data_outside_of_the_support_are_refused():
    register()
    with pytest.raises(
        ValueError, match=r"site 'x': row 1, column 0 is -2.0 .*Exponential takes Positive"
    ):
        read_partition(program()).rows(program(np.where(X == 0.2, -2.0, X)))


FAILURES_OF_THREE = lambda p: dist.BinomialProbs(p, 3)
REFUSED = {
    "a statistic is missing": (
        dist.Gamma,
        dist.Exponential,
        None,
        {"rate": lambda x: x},
        "wanted what a row adds to each of .'conc",
    ),
    "a vector": (
        dist.Dirichlet,
        dist.CategoricalProbs,
        None,
        {"concentration": lambda x: x},
        "prior: found Dirichlet, whose support is",
    ),
    "a bound": (
        dist.Pareto,
        dist.Uniform,
        None,
        {"scale": lambda x: x, "alpha": lambda x: 1.0},
        "prior: found Pareto, whose support is",
    ),
    "not linear": (
        dist.Normal,
        dist.Normal,
        None,
        {"loc": lambda x: x, "scale": lambda x: -0.5},
        "Normal is not linear in its arg",
    ),
    "another class": (
        dist.Beta,
        dist.GeometricProbs,
        FAILURES_OF_THREE,
        GEOMETRIC,
        "rows: found BinomialProbs.*of GeometricProbs",
    ),
}


@in_double
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_pair_is_not_registered(name):
    prior, likelihood, rows, statistics, message = REFUSED[name]
    before = dict(_table.TABLE)
    with pytest.raises(ValueError, match=message):
        register_conjugate(prior, likelihood, statistics=statistics, mean=mean_wait, rows=rows)
    assert before == _table.TABLE


@in_double
def test_a_pair_without_a_mean_field_posterior_is_refused_by_coordinate_ascent():
    methods = dict.fromkeys(_table.ConjugatePair.__abstractmethods__)
    _table.put(type("Alone", (_table.ConjugatePair,), methods)(("Gamma",), "Exponential"))
    with pytest.raises(
        StructureError, match="site 'x': its pair in the table has no mean-field posterior"
    ):
        read_assignment(sticks())
