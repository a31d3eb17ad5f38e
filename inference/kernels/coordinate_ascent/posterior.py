"""The factors of q other than those of the rows.

They send messages to the rows, which are expected log densities of a row in each group; are updated
from sums over the rows; and have a divergence from the prior.

Tasks may share groups: group h of task j is the shared group s with probability share_jhs under q.
The messages to the rows and the sums over them are linear in these probabilities. So with the
message m_s of each shared group and the sums S_jh over the rows of each group of a task

    m_jh = E log pi_jh + sum_s share_jhs m_s,     S_s = sum_jh share_jhs S_jh,
    log share_jhs = E log eta_s + <m_s, S_jh> + const.

A row then sees the groups of its task, each with one quadratic form, and its missing entries stay
joint with its group. That bound is tighter than the paper's, in which they are independent. Without
shared groups share is the identity, and one data set is one task.

Cost of a sweep beside that of the rows, for J tasks of H groups, S shared ones and D entries of a
row: J H S D^2.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float

from inference.kernels.coordinate_ascent.rows import Message, SufficientSums
from inference.reading.conjugate.pairs import (
    beta_divergence,
    digamma,
    gamma_divergence,
    gamma_means,
    log_sticks,
)
from inference.reading.conjugate.quadratic import (
    Common,
    Form,
    GateMeans,
    Weights,
    common_divergence,
    common_posterior,
    gate_divergence,
    gate_expected,
    gate_means,
    gate_natural,
    gate_posterior,
    known_weights,
    total,
    weights_posterior,
    weights_terms,
)
from inference.reading.stick_mixture.structure import (
    Assignment,
    MixtureRows,
    Prior,
    values_by_group,
    with_class_axis,
)

__all__ = [
    "Factors",
    "Shape",
    "Upper",
    "agreement",
    "blocks_of",
    "concentration_given",
    "divergence",
    "expected_log_weights",
    "expert_sums",
    "factors_of",
    "gathered",
    "group_messages",
    "group_messages_at",
    "has_rows",
    "is_open",
    "means_of",
    "message_at",
    "message_of",
    "parameters_of",
    "shape_of",
    "share_of",
    "spread",
    "statistics_of",
    "sticks_given",
    "sticks_of",
]

NUM_ROUNDS = 4  # updates of cheap factors, each given the others, in a sweep
WIDE = 10.0  # at the start the variance of the weights is this times what the prior expects

Pair = tuple[Array, Array]


class Upper(NamedTuple):
    """q of the weights of shared groups, and of the shared group of each group of a task."""

    concentration: Pair  # (concentration, rate) of beta; rate infinite: beta is known
    sticks: Pair  # (concentration1, concentration0) of each U
    log_share: Array  # [task, own group, group]


class Factors(NamedTuple):
    """The parameters of q, without those of the rows."""

    concentration: Pair  # (concentration, rate) of alpha; rate infinite: alpha is known
    sticks: Pair  # of each V [task, stick]; one data set is one task
    upper: Upper | None  # where tasks share groups
    columns: tuple[Any, ...]  # of each block of columns
    features: Any  # WishartHyper, or None
    weights: Weights | None
    common: Common | None
    num_open: Array  # only these first groups of a task have rows under q


class Shape(NamedTuple):
    """The layout of the entries of a row; static."""

    num_features: int
    num_entries: int
    design: tuple[int, ...]  # which entry each weight of an expert multiplies

    @property
    def sees_all(self) -> bool:
        """Whether the weights multiply all entries, in their order."""
        return self.design == tuple(range(self.num_entries))


def shape_of(rows: MixtureRows) -> Shape:
    """The layout of the entries of these rows."""
    width = rows.features.shape[1]
    return Shape(width, width + 1 + rows.extras.shape[1], rows.design)


def statistics_of(found: Assignment, rows: MixtureRows) -> tuple[np.ndarray, np.ndarray]:
    """The sufficient statistics of all columns [row, statistic], and log base measures [row]."""
    num_rows = len(rows.features)
    parts, base = [np.zeros((num_rows, 0))], np.zeros(num_rows)
    for block, x, hyper in zip(found.columns, rows.columns, found.prior.columns, strict=True):
        parts.append(
            np.asarray(block.family.statistics(jnp.asarray(x, float), hyper)).reshape(num_rows, -1)
        )
        base += np.asarray(block.family.log_base(jnp.asarray(x, float)))
    return np.concatenate(parts, 1), base


# Messages to the rows.


def group_messages(
    found: Assignment, shape: Shape, factors: Factors, means: GateMeans | None = None
) -> Message:
    """The message to a row of each group under q, without the weight of the group."""
    means = means or means_of(factors)
    each = [
        block.family.expected(hyper)
        for block, hyper in zip(found.columns, factors.columns, strict=True)
    ]
    return _message(
        jnp.zeros(found.num_groups, factors.sticks[0].dtype),
        shape,
        means and gate_expected(factors.features, means),
        each,
        factors.weights,
    )


def group_messages_at(found: Assignment, shape: Shape, values: Mapping[str, Array]) -> Message:
    """The message to a row of each group at known parameters, without the weight of the group."""
    form = weights = None
    parameters = {block.site: values_by_group(found, block, values) for block in found.blocks}
    if found.features:
        form = gate_natural(
            *found.features.family.precision_and_loc(parameters[found.features.site])
        )
    if found.experts:
        weights = known_weights(with_class_axis(values[found.experts.weights], 3))
    return _message(
        jnp.zeros(found.num_groups, values[found.sticks].dtype),
        shape,
        form,
        [block.family.natural(parameters[block.site]) for block in found.columns],
        weights,
    )


def _message(
    const: Array, shape: Shape, form: Form | None, columns: list[Array], weights: Weights | None
) -> Message:
    num, dtype = len(const), const.dtype
    matrix = jnp.zeros((num, shape.num_entries, shape.num_entries), dtype)
    if form is not None:
        const, width = const + form.const, shape.num_features + 1
        matrix = matrix.at[:, :width, :width].set(form.matrix)
    mean, covariance = weights or known_weights(jnp.zeros((0, num, len(shape.design)), dtype))
    return Message(
        const,
        matrix,
        *_placed(shape, mean, covariance),
        jnp.concatenate([jnp.zeros((0, num), dtype), *(eta.reshape(num, -1).T for eta in columns)]),
    )


def means_of(factors: Factors) -> GateMeans | None:
    """The means under q from which the message of the features and their divergence follow."""
    return None if factors.features is None else gate_means(factors.features)


def message_of(
    found: Assignment, shape: Shape, factors: Factors, means: GateMeans | None = None
) -> Message:
    """The messages to the rows of each task's groups under q [task, ...].

    `means` is that of `means_of`, if it is known.
    """
    log_weights = expected_log_weights(factors.sticks)
    return spread(
        group_messages(found, shape, factors, means),
        jnp.where(is_open(factors.num_open, found.num_own), log_weights, -jnp.inf),
        share_of(factors.upper),
    )


def message_at(found: Assignment, shape: Shape, values: Mapping[str, Array]) -> Message:
    """The messages to the rows of each task's groups at known parameters [task, ...]."""
    V = jnp.atleast_2d(values[found.sticks])
    return spread(
        group_messages_at(found, shape, values),
        log_sticks(jnp.log(V), jnp.log1p(-V)),
        found.share_at(values),
    )


