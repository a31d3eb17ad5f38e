"""The strategy of `CoordinateAscent` for mixtures among common factors.

    q = q(alpha) q(V) prod_h q(mu_h, Lambda_h) q(w) q(zeta, lambda)
        prod_hk q(b_hk, pi_hk) prod_p q(A_p, c_p) q(beta) q(psi)
        prod_i q(z_i) q(s_i, t_i | z_i)

It starts from principal components of the features as factors, and from groups found among those.
A step is two sweeps over the rows (`factor_rows`), each followed by updates of groups and experts.
After the first sweep q(b, pi) is updated, after the second q of the loadings and the noise, because
each of the two needs sums over rows that hold the other one fixed.

A prediction integrates out the missing entries of a row. The factors of a group are taken as Normal
with the mean and covariance of their predictive distribution, a Student t. The loadings enter by
their means and covariances under q, as in a sweep. The score of an expert is taken as Normal with
its mean and variance under q(w) and those factors.

Cost of a step over n rows with P features, K factors and H groups: 2 n (P K^2 + H K^3) + P K^3; of
a prediction of a row: P K^2 + H K^3.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.scipy.special import xlog1py, xlogy
from jax.scipy.stats import beta, norm
from jaxtyping import Float

from inference.kernels.coordinate_ascent.draws import (
    Drawn,
    draw_free_labels,
    draw_gamma,
    draw_groups,
    draw_normal,
    draw_soft_labels,
)
from inference.kernels.coordinate_ascent.factor_rows import (
    FactorChunks,
    GroupConditional,
    factor_chunks,
    factor_posterior,
    group_conditional,
    loading_sums,
    shown_sums,
    sum_chunks,
)
from inference.kernels.coordinate_ascent.posterior import (
    Factors,
    Shape,
    divergence,
    factors_of,
    means_of,
    message_of,
    parameters_of,
)
from inference.kernels.coordinate_ascent.predict import (
    Prediction,
    in_chunks,
    log_label,
    log_weights,
)
from inference.kernels.coordinate_ascent.rows import Message, SufficientSums, as_floats
from inference.kernels.coordinate_ascent.start import STARTS, by_size
from inference.program.compiling import compiled, once
from inference.program.interpreting import interpreted
from inference.program.program import Program
from inference.reading.conjugate.loadings import (
    Linear,
    LinearPrior,
    LinearSums,
    linear_divergence,
    linear_posterior,
    loading_moments,
    shown_posterior,
)
from inference.reading.conjugate.quadratic import GateMeans, gate_natural, outer
from inference.reading.factor_mixture import FactorMixture, factors_and_rows
from inference.reading.stick_mixture.structure import MixtureRows, Prior

__all__ = ["FactorAscent", "FactorData", "FactorState", "factor_message"]


class FactorState(NamedTuple):
    """The parameters of q.

    For rows it keeps only the locations of the soft labels that are factors of their own.
    """

    factors: Factors
    linear: Linear
    score: Array  # [chunk, place, class, group]
    size: Array  # expected number of rows of each group
    elbo: Array  # of the last step
    gain: Array  # over the step before
    trial: None = None  # no merges are tried


class FactorData(NamedTuple):
    """What a step reads."""

    chunks: FactorChunks
    prior: Prior  # of the groups
    linear: LinearPrior


@dataclass(frozen=True, eq=False)
class FactorAscent:
    """A mixture among common factors as it was read, and its steps."""

    attributes: ClassVar = {"route": "factors"}
    found: FactorMixture
    rows: MixtureRows  # as they came: a start reads them, steps read `FactorChunks`
    shape: Shape

    @classmethod
    def read(
        cls, program: Program, dtype: str | None, batch_size: int | None, forgetting: float
    ) -> "tuple[FactorAscent, FactorData]":
        """The mixture, proved, and the rows in chunks; refuses settings that it does not have."""
        for name, value in (("batch_size", batch_size), ("dtype", dtype)):
            if value is not None:
                raise ValueError(
                    f"{name}: found {value!r} for a model whose rows have latent factors; wanted "
                    "None."
                )
        found, rows = factors_and_rows(program)
        size = found.num_factors
        if any(place > size for place in rows.design):
            raise ValueError(
                f"site {found.given.experts}: experts see more than factors and a bias; wanted no "
                "other columns."
            )
        reading = cls(found, rows, Shape(size, size + 1, rows.design))
        chunks = factor_chunks(rows.features, rows.signs, found.given.num_own, size + 1)
        return reading, FactorData(chunks, *as_floats((found.given.prior, found.prior)))

    def start(self, rng: np.random.Generator, init: str, data: FactorData) -> FactorState:
        """q after an update of each factor, given starting groups and principal components."""
        sums, linear_sums = _start_sums(self.found, self.rows, init, rng)
        given = (data, sums, linear_sums)
        return interpreted(self._started, *given)(*given)

    def _started(
        self, data: FactorData, sums: SufficientSums, linear_sums: LinearSums
    ) -> FactorState:
        # The loadings start with noise and precisions of 1 where they are not known.
        linked, prior = self.found.linked, data.linear
        or_one = lambda part, rate: jnp.where(jnp.isinf(rate), part, 1.0)
        known = lambda pair: (or_one(pair[0], pair[1]), or_one(pair[1], pair[1]))
        size = prior.loc.shape[1]
        shown = jnp.full((len(prior.share), size), 0.9 if linked.shown else 1.0)
        shown = shown.at[:, -1].set(float(linked.centre is not None))
        linear = Linear(
            prior.loc,
            jnp.broadcast_to(jnp.eye(size), (*prior.loc.shape, size)),
            known(prior.beta),
            known(prior.noise),
            shown,
        )
        signs, infinite = data.chunks.signs[..., None], jnp.full((), jnp.inf, sums.bound.dtype)
        return FactorState(
            factors_of(self.found.given, self.shape, data.prior, sums),
            linear_posterior(prior, linear, linear_sums),
            jnp.broadcast_to(signs, (*signs.shape[:-1], len(shown))),
            sums.moments[0, :, -1, -1],
            -infinite,
            infinite,
        )

    def moved(self, rng_key: Array, state: FactorState, data: FactorData) -> FactorState:
        """A step, which needs no random numbers; the bound is that of the q it started from."""
        before, elbo = state.elbo, None
        if self.found.linked.shown:
            (moments, products), state = self._swept(state, data, shown_sums)
            shown = shown_posterior(data.linear, state.linear.shown, moments, products)
            state, elbo = state._replace(linear=state.linear._replace(shown=shown)), state.elbo
        sums, state = self._swept(state, data, loading_sums)
        elbo = state.elbo if elbo is None else elbo
        return state._replace(
            linear=linear_posterior(data.linear, state.linear, sums),
            elbo=elbo,
            gain=elbo - before,
        )

    def _swept(self, state: FactorState, data: FactorData, summary: Any) -> tuple[Any, FactorState]:
        given, linear = self.found.given, state.linear
        means = means_of(state.factors)
        (sums, own), score = sum_chunks(
            factor_message(self.found, self.shape, state.factors, means),
            loading_moments(linear),
            data.chunks,
            state.score,
            summary,
        )
        elbo = (
            sums.bound
            - divergence(given, data.prior, state.factors, means)
            - linear_divergence(data.linear, linear)
        )
        return own, state._replace(
            factors=factors_of(given, self.shape, data.prior, sums, state.factors),
            score=score,
            size=sums.moments[0, :, -1, -1],
            elbo=elbo,
        )

    def predict(self, state: FactorState, rows: MixtureRows) -> Prediction:
        """The predictions for rows, as if they had not been fitted."""
        x, seen = np.nan_to_num(rows.features), ~np.isnan(rows.features)
        parts = (x, seen, rows.signs, np.ones(len(x)))
        given = tuple(np.asarray(part, state.elbo.dtype) for part in parts)
        of_chunk = lambda given: _predicted(self.shape, state.factors, state.linear, *given)
        found = in_chunks(of_chunk, given)
        return found._replace(
            mean=np.where(seen, x, found.mean), deviation=np.where(seen, 0, found.deviation)
        )

    def draw(
        self, rng_key: Array, state: FactorState, data: FactorData, num_draws: int
    ) -> dict[str, Array]:
        """Independent draws from q of all sites [draw, ...]; `log_q` is their density."""
        found = self.found
        message = factor_message(found, self.shape, state.factors)
        moments = loading_moments(state.linear)
        in_group = lambda part: group_conditional(message, moments, *part)
        parts, labels = (data.chunks, state.score), data.chunks.signs
        given = compiled(lambda parts: lax.map(in_group, parts), parts)(parts)
        num_rows, num_places = len(self.rows.features), labels.shape[0] * labels.shape[1]
        flat = lambda leaf: leaf.reshape(num_places, *leaf.shape[2:])[:num_rows]
        given, signs, score = jax.tree.map(flat, (given, labels, state.score))

        def one(key: Array) -> dict[str, Array]:
            keys = random.split(key, 4)
            values, log_q = draw_groups(found.given, state.factors, keys[0])
            linear, of_linear = _draw_linear(found, data.linear, state.linear, keys[1])
            rows, soft, of_rows = _draw_rows(found, given, signs, score, keys[2])
            values, log_q = values | linear | rows, log_q + of_linear + of_rows
            if found.given.experts:
                scores, z = values[found.linked.scores], values[found.given.z]
                entries = jnp.concatenate([scores, jnp.ones_like(scores[:, :1])], 1)[
                    :, jnp.array(self.shape.design)
                ]
                values[found.given.experts.soft], of_free = draw_free_labels(
                    keys[3], found.given, values, z, entries, signs, soft
                )
                log_q = log_q + of_free
            return values | {"log_q": log_q}

        # Compiling takes longer than running.
        keys = random.split(rng_key, num_draws)
        return once(lambda keys: lax.map(one, keys), keys)(keys)

    def parameters(self, state: FactorState) -> dict[str, dict[str, Array]]:
        """The parameters of q by site, without those of the rows."""
        linked, linear = self.found.linked, state.linear
        gamma = lambda pair: {"concentration": pair[0], "rate": pair[1]}
        named = {
            linked.loadings: {"loc": linear.mean[:, :-1].T, "covariance": linear.covariance},
            linked.centre: {"loc": linear.mean[:, -1]},
            linked.beta: gamma(linear.beta),
            linked.noise: gamma(linear.noise),
            linked.shown: {"probs": linear.shown[:, :-1]},
        }
        named = parameters_of(self.found.given, state.factors) | named
        return {site: parameters for site, parameters in named.items() if site}


def factor_message(
    found: FactorMixture, shape: Shape, factors: Factors, means: GateMeans | None = None
) -> Message:
    """The messages of groups and of their experts to the factors of a row."""
    return jax.tree.map(lambda leaf: leaf[0], message_of(found.given, shape, factors, means))


# The start.


def _start_sums(
    found: FactorMixture, rows: MixtureRows, init: str, rng: np.random.Generator
) -> tuple[SufficientSums, LinearSums]:
    # The sums over rows that components and groups imply, with the mean of a feature for a missing
    # one, and a sign for a soft label.
    seen = ~np.isnan(rows.features)
    x = np.where(seen, rows.features, 0)
    scores = _components(
        np.where(seen, x - x.sum(0) / np.maximum(seen.sum(0), 1), 0), found.num_factors, rng
    )
    num_groups, size = found.given.num_own, found.num_factors + 1
    u = np.concatenate([scores, np.ones((len(x), 1))], 1)
    variance = 0.1 * np.diag([*np.ones(size - 1), 0.0])  # of the factors of a row
    second, rho = (
        u[:, :, None] * u[:, None] + variance,
        np.eye(num_groups)[by_size(STARTS[init](scores, num_groups, rng), num_groups)],
    )
    sums = (
        np.einsum("nh,nij->hij", rho, second),
        np.einsum("nc,nh,nij->chij", (rows.signs != 0).astype(float), rho, second, optimize=True),
        np.einsum("nc,nh,ni->chi", rows.signs, rho, u, optimize=True),
        np.zeros((0, num_groups)),
    )
    shown = np.array([*np.ones(size - 1), float(found.linked.centre is not None)])
    moments = np.tensordot(seen.astype(float), second * np.outer(shown, shown), ((0,), (0,)))
    own = SufficientSums(*as_floats((*(part[None] for part in sums), 0.0)))
    linear = (moments, x.T @ (u * shown), seen.sum(0), (x**2).sum(0))
    return own, LinearSums(*as_floats(linear))


def _components(x: np.ndarray, num: int, rng: np.random.Generator) -> np.ndarray:
    # Principal component scores of variance 1; noise where there are fewer components.
    left, values, _ = np.linalg.svd(x, full_matrices=False)
    kept = values[:num] > 1e-8 * max(values[0], 1e-300)
    scores = rng.normal(size=(len(x), num))
    scores[:, : kept.sum()] = left[:, :num][:, kept] * np.sqrt(len(x))
    return scores


# Draws.


def _draw_linear(found: FactorMixture, prior: LinearPrior, linear: Linear, rng_key: Array) -> Drawn:
    linked, keys = found.linked, random.split(rng_key, 5)
    own, log_q = draw_normal((linear.mean, linear.covariance), keys[0])
    values = {linked.loadings: own[:, :-1].T}
    if linked.centre:
        values[linked.centre] = own[:, -1]
    else:  # the last entry is no site, and independent of the others
        log_q = log_q - jnp.sum(
            norm.logpdf(own[:, -1], linear.mean[:, -1], jnp.sqrt(linear.covariance[:, -1, -1]))
        )
    gammas = ((linked.beta, linear.beta), (linked.noise, linear.noise))
    for key, (name, pair) in zip(keys[1:3], gammas, strict=True):
        if name:
            values[name], of_gamma = draw_gamma(key, pair)
            log_q = log_q + of_gamma
    if linked.shown:
        q = linear.shown[:, :-1]
        shown = random.bernoulli(keys[3], q).astype(q.dtype)
        values[linked.shown] = shown.astype(found.few.sites[linked.shown].dtype)
        log_q = log_q + jnp.sum(xlogy(shown, q) + xlog1py(1 - shown, -q))
        if linked.share and prior.counts:
            counts = (prior.counts[0] + shown, prior.counts[1] + 1 - shown)
            values[linked.share] = random.beta(keys[4], *counts)
            log_q = log_q + jnp.sum(beta.logpdf(values[linked.share], *counts))
    return values, log_q


def _draw_rows(
    found: FactorMixture,
    given: GroupConditional,
    signs: Float[Array, "row class"],
    score: Float[Array, "row class group"],
    rng_key: Array,
) -> tuple[dict[str, Array], Float[Array, "row class"], Float[Array, ""]]:
    # Groups and factors; soft labels that have a sign [row, class]; and the log density.
    group_key, soft_key, score_key = random.split(rng_key, 3)
    log_rho = jax.nn.log_softmax(given.log_joint, axis=1)
    z = random.categorical(group_key, log_rho)
    at = jnp.arange(len(z))
    mean, covariance, pull, loc, variance = (leaf[at, z] for leaf in given[1:-1])
    soft, of_labels = draw_soft_labels(
        soft_key,
        jnp.where(given.last > 0, loc[:, None], score[at, :, z]),
        jnp.where(given.last > 0, jnp.sqrt(variance)[:, None], 1),
        signs,
    )
    is_tied = given.last.sum(1)
    covariance = covariance - outer(pull) * (is_tied / variance)[:, None, None]
    scores, of_scores = draw_normal(
        (
            mean + pull * (is_tied * (jnp.sum(given.last * soft, 1) - loc) / variance)[:, None],
            covariance,
        ),
        score_key,
    )
    z_site, scores_site = found.given.z, found.linked.scores
    values = {z_site: z.astype(found.few.sites[z_site].dtype), scores_site: scores}
    return values, soft, jnp.sum(log_rho[at, z]) + jnp.sum(of_labels) + of_scores


# Predictions.


@partial(jax.jit, static_argnums=0)
def _predicted(shape: Shape, factors: Factors, linear: Linear, *given: Array) -> Prediction:
    # Mean and standard deviation are those of all features, seen or not.
    chunk, moments = FactorChunks(*given), loading_moments(linear)
    # The covariance of the Student t of the factors; its scale where it has no covariance.
    loc, kappa, nu, rate = factors.features
    freedom = nu + 1 - loc.shape[1]
    freedom = jnp.where(freedom > 2, freedom - 2, freedom)
    form = gate_natural(
        jnp.linalg.inv(rate * ((kappa + 1) / (kappa * freedom))[:, None, None]), loc
    )
    nothing = jnp.zeros((0, *form.matrix.shape), loc.dtype)
    const = form.const + log_weights(factors)[0]
    message = Message(const, form.matrix, nothing[..., 0], nothing, nothing[:, :, 0, 0])
    # The mean of each feature's noise; rate / concentration where it has no mean.
    concentration, noise_rate = linear.noise
    is_known = jnp.isinf(noise_rate)
    noise = jnp.where(
        is_known,
        1 / concentration,
        jnp.where(is_known, 1, noise_rate)
        / jnp.where(concentration > 1, concentration - 1, concentration),
    )

    unlabelled = chunk._replace(signs=chunk.signs[:, :0])
    no_labels = jnp.zeros((*unlabelled.signs.shape, len(const)), const.dtype)
    given = group_conditional(message, moments, unlabelled, no_labels)
    placed = factor_posterior(message, moments, unlabelled, no_labels)
    rho = jnp.exp(placed.log_rho)
    mean = jnp.einsum("nh,hi,nhi->ni", rho, moments.shown, placed.mean) @ moments.mean.T
    square = jnp.einsum("nh,hij,nhij,pij->np", rho, moments.both, placed.second, moments.second)
    log_side = jnp.zeros_like(placed.log_rho)
    if (weights := factors.weights) is not None:
        log_side = jax.vmap(lambda *row: log_label(weights, row[0], shape.design, *row[1:]))(
            chunk.signs, placed.mean, given.covariance
        )
    return Prediction(
        placed.log_rho,
        jax.nn.logsumexp(placed.log_rho + log_side, axis=1),
        mean,
        jnp.sqrt(noise[None] + square - mean**2),
    )
