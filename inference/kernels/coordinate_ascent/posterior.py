"""Tasks, whose groups of rows may be under groups that all tasks share.

Group h of task j is under the shared group s with probability share_jhs under q. What is said of
rows and what is summed over them is linear, so with the message m_s of each shared group and the
sums S_jh over the rows of each group of a task

    m_jh = E log pi_jh + sum_s share_jhs m_s,     S_s = sum_jh share_jhs S_jh,     log share_jhs = E log eta_s + <m_s, S_jh> + const.

A row then sees the groups of its task, each with one quadratic form, and its missing entries stay
tied to its group; the paper lets go of that tie, for a looser bound. Without shared groups share is
the identity, and one data set is one task.

Cost of a sweep beside that of the rows, for J tasks of H groups, S shared ones and D entries of a
row: J H S D^2.

The factors of a mean-field posterior beside those of rows: what they say of a row, how sums
over rows set them, their divergence.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.special import digamma

from inference.kernels.coordinate_ascent.rows import Message, Sums
from inference.reading.conjugate.pairs import (
    beta_divergence,
    gamma_divergence,
    gamma_means,
    log_sticks,
)
from inference.reading.conjugate.quadratic import (
    Common,
    Form,
    Weights,
    common_divergence,
    common_posterior,
    gate_divergence,
    gate_expected,
    gate_natural,
    gate_posterior,
    known_weights,
    weights_posterior,
    weights_term,
)
from inference.reading.stick_mixture.structure import (
    Assignment,
    Prior,
    Rows,
    by_class,
    precision_and_loc,
    values_by_group,
)

__all__ = [
    "Factors",
    "Shape",
    "Upper",
    "agreement",
    "blocks_of",
    "concentration_given",
    "divergence",
    "divergence_of_sticks",
    "divergence_of_upper",
    "expected_log_weights",
    "factors_of",
    "gathered",
    "message_at",
    "message_of",
    "parameters_of",
    "said_at",
    "said_by_groups",
    "seen_by_experts",
    "shape_of",
    "share_of",
    "spread",
    "statistics_of",
    "sticks_given",
    "sticks_of",
    "upper_of",
]

NUM_ROUNDS = 4  # of factors that wait for each other and cost little

Pair = tuple[Array, Array]


class Upper(NamedTuple):
    """q of the shared groups' weights, and of the shared group that each group of a task is
    under.
    """

    concentration: Pair  # (concentration, rate) of beta; rate infinite: beta is known
    sticks: Pair  # (concentration1, concentration0) of each U
    log_share: Array  # [task, own group, group]


def share_of(upper: Upper | None) -> Array | None:
    """How probable each shared group is [task, own group, group]."""
    return None if upper is None else jnp.exp(upper.log_share)


def spread(message: Message, log_weights: Array, share: Array | None) -> Message:
    """What is said of rows [task, ...], from what each shared group says of its rows, and the
    log weights [task, own group].
    """
    if share is None:
        each = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (len(log_weights), *leaf.shape)), message
        )
    else:
        answers = jnp.einsum("jhs,csa->jcha", share, message.answers)
        each = Message(
            share @ message.const,
            jnp.einsum("jhs,sab->jhab", share, message.matrix),
            answers,
            jnp.einsum("jhs,csab->jchab", share, message.second())
            - answers[..., :, None] * answers[..., None, :],
            jnp.einsum("jhs,fs->jfh", share, message.columns),
        )
    return each._replace(const=each.const + log_weights)


def gathered(sums: Sums, share: Array | None) -> Sums:
    """Sums over the rows of each shared group, from those over the groups of each task."""
    if share is None:
        return Sums(*(part.sum(0) for part in sums[:-1]), sums.bound)
    return Sums(
        jnp.einsum("jhs,jhab->sab", share, sums.moments),
        jnp.einsum("jhs,jchab->csab", share, sums.asked),
        jnp.einsum("jhs,jcha->csa", share, sums.products),
        jnp.einsum("jhs,jfh->fs", share, sums.columns),
        sums.bound,
    )


def agreement(message: Message, sums: Sums, one: int) -> Array:
    """What each shared group says of the rows of each group of a task, summed; `one` is the
    entry of a row that is 1.
    """
    found = sums.moments[:, :, one, one][..., None] * message.const[None, None]
    found = found - jnp.einsum("jhab,sab->jhs", sums.moments, message.matrix) / 2
    found = found - jnp.einsum("jchab,csab->jhs", sums.asked, message.second()) / 2
    return (
        found
        + jnp.einsum("jcha,csa->jhs", sums.products, message.answers)
        + jnp.einsum("jfh,fs->jhs", sums.columns, message.columns)
    )


# Sticks.


def expected_log_weights(sticks: Pair) -> Array:
    """E log pi, [..., group]."""
    c1, c0 = sticks
    total = digamma(c1 + c0)
    return log_sticks(digamma(c1) - total, digamma(c0) - total)


def sticks_given(count: Array, concentration: Array) -> Pair:
    """Of each V, given how many are in each group [..., group] and the concentration, or its
    mean.
    """
    after = jnp.cumsum(count[..., ::-1], -1)[..., ::-1]
    return 1 + count[..., :-1], concentration + after[..., 1:]


def concentration_given(prior: Pair, log_left: Array, is_told: Any = True) -> Pair:
    """(concentration, rate) given the logarithms of what sticks leave, or their means; of sticks
    that are not told nothing is known.
    """
    (a0, b0), told = prior, jnp.broadcast_to(is_told, log_left.shape).astype(log_left.dtype)
    return jnp.where(jnp.isinf(b0), a0, a0 + jnp.sum(told)), b0 - jnp.sum(told * log_left)


def sticks_of(prior: Pair, count: Array, concentration: Pair) -> tuple[Pair, Pair]:
    """q of the concentration, and of the sticks of each row of counts [..., group], in turns."""

    def turn(_, at):
        (a, b), _ = at
        sticks = sticks_given(count, jnp.where(jnp.isinf(b), a, a / b))
        log_left = digamma(sticks[1]) - digamma(sticks[0] + sticks[1])
        return concentration_given(prior, log_left), sticks

    return lax.fori_loop(
        0,
        NUM_ROUNDS,
        turn,
        (tuple(concentration), sticks_given(count, jnp.ones_like(count[..., :1]))),
    )


def upper_of(
    prior: Pair, log_share: Array, before: Upper | None = None, agrees: Array | None = None
) -> Upper:
    """q of all that is above the tasks, in turns; `agrees` is what the rows say, where
    `log_share` is not yet what follows from that.
    """

    def counted(log_share: Array, concentration: Pair) -> Upper:
        return Upper(*sticks_of(prior, jnp.exp(log_share).sum((0, 1)), concentration), log_share)

    start = counted(log_share, prior if before is None else before.concentration)
    if agrees is None or before is None:
        return start

    def turn(_, at: Upper) -> Upper:
        return counted(
            jax.nn.log_softmax(agrees + expected_log_weights(at.sticks)[None, None]),
            at.concentration,
        )

    return lax.fori_loop(0, NUM_ROUNDS, turn, before)


def divergence_of_sticks(prior: Pair, concentration: Pair, sticks: Pair) -> Array:
    """KL(q | prior) of sticks and their concentration."""
    (mean, mean_log), (c1, c0) = gamma_means(concentration), sticks
    log_left = digamma(c0) - digamma(c1 + c0)
    one = jnp.ones_like(c1)
    total = jnp.sum(beta_divergence((c1, c0), (one, one)) - mean_log - (mean - 1) * log_left)
    return total + gamma_divergence(concentration, prior)


def divergence_of_upper(prior: Any, upper: Upper) -> Array:
    """KL(q | prior) of the level above the tasks."""
    of_share = jnp.sum(
        jnp.exp(upper.log_share)
        * (upper.log_share - expected_log_weights(upper.sticks)[None, None])
    )
    return of_share + divergence_of_sticks(prior, upper.concentration, upper.sticks)


WIDE = 10.0  # by how much the first variance of the weights is larger than what the prior expects


class Factors(NamedTuple):
    """Parameters of q, but for the rows."""

    # (concentration, rate) of alpha; rate infinite: alpha is known
    concentration: tuple[Array, Array]
    sticks: tuple[Array, Array]  # of each V, [task, stick]; one data set is one task
    upper: Upper | None  # where tasks share groups
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
    of = lambda block, hyper: block.family.expected(jax.tree.map(jnp.asarray, hyper)).shape[1:]
    sizes = tuple(
        of(block, hyper) for block, hyper in zip(found.columns, found.prior.columns, strict=True)
    )
    width = rows.features.shape[1]
    return Shape(width, width + 1 + rows.extras.shape[1], rows.design, sizes)


def statistics_of(found: Assignment, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """F(x) of all columns [row, statistic], and log base(x) [row]."""
    assert found.prior is not None
    num_rows = len(rows.features)
    parts, base = [np.zeros((num_rows, 0))], np.zeros(num_rows)
    for block, x, hyper in zip(found.columns, rows.columns, found.prior.columns, strict=True):
        field, x = block.family, jnp.asarray(x, float)
        parts.append(np.asarray(field.statistics(x, hyper)).reshape(num_rows, -1))
        base += np.asarray(field.log_base(x))
    return np.concatenate(parts, 1), base


def said_by_groups(found: Assignment, shape: Shape, factors: Factors) -> Message:
    """What the factors say of a row of each group; not yet how probable the group is."""
    form = None if factors.features is None else gate_expected(factors.features)
    each = [
        block.family.expected(hyper)
        for block, hyper in zip(found.columns, factors.columns, strict=True)
    ]
    return _said(
        jnp.zeros(found.num_groups, factors.sticks[0].dtype), shape, form, each, factors.weights
    )


def said_at(found: Assignment, shape: Shape, values: Mapping[str, Array]) -> Message:
    """The same of parameters that are known, values of their sites."""
    form = gate_natural(*precision_and_loc(found.features, values)) if found.features else None
    each = [block.family.natural(values_by_group(found, block, values)) for block in found.columns]
    weights = known_weights(by_class(values[found.experts.weights], 3)) if found.experts else None
    return _said(
        jnp.zeros(found.num_groups, values[found.sticks].dtype), shape, form, each, weights
    )


def _said(
    const: Array, shape: Shape, form: Form | None, columns: list[Array], weights: Weights | None
) -> Message:
    matrix = jnp.zeros((len(const), shape.num_entries, shape.num_entries), const.dtype)
    if form is not None:
        const, width = const + form.const, shape.num_features + 1
        matrix = matrix.at[:, :width, :width].set(form.matrix)
    flat = jnp.concatenate(
        [
            jnp.zeros((len(const), 0), const.dtype),
            *(eta.reshape(len(const), -1) for eta in columns),
        ],
        1,
    )
    place = _place(shape, const.dtype)
    if weights is None:
        answers, covariance = (
            jnp.zeros((0, *matrix.shape[:2]), const.dtype),
            jnp.zeros((0, *matrix.shape), const.dtype),
        )
    else:
        answers, covariance = weights.mean @ place, place.T @ weights.covariance @ place
    return Message(const, matrix, answers, covariance, flat.T)


def message_of(found: Assignment, shape: Shape, factors: Factors) -> Message:
    """What the factors say of a row of each task's groups, [task, ...]."""
    return spread(
        said_by_groups(found, shape, factors),
        expected_log_weights(factors.sticks),
        share_of(factors.upper),
    )


