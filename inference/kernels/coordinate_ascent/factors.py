"""Where coordinate ascent among common factors starts: principal components of the features as
factors, groups found among those.

Coordinate ascent for mixtures among common factors: what `CoordinateAscent` reads where rows have
latent factors, and its steps.

    q = q(alpha) q(V) prod_h q(mu_h, Lambda_h) q(w) q(zeta, lambda)  prod_hk q(b_hk, pi_hk) prod_p
    q(A_p, c_p) q(beta) q(psi)
        prod_i q(z_i) q(s_i, t_i | z_i)

A step is two sweeps over the rows (`factor_rows`), each followed by what groups and experts say;
after the first sweep which factors each group shows, after the second the loadings and the noise:
both need sums over rows that hold the other one fixed. Cost of a step over n rows with P features,
K factors and H groups: 2 n (P K^2 + H K^3) + P K^3.

Independent draws from the mean-field posterior of a mixture among common factors, every latent
site, with their density under it.

What the mean-field posterior of a mixture among common factors says of other rows, their missing
entries integrated out.

A row's group and factors follow from what it shows: an entry that is missing has no part. The
factors of a group are taken for normal with the mean and covariance of their predictive, a Student
t, and the loadings come in by their means and covariances under q, as in a sweep. What an expert
then says is that of a score with the mean and variance that it has under q(w) and those factors.

Cost of a row with P features, K factors, H groups: P K^2 + H K^3.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.scipy.special import xlog1py, xlogy
from jax.scipy.stats import beta, gamma, norm

from inference.distributions.truncated_normal import TruncatedNormal
from inference.kernels.coordinate_ascent.draws import draw_groups
from inference.kernels.coordinate_ascent.factor_rows import (
    Chunks,
    Given,
    Said,
    given_group,
    lay_out,
    place,
    sum_chunks,
)
from inference.kernels.coordinate_ascent.posterior import (
    Factors,
    Shape,
    divergence,
    expected_log_weights,
    factors_of,
    parameters_of,
)
from inference.kernels.coordinate_ascent.predict import Prediction, log_label, log_weights
from inference.kernels.coordinate_ascent.rows import Sums
from inference.kernels.coordinate_ascent.start import STARTS
from inference.program.compiling import compiled, once
from inference.program.program import Program
from inference.reading.conjugate.loadings import (
    Linear,
    LinearPrior,
    LinearSums,
    Told,
    posterior,
    shown_posterior,
    surprise,
    told,
)
from inference.reading.conjugate.quadratic import gate_expected, gate_natural
from inference.reading.factor_mixture import FactorMixture, FactorRows, read_factors
from inference.reading.stick_mixture.structure import by_class

__all__ = [
    "FactorAscent",
    "FactorData",
    "FactorState",
    "draw_factors",
    "predict_factors",
    "said_of",
    "start_linear",
    "start_sums",
]

SHOWN = 0.9  # of each factor in each group, at the start
SPREAD = 0.1  # variance of the factors of a row, at the start


def start_sums(
    found: FactorMixture, rows: FactorRows, init: str, rng: np.random.Generator
) -> tuple[Sums, LinearSums]:
    """The sums over rows that components and groups imply, a missing feature taken for its mean,
    a soft label for its sign.
    """
    seen = ~np.isnan(rows.features)
    count = np.maximum(seen.sum(0), 1)
    x = np.where(seen, rows.features, 0)
    centred = np.where(seen, x - x.sum(0) / count, 0)
    scores = _components(centred, found.num_factors, rng)
    num_groups, size = found.given.num_own, found.num_factors + 1
    group = STARTS[init](scores, num_groups, rng)
    group = np.argsort(np.argsort(-np.bincount(group, minlength=num_groups), kind="stable"))[group]
    u = np.concatenate([scores, np.ones((len(x), 1))], 1)
    second = u[:, :, None] * u[:, None] + SPREAD * np.diag([*np.ones(size - 1), 0.0])
    rho = np.eye(num_groups)[group]
    is_asked = (rows.signs != 0).astype(float)
    moments = np.einsum("nh,nij->hij", rho, second)
    asked = np.einsum("nc,nh,nij->chij", is_asked, rho, second, optimize=True)
    products = np.einsum("nc,nh,ni->chi", rows.signs, rho, u, optimize=True)
    sums = (moments, asked, products, np.zeros((0, num_groups)))
    shown = np.array([*np.ones(size - 1), float(found.linked.centre is not None)])
    linear = (
        np.tensordot(seen.astype(float), second * np.outer(shown, shown), ((0,), (0,))),
        x.T @ (u * shown),
    )
    sums = Sums(*(jnp.asarray(part, float)[None] for part in sums), jnp.zeros((), float))
    return sums, LinearSums(*(jnp.asarray(part, float) for part in linear))


def start_linear(prior: LinearPrior, is_centred: bool, is_shown: bool) -> Linear:
    """Before the first update of the loadings: noise and precisions of 1 where they are not
    known.
    """
    known = lambda pair: (
        jnp.where(jnp.isinf(pair[1]), pair[0], 1.0),
        jnp.where(jnp.isinf(pair[1]), pair[1], 1.0),
    )
    size = prior.loc.shape[1]
    covariance = jnp.broadcast_to(jnp.eye(size), (*prior.loc.shape, size))
    shown = jnp.full(prior.share.shape, SHOWN if is_shown else 1.0)
    last = jnp.full((len(shown), 1), float(is_centred))
    return Linear(
        prior.loc,
        covariance,
        known(prior.beta),
        known(prior.noise),
        jnp.concatenate([shown, last], 1),
    )


def _components(x: np.ndarray, num: int, rng: np.random.Generator) -> np.ndarray:
    """Scores of variance 1; where there are fewer components, noise."""
    left, values, _ = np.linalg.svd(x, full_matrices=False)
    kept = values[:num] > 1e-8 * max(values[0], 1e-300)
    scores = rng.normal(size=(len(x), num))
    scores[:, : kept.sum()] = left[:, :num][:, kept] * np.sqrt(len(x))
    return scores


class FactorData(NamedTuple):
    """The rows as a step reads them."""

    chunks: Chunks
    count: Array  # seen entries of each feature
    squares: Array  # sum of their squares


class FactorState(NamedTuple):
    """q; of the rows only the locations of soft labels that are factors of their own, the rest
    follows.
    """

    factors: Factors
    linear: Linear
    score: Array  # [chunk, place, class, group]
    size: Array  # rows of each group
    elbo: Array  # of the last step
    gain: Array  # over the step before

    may_end = True  # nothing is held


@dataclass(frozen=True, eq=False)
class FactorAscent:
    """The model as it was read, and its steps."""

    attributes: ClassVar = {"route": "factors"}
    found: FactorMixture
    prior: LinearPrior
    rows: FactorRows  # as they came: a start reads them, steps read `FactorData`
    shape: Shape

    @classmethod
    def read(cls, program: Program) -> "tuple[FactorAscent, FactorData]":
        """Proved, and the rows laid out."""
        found = read_factors(program)
        assert found.prior is not None
        rows, size = found.rows(program), found.num_factors
        if any(place > size for place in rows.design):
            raise ValueError(
                f"site {found.given.experts}: experts see more than factors and a bias; wanted no "
                "other columns."
            )
        x, seen = np.nan_to_num(rows.features), ~np.isnan(rows.features)
        features, signs = jnp.asarray(rows.features, float), jnp.asarray(rows.signs, float)
        chunks = lay_out(features, signs, found.given.num_own * (size + 1) ** 2)
        data = FactorData(
            chunks, jnp.asarray(seen.sum(0), float), jnp.asarray((x**2).sum(0), float)
        )
        prior = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), found.prior)
        return cls(found, prior, rows, Shape(size, size + 1, rows.design, ())), data

    def start(self, rng: np.random.Generator, init: str, data: FactorData) -> FactorState:
        """What a start's groups and principal components imply."""
        sums, linear_sums = start_sums(self.found, self.rows, init, rng)
        factors, linear = jax.jit(self._started)(sums, linear_sums, data)
        signs = data.chunks.signs[..., None]
        score = jnp.broadcast_to(signs, (*signs.shape[:-1], self.found.given.num_own))
        infinite = jnp.asarray(jnp.inf, float)
        return FactorState(factors, linear, score, sums.moments[0, :, -1, -1], -infinite, infinite)

    def _started(
        self, sums: Any, linear_sums: LinearSums, data: FactorData
    ) -> tuple[Factors, Linear]:
        linked = self.found.linked
        linear = start_linear(self.prior, linked.centre is not None, linked.shown is not None)
        return factors_of(self.found.given, self.shape, sums), posterior(
            self.prior, linear, linear_sums, data.count, data.squares
        )

    def moved(self, rng_key: Array, state: FactorState, data: FactorData) -> FactorState:
        """A step, which needs no random numbers; the bound is that of the q it started from."""
        before = state.elbo
        state = self._swept(state, data, is_of_loadings=False) if self.found.linked.shown else state
        elbo = state.elbo
        state = self._swept(state, data, is_of_loadings=True)
        elbo = elbo if self.found.linked.shown else state.elbo
        return state._replace(elbo=elbo, gain=elbo - before)

    def _swept(self, state: FactorState, data: FactorData, is_of_loadings: bool) -> FactorState:
        said, linear = said_of(self.found, self.shape, state.factors), state.linear
        sums, score = sum_chunks(said, told(linear), data.chunks, state.score, is_of_loadings)
        elbo = (
            sums.rows.bound
            - divergence(self.found.given, state.factors)
            - surprise(self.prior, linear)
        )
        if sums.linear is not None:
            linear = posterior(self.prior, linear, sums.linear, data.count, data.squares)
        elif sums.moments is not None and sums.products is not None:
            linear = linear._replace(
                shown=shown_posterior(self.prior, linear.shown, sums.moments, sums.products)
            )
        factors = factors_of(self.found.given, self.shape, sums.rows, state.factors)
        return state._replace(
            factors=factors,
            linear=linear,
            score=score,
            size=sums.rows.moments[0, :, -1, -1],
            elbo=elbo,
        )

    def predict(self, state: FactorState, program: Program) -> Prediction:
        """What q says of the rows of a program as if they were new."""
        return predict_factors(
            self.found, self.shape, state.factors, state.linear, self.found.rows(program)
        )

    def draw(
        self, rng_key: Array, state: FactorState, data: FactorData, num_draws: int
    ) -> dict[str, Array]:
        """Independent draws from q, all sites; `log_q` is their density."""
        said, parameters = (
            said_of(self.found, self.shape, state.factors),
            (state.factors, state.linear),
        )
        return draw_factors(
            rng_key,
            self.found,
            self.prior,
            parameters,
            said,
            data.chunks,
            state.score,
            self.shape.design,
            num_draws,
        )

    def parameters(self, state: FactorState) -> dict[str, dict[str, Array]]:
        """The parameters of q by site, but for the rows."""
        linked, linear = self.found.linked, state.linear
        gamma = lambda pair: {"concentration": pair[0], "rate": pair[1]}
        named = {
            linked.loadings: {"loc": linear.mean[:, :-1].T, "covariance": linear.covariance},
            linked.centre: {"loc": linear.mean[:, -1]},
            linked.beta: gamma(linear.beta),
            linked.noise: gamma(linear.noise),
            linked.shown: {"probs": linear.shown[:, :-1]},
        }
        return parameters_of(self.found.given, state.factors) | {
            site: own for site, own in named.items() if site
        }


