"""The chain visits every partition as often as its posterior says: all of them written down, for
every family of components.
"""

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import plate, sample
from scipy import stats

from inference import CollapsedGibbs
from inference.distributions import CRP, Missing, PitmanYor
from inference.kernels.collapsed_gibbs import kernel as collapsed_gibbs
from inference.program.compiling import once
from tests.inference.partitions import (
    Mixture,
    bernoulli,
    categorical,
    codes,
    normal,
    poisson,
    together,
    wishart,
)
from zoo.aclass import aclass, gamma_poisson, mixed, normal_inverse_chi2, normal_inverse_wishart

pytestmark = pytest.mark.usefixtures("numpyro_promotion")

NUM_DRAWS, NUM_SWEEPS = 3_000, 12  # independent draws, each the end of a chain of its own
# p-values: a planted bug has less than the one, the kernel more than the other
SURE, DOUBT = 1e-6, 1e-3

RNG = np.random.default_rng(1)
BITS, REALS = RNG.integers(0, 2, (5, 3)).astype(float), RNG.normal(size=(5, 2)) * [1, 3]
CODES, COUNTS = RNG.integers(0, 3, (6, 2)).astype(float), RNG.poisson(3.0, (5, 2)).astype(float)
# row 3 of the bits is missing as a whole
BITS[0, 1] = BITS[3] = REALS[2, 0] = CODES[4, 1] = COUNTS[1, 1] = np.nan
# where columns are coupled a row is seen whole or not at all
WHOLE = np.where(np.arange(5)[:, None] == 2, np.nan, RNG.normal(size=(5, 2)))
UNLABELLED = np.array([0, -1, 1, -1, 0])
SHARES, BY_FEATURE = (0.3, 0.7), np.array([[0.4], [1.5]])


def plain(codes):
    """No classes, at most two groups, and a prior for each feature."""
    z = sample("z", CRP(2.0, len(codes), max_groups=2))
    with plate("group", 2, dim=-2), plate("feature", 2):
        p = sample("p", dist.Dirichlet(jnp.broadcast_to(jnp.asarray(BY_FEATURE), (2, 3))))
    with plate("row", len(codes), dim=-2), plate("feature", 2):
        sample("x", Missing(dist.Categorical(p[z])), obs=codes)


def renamed(counts, reals, kinds):
    """Two observed sites, fixed shares of the classes, and other names for everything."""
    with plate("case", len(reals)):
        kind = sample(
            "kind",
            dist.Categorical(jnp.array(SHARES)),
            obs=jnp.maximum(kinds, 0),
            obs_mask=kinds >= 0,
        )
    cluster = sample("cluster", CRP(0.6, len(reals), labels=kind, num_classes=2))
    cases, items, scales = plate("case", len(reals), dim=-2), plate("item", 2), plate("scale", 2)
    with plate("kinds", 2, dim=-3), plate("clusters", len(reals), dim=-2):
        with items:
            pace = sample("pace", dist.Gamma(1.0, 0.1))
        with scales:
            spread = sample("spread", dist.InverseGamma(1.0, 1.0))
            centre = sample("centre", dist.Normal(0.0, jnp.sqrt(spread / 0.1)))
    with cases, items:
        sample("events", Missing(dist.Poisson(pace[kind, cluster])), obs=counts)
    with cases, scales:
        sample(
            "entries",
            Missing(dist.Normal(centre[kind, cluster], jnp.sqrt(spread[kind, cluster]))),
            obs=reals,
        )


def inverse_wishart(x, at):
    """Coupled features by their covariance, not its inverse."""
    at = at.joint()
    with at.classes, at.groups:
        covariance = sample("covariance", dist.InverseWishart(3.0, scale_matrix=3.0 * jnp.eye(2)))
        loc = sample(
            "loc", dist.MultivariateNormal(jnp.zeros(2), covariance_matrix=covariance / 0.1)
        )
    with at.rows:
        return sample(
            "x",
            Missing(dist.MultivariateNormal(loc[at.z], covariance_matrix=covariance[at.z])),
            obs=x,
        )


def spread_out(bits):
    """A rule of seating with a discount, no classes."""
    team = sample("team", PitmanYor(0.6, 0.5, len(bits)))
    with plate("teams", len(bits), dim=-2), plate("feature", 3):
        chance = sample("chance", dist.Beta(0.5, 0.5))
    with plate("row", len(bits), dim=-2), plate("feature", 3):
        sample("x", Missing(dist.Bernoulli(chance[team])), obs=bits)


class Case(NamedTuple):
    model: object
    data: tuple
    mixture: Mixture