def message_at(found: Assignment, shape: Shape, values: Mapping[str, Array]) -> Message:
    """What groups with known parameters say of the rows of each task, [task, ...]."""
    V = jnp.atleast_2d(values[found.sticks])
    return spread(
        said_at(found, shape, values), log_sticks(jnp.log(V), jnp.log1p(-V)), found.share_at(values)
    )


def _place(shape: Shape, dtype: Any) -> Array:
    """[weight, entry]: 1 where the entry is what the weight is for."""
    entries = jnp.arange(shape.num_entries)
    return (jnp.array(shape.design, int).reshape(-1, 1) == entries[None]).astype(dtype)


def factors_of(
    found: Assignment,
    shape: Shape,
    sums: Sums,
    before: Factors | None = None,
    log_share: Array | None = None,
    is_held: Any = False,
) -> Factors:
    """What follows from sums over the rows of each task's groups, one factor after the other; each
    step raises the bound.

    :param before: what the last sweep left; at a start None, and where tasks share groups,
    `log_share` beside it.
    :param is_held: what experts have in common stays as it is.
    """
    assert found.prior is not None
    prior = jax.tree.map(lambda leaf: jnp.asarray(leaf, sums.bound.dtype), found.prior)
    upper, one = None, shape.num_features
    if before is not None and before.upper is not None:
        upper = upper_of(
            prior.upper,
            before.upper.log_share,
            before.upper,
            agreement(said_by_groups(found, shape, before), sums, one),
        )
    elif log_share is not None:
        upper = upper_of(prior.upper, log_share)
    count = sums.moments[:, :, one, one]
    concentration, sticks = sticks_of(
        prior.concentration, count, prior.concentration if before is None else before.concentration
    )
    sums = gathered(sums, share_of(upper))
    columns, features = blocks_of(found, shape, prior, sums)
    weights, common = _experts(prior, shape, sums, before, is_held)
    return Factors(concentration, sticks, upper, columns, features, weights, common)