def said_of(found: FactorMixture, shape: Shape, factors: Factors) -> Said:
    """What groups and their experts say of a row's factors."""
    form = gate_expected(factors.features)
    const, num = form.const + expected_log_weights(factors.sticks)[0], shape.num_entries
    if factors.weights is None:
        answers, covariance = (
            jnp.zeros((0, *form.matrix.shape[:2])),
            jnp.zeros((0, *form.matrix.shape)),
        )
        return Said(const, form.matrix, answers.astype(const.dtype), covariance.astype(const.dtype))
    place = jnp.eye(num, dtype=const.dtype)[jnp.array(shape.design)]  # [weight, entry]
    return Said(
        const,
        form.matrix,
        factors.weights.mean @ place,
        place.T @ factors.weights.covariance @ place,
    )


def draw_factors(
    rng_key: Array,
    found: FactorMixture,
    prior: LinearPrior,
    factors: tuple[Factors, Linear],
    said: Said,
    chunks: Chunks,
    scores: Array,
    design: tuple[int, ...],
    num_draws: int,
) -> dict[str, Array]:
    """[draw, ...] of each site, and `log_q`."""
    num_rows = int(chunks.weight.sum())
    at_once = told(factors[1])

    def flat(leaf: Array) -> Array:
        return leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])[:num_rows]

    def one(key: Array) -> dict[str, Array]:
        keys = random.split(key, 4)
        values, log_q = draw_groups(found.given, factors[0], keys[0])
        own, of_linear = _linear(found, prior, factors[1], keys[1])
        rows, soft, of_rows = _rows(found, given, signs, score, keys[2])
        values, log_q = values | own | rows, log_q + of_linear + of_rows
        if found.given.experts:
            soft, of_free = _free_labels(found, values, signs, soft, design, keys[3])
            values[found.given.experts.soft], log_q = soft, log_q + of_free
        return values | {"log_q": log_q}

    of_chunks = lambda parts: lax.map(lambda part: given_group(said, at_once, *part), parts)
    given = jax.tree.map(flat, jax.jit(of_chunks)((chunks, scores)))
    signs, score, keys = flat(chunks.signs), flat(scores), random.split(rng_key, num_draws)
    # which takes longer to compile than to run
    return once(lambda keys: lax.map(one, keys), keys)(keys)