def _placed(
    shape: Shape,
    mean: Float[Array, "class group weight"],
    covariance: Float[Array, "class group weight weight"],
) -> tuple[Float[Array, "class group entry"], Float[Array, "class group entry entry"]]:
    # The mean and the covariance of weights in the place of the entries that they multiply.
    if shape.sees_all:
        return mean, covariance
    place = jnp.eye(shape.num_entries, dtype=mean.dtype)[jnp.array(shape.design, int)]
    return mean @ place, place.T @ covariance @ place


# Groups that tasks share.


def share_of(upper: Upper | None) -> Array | None:
    """The probability of each shared group [task, own group, group]."""
    return None if upper is None else jnp.exp(upper.log_share)


def spread(
    message: Message,
    log_weights: Float[Array, "task own"],
    share: Float[Array, "task own group"] | None,
) -> Message:
    """The message to the rows of each task's groups [task, ...].

    Args:
        message: The message of each shared group.
        log_weights: The log weights of the groups of each task.
        share: The probability of each shared group; None where tasks do not share groups.
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


def gathered(sums: SufficientSums, share: Float[Array, "task own group"] | None) -> SufficientSums:
    """The sums over the rows of each shared group, from those over the groups of each task."""
    if share is None:
        return SufficientSums(*(part.sum(0) for part in sums[:-1]), sums.bound)
    return SufficientSums(
        jnp.einsum("jhs,jhab->sab", share, sums.moments),
        jnp.einsum("jhs,jchab->csab", share, sums.asked),
        jnp.einsum("jhs,jcha->csa", share, sums.products),
        jnp.einsum("jhs,jfh->fs", share, sums.columns),
        sums.bound,
    )


def agreement(message: Message, sums: SufficientSums, one: int) -> Float[Array, "task own group"]:
    """The message of each shared group, summed over the rows of each group of a task.

    Args:
        message: The message of each shared group.
        sums: The sums over the rows of each task's groups.
        one: The index of the entry of a row that is 1.
    """
    return (
        sums.moments[:, :, one, one][..., None] * message.const[None, None]
        - jnp.einsum("jhab,sab->jhs", sums.moments, message.matrix) / 2
        - jnp.einsum("jchab,csab->jhs", sums.asked, message.second()) / 2
        + jnp.einsum("jcha,csa->jhs", sums.products, message.answers)
        + jnp.einsum("jfh,fs->jhs", sums.columns, message.columns)
    )


def _upper(prior: Pair, before: Upper, agrees: Array) -> Upper:
    def turn(_, at: Upper) -> Upper:
        return _upper_at(
            prior,
            jax.nn.log_softmax(agrees + expected_log_weights(at.sticks)[None, None]),
            at.concentration,
        )

    return lax.fori_loop(0, NUM_ROUNDS, turn, before)


def _upper_at(prior: Pair, log_share: Array, concentration: Pair) -> Upper:
    return Upper(*sticks_of(prior, jnp.exp(log_share).sum((0, 1)), concentration), log_share)


# Sticks.


def is_open(num_open: Any, num: int) -> Bool[Array, " group"]:
    """Which of so many groups, or of their sticks, may have rows."""
    return jnp.arange(num) < num_open


def has_rows(found: Assignment, upper: Upper | None, num_open: Any) -> Bool[Array, " group"]:
    """Which groups may have rows; where tasks share groups all of them."""
    return is_open(found.num_groups if upper else num_open, found.num_groups)


def expected_log_weights(sticks: Pair) -> Array:
    """E log pi [..., group]."""
    c1, c0 = sticks
    total = digamma(c1 + c0)
    return log_sticks(digamma(c1) - total, digamma(c0) - total)


def sticks_given(count: Float[Array, "*batch group"], concentration: Float[Array, "..."]) -> Pair:
    """The Beta posterior of each V, given the number of rows of each group and alpha or E alpha."""
    return 1 + count[..., :-1], concentration + jnp.cumsum(count[..., ::-1], -1)[..., ::-1][..., 1:]


def concentration_given(prior: Pair, log_left: Array, is_seen: Any = True) -> Pair:
    """The Gamma posterior (concentration, rate) of alpha.

    Args:
        prior: The prior (concentration, rate); alpha is known where the rate is infinite.
        log_left: log (1 - V) of the sticks, or its mean.
        is_seen: The sticks that count.
    """
    (a0, b0), seen = prior, jnp.broadcast_to(is_seen, log_left.shape).astype(log_left.dtype)
    return jnp.where(jnp.isinf(b0), a0, a0 + jnp.sum(seen)), b0 - jnp.sum(seen * log_left)


def sticks_of(
    prior: Pair, count: Float[Array, "*batch group"], concentration: Pair, is_seen: Any = True
) -> tuple[Pair, Pair]:
    """q of alpha and q of the sticks of each row of counts, updated in turn.

    Sticks that are not seen follow the prior given alpha, so alpha does not depend on them.
    """

    def turn(_, at):
        (a, b), _ = at
        sticks = sticks_given(count, jnp.where(jnp.isinf(b), a, a / b))
        return concentration_given(
            prior, digamma(sticks[1]) - digamma(sticks[0] + sticks[1]), is_seen
        ), sticks

    like = jnp.zeros_like(count[..., 1:])
    return lax.fori_loop(0, NUM_ROUNDS, turn, (tuple(concentration), (like, like)))


# All factors.


def factors_of(
    found: Assignment,
    shape: Shape,
    prior: Prior,
    sums: SufficientSums,
    before: Factors | None = None,
    log_share: Array | None = None,
    is_held: Any = False,
    means: GateMeans | None = None,
    num_open: Any = None,
) -> Factors:
    """Sets one factor after the other to its optimum; each raises the bound.

    Args:
        found: The mixture.
        shape: The layout of the entries of a row.
        prior: The hyper-parameters.
        sums: The sums over the rows of each task's groups.
        before: The factors after the last sweep; None at a start.
        log_share: Where tasks share groups, the share at a start.
        is_held: Whether q(zeta, lambda) stays as it is.
        means: What `means_of` returns for `before`, if it is known.
        num_open: The number of groups that may have rows; None: that of `before`, all at a start.
    """
    if num_open is None:
        num_open = jnp.array(found.num_own) if before is None else before.num_open
    upper, one = None, shape.num_features
    if before is not None and before.upper is not None:
        message = group_messages(found, shape, before, means)
        upper = _upper(prior.upper, before.upper, agreement(message, sums, one))
    elif log_share is not None:
        upper = _upper_at(prior.upper, log_share, prior.upper)
    concentration, sticks = sticks_of(
        prior.concentration,
        sums.moments[:, :, one, one],
        (prior if before is None else before).concentration,
        is_open(num_open, found.num_own - 1),
    )
    sums = gathered(sums, share_of(upper))
    columns, features = blocks_of(found, shape, prior, sums)
    is_seen = has_rows(found, upper, num_open)[None]
    weights, common = _experts(prior, shape, sums, before, is_held, is_seen)
    return Factors(concentration, sticks, upper, columns, features, weights, common, num_open)


def blocks_of(
    found: Assignment, shape: Shape, prior: Prior, sums: SufficientSums
) -> tuple[tuple[Any, ...], Any]:
    """The posterior hyper-parameters of the columns and of the features, for each group."""
    sizes = [  # (columns, statistics) of each block
        jax.eval_shape(block.family.expected, hyper).shape[1:]
        for block, hyper in zip(found.columns, prior.columns, strict=True)
    ]
    ends = np.cumsum([np.prod(size) for size in sizes], dtype=int)[:-1].tolist()
    blocks = tuple(
        block.family.posterior(hyper, own.T.reshape(-1, *size))
        for block, hyper, size, own in zip(
            found.columns, prior.columns, sizes, jnp.split(sums.columns, ends), strict=False
        )
    )
    width = shape.num_features + 1
    return blocks, gate_posterior(
        prior.features, sums.moments[:, :width, :width]
    ) if found.features else None


def expert_sums(shape: Shape, sums: SufficientSums) -> tuple[Array, Array]:
    """The sums of d d' and of t d over rows, with d the entries that the weights multiply."""
    if shape.sees_all:
        return sums.asked, sums.products
    at = jnp.array(shape.design, int)
    return sums.asked[..., at[:, None], at], sums.products[..., at]