def blocks_of(
    found: Assignment, shape: Shape, prior: Prior, sums: Sums
) -> tuple[tuple[Any, ...], Any]:
    """Hyper-parameters of the columns and of the features, from sums over the rows of each
    group.
    """
    blocks, split = (
        [],
        jnp.split(
            sums.columns,
            np.cumsum([np.prod(size) for size in shape.columns], dtype=int)[:-1].tolist(),
        ),
    )
    for block, hyper, size, own in zip(
        found.columns, prior.columns, shape.columns, split, strict=False
    ):
        blocks.append(block.family.posterior(hyper, own.T.reshape(-1, *size)))
    width = shape.num_features + 1
    return tuple(blocks), gate_posterior(
        prior.features, sums.moments[:, :width, :width]
    ) if found.features else None


def seen_by_experts(shape: Shape, sums: Sums) -> tuple[Array, Array]:
    """The sums that weights follow from: of d d' and of t d, d what the weights are for."""
    place = _place(shape, sums.bound.dtype)
    return place @ sums.asked @ place.T, sums.products @ place.T


def _experts(
    prior: Prior, shape: Shape, sums: Sums, before: Factors | None, is_held: Any
) -> tuple[Weights | None, Common | None]:
    """q(w) and q(zeta, lambda), in turns; at a start the latter is the prior, but wide, which
    leaves the weights free.
    """
    own = prior.experts
    if own is None:
        return None, None
    moments, products = seen_by_experts(shape, sums)
    wide = own._replace(rate=WIDE * own.rate)
    common = wide if before is None or before.common is None else before.common
    start = (weights_posterior(common, moments, products), common)

    def turn(_, at):
        weights = weights_posterior(at[1], moments, products)
        return weights, jax.tree.map(
            partial(jnp.where, is_held), at[1], common_posterior(own, weights)
        )

    return lax.fori_loop(0, NUM_ROUNDS, turn, start)