def _linear(
    found: FactorMixture, prior: LinearPrior, linear: Linear, rng_key: Array
) -> tuple[dict[str, Array], Array]:
    """Loadings and all that belongs to them."""
    linked, keys = found.linked, random.split(rng_key, 5)
    values, log_q = {}, jnp.zeros((), linear.mean.dtype)
    noise, root = (
        random.normal(keys[0], linear.mean.shape, linear.mean.dtype),
        jnp.linalg.cholesky(linear.covariance),
    )
    own = linear.mean + jnp.einsum("pij,pj->pi", root, noise)
    values[linked.loadings] = own[:, :-1].T
    log_q = (
        log_q
        + jnp.sum(norm.logpdf(noise))
        - jnp.sum(jnp.log(jnp.diagonal(root, axis1=-2, axis2=-1)))
    )
    if linked.centre:
        values[linked.centre] = own[:, -1]
    else:  # there is no such entry
        log_q = log_q - jnp.sum(norm.logpdf(own[:, -1], linear.mean[:, -1], root[:, -1, -1]))
    for key, name, (a, b) in (
        (keys[1], linked.beta, linear.beta),
        (keys[2], linked.noise, linear.noise),
    ):
        if name:
            values[name] = random.gamma(key, a) / b
            log_q = log_q + jnp.sum(gamma.logpdf(values[name], a, scale=1 / b))
    if linked.shown:
        q = linear.shown[:, :-1]
        shown = random.bernoulli(keys[3], q).astype(q.dtype)
        values[linked.shown] = shown.astype(found.few.sites[linked.shown].dtype)
        log_q = log_q + jnp.sum(xlogy(shown, q) + xlog1py(1 - shown, -q))
        if linked.share and prior.counts:
            c1, c0 = prior.counts[0] + shown, prior.counts[1] + 1 - shown
            values[linked.share] = random.beta(keys[4], c1, c0)
            log_q = log_q + jnp.sum(beta.logpdf(values[linked.share], c1, c0))
    return values, log_q