def _experts(
    prior: Prior,
    shape: Shape,
    sums: SufficientSums,
    before: Factors | None,
    is_held: Any,
    is_seen: Array,
) -> tuple[Weights | None, Common | None]:
    own = prior.experts
    if own is None:
        return None, None
    moments, products = expert_sums(shape, sums)
    # At a start q(zeta, lambda) is the prior with a larger variance, which leaves the weights free.
    known = None if before is None else before.common
    common = known or own._replace(rate=WIDE * own.rate)

    def turn(_, at):
        weights = weights_posterior(at[1], moments, products)
        return weights, jax.tree.map(
            partial(jnp.where, is_held), at[1], common_posterior(own, weights, is_seen)
        )

    like = Weights(jnp.zeros_like(products), jnp.zeros_like(moments))
    return lax.fori_loop(0, NUM_ROUNDS, turn, (like, common))


def divergence(
    found: Assignment, prior: Prior, factors: Factors, means: GateMeans | None = None
) -> Array:
    """KL(q | prior) of the factors, which the evidence bound subtracts.

    `means` is that of `means_of`, if it is known.
    """
    means = means or means_of(factors)
    of_sticks, of_alpha = _stick_divergence(
        prior.concentration, factors.concentration, factors.sticks
    )
    terms = [of_alpha, of_sticks * is_open(factors.num_open, of_sticks.shape[-1])[None]]
    if factors.upper is not None:
        concentration, sticks, log_share = factors.upper
        terms += _stick_divergence(prior.upper, concentration, sticks)
        terms += [jnp.exp(log_share) * (log_share - expected_log_weights(sticks)[None, None])]
    for block, hyper, own in zip(found.columns, factors.columns, prior.columns, strict=True):
        terms += [block.family.divergence(hyper, own)]
    if means:
        terms += gate_divergence(factors.features, means, prior.features)
    if factors.weights is not None and factors.common is not None and prior.experts:
        seen = has_rows(found, factors.upper, factors.num_open)[None, :, None]
        terms += [-term * seen for term in weights_terms(factors.common, factors.weights)]
        terms += [common_divergence(factors.common, prior.experts)]
    return total(*terms)