def divergence(found: Assignment, factors: Factors) -> Array:
    """KL(q | prior) of the factors: what they take from the evidence bound."""
    assert found.prior is not None
    prior = jax.tree.map(lambda leaf: jnp.asarray(leaf, factors.sticks[0].dtype), found.prior)
    total = divergence_of_sticks(prior.concentration, factors.concentration, factors.sticks)
    if factors.upper is not None:
        total = total + divergence_of_upper(prior.upper, factors.upper)
    for block, hyper, own in zip(found.columns, factors.columns, prior.columns, strict=True):
        total = total + block.family.divergence(hyper, own)
    if factors.features is not None:
        total = total + gate_divergence(factors.features, prior.features)
    if factors.weights is not None and factors.common is not None and prior.experts is not None:
        total = (
            total
            - weights_term(factors.common, factors.weights)
            + common_divergence(factors.common, prior.experts)
        )
    return total


def parameters_of(found: Assignment, factors: Factors) -> dict[str, dict[str, Array]]:
    """The parameters of the factors by site."""
    one_row = len(found.few.sites[found.sticks].shape) == 1
    levels = [
        (
            found.lower,
            factors.concentration,
            [part[0] if one_row else part for part in factors.sticks],
        )
    ]
    named: dict[str | None, dict[str, Array]] = {}
    if found.upper and factors.upper:
        levels.append((found.upper, factors.upper.concentration, [*factors.upper.sticks]))
        named[found.upper.site] = {"probs": jnp.exp(factors.upper.log_share)}
    for level, (a, b), (c1, c0) in levels:
        named |= {
            level.concentration: {"concentration": a, "rate": b},
            level.sticks: {"concentration1": c1, "concentration0": c0},
        }
    named |= {
        block.priors[-1]: hyper._asdict()
        for block, hyper in zip(found.columns, factors.columns, strict=True)
    }
    if found.features:
        named[found.features.priors[-1]] = factors.features._asdict()
    if found.experts and factors.weights and (common := factors.common):
        named |= {
            found.experts.weights: factors.weights._asdict(),
            found.experts.loc: {"loc": common.loc, "gamma": common.gamma},
            found.experts.precision: {"concentration": common.concentration, "rate": common.rate},
        }
    return {site: own for site, own in named.items() if site}
