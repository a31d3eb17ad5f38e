"""Reading a mixture among common factors: groups see the factors of a row, and features are sums of
those.

    structure = read_factors(program)             # which sites play which part; or an error that
                                                  names the site
    structure.given                               # the mixture as if factors were data, as
                                                  `inference.reading.stick_mixture.read` reads it
    structure.prior                               # the numbers of the priors of what is between
                                                  factors and features
    rows = structure.rows(program)                # the data, one entry a row

    z[i], groups, soft labels and labels   a truncated mixture, factors s[i] in the place of
                                           features
    features     x[i, p] ~ Normal(c[p] + sum_k s[i, k] b[z[i], k] A[k, p], 1 / psi[p]), NaN where
                 missing
    A, c, b, psi as `inference.reading.conjugate.loadings` has them; there may be no c and no b;
    priors conjugate, or numbers that are known

Given the factors everything above the features is a mixture of what would be data, and is read and
proved as such, by the same code. The rest is read by types, shapes and dependencies, and proved by
comparing each site's log probability with the model's own at random values, in each row.

Cost: that of reading a mixture, and a few evaluations more of the model on all rows, or on many.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import xlog1py, xlogy
from jax.scipy.stats import beta, gamma, norm
from numpyro import handlers
from numpyro.distributions import biject_to

from inference.program.program import Program
from inference.program.sites import StructureError, unwrap
from inference.reading.conjugate.loadings import LinearPrior, of_rows, told_at
from inference.reading.proof import (
    Magnitude,
    at_magnitude,
    further,
    gap,
    gap_of_sums,
    prove,
    prove_numbers,
)
from inference.reading.stick_mixture.read import (
    FEW,
    MOST,
    WAY_OUT,
    assignment_site,
    many_rows,
    numbers_of_a_row,
    read_assignment,
    row_sums,
    some_rows,
)
from inference.reading.stick_mixture.structure import Assignment

__all__ = ["FactorMixture", "FactorRows", "GivenScores", "Linked", "has_factors", "read_factors"]


class Linked(NamedTuple):
    """The sites between factors and features; None where there is none, or where it is a number."""

    site: str  # the features
    scores: str
    loadings: str
    beta: str | None
    centre: str | None
    noise: str | None
    shown: str | None
    share: str | None

    @property
    def latent(self) -> tuple[str, ...]:
        """But for the scores."""
        return tuple(name for name in self[2:] if name)


class FactorRows(NamedTuple):
    """The data."""

    features: np.ndarray  # [row, feature], NaN where missing
    # [row, class]: the side of 0 on which a soft label lies; 0 where the label does not tell
    signs: np.ndarray
    design: tuple[int, ...]  # which entry of u = (factors, 1) each weight of an expert is for


@dataclass(frozen=True)
class FactorMixture:
    """Who is who among the sites."""

    few: Program  # the model on a few of its rows
    linked: Linked
    given: Assignment
    prior: LinearPrior | None = None

    @property
    def num_factors(self) -> int:
        """Columns of the scores."""
        return self.few.sites[self.linked.scores].shape[1]

    def start(self, program: Program, seed: int) -> dict[str, np.ndarray]:
        """Values at random, unconstrained."""
        rng, found = np.random.default_rng(seed), {}
        for name in program.latent:
            site = program.sites[name]
            if name in (self.given.z, self.linked.shown):
                found[name] = rng.integers(
                    0, self.given.num_own if name == self.given.z else 2, site.shape
                ).astype(site.dtype)
            else:
                found[name] = rng.uniform(
                    -1.0, 1.0, biject_to(site.support).inverse_shape(site.shape)
                ).astype(site.dtype)
        return found

    def rows(self, program: Program) -> FactorRows:
        """The data by row, refused where they are infinite."""
        x = np.asarray(program.observed_values[self.linked.site], np.float64)
        if np.isinf(x).any():
            row, column = np.argwhere(np.isinf(x))[0]
            raise ValueError(
                f"site {self.linked.site!r}: row {row}, column {column} is infinite; wanted "
                "numbers, NaN where missing."
            )
        upper = self.given.rows(
            _given_scores(program, self.linked, _constants(self.few, self.linked))
        )
        return FactorRows(x, upper.signs, upper.design)

    def prior_at(self, program: Program, values: Mapping[str, Array]) -> LinearPrior:
        """The numbers of the priors at values of the latent sites, on which they must not
        depend.
        """
        trace, linked = program.trace(values), self.linked
        fn = lambda name: unwrap(trace[name]["fn"])
        spread = lambda number, shape: jnp.broadcast_to(number, shape)
        num_factors, num_features = values[linked.loadings].shape

        def gamma_of(name: str | None, known: Array, size: int) -> tuple[Array, Array]:
            pair = (
                (fn(name).concentration, fn(name).rate)
                if name
                else (known, jnp.full((), jnp.inf, known.dtype))
            )
            return spread(pair[0], (size,)), spread(pair[1], (size,))

        a = fn(linked.loadings)
        scale = spread(a.scale, (num_factors, num_features))
        centre = fn(linked.centre) if linked.centre else None
        loc = (
            spread(centre.loc, (num_features,)) if centre else jnp.zeros(num_features, scale.dtype)
        )
        of_centre = (
            spread(centre.scale, (num_features,)) ** -2
            if centre
            else jnp.ones(num_features, scale.dtype)
        )
        shape = (self.given.num_own, num_factors)
        counts, share = None, jnp.ones(shape, scale.dtype)
        if linked.shown:
            counts = (
                (
                    spread(fn(linked.share).concentration1, shape),
                    spread(fn(linked.share).concentration0, shape),
                )
                if linked.share
                else None
            )
            share = (
                counts[0] / (counts[0] + counts[1])
                if counts
                else spread(fn(linked.shown).probs, shape)
            )
        precision = spread(fn(linked.site).scale, program.sites[linked.site].shape)[0] ** -2
        locs = jnp.concatenate([spread(a.loc, scale.shape).T, loc[:, None]], 1)
        of_loadings = gamma_of(linked.beta, scale[:, 0] ** -2, num_factors)
        return LinearPrior(
            locs,
            of_centre,
            of_loadings,
            gamma_of(linked.noise, precision, num_features),
            share,
            counts,
        )


def has_factors(program: Program) -> bool:
    """Whether rows have latent normal vectors of their own; only then is there something for
    `read_factors`.
    """
    return bool(_scores(program))


def _scores(program: Program) -> list[str]:
    rows = next(
        (
            site.plates
            for site in program.sites.values()
            if site.kind == "latent" and site.family.startswith("Categorical")
        ),
        None,
    )
    is_vector = lambda site: (
        site.kind == "latent" and site.family == "MultivariateNormal" and len(site.shape) == 2
    )
    return [name for name, site in program.sites.items() if is_vector(site) and site.plates == rows]


def read_factors(program: Program) -> FactorMixture:
    """Reads and proves; raises StructureError, by the name of the site, where a part is not what
    it looks like.
    """
    z = assignment_site(program)
    few = some_rows(program, z, FEW)
    linked = _linked(few, z)
    _refuse_other_children(few, linked)
    values = _constants(few, linked)
    given = read_assignment(_given_scores(program, linked, values))
    _refuse_other_parts(given, linked)
    found = FactorMixture(few, linked, given)
    compared = many_rows(program, z, MOST // numbers_of_a_row(few, linked.scores))
    found = replace(found, prior=_proved(found, compared))
    for others in (few, program):
        if others is not compared:
            _prove_for(others, found)
    return found


def _prove_for(others: Program, found: FactorMixture) -> None:
    refusal = lambda site, _: (
        f"site {site!r}: the numbers of the priors of its loadings follow the rows; wanted numbers "
        "that hold for any rows. Compute "
        f"them outside of the model, and give them as arguments."
    )
    prove_numbers(found.linked.site, found.prior, found.prior_at, found.start, others, refusal)


def _linked(few: Program, z: str) -> Linked:
    scores = _scores(few)
    if len(scores) != 1:
        raise StructureError(
            f"sites {scores}: several vectors of factors for each row; wanted one. {WAY_OUT}"
        )
    below = [
        name
        for name in few.observed
        if scores[0] in few.parents[name] and few.sites[name].family == "Normal"
    ]
    if len(below) != 1 or len(few.sites[below[0]].shape) != 2:
        raise StructureError(
            f"site {scores[0]!r}: Normal sites {below} are computed from it; wanted one of "
            f"features, [row, feature]. {WAY_OUT}"
        )
    site = below[0]
    num_features, num_factors = few.sites[site].shape[1], few.sites[scores[0]].shape[1]
    parents, found = (
        few.parents[site] - {scores[0], z},
        dict.fromkeys(("loadings", "centre", "noise", "shown")),
    )
    kinds = {
        ("Normal", (num_factors, num_features)): "loadings",
        ("Normal", (num_features,)): "centre",
        ("Gamma", (num_features,)): "noise",
    }
    for name in sorted(parents):
        own = few.sites[name]
        is_shown = (
            own.family == "BernoulliProbs" and len(own.shape) == 2 and own.shape[1] == num_factors
        )
        role = "shown" if is_shown else kinds.get((own.family, own.shape))
        if role is None or found[role]:
            raise StructureError(
                f"site {site!r}: it is computed from {name!r} ({own.family}, of shape "
                f"{own.shape}); wanted Normal loadings "
                f"[{num_factors}, {num_features}], a Normal centre and a Gamma precision of each "
                "feature, and a Bernoulli site for each "
                f"group and factor. {WAY_OUT}"
            )
        found[role] = name
    if not found["loadings"]:
        raise StructureError(
            f"site {site!r}: no Normal loadings [{num_factors}, {num_features}] among "
            f"{sorted(parents)}. {WAY_OUT}"
        )
    beta = _behind(few, found["loadings"], "Gamma", (num_factors,))
    share = (
        _behind(few, found["shown"], "Beta", few.sites[found["shown"]].shape)
        if found["shown"]
        else None
    )
    for name in (found["centre"], found["noise"]):
        if name:
            _behind(few, name, "", ())
    return Linked(
        site,
        scores[0],
        found["loadings"],
        beta,
        found["centre"],
        found["noise"],
        found["shown"],
        share,
    )


def _behind(few: Program, name: str, family: str, shape: tuple[int, ...]) -> str | None:
    """The parent of a site, if it has one."""
    parents = sorted(few.parents[name])
    right = [
        parent
        for parent in parents
        if (few.sites[parent].family, few.sites[parent].shape) == (family, shape)
    ]
    if parents != right or len(parents) > 1 or any(few.parents[parent] for parent in parents):
        wanted = f"numbers, or one {family} site of shape {shape}" if family else "numbers"
        raise StructureError(
            f"site {name!r}: its prior is computed from {parents}; wanted {wanted}. {WAY_OUT}"
        )
    return parents[0] if parents else None


def _refuse_other_children(few: Program, linked: Linked) -> None:
    """Loadings and what belongs to them must tell of nothing but the features."""
    for name, parents in few.parents.items():
        allowed = name in (linked.site, *linked.latent) or few.sites[name].kind == "deterministic"
        shared = sorted(parents & set(linked.latent))
        if shared and not allowed:
            raise StructureError(
                f"site {name!r} ({few.sites[name].family}): it depends on {shared}, which was read "
                "as part of the loadings of "
                f"{linked.site!r}. {WAY_OUT}"
            )


def _refuse_other_parts(given: Assignment, linked: Linked) -> None:
    site = next((block.site for block in given.columns), given.upper.site if given.upper else None)
    if site or given.features is None:
        raise StructureError(
            f"site {site or linked.scores!r}: beside factors only they and labels may depend on "
            f"groups. {WAY_OUT}"
        )


def _constants(few: Program, linked: Linked) -> dict[str, np.ndarray]:
    """Some values of what is between factors and features."""
    found = {}
    for name in linked.latent:
        site = few.sites[name]
        value = (
            np.zeros(site.shape)
            if site.is_discrete
            else biject_to(site.support)(jnp.zeros(site.shape))
        )
        found[name] = np.asarray(value, site.dtype)
    return found


@dataclass(frozen=True)
class GivenScores:
    """A model as if the factors of a row were data, without the features and what makes them."""

    model: Callable
    linked: Linked
    values: Mapping[str, Any]  # of the sites that are left out, which then say nothing

    def __call__(self, scores: Any, **arguments: Any) -> Any:
        """Runs it."""
        held = {name: jnp.asarray(self.values[name]) for name in self.linked.latent}
        conditioned = handlers.condition(
            handlers.substitute(self.model, data=held), {self.linked.scores: jnp.asarray(scores)}
        )
        return handlers.block(conditioned, hide=[self.linked.site, *self.linked.latent])(
            **arguments
        )


def _given_scores(program: Program, linked: Linked, values: Mapping[str, Any]) -> Program:
    shape = program.sites[linked.scores].shape
    return Program(
        GivenScores(program.model, linked, values),
        np.random.default_rng(0).normal(size=shape),
        **program.arguments,
    )


def _proved(found: FactorMixture, program: Program) -> LinearPrior:
    """The numbers of the priors; raises StructureError, by the name of the site, where a part is
    not what it looks like on the rows of `program`.
    """
    x = found.rows(program).features
    refusal = lambda site, missed: (
        f"site {site!r} ({program.sites[site].family}): read as part of Normal features that are "
        "sums of the factors "
        f"{found.linked.scores!r} that the group of the row shows, but the log probability of the "
        "model misses that by "
        f"{missed:.2g} (relative), in some row or at some value. Look for a parameter that is "
        "transformed, scaled, clipped, shared or "
        f"masked. {WAY_OUT}"
    )
    identities = lambda some: partial(
        _compared, found, some, x if some is program else found.rows(some).features
    )
    return prove(identities, further(partial(found.start, program), x), refusal, program)[0]


def _compared(
    found: FactorMixture, program: Program, x: np.ndarray, first: Any, second: Any, size: Magnitude
) -> tuple[dict[str, Array], LinearPrior]:
    """The gaps at the second start, by the numbers of the priors at the first; and these."""
    prior = found.prior_at(program, program.constrain(first))
    return _gaps(
        found, program, prior, jnp.asarray(x, float), at_magnitude(program, second, size)
    ), prior


def _gaps(
    found: FactorMixture, program: Program, prior: LinearPrior, x: Array, values: dict[str, Array]
) -> dict[str, Array]:
    """Of each site how far what was read is from the model; of the features in the worst row."""
    linked, each = found.linked, program.log_probs(values)
    number = lambda name, pair: values[name] if name else pair[0]
    precision, noise = number(linked.beta, prior.beta), number(linked.noise, prior.noise)
    centre = values[linked.centre] if linked.centre else jnp.zeros(x.shape[1])
    loc = prior.loc.T
    read = {
        linked.loadings: jnp.sum(
            norm.logpdf(values[linked.loadings], loc[:-1], 1 / jnp.sqrt(precision)[:, None])
        )
    }
    for name, pair in ((linked.beta, prior.beta), (linked.noise, prior.noise)):
        if name:
            read[name] = jnp.sum(gamma.logpdf(values[name], pair[0], scale=1 / pair[1]))
    if linked.centre:
        read[linked.centre] = jnp.sum(norm.logpdf(centre, loc[-1], 1 / jnp.sqrt(prior.centre)))
    if linked.share and prior.counts:
        read[linked.share] = jnp.sum(beta.logpdf(values[linked.share], *prior.counts))
    if linked.shown:
        shown, share = (
            values[linked.shown].astype(float),
            values[linked.share] if linked.share else prior.share,
        )
        read[linked.shown] = jnp.sum(xlogy(shown, share) + xlog1py(1 - shown, -share))
    value, size = _of_features(found, prior, x, centre, noise, values)
    gaps = {name: gap(value, jnp.sum(each[name])) for name, value in read.items()}
    return gaps | {linked.site: gap_of_sums(value, row_sums(each[linked.site], len(x)), size)}


def _of_features(
    found: FactorMixture,
    prior: LinearPrior,
    x: Array,
    centre: Array,
    noise: Array,
    values: dict[str, Array],
) -> tuple[Array, Array]:
    """Log probability of what each row shows, and how large the terms are that it is a sum of."""
    linked = found.linked
    shown = values[linked.shown].astype(float) if linked.shown else jnp.ones_like(prior.share)
    loadings = jnp.concatenate([values[linked.loadings].T, centre[:, None]], 1)
    told = told_at(loadings, noise, jnp.concatenate([shown, jnp.ones((len(shown), 1))], 1))
    seen = ~jnp.isnan(x)
    const, matrix, slope = of_rows(told, jnp.where(seen, x, 0), seen.astype(float))
    z, scores = values[found.given.z], values[linked.scores]
    u = jnp.concatenate([scores, jnp.ones((len(scores), 1))], 1)
    linear, square = (
        told.shown[z] * slope * u,
        u[:, :, None] * told.both[z] * matrix * u[:, None] / 2,
    )
    size = jnp.abs(const) + jnp.abs(linear).sum(1) + jnp.abs(square).sum((1, 2))
    return const + linear.sum(1) - square.sum((1, 2)), size
