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
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.special import digamma

from inference.kernels.coordinate_ascent.rows import Message, Sums
from inference.reading.conjugate.pairs import (
    beta_divergence,
    gamma_divergence,
    gamma_means,
    log_sticks,
)

__all__ = [
    "Upper",
    "agreement",
    "concentration_given",
    "divergence_of_sticks",
    "divergence_of_upper",
    "expected_log_weights",
    "gathered",
    "share_of",
    "spread",
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
