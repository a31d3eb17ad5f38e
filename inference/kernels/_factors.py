"""The factors of a mean-field posterior beside those of rows: what they say of a row, how sums over rows set them, their divergence."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.special import digamma

from inference.assignment import Assignment, Prior, Rows
from inference.kernels._row_block import Message, Sums
from inference.mean_field import COLUMNS, beta_divergence, gamma_divergence, log_sticks
from inference.quadratic import (
    Common,
    Weights,
    common_divergence,
    common_posterior,
    gate_divergence,
    gate_expected,
    gate_posterior,
    weights_posterior,
    weights_term,
)

__all__ = ["Factors", "Shape", "divergence", "factors_of", "message_of", "shape_of", "statistics_of"]

NUM_ROUNDS = 4  # of factors that wait for each other and cost little; groups without rows would slow them down


class Factors(NamedTuple):
    """Parameters of q, but for the rows."""

    concentration: tuple[Array, Array]  # (concentration, rate) of alpha; rate infinite: alpha is known
    sticks: tuple[Array, Array]  # of each V
    columns: tuple[Any, ...]  # of each block of columns
    features: Any  # WishartHyper, or None
    weights: Weights | None
    common: Common | None


class Shape(NamedTuple):
    """Where things are; static."""

    num_features: int
    num_entries: int
    design: tuple[int, ...]
    columns: tuple[tuple[int, ...], ...]  # (columns, statistics) of each block


def shape_of(found: Assignment, rows: Rows) -> Shape:
    """As the data have it."""
    assert found.prior is not None
    of = lambda block, hyper: COLUMNS[block.family].expected(jax.tree.map(jnp.asarray, hyper)).shape[1:]
    sizes = tuple(of(block, hyper) for block, hyper in zip(found.columns, found.prior.columns, strict=True))
    width = rows.features.shape[1]
    return Shape(width, width + 1 + rows.extras.shape[1], rows.design, sizes)


def statistics_of(found: Assignment, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """F(x) of all columns [row, statistic], and log base(x) [row]."""
    assert found.prior is not None
    num_rows = len(rows.features)
    parts, base = [np.zeros((num_rows, 0))], np.zeros(num_rows)
    for block, x, hyper in zip(found.columns, rows.columns, found.prior.columns, strict=True):
        field, x = COLUMNS[block.family], jnp.asarray(x, float)
        parts.append(np.asarray(field.statistics(x, hyper)).reshape(num_rows, -1))
        base += np.asarray(field.log_base(x))
    return np.concatenate(parts, 1), base


def message_of(found: Assignment, shape: Shape, factors: Factors) -> Message:
    """What the factors say of a row of each group."""
    c1, c0 = factors.sticks
    total = digamma(c1 + c0)
    const = log_sticks(digamma(c1) - total, digamma(c0) - total)
    matrix = jnp.zeros((len(const), shape.num_entries, shape.num_entries), const.dtype)
    if factors.features is not None:
        form = gate_expected(factors.features)
        const, width = const + form.const, shape.num_features + 1
        matrix = matrix.at[:, :width, :width].set(form.matrix)
    each = [COLUMNS[block.family].expected(hyper) for block, hyper in zip(found.columns, factors.columns, strict=True)]
    columns = jnp.concatenate([eta.reshape(len(const), -1) for eta in each], 1) if each else jnp.zeros((len(const), 0), const.dtype)
    place = _place(shape, const.dtype)
    if factors.weights is None:
        answers, second = jnp.zeros((0, *matrix.shape[:2]), const.dtype), jnp.zeros((0, *matrix.shape), const.dtype)
    else:
        answers = factors.weights.mean @ place
        second = place.T @ factors.weights.second() @ place
    return Message(const, matrix, answers, second, columns.T)


def _place(shape: Shape, dtype: Any) -> Array:
    """[weight, entry]: 1 where the entry is what the weight is for."""
    entries = jnp.arange(shape.num_entries)
    return (jnp.array(shape.design, int).reshape(-1, 1) == entries[None]).astype(dtype)


def factors_of(found: Assignment, shape: Shape, sums: Sums, before: Factors | None = None) -> Factors:
    """What follows from sums over rows, one factor after the other; each step raises the bound. `before` is what the last sweep left."""
    assert found.prior is not None
    prior = jax.tree.map(lambda leaf: jnp.asarray(leaf, sums.bound.dtype), found.prior)
    count = sums.moments[:, shape.num_features, shape.num_features]
    concentration, sticks = _weights_of_groups(prior, count, prior.concentration if before is None else before.concentration)
    blocks, split = [], jnp.split(sums.columns, np.cumsum([np.prod(size) for size in shape.columns], dtype=int)[:-1].tolist())
    for block, hyper, size, own in zip(found.columns, prior.columns, shape.columns, split, strict=False):
        blocks.append(COLUMNS[block.family].posterior(hyper, own.T.reshape(-1, *size)))
    features = None
    if found.features:
        width = shape.num_features + 1
        features = gate_posterior(prior.features, sums.moments[:, :width, :width])
    weights, common = _experts(prior, shape, sums, before)
    return Factors(concentration, sticks, tuple(blocks), features, weights, common)


def _weights_of_groups(prior: Prior, count: Array, concentration: Any) -> tuple[Any, Any]:
    """q(alpha) and q(V), in turns."""
    after = jnp.cumsum(count[::-1])[::-1][1:]
    num_sticks = len(after)

    def turn(_, at):
        (a, b), _ = at
        sticks = (1 + count[:-1], jnp.where(jnp.isinf(b), a, a / b) + after)
        log_left = digamma(sticks[1]) - digamma(sticks[0] + sticks[1])
        a0, b0 = prior.concentration
        return (jnp.where(jnp.isinf(b0), a0, a0 + num_sticks), b0 - jnp.sum(log_left)), sticks

    start = (tuple(concentration), (1 + count[:-1], 1 + after))
    return lax.fori_loop(0, NUM_ROUNDS, turn, start)


def _experts(prior: Prior, shape: Shape, sums: Sums, before: Factors | None) -> tuple[Weights | None, Common | None]:
    """q(w) and q(zeta, lambda), in turns."""
    own = prior.experts
    if own is None:
        return None, None
    place = _place(shape, sums.bound.dtype)
    moments, products = place @ sums.asked @ place.T, sums.products @ place.T
    common = Common(*own) if before is None or before.common is None else before.common
    start = (weights_posterior(common, moments, products), common)

    def turn(_, at):
        weights = weights_posterior(at[1], moments, products)
        return weights, common_posterior(own, weights)

    return lax.fori_loop(0, NUM_ROUNDS, turn, start)


def divergence(found: Assignment, factors: Factors) -> Array:
    """KL(q | prior) of the factors: what they take from the evidence bound."""
    assert found.prior is not None
    prior = jax.tree.map(lambda leaf: jnp.asarray(leaf, factors.sticks[0].dtype), found.prior)
    (a, b), (a0, b0), (c1, c0) = factors.concentration, prior.concentration, factors.sticks
    is_known = jnp.isinf(b)
    safe_b, safe_b0 = jnp.where(is_known, 1, b), jnp.where(is_known, 1, b0)
    mean, mean_log = jnp.where(is_known, a, a / safe_b), jnp.where(is_known, jnp.log(a), digamma(a) - jnp.log(safe_b))
    log_left = digamma(c0) - digamma(c1 + c0)
    one = jnp.ones_like(c1)
    total = jnp.sum(beta_divergence((c1, c0), (one, one)) - mean_log - (mean - 1) * log_left)
    total = total + jnp.where(is_known, 0, gamma_divergence((a, safe_b), (a0, safe_b0)))
    for block, hyper, own in zip(found.columns, factors.columns, prior.columns, strict=True):
        total = total + COLUMNS[block.family].divergence(hyper, own)
    if factors.features is not None:
        total = total + gate_divergence(factors.features, prior.features)
    if factors.weights is not None and factors.common is not None and prior.experts is not None:
        total = total - weights_term(factors.common, factors.weights) + common_divergence(factors.common, prior.experts)
    return total
