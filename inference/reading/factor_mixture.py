"""Finds a mixture among common factors in a model, and proves it.

The groups are a mixture over the factors of a row; the features are noisy sums of these factors.

    found = read_factors(program)     # a `FactorMixture`: the part of each site
    found.given                       # the mixture as if factors were data, an `Assignment`
    found.prior                       # hyper-parameters of the sites between factors and features
    found.rows(program)               # the data by row

    z, groups, soft labels, labels    a truncated mixture with the factors s[i] as its features
    features     x[i, p] ~ Normal(c[p] + sum_k s[i, k] b[z[i], k] A[k, p], 1 / psi[p]), NaN where
                 missing
    A, c, b, psi as in `inference.reading.conjugate.loadings`. There may be no c and no b. Each has
                 a conjugate prior, or is a known number.

Given the factors, all but the features is a mixture with known data, and is read and proved by
`inference.reading.stick_mixture`. The rest is read by types, shapes and dependencies. It is proved
by comparing each site's log probability with the model's own at random values, row by row.

Cost: that of reading a mixture, and a few more evaluations of the model on all rows, or on many.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import xlog1py, xlogy
from jax.scipy.stats import beta, gamma, norm
from numpyro import handlers
from numpyro.distributions import biject_to

from inference.program.program import Program
from inference.program.sites import require, unwrap
from inference.reading.conjugate.loadings import LinearPrior, known_loadings, row_forms
from inference.reading.proof import gap, gap_of_sums
from inference.reading.stick_mixture.read import (
    FEW,
    MOST,
    assignment_and_rows,
    assignment_site,
    many_rows,
    numbers_of_a_row,
    prove_for,
    proved_prior,
    row_sums,
    some_rows,
)
from inference.reading.stick_mixture.structure import (
    WAY_OUT,
    Assignment,
    MixtureRows,
    random_start,
    refuse_infinite,
    refuse_other_children,
)

__all__ = [
    "FactorMixture",
    "GivenScores",
    "Linked",
    "factors_and_rows",
    "has_factors",
    "read_factors",
]


class Linked(NamedTuple):
    """The sites between factors and features; None for one that is absent, or a number."""

    site: str  # the features
    scores: str
    loadings: str
    beta: str | None
    centre: str | None
    noise: str | None
    shown: str | None  # b: whether a group uses a factor
    share: str | None  # the probability of b

    @property
    def latent(self) -> tuple[str, ...]:
        """The latent sites other than the factors."""
        return tuple(name for name in self[2:] if name)


@dataclass(frozen=True)
class FactorMixture:
    """The part of each site in the mixture."""

    few: Program  # the model on a few of its rows
    linked: Linked
    given: Assignment
    prior: LinearPrior | None = None

    @property
    def num_factors(self) -> int:
        """The number of factors of a row."""
        return self.few.sites[self.linked.scores].shape[1]

    def start(self, program: Program, seed: int) -> dict[str, np.ndarray]:
        """Random unconstrained values of the latent sites of a program."""
        return random_start(program, seed, {self.given.z: self.given.num_own, self.linked.shown: 2})

    def rows(self, program: Program) -> MixtureRows:
        """The data of a program by row; raises ValueError for infinite features."""
        return self.with_features(
            program,
            self.given.rows(_given_scores(program, self.linked, _constants(self.few, self.linked))),
        )

    def with_features(self, program: Program, upper: MixtureRows) -> MixtureRows:
        """The data by row, given those of the mixture as if factors were data."""
        x = np.asarray(program.observed_values[self.linked.site], np.float64)
        refuse_infinite(self.linked.site, x)
        return upper._replace(features=x)

    def prior_at(self, program: Program, values: Mapping[str, Array]) -> LinearPrior:
        """The hyper-parameters, as the model has them at these values of the latent sites."""
        trace, linked = program.trace(values), self.linked

        def number(site: str, name: str, *shape: int) -> Array:
            return jnp.broadcast_to(getattr(unwrap(trace[site]["fn"]), name), shape)

        def gamma_of(site: str | None, known: Array) -> tuple[Array, Array]:
            if site is None:
                return known, jnp.full_like(known, jnp.inf)
            return number(site, "concentration", len(known)), number(site, "rate", len(known))

        scale, loc = (
            number(linked.loadings, name, *values[linked.loadings].shape)
            for name in ("scale", "loc")
        )
        num_factors, num_features = scale.shape
        centre_loc, centre = jnp.zeros(num_features, scale.dtype), jnp.ones_like(scale[0])
        if linked.centre:
            centre_loc = number(linked.centre, "loc", num_features)
            centre = number(linked.centre, "scale", num_features) ** -2
        shape, counts = (self.given.num_own, num_factors), None
        share = jnp.ones(shape, scale.dtype)
        if linked.share:
            c1, c0 = (number(linked.share, f"concentration{i}", *shape) for i in (1, 0))
            counts, share = (c1, c0), c1 / (c0 + c1)
        elif linked.shown:
            share = number(linked.shown, "probs", *shape)
        return LinearPrior(
            jnp.concatenate([loc.T, centre_loc[:, None]], 1),
            centre,
            gamma_of(linked.beta, scale[:, 0] ** -2),
            gamma_of(
                linked.noise,
                number(linked.site, "scale", *program.sites[linked.site].shape)[0] ** -2,
            ),
            share,
            counts,
        )


def has_factors(program: Program) -> bool:
    """Whether rows have latent Normal vectors of their own, so that `read_factors` applies."""
    return bool(_scores(program))


def _scores(program: Program) -> list[str]:
    sites = [site for site in program.sites.values() if site.kind == "latent"]
    rows = next((site.plates for site in sites if site.family.startswith("Categorical")), None)
    is_vector = lambda site: site.family == "MultivariateNormal" and len(site.shape) == 2
    return [site.name for site in sites if is_vector(site) and site.plates == rows]


def read_factors(program: Program) -> FactorMixture:
    """Reads the mixture of a model and proves it; a StructureError names the site that differs."""
    return factors_and_rows(program)[0]


def factors_and_rows(program: Program) -> tuple[FactorMixture, MixtureRows]:
    """The mixture of a model, proved, and the data by row, which the proof needs as well."""
    z = assignment_site(program)
    few = some_rows(program, z, FEW)
    linked = _linked(few, z)
    refuse_other_children(few, {name: {linked.site, *linked.latent} for name in linked.latent})
    given, upper = assignment_and_rows(_given_scores(program, linked, _constants(few, linked)))
    others = [block.site for block in given.columns] + [level.site for level in given.levels[1:]]
    require(
        given.features and not others,
        f"site {(others or [linked.scores])[0]!r}: only factors and labels may depend on groups. "
        f"{WAY_OUT}",
    )
    found = FactorMixture(few, linked, given)
    compared = many_rows(program, z, MOST // numbers_of_a_row(few, linked.scores))
    refusal = lambda site, missed: (
        f"site {site!r} ({compared.sites[site].family}): read as part of Normal features that are "
        f"sums of the factors {linked.scores!r} that the group of the row uses, but the log "
        f"probability of the model misses that by {missed:.2g} (relative), in some row or at some "
        "value. Look for a parameter that is transformed, scaled, clipped, shared or masked. "
        f"{WAY_OUT}"
    )
    rows = found.with_features(program, upper)
    some = rows if compared is program else found.rows(compared)
    found = replace(found, prior=proved_prior(found, compared, some, _gaps, refusal))
    for other in (few, program):
        if other is not compared:
            prove_for(other, found, linked.site, "loadings")
    return found, rows


def _linked(few: Program, z: str) -> Linked:
    scores = _scores(few)
    require(
        len(scores) == 1,
        f"sites {scores}: several vectors of factors for each row; wanted one. {WAY_OUT}",
    )
    depends = lambda name: scores[0] in few.parents[name] and few.sites[name].family == "Normal"
    below = [name for name in few.observed if depends(name)]
    require(
        [len(few.sites[name].shape) for name in below] == [2],
        f"site {scores[0]!r}: Normal sites {below} are computed from it; wanted one of features, "
        f"[row, feature]. {WAY_OUT}",
    )
    site = below[0]
    num_features, num_factors = few.sites[site].shape[1], few.sites[scores[0]].shape[1]
    parents = sorted(few.parents[site] - {scores[0], z})
    kinds = {
        ("Normal", (num_factors, num_features)): "loadings",
        ("Normal", (num_features,)): "centre",
        ("Gamma", (num_features,)): "noise",
    }
    found: dict[Any, Any] = dict.fromkeys(("loadings", "centre", "noise", "shown"))
    for name in parents:
        own = few.sites[name]
        is_shown = own.family == "BernoulliProbs" and own.shape[1:] == (num_factors,)
        role = "shown" if is_shown else kinds.get((own.family, own.shape))
        require(
            role and not found[role],
            f"site {site!r}: it is computed from {name!r} ({own.family}, of shape {own.shape}); "
            f"wanted Normal loadings [{num_factors}, {num_features}], a Normal centre and a Gamma "
            "precision of each feature, and a Bernoulli site for each group and factor. "
            f"{WAY_OUT}",
        )
        found[role] = name
    require(
        found["loadings"],
        f"site {site!r}: no Normal loadings [{num_factors}, {num_features}] among {parents}. "
        f"{WAY_OUT}",
    )
    loadings, centre, noise, shown = found.values()
    share = _behind(few, shown, "Beta", few.sites[shown].shape) if shown else None
    for name in filter(None, (centre, noise)):
        _behind(few, name, "", ())
    return Linked(
        site,
        scores[0],
        loadings,
        _behind(few, loadings, "Gamma", (num_factors,)),
        centre,
        noise,
        shown,
        share,
    )


def _behind(few: Program, name: str, family: str, shape: tuple[int, ...]) -> str | None:
    # The parent of a site, if it has one; it must be of this family and shape, without parents.
    parents = sorted(few.parents[name])
    kinds = {
        (few.sites[each].family, few.sites[each].shape, *few.parents[each]) for each in parents
    }
    wanted = f"numbers, or one {family} site of shape {shape}" if family else "numbers"
    require(
        len(parents) < 2 and kinds <= {(family, shape)},
        f"site {name!r}: its prior is computed from {parents}; wanted {wanted}. {WAY_OUT}",
    )
    return parents[0] if parents else None


def _constants(few: Program, linked: Linked) -> dict[str, np.ndarray]:
    found = {}
    for name in linked.latent:
        site = few.sites[name]
        zeros = jnp.zeros(site.shape)
        found[name] = np.asarray(
            zeros if site.is_discrete else biject_to(site.support)(zeros), site.dtype
        )
    return found


@dataclass(frozen=True)
class GivenScores:
    """A model as if the factors of a row were data, without the features and the sites between."""

    model: Callable
    linked: Linked
    values: Mapping[str, Any]  # of the sites that are left out

    def __call__(self, scores: Any, **arguments: Any) -> Any:
        """Runs the model at these factors."""
        held = {name: jnp.asarray(self.values[name]) for name in self.linked.latent}
        conditioned = handlers.condition(
            handlers.substitute(self.model, data=held), {self.linked.scores: jnp.asarray(scores)}
        )
        return handlers.block(conditioned, hide=[self.linked.site, *self.linked.latent])(
            **arguments
        )


def _given_scores(program: Program, linked: Linked, values: Mapping[str, Any]) -> Program:
    return Program(
        GivenScores(program.model, linked, values),
        np.random.default_rng(0).normal(size=program.sites[linked.scores].shape),
        **program.arguments,
    )


# The proof.


def _gaps(
    found: FactorMixture,
    program: Program,
    rows: MixtureRows,
    prior: LinearPrior,
    values: dict[str, Array],
) -> dict[str, Array]:
    linked, each = found.linked, program.log_probs(values)
    x = jnp.asarray(rows.features, float)
    site, scores, loadings, beta_site, centre_site, noise_site, shown_site, share_site = linked
    at = lambda name, known: values[name] if name else known
    precision, noise = at(beta_site, prior.beta[0]), at(noise_site, prior.noise[0])
    centre, share = at(centre_site, jnp.zeros(x.shape[1])), at(share_site, prior.share)
    shown = at(shown_site, jnp.ones_like(prior.share)).astype(float)
    loc, scale = prior.loc.T, 1 / jnp.sqrt(precision)[:, None]
    read = {
        loadings: norm.logpdf(values[loadings], loc[:-1], scale),
        centre_site: norm.logpdf(centre, loc[-1], 1 / jnp.sqrt(prior.centre)),
        beta_site: gamma.logpdf(precision, prior.beta[0], scale=1 / prior.beta[1]),
        noise_site: gamma.logpdf(noise, prior.noise[0], scale=1 / prior.noise[1]),
        shown_site: xlogy(shown, share) + xlog1py(1 - shown, -share),
        share_site: beta.logpdf(share, *prior.counts) if prior.counts else jnp.zeros(()),
    }
    moments = known_loadings(
        jnp.concatenate([values[loadings].T, centre[:, None]], 1),
        noise,
        jnp.pad(shown, ((0, 0), (0, 1)), constant_values=1.0),
    )
    seen, z = ~jnp.isnan(x), values[found.given.z]
    const, matrix, slope = row_forms(moments, jnp.where(seen, x, 0), seen.astype(float))
    u = jnp.pad(values[scores], ((0, 0), (0, 1)), constant_values=1.0)
    linear = moments.shown[z] * slope * u
    square = u[:, :, None] * moments.both[z] * matrix * u[:, None] / 2
    gaps = {name: gap(jnp.sum(own), jnp.sum(each[name])) for name, own in read.items() if name}
    gaps[site] = gap_of_sums(
        const + linear.sum(1) - square.sum((1, 2)),
        row_sums(each[site], len(x)),
        jnp.abs(const) + jnp.abs(linear).sum(1) + jnp.abs(square).sum((1, 2)),
    )
    return gaps