def _rows(
    found: FactorMixture, given: Given, signs: Array, score: Array, rng_key: Array
) -> tuple[dict[str, Array], Array, Array]:
    """Groups and factors; soft labels that a label tells of [class, row]; and the log density."""
    group_key, soft_key, score_key = random.split(rng_key, 3)
    log_rho = jax.nn.log_softmax(given.log_joint, axis=1)
    z = random.categorical(group_key, log_rho)
    at = jnp.arange(len(z))
    log_q = jnp.sum(log_rho[at, z])
    mean, covariance, pull, loc, variance = (leaf[at, z] for leaf in given[1:-1])
    locs = jnp.where(given.last > 0, loc[:, None], score[at, :, z])
    scales = jnp.where(given.last > 0, jnp.sqrt(variance)[:, None], 1)
    low, high = (
        jnp.where(signs * side < 0, 0.0, side * jnp.inf).astype(loc.dtype) for side in (-1, 1)
    )
    cut = TruncatedNormal(locs, scales, low, high)
    soft = cut.sample(soft_key)
    log_q = log_q + jnp.sum(jnp.where(signs != 0, cut.log_prob(soft), 0))
    is_tied = given.last.sum(1)
    away = is_tied * (jnp.sum(given.last * soft, 1) - loc) / variance
    mean = mean + pull * away[:, None]
    covariance = covariance - pull[:, :, None] * pull[:, None] * (is_tied / variance)[:, None, None]
    root, noise = jnp.linalg.cholesky(covariance), random.normal(score_key, mean.shape, mean.dtype)
    log_q = (
        log_q
        + jnp.sum(norm.logpdf(noise))
        - jnp.sum(jnp.log(jnp.diagonal(root, axis1=-2, axis2=-1)))
    )
    scores = mean + jnp.einsum("nij,nj->ni", root, noise)
    return (
        {
            found.given.z: z.astype(found.few.sites[found.given.z].dtype),
            found.linked.scores: scores,
        },
        soft.T,
        log_q,
    )


