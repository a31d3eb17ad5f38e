"""The table of conjugate pairs: the prior of a group's parameters, the likelihood of its rows, and
the group integrated out.

A *group* is rows that share their parameters phi. Where p(phi) p(x | phi) is of p(phi)'s family,
the group is its hyper-parameters: h before a row, `add(h, x)` after it. For every phi

    log p(phi | h) + log p(x | phi) - log p(phi | add(h, x)) = log p(x | h),                                                 (1)

which ties `log_prior`, `add` and `log_predictive` to the likelihood, and to each other.

    priors                                   likelihood           predictive p(x | h)
    Beta(c1, c0)                             BernoulliProbs       c1 / (c1 + c0) for 1, c0 / (c1 + c0) for 0
    Dirichlet(c)                             CategoricalProbs     c_x / sum_k c_k
    Gamma(a, b)                              Poisson              negative binomial, Gamma(a+x) b^a / (Gamma(a) x! (b+1)^(a+x))
    InverseGamma + Normal                    Normal               Student t
    (Inverse)Wishart + MultivariateNormal    MultivariateNormal   multivariate t

Every pair has the methods of `ConjugatePair`. Readers look one up by `pair_of`, and then prove it
against the model's own terms. `register_conjugate` adds a pair to the table.

A row is a float array [columns], or [columns, D] where a column is D features that depend on each
other; NaN is missing, tells nothing. Columns are independent. Hyper-parameters are tuples of arrays
[..., columns] and a parameter's own axes; a row is spread over the leading axes (class, group).
Every result has the dtype of the hyper-parameters.

Rounding: an emptied group is off by eps n after n rows, or more: start it from the prior. In
float32 a count ends at 2^24 = 1.7e7.
"""

from collections.abc import Callable, Mapping
from typing import Any

from numpyro.distributions import Distribution

from inference.program.sites import StructureError
from inference.reading.conjugate.counts import (
    BetaBernoulli,
    BetaHyper,
    DirichletCategorical,
    DirichletHyper,
    GammaHyper,
    GammaPoisson,
)
from inference.reading.conjugate.derived import derived
from inference.reading.conjugate.normal import (
    NormalInverseGamma,
    NormalInverseWishart,
    NormalWishart,
)
from inference.reading.conjugate.pairs import ConjugatePair

__all__ = [
    "TABLE",
    "BetaBernoulli",
    "BetaHyper",
    "ConjugatePair",
    "DirichletCategorical",
    "DirichletHyper",
    "GammaHyper",
    "GammaPoisson",
    "NormalInverseGamma",
    "NormalInverseWishart",
    "NormalWishart",
    "pair_of",
    "put",
    "register_conjugate",
]


# by the classes of the priors, in order of the alphabet, and of the rows
TABLE: dict[tuple[tuple[str, ...], str], ConjugatePair] = {}


def put(pair: ConjugatePair) -> None:
    """Puts a pair into the table, in the place of one of the same classes."""
    TABLE[tuple(sorted(pair.priors)), pair.likelihood] = pair


for each in (
    BetaBernoulli(),
    DirichletCategorical(),
    GammaPoisson(),
    NormalInverseGamma(),
    NormalWishart(),
    NormalInverseWishart(),
):
    put(each)


def pair_of(
    site: str, priors: Mapping[str, str], likelihood: str, way_out: str = ""
) -> tuple[tuple[str, ...], ConjugatePair]:
    """The pair of an observed site, and the sites of its parameters in the order that the pair has
    them in.

    Raises StructureError, by the name of the site, where the table has no such pair.

    :param priors: sites of the group's parameters, and the classes of their distributions.
    :param likelihood: class of the site's own distribution.
    :param way_out: what else the error says.
    """
    listed = "; ".join(f"{' + '.join(pair.priors)} -> {pair.likelihood}" for pair in TABLE.values())
    if not priors:
        raise StructureError(
            f"site {site!r}: no group parameter is behind its {likelihood}; wanted one of "
            f"{listed}. {way_out}".strip()
        )
    pair = TABLE.get((tuple(sorted(priors.values())), likelihood))
    if pair is None:
        found = " and ".join(f"{name!r} ~ {kind}" for name, kind in priors.items())
        raise StructureError(
            f"site {site!r}: {likelihood} with {found} is not in the table of conjugate pairs; "
            "register it with "
            f"inference.register_conjugate, see its docstring. In the table: {listed}. "
            f"{way_out}".strip()
        )
    return tuple(
        next(name for name, kind in priors.items() if kind == wanted) for wanted in pair.priors
    ), pair


def register_conjugate(
    prior: type[Distribution],
    likelihood: type[Distribution],
    *,
    statistics: Mapping[str, Callable[[Any], Any]],
    mean: Callable[..., Any],
    rows: Callable[[Any], Distribution] | None = None,
) -> None:
    """Puts a pair into the table of conjugate pairs; ParticleFilter, CollapsedGibbs and
    CoordinateAscent then follow a model with it.

    :param prior: class of the prior of a group's parameter, a number for each column. After a row
    it must be the same distribution with
        other arguments, each with something added.
    :param likelihood: class of the distribution of a row's entries given the parameter.
    :param statistics: for each argument of the prior, what one row adds to it: a function of the
    row's entries.
    :param mean: of the next row: a function of the prior's arguments, in the order of `statistics`.
    It fills in missing entries, and no
        proof covers it.
    :param rows: the distribution of the entries given the parameter, where it is not
    `likelihood(parameter)`.

    Densities, draws and updates follow from those of the two distributions. When a kernel reads a
    model, the pair is proved against the model's own terms; where a statistic is wrong, the model
    is refused by the name of the site. A pair that is registered again takes the place of the
    earlier one. Raises ValueError where `prior` does not take what rows add as arguments.

    A pair of several parameters, or of vectors, is an object with the methods of
    `inference.reading.conjugate.pairs.ConjugatePair`: give it to
    `inference.reading.conjugate.table.put`. `CoordinateAscent` asks those of
    `inference.reading.conjugate.pairs.Columns` as well.

    Waiting times whose rate is unknown, in groups:

    >>> import numpy as np, numpyro, numpyro.distributions as dist
    >>> from inference import CollapsedGibbs, Driver, register_conjugate
    >>> from inference.distributions import CRP
    >>> register_conjugate(
    ...     dist.Gamma,
    ...     dist.Exponential,
    ...     statistics={"concentration": lambda wait: 1.0, "rate": lambda wait: wait},
    ...     mean=lambda concentration, rate: rate / (concentration - 1),
    ... )
    >>> def waits(x):
    ...     crp = CRP(1.0, len(x))
    ...     z = numpyro.sample("z", crp)
    ...     with numpyro.plate("group", crp.capacity):
    ...         rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    ...     with numpyro.plate("row", len(x)):
    ...         numpyro.sample("x", dist.Exponential(rate[z]), obs=x)
    >>> x = np.array([0.1, 0.2, 9.0, 0.1, 7.0])
    >>> tree = Driver(CollapsedGibbs(waits), num_warmup=20, num_samples=30,
    progress_bar=False).run(0, x)
    >>> tree.posterior["z"].shape  # chain, draw, row
    (1, 30, 5)
    """
    put(derived(prior, likelihood, rows or likelihood, statistics, mean))