BERNOULLI, PLAIN = "Bernoulli, unlabelled rows", "categorical, no classes, at most 2 groups"
PITMAN_YOR = "Bernoulli, Pitman-Yor, no classes"
PARTS = mixed(
    n=([0, 1], gamma_poisson),
    real=([2, 3], normal_inverse_chi2),
    pair=([4, 5], normal_inverse_wishart),
)
RENAMED = Mixture(
    together(([0, 1], poisson), ([2, 3], normal)),
    alpha=0.6,
    gamma=None,
    shares=SHARES,
    num_classes=2,
)
CASES = {
    BERNOULLI: Case(
        partial(aclass, alpha=1.7, gamma=2.0),
        (BITS, UNLABELLED),
        Mixture(bernoulli, alpha=1.7, gamma=(2.0, 2.0), num_classes=2),
    ),
    PITMAN_YOR: Case(spread_out, (BITS,), Mixture(bernoulli, alpha=0.6, discount=0.5)),
    PLAIN: Case(
        plain,
        (CODES,),
        Mixture(partial(categorical, num_values=3, beta=BY_FEATURE), alpha=2.0, max_groups=2),
    ),
    "Poisson and normal, fixed shares, renamed": Case(
        renamed, (COUNTS, REALS, UNLABELLED), RENAMED
    ),
    "Poisson, normal and Wishart": Case(
        partial(aclass, num_classes=1, component=PARTS),
        (np.hstack([COUNTS, REALS, WHOLE]), np.zeros(5, int)),
        Mixture(together(([0, 1], poisson), ([2, 3], normal), ([4, 5], wishart))),
    ),
    "inverse Wishart": Case(
        partial(aclass, num_classes=1, component=inverse_wishart),
        (WHOLE, np.zeros(5, int)),
        Mixture(wishart),
    ),
}
SLOW = {"Poisson, normal and Wishart", "inverse Wishart"}


@cache
def started(name):
    """A kernel that has read the model of a case, and its start."""
    kernel = CollapsedGibbs(CASES[name].model)
    with pytest.MonkeyPatch.context() as patch:
        # proofs have their own tests, and take long
        patch.setattr("inference.reading.crp_mixture.prove", lambda *_, **__: None)
        return kernel, kernel.init(random.key(0), 0, None, CASES[name].data, {})


def drawn(name):
    """Independent draws of all sites."""
    kernel, start = started(name)

    def end(key):
        return jax.lax.fori_loop(
            0,
            NUM_SWEEPS,
            lambda _, at: kernel.sample(at, CASES[name].data, {}),
            start._replace(rng_key=key),
        ).values

    keys = random.split(random.key(1), NUM_DRAWS)
    return jax.device_get(once(jax.vmap(end), keys)(keys))


def p_value(name, values):
    """Chi-square test of the draws; what is no partition is no draw at all.

    Rare answers are counted together.
    """
    case, (kernel, _) = CASES[name], started(name)
    *columns, labels = case.data if len(case.data) > 1 else (*case.data, None)
    exact, z = case.mixture.answers(np.hstack(columns), labels), values[kernel.reading.partition.z]
    labels = next(
        (values[site] for site in values if site.endswith("_unobserved")), np.zeros_like(z)
    )
    known, found = codes(exact.labels, exact.groups), codes(labels, z)
    assert np.isin(found, known).all()
    count, expected = (found[:, None] == known).sum(0), exact.posterior * len(found)
    is_rare = expected < 5
    pool = lambda each: np.append(each[~is_rare], each[is_rare].sum())[
        : None if expected[is_rare].sum() else -1
    ]
    return stats.chisquare(pool(count), pool(expected)).pvalue


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES]
)
def test_partitions_have_their_exact_frequencies(name):
    values = drawn(name)
    assert p_value(name, values) > DOUBT
    if name == BERNOULLI:  # and the shares of the classes are Dirichlet given these
        count = (values["y_unobserved"] == 1).sum(1)
        cdf = lambda extra: stats.beta(2.0 + count + extra, 2.0 + 5 - count).cdf(
            values["share"][:, 1]
        )
        assert stats.kstest(cdf(0), "uniform").pvalue > DOUBT
        assert stats.kstest(cdf(1), "uniform").pvalue < SURE


features_stay = lambda rules, prior, table, cls, group, x: table._replace(
    count=table.count.at[cls, group].add(-1)
)
log_seating = CRP.log_seating
one_alpha = lambda rule, size: log_seating(CRP(1.0, 1, max_groups=rule.max_groups), size)
row_too_many = lambda rule, size: log_seating(rule, jnp.where(size > 0, size + 1, 0))
as_a_crp = lambda rule, size: log_seating(CRP(rule.concentration, 1), size)
PLANTED = {
    "the features are not taken out": (BERNOULLI, collapsed_gibbs, "_without", features_stay),
    "the prior of the classes is forgotten": (
        BERNOULLI,
        collapsed_gibbs,
        "log_class",
        lambda rules, weights, count: jnp.zeros_like(count),
    ),
    "alpha is taken for 1": (PLAIN, CRP, "log_seating", one_alpha),
    "the discount is forgotten": (PITMAN_YOR, PitmanYor, "log_seating", as_a_crp),
    "each group has a row too many": (BERNOULLI, CRP, "log_seating", row_too_many),
    "the bound on the groups is forgotten": (PLAIN, CRP, "log_seating", as_a_crp),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_seen(bug, monkeypatch):
    name, place, function, planted = PLANTED[bug]
    started(name)
    monkeypatch.setattr(place, function, planted)
    # what was compiled has no bug
    monkeypatch.setattr(collapsed_gibbs, "sweep", collapsed_gibbs.sweep.__wrapped__)
    assert p_value(name, drawn(name)) < SURE