def _free_labels(
    found: FactorMixture,
    values: Any,
    signs: Array,
    soft: Array,
    design: tuple[int, ...],
    rng_key: Array,
) -> tuple[Array, Array]:
    """Of soft labels of which nothing is known the model itself says what they are given all
    else.
    """
    experts = found.given.experts
    assert experts is not None
    scores, weights = values[found.linked.scores], by_class(values[experts.weights], 3)
    u = jnp.concatenate([scores, jnp.ones_like(scores[:, :1])], 1)
    loc = jnp.sum(weights[:, values[found.given.z]] * u[:, jnp.array(design)][None], -1)
    drawn = loc + random.normal(rng_key, loc.shape, loc.dtype)
    is_free = signs.T == 0
    t = jnp.where(is_free, drawn, soft)
    shape = loc.shape[1:] if len(found.few.sites[experts.soft].shape) == 1 else loc.shape
    return t.reshape(shape), jnp.sum(jnp.where(is_free, norm.logpdf(drawn - loc), 0))


def predict_factors(
    found: FactorMixture, shape: Shape, factors: Factors, linear: Linear, rows: FactorRows
) -> Prediction:
    """Predicts rows that were not fitted; rows that were are taken as new ones."""
    said, at_once, size = _said(factors), told(linear), shape.num_entries
    num_rows, num_groups = len(rows.features), found.given.num_own
    chunks = lay_out(
        jnp.asarray(rows.features, float), jnp.asarray(rows.signs, float), num_groups * size**2
    )
    noise = _variance(linear)

    def of_chunk(chunk: Chunks) -> Prediction:
        return _predicted(said, at_once, noise, factors, shape, chunk)

    parts = compiled(lambda chunks: lax.map(of_chunk, chunks), chunks)(chunks)
    whole = jax.tree.map(
        lambda leaf: leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])[:num_rows], parts
    )
    seen = jnp.asarray(~np.isnan(rows.features))
    mean = jnp.where(seen, jnp.nan_to_num(jnp.asarray(rows.features, float)), whole.mean)
    return whole._replace(mean=mean, deviation=jnp.where(seen, 0, whole.deviation))


def _predicted(
    said: Said, at_once: Told, noise: Array, factors: Factors, shape: Shape, chunk: Chunks
) -> Prediction:
    """Mean and deviation of all features, those that are seen as well."""
    silent = chunk._replace(signs=chunk.signs[:, :0])
    no_labels = jnp.zeros((*silent.signs.shape, len(said.const)), said.const.dtype)
    given = given_group(said, at_once, silent, no_labels)
    placed = place(said, at_once, silent, no_labels)
    rho, size = jnp.exp(placed.log_rho), placed.mean.shape[-1]
    first = jnp.einsum("nh,hi,nhi->ni", rho, at_once.shown, placed.mean)
    second = jnp.einsum("nh,hij,nhij->nij", rho, at_once.both, placed.second).reshape(
        -1, size * size
    )
    mean = first @ at_once.mean.T
    variance = noise[None] + second @ at_once.second.reshape(-1, size * size).T - mean**2
    log_side = jnp.zeros_like(placed.log_rho)
    if factors.weights is not None:
        weights = factors.weights
        of_row = lambda signs, entries, covariance: log_label(
            weights, signs, shape.design, entries, covariance
        )
        log_side = jax.vmap(of_row)(chunk.signs, placed.mean, given.covariance)
    return Prediction(
        placed.log_rho,
        jax.nn.logsumexp(placed.log_rho + log_side, axis=1),
        mean,
        jnp.sqrt(variance),
    )


def _said(factors: Factors) -> Said:
    """What groups say of factors when all that is known of the groups is integrated out; of
    experts nothing.
    """
    loc, kappa, nu, rate = factors.features
    freedom = nu + 1 - loc.shape[1]
    # a covariance, or where there is none the scale
    freedom = jnp.where(freedom > 2, freedom - 2, freedom)
    precision = jnp.linalg.inv(rate * ((kappa + 1) / (kappa * freedom))[:, None, None])
    form = gate_natural(precision, loc)
    nothing = jnp.zeros((0, *form.matrix.shape[:2]), loc.dtype)
    return Said(form.const + log_weights(factors)[0], form.matrix, nothing, nothing[..., None])


def _variance(linear: Linear) -> Array:
    """The mean of each feature's noise; rate / concentration where it has no mean."""
    concentration, rate = linear.noise
    is_known = jnp.isinf(rate)
    free = jnp.where(concentration > 1, concentration - 1, concentration)
    return jnp.where(is_known, 1 / concentration, jnp.where(is_known, 1, rate) / free)