def _stick_divergence(prior: Pair, concentration: Pair, sticks: Pair) -> tuple[Array, Array]:
    (mean, mean_log), (c1, c0) = gamma_means(concentration), sticks
    one = jnp.ones_like(c1)
    of_sticks = (
        beta_divergence(sticks, (one, one))
        - mean_log
        - (mean - 1) * (digamma(c0) - digamma(c1 + c0))
    )
    return of_sticks, gamma_divergence(concentration, prior)


def parameters_of(found: Assignment, factors: Factors) -> dict[str, dict[str, Array]]:
    """The parameters of the factors by site."""
    shape = found.few.sites[found.sticks].shape
    lower = (factors.concentration, [part.reshape(shape) for part in factors.sticks])
    named: dict[str | None, dict[str, Array]] = {}
    if found.upper and factors.upper:
        named[found.upper.site] = {"probs": jnp.exp(factors.upper.log_share)}
    each = (lower, factors.upper[:2] if factors.upper else lower)
    for level, ((a, b), (c1, c0)) in zip(found.levels, each, strict=False):
        named[level.concentration] = {"concentration": a, "rate": b}
        named[level.sticks] = {"concentration1": c1, "concentration0": c0}
    for block, hyper in zip(found.blocks, (*factors.columns, factors.features), strict=False):
        named[block.priors[-1]] = hyper._asdict()
    if found.experts and factors.weights and (common := factors.common):
        _, _, weights, loc, precision = found.experts
        named |= {
            weights: factors.weights._asdict(),
            loc: {"loc": common.loc, "gamma": common.gamma},
            precision: {"concentration": common.concentration, "rate": common.rate},
        }
    return {site: own for site, own in named.items() if site}
