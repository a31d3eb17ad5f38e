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
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from inference.kernels.coordinate_ascent.factor_draws import draw_factors, predict_factors
from inference.kernels.coordinate_ascent.factor_rows import Chunks, Said, lay_out, sum_chunks
from inference.kernels.coordinate_ascent.posterior import (
    Factors,
    Shape,
    divergence,
    factors_of,
    parameters_of,
)
from inference.kernels.coordinate_ascent.predict import Prediction
from inference.kernels.coordinate_ascent.rows import Sums
from inference.kernels.coordinate_ascent.start import STARTS
from inference.kernels.coordinate_ascent.sticks import expected_log_weights
from inference.program.program import Program
from inference.reading.conjugate.loadings import (
    Linear,
    LinearPrior,
    LinearSums,
    posterior,
    shown_posterior,
    surprise,
    told,
)
from inference.reading.conjugate.quadratic import gate_expected
from inference.reading.factor_mixture import FactorMixture, FactorRows, read_factors

__all__ = ["FactorAscent", "FactorData", "FactorState", "said_of", "start_linear", "start_sums"]

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
