"""The rows of a sweep: their layout, and q(z) q(x_missing, t | z) of each row.

A row has the group z, the missing entries x_missing (its *holes*) and the soft labels t.

Layout. A bucket has rows with similar numbers of holes. It is cut into chunks of rows of one task
whose labels leave the same classes open. All chunks of a bucket have one shape, so a bucket is one
compiled loop, and the memory is that of a chunk. A row that misses m entries costs as much as one
that misses the width of its bucket. The widths minimise the total cost.

Posterior. Every block that sees a row sends a message: a number and a quadratic form in u =
(features, 1, extras) for each group h. The experts send the mean w and the covariance C of the
weights, 0 where they see no entry. The sum, under q of the parameters, is

    s_h(u, t) = const_h - u' (Q_h + C_h) u / 2 + log Normal(t | w_h . u, 1)                     (1)

with t on the side of 0 that the label says. Given the group t and the missing entries m are jointly
Normal, with t truncated at 0. Let A = (Q_h + C_h)_mm, c = -(Q_h + C_h)_mo u_o, omega = A^-1, x =
omega c (the mean of the missing entries without the label) and g = omega w_m. The location of t is
a = w_h . (x, u_o), its variance v = 1 + w_m . g, and

    log q(h) = s_h without t at x_m = 0, + (c . omega c - log |A| + |m| log 2 pi) / 2
               + log Phi(+-a / sqrt(v)) + const,
    t | h    ~ Normal(a, v) truncated at 0, with mean b and variance v (1 - lost),              (2)
    x_m | h    has the mean x + g (b - a) / v and the covariance omega - g g' lost / v,
               and cov(t, x_m | h) = g (1 - lost).

Where a label decides the sign of several soft labels, the classes are independent given the group
and the entries. So (2) holds of each class in rows without holes. In rows with holes it would take
orthant probabilities of as many dimensions. There only the last class whose sign is known is joint
with the missing entries. The soft labels of the others are factors q(t_c | z) of their own,
Normal(score_ch, 1) truncated at 0: E t_c w_c adds to c, and w_c w_c' to Q_h.

A row enters the other factors only through sums over rows, of rho u u', of rho t u, and of rho F of
the columns, where rho is the responsibility of a group. They are expectations under (2).

Cost of a row without holes: K D^2 / 2 multiplications twice, as one matrix product each over the
products of its entries; of a row with m holes: 2 K D^2 and K m^3 / 2, by sweeps that run over many
rows at once, with all groups side by side.
"""

import math
from itertools import combinations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from inference.distributions.truncated_normal import one_sided
from inference.reading.conjugate.quadratic import outer
from inference.reading.stick_mixture.structure import MixtureRows

__all__ = [
    "ClassMasks",
    "CompletePosterior",
    "IncompletePosterior",
    "Message",
    "RowBucket",
    "SufficientSums",
    "as_floats",
    "class_masks",
    "complete_posterior",
    "form_of",
    "incomplete_given_soft",
    "incomplete_posterior",
    "inverse",
    "lay_out",
    "message_to",
    "rounded",
    "score_of",
    "soft_labels",
    "sum_rows",
]

BLOCK = 16  # rows whose missing entries are worked out together
OVERHEAD = 2e5  # of compiling a bucket, in multiplications of a group
LONGEST_CHUNK = {"complete": 1024, "incomplete": 256}
FEW = 500  # rows; with fewer, compiling takes longer than a sweep
EMPTY = np.iinfo(np.int32).max  # a place without a row


class RowBucket(NamedTuple):
    """Rows with similar numbers of holes; all arrays but `task` are [chunk, place, ...]."""

    row: Array  # number of the row, or `EMPTY`
    entries: Array  # u = (features, 1, extras), 0 where missing
    statistics: Array  # of the columns, one block after the other
    signs: Array  # of the soft labels [..., class]; 0 where the label leaves the sign open
    missing: Array  # [..., hole]: which entries are missing, 0 where there are fewer
    num_missing: Array
    task: Array  # of all rows of a chunk [chunk]


def lay_out(
    rows: MixtureRows,
    statistics: Float[np.ndarray, "row statistic"],
    dtype: str,
    shuffled: bool = False,
) -> tuple[RowBucket, ...]:
    """The buckets of rows, in the order of the rows or shuffled, the same way each time."""
    is_missing = np.isnan(rows.features)
    count = is_missing.sum(1)
    entries = np.concatenate(
        [np.where(is_missing, 0, rows.features), np.ones((len(count), 1)), rows.extras], 1
    )
    order = np.argsort(~is_missing, axis=1, kind="stable")  # missing entries first
    kinds = np.unique(np.column_stack([rows.task, rows.signs != 0]), axis=0, return_inverse=True)[
        1
    ].reshape(-1)
    found, narrower = [], -1
    for width in _widths(count, entries.shape[1]):
        chosen = np.flatnonzero((count > narrower) & (count <= width))
        chosen = np.random.default_rng(0).permutation(chosen) if shuffled else chosen
        narrower = width
        row = _places(chosen, kinds[chosen], LONGEST_CHUNK["incomplete" if width else "complete"])
        # An empty place has the data of some row, and weight 0.
        at = np.minimum(row, len(count) - 1)
        missing = np.where(np.arange(width) < count[at][..., None], order[at, :width], 0)
        numbers = (
            np.asarray(part, dtype) for part in (entries[at], statistics[at], rows.signs[at])
        )
        row, missing, num_missing, task = (
            np.asarray(part, np.int32) for part in (row, missing, count[at], rows.task[row[:, 0]])
        )
        parts = (row, *numbers, missing, num_missing, task)
        found.append(RowBucket(*jax.device_put(parts)))
    return tuple(found)


def _places(
    chosen: Int[np.ndarray, " row"], kinds: Int[np.ndarray, " row"], longest: int
) -> Int[np.ndarray, "chunk place"]:
    # Row numbers [chunk, place], each chunk of one kind.
    size = int(np.bincount(kinds).max())
    # Code for chunks of the longest size takes long to compile: not for fewer than 500 rows.
    longest = longest if size >= FEW else max(longest // 2, 1)
    size = rounded(-(-size // -(-size // longest)), min(BLOCK, longest))
    pad = lambda own: np.pad(own, (0, -len(own) % size), constant_values=EMPTY)
    return np.concatenate([pad(chosen[kinds == kind]) for kind in np.unique(kinds)]).reshape(
        -1, size
    )


def rounded(size: int, least: int) -> int:
    """The next of few sizes: multiples of `least`, so that other data often need no other code."""
    step = min(max(2 ** (size.bit_length() - 2), least), 128)
    return -(-size // step) * step


def _widths(count: np.ndarray, size: int, most: int = 20, most_buckets: int = 5) -> tuple[int, ...]:
    # The largest number of missing entries of each bucket, chosen among at most `most` numbers by
    # the cost of a sweep; `size` is that of u.
    if len(count) < FEW:
        count = np.array([min(rounded(int(number), 1), size - 1) for number in count])
    sizes, how_many = np.unique(count, return_counts=True)
    ends = np.unique(np.linspace(0, len(sizes) - 1, min(most, len(sizes))).round().astype(int))
    how_many = np.add.reduceat(how_many, np.concatenate([[0], ends[:-1] + 1]))
    sizes = sizes[ends]

    def cost(widths: tuple[int, ...]) -> float:
        width = np.asarray(widths)[np.searchsorted(widths, sizes)]
        each = np.where(width == 0, size**2, 2 * size**2 + (width + 2.0) ** 3)
        return float(how_many @ each) + OVERHEAD * len(widths)

    inner = (
        chosen
        for number in range(most_buckets)
        for chosen in combinations(sizes[:-1].tolist(), min(number, len(sizes) - 1))
    )
    return min(((*chosen, int(sizes[-1])) for chosen in inner), key=cost)


def as_floats(tree: Any) -> Any:
    """A tree of numbers as arrays of JAX's default precision, without a compiler."""
    dtype = jnp.result_type(float)
    return jax.device_put(jax.tree.map(lambda leaf: np.asarray(leaf, dtype), tree))


class Message(NamedTuple):
    """The sum of the messages of all blocks to a row of each group.

    With several tasks each array has a first axis of tasks.
    """

    const: Array  # [group], the log weight of the group in it
    matrix: Array  # Q, the features' part [group, entry, entry]
    answers: Array  # E w in the place of its entries [class, group, entry]
    covariance: Array  # C of w [class, group, entry, entry]
    columns: Array  # E eta [statistic, group]

    def second(self) -> Array:
        """E w w'."""
        return self.covariance + outer(self.answers)


def message_to(message: Message, task: Array) -> Message:
    """The message to the rows of a task."""
    return jax.tree.map(lambda leaf: leaf[task], message)


class SufficientSums(NamedTuple):
    """Sums over rows. With several tasks each array but the bound has a first axis of tasks."""

    moments: Array  # rho u u' [group, entry, entry]
    asked: Array  # the same over rows with the sign of a class [class, group, entry, entry]
    products: Array  # rho t u [class, group, entry]
    columns: Array  # rho F [statistic, group]
    bound: Array  # what the rows add to the evidence bound

    def plus(self, other: "SufficientSums") -> "SufficientSums":
        """The sums over the rows of both."""
        return jax.tree.map(jnp.add, self, other)

    def times(self, factor: Any) -> "SufficientSums":
        """The sums where each row counts `factor` times."""
        return jax.tree.map(lambda leaf: leaf * jnp.asarray(factor, leaf.dtype), self)

    def plus_task(self, other: "SufficientSums", task: Array) -> "SufficientSums":
        """The sums with those over rows of one task added."""
        add = lambda mine, own: lax.dynamic_update_index_in_dim(mine, mine[task] + own, task, 0)
        return SufficientSums(*map(add, self[:-1], other[:-1]), self.bound + other.bound)


def sum_rows(
    message: Message,
    bucket: RowBucket,
    score: Float[Array, "chunk place class group"],
) -> tuple[SufficientSums, Array]:
    """The sums over the rows of a bucket, and the new `score`.

    Args:
        message: The messages to the rows [task, ...].
        bucket: The rows.
        score: Locations of the soft labels that are factors of their own, of all classes but the
            last; not used in rows without holes.
    """
    visit = _visit_incomplete if bucket.missing.shape[-1] else _visit_complete
    like = (message.matrix, message.covariance, message.answers, message.columns)

    def add(total: SufficientSums, part: tuple[RowBucket, Array]) -> tuple[SufficientSums, Array]:
        chunk, weight = part[0], (part[0].row != EMPTY).astype(message.const.dtype)
        sums, score = visit(message_to(message, chunk.task), *part, weight)
        return total.plus_task(sums, chunk.task), score

    return lax.scan(
        add,
        SufficientSums(*map(jnp.zeros_like, like), jnp.zeros((), message.const.dtype)),
        (bucket, score),
    )


class ClassMasks(NamedTuple):
    """The classes whose sign the labels of a chunk decide, 1 or 0 [class]."""

    all: Array
    last: Array  # the class whose soft label is joint with missing entries
    others: Array


def class_masks(signs: Float[Array, " class"]) -> ClassMasks:
    """The masks of a chunk, from one of its rows: their labels leave the same classes open."""
    every = (signs != 0).astype(signs.dtype)
    last = every * (jnp.cumsum(every[::-1])[::-1] == 1).astype(signs.dtype)
    return ClassMasks(every, last, every - last)


def soft_labels(score: Array, signs: Array) -> tuple[Array, Array]:
    """The means of soft labels that are factors of their own, and their terms of the bound.

    Such a factor is Normal(score, 1), truncated to the side of 0 that the sign says. Mean and term
    are 0 where the sign is 0.
    """
    is_cut, cut = signs != 0, one_sided(signs * score)
    mean = score + signs * cut.shift
    return jnp.where(is_cut, mean, 0), jnp.where(
        is_cut, cut.log_mass + score**2 / 2 - score * mean, 0
    )


def form_of(message: Message, masks: ClassMasks) -> Array:
    """The quadratic form of rows with holes [group, entry, entry].

    It is Q + C, plus w w' of each soft label that is a factor of its own.
    """
    return _form(message, masks) + jnp.einsum(
        "c,cki,ckj->kij", masks.others, message.answers, message.answers
    )


def _form(message: Message, masks: ClassMasks) -> Array:
    return message.matrix + jnp.einsum("c,ckij->kij", masks.all, message.covariance)


def score_of(
    message: Message, chunk: RowBucket, score: Float[Array, "place class group"]
) -> Float[Array, "place class group"]:
    """The locations of the soft labels that are factors of their own.

    In rows without holes they are at their optimum, whatever `score` is.
    """
    return jnp.where(
        (chunk.num_missing == 0)[:, None, None],
        jnp.einsum("pi,cki->pck", chunk.entries, message.answers[: score.shape[1]]),
        score,
    )


# Rows without holes, places last.


class CompletePosterior(NamedTuple):
    """q(z, t) of the rows of a chunk without holes."""

    log_joint: Array  # s of (2) [group, place]
    soft: Array  # expected soft labels, 0 where their sign is open [class, group, place]
    products: Array  # of entries [pair of entries, place]


def complete_posterior(message: Message, chunk: RowBucket) -> CompletePosterior:
    """q(z, t) of rows without holes, whose soft labels are independent given the group."""
    u, masks, signs = chunk.entries.T, class_masks(chunk.signs[0]), chunk.signs.T[:, None]
    first, second = np.triu_indices(len(u))
    products = u[first] * u[second]
    form = (
        _form(message, masks)[:, first, second]
        * jnp.where(first == second, -0.5, -1.0).astype(u.dtype)[None]
    ) @ products
    log_joint = message.const[:, None] + form + message.columns.T @ chunk.statistics.T
    loc, is_cut = jnp.einsum("cki,ip->ckp", message.answers, u), masks.all[:, None, None]
    cut = one_sided(signs * loc)
    return CompletePosterior(
        log_joint + jnp.sum(is_cut * cut.log_mass, 0), is_cut * (loc + signs * cut.shift), products
    )


def _visit_complete(
    message: Message,
    chunk: RowBucket,
    score: Float[Array, "place class group"],
    weight: Float[Array, " place"],
) -> tuple[SufficientSums, Float[Array, "place class group"]]:
    found = complete_posterior(message, chunk)
    total = jax.nn.logsumexp(found.log_joint, axis=0)
    rho = jnp.exp(found.log_joint - total[None]) * weight[None]
    size = chunk.entries.shape[1]
    pair, (first, second) = np.zeros((size, size), int), np.triu_indices(size)
    pair[first, second] = pair[second, first] = np.arange(len(first))
    moments = (rho @ found.products.T)[:, pair]
    return SufficientSums(
        moments,
        class_masks(chunk.signs[0]).all[:, None, None, None] * moments[None],
        jnp.einsum("ckp,pi->cki", found.soft * rho[None], chunk.entries),
        chunk.statistics.T @ rho.T,
        jnp.sum(weight * total),
    ), score


# Rows with holes, groups last.


class IncompletePosterior(NamedTuple):
    """q(z, x_missing, t) of the rows of a chunk."""

    log_rho: Array  # [place, group]
    entries: Array  # u, expected [place, entry, group]
    # of the missing entries [block of places, hole, hole, place of the block, group]
    covariance: Array
    soft: Array  # expected soft label of the last class with a sign [place, group]
    tie: Array  # its covariance with the missing entries [place, hole, group]
    norm: Array  # log of the sum of exp(s) over the groups [place]


class _Holes(NamedTuple):  # the missing entries without the last soft label; see (2)
    mean: Array  # x [place, hole, group]
    covariance: Array  # omega [block of places, hole, hole, place of the block, group]
    gain: Array  # (c . omega c - log |A| + |m| log 2 pi) / 2 [place, group]
    pull: Array  # g [place, hole, group]
    score: Array  # w_m . x [place, group]
    variance: Array  # w_m . g [place, group]


def incomplete_posterior(
    message: Message, chunk: RowBucket, score: Float[Array, "place class group"]
) -> IncompletePosterior:
    """q(z, x_missing, t) of rows with holes.

    `score` has the locations of the soft labels that are factors of their own.
    """
    signs = (chunk.signs * class_masks(chunk.signs[0]).others[None])[:, : score.shape[1], None]
    soft, term = soft_labels(score_of(message, chunk, score), signs)
    return incomplete_given_soft(message, chunk, soft, term)


def incomplete_given_soft(
    message: Message,
    chunk: RowBucket,
    soft: Float[Array, "place class group"],
    term: Float[Array, "place class group"],
) -> IncompletePosterior:
    """q(z, x_missing, t) of rows with holes, given all soft labels but the last one.

    Args:
        message: The messages to the rows.
        chunk: The rows.
        soft: Values or means of the other soft labels; 0 where their sign is open.
        term: What these add to the log joint.
    """
    u, masks, num = chunk.entries, class_masks(chunk.signs[0]), soft.shape[1]
    matrix = form_of(message, masks).transpose(1, 2, 0)
    experts = jnp.einsum("c,cki->ik", masks.last, message.answers)
    size, _, groups = matrix.shape
    push = jnp.einsum("pck,cki->pik", soft, message.answers[:num])
    form = (u @ matrix.reshape(size, -1)).reshape(-1, size, groups)
    log_joint = (
        message.const[None]
        + jnp.einsum("pi,pik->pk", u, push - form / 2)
        + chunk.statistics @ message.columns
        + term.sum(1)
    )
    holes = _holes(chunk, matrix, push - form, experts if len(message.answers) else None)
    # The last soft label; where there is none its sign is 0, and the experts are.
    sign, is_tied = (chunk.signs @ masks.last)[:, None], masks.last.sum()
    loc, scale = u @ experts + holes.score, jnp.sqrt(1 + holes.variance)
    cut = one_sided(sign * loc / scale)
    log_joint = log_joint + holes.gain + is_tied * cut.log_mass
    total = jax.nn.logsumexp(log_joint, axis=1)
    entries = (
        jnp.broadcast_to(u[:, :, None], form.shape)
        .at[jnp.arange(len(u))[:, None], chunk.missing]
        .add(holes.mean + holes.pull * (sign * cut.shift / scale)[:, None])  # 0 beyond the holes
    )
    blocks, _, width, block, _ = holes.covariance.shape
    g = holes.pull.reshape(blocks, block, width, groups).swapaxes(1, 2)
    lost = (cut.lost / scale**2).reshape(blocks, 1, 1, block, groups)
    return IncompletePosterior(
        log_joint - total[:, None],
        entries,
        holes.covariance - g[:, :, None] * g[:, None] * lost,
        loc + sign * scale * cut.shift,
        holes.pull * (1 - cut.lost)[:, None],
        total,
    )


def _holes(
    chunk: RowBucket,
    matrix: Float[Array, "entry entry group"],
    slope: Float[Array, "place entry group"],
    experts: Float[Array, "entry group"] | None,
) -> _Holes:
    # `BLOCK` rows at a time stay in the cache.
    rows, block = len(chunk.missing), math.gcd(len(chunk.missing), BLOCK)
    split = lambda leaf: leaf.reshape(rows // block, block, *leaf.shape[1:])
    # Unrolled code for more than 24 holes would be long.
    is_unrolled = rows >= LONGEST_CHUNK["incomplete"] and chunk.missing.shape[1] <= 24
    found = lax.map(
        lambda part: _holes_of_block(*part, matrix, experts, is_unrolled),
        jax.tree.map(split, (chunk.missing, chunk.num_missing, slope)),
    )
    joined = jax.tree.map(
        lambda leaf: leaf.reshape(rows, *leaf.shape[2:]), found._replace(covariance=None)
    )
    return joined._replace(covariance=found.covariance)


def _holes_of_block(
    missing: Int[Array, "place hole"],
    num_missing: Int[Array, " place"],
    slope: Float[Array, "place entry group"],
    matrix: Float[Array, "entry entry group"],
    experts: Float[Array, "entry group"] | None,
    is_unrolled: bool,
) -> _Holes:
    size, groups, width = *matrix.shape[1:], missing.shape[1]
    is_hole = jnp.arange(width)[None] < num_missing[:, None]  # [place, hole]
    of_holes = lambda of_entries: (
        jnp.take_along_axis(of_entries, missing[:, :, None], 1) * is_hole[:, :, None]
    )
    both = (is_hole.T[:, None] & is_hole.T[None])[..., None]
    own = matrix.reshape(size * size, groups)[_pairs(missing, size)]
    covariance, log_det = inverse(
        jnp.where(both, own, jnp.eye(width, dtype=own.dtype)[:, :, None, None]), is_unrolled
    )
    solved = lambda vectors: jnp.einsum("abpk,pbk->pak", covariance, vectors)
    c = of_holes(slope)
    mean = solved(c)
    constant = (num_missing.astype(own.dtype) * math.log(2 * math.pi))[:, None]
    if experts is None:
        w = pull = jnp.zeros_like(mean)
    else:
        w = of_holes(jnp.broadcast_to(experts[None], slope.shape))
        pull = solved(w)
    score, variance = jnp.sum(w * mean, 1), jnp.sum(w * pull, 1)
    return _Holes(
        mean,
        jnp.where(both, covariance, 0),
        (jnp.sum(c * mean, 1) - log_det + constant) / 2,
        pull,
        score,
        variance,
    )


def _pairs(missing: Array, size: int) -> Array:
    # Where each pair of missing entries is in a flattened matrix [hole, hole, place].
    return missing.T[:, None] * size + missing.T[None]


def inverse(matrix: Array, is_unrolled: bool = False) -> tuple[Array, Array]:
    """The inverse and the log determinant of positive definite matrices [i, j, ...], all at once.

    Unrolled code is three times as fast, and slow to compile.
    """
    return (_eliminated if is_unrolled or not len(matrix) else _swept)(matrix)


def _swept(matrix: Array) -> tuple[Array, Array]:
    """The inverse and the log determinant by the sweep operator.

    At each index the pivot p becomes -1 / p, its column v becomes v / p, and the rest becomes
    rest - v v' / p.
    """
    size = len(matrix)

    def sweep(j: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
        matrix, log_det = at
        column = lax.dynamic_index_in_dim(matrix, j, 0, keepdims=False)
        pivot = lax.dynamic_index_in_dim(column, j, 0, keepdims=False)
        unit = (jnp.arange(size) == j).astype(matrix.dtype).reshape(size, *(1,) * (matrix.ndim - 2))
        column = column - unit
        return (matrix - column[:, None] * (column / pivot[None])[None]) - 2 * unit[:, None] * unit[
            None
        ], log_det + jnp.log(pivot)

    negative, log_det = lax.fori_loop(
        0, size, sweep, (matrix, jnp.zeros(matrix.shape[2:], matrix.dtype))
    )
    return -negative, log_det


def _eliminated(matrix: Array) -> tuple[Array, Array]:
    """The inverse and the log determinant by Schur complements, with v = column / pivot in a step.

    On the way back, from the inverse Z of the complement and y = Z v, the inverse is ((1 / pivot +
    v . y, -y'), (-y, Z)). Each step is a loop of its own, or XLA would compute steps several times.
    """
    rest, pivots, steps = matrix, [], []
    for _ in range(len(matrix)):
        pivots.append(rest[0, 0])
        steps.append(lax.optimization_barrier(rest[1:, 0] / rest[:1, 0]))
        rest = lax.optimization_barrier(rest[1:, 1:] - rest[1:, :1] * steps[-1][None])
    found = rest
    for pivot, step in zip(reversed(pivots), reversed(steps), strict=True):
        y = lax.optimization_barrier(jnp.sum(found * step[None], 1))
        top = jnp.concatenate([(1 / pivot + jnp.sum(step * y, 0))[None], -y])
        found = lax.optimization_barrier(
            jnp.concatenate([top[None], jnp.concatenate([-y[:, None], found], 1)])
        )
    return found, sum(map(jnp.log, pivots), start=jnp.zeros(matrix.shape[2:], matrix.dtype))


def _visit_incomplete(
    message: Message,
    chunk: RowBucket,
    score: Float[Array, "place class group"],
    weight: Float[Array, " place"],
) -> tuple[SufficientSums, Float[Array, "place class group"]]:
    masks, num = class_masks(chunk.signs[0]), score.shape[1]
    found = incomplete_posterior(message, chunk, score)
    score = jnp.einsum("pik,cki->pck", found.entries, message.answers[:num])
    others = soft_labels(score, (chunk.signs * masks.others[None])[:, :num, None])[0]
    soft = (
        jnp.pad(others, ((0, 0), (0, len(masks.last) - num), (0, 0)))
        + masks.last[None, :, None] * found.soft[:, None]
    )
    rho = jnp.exp(found.log_rho) * weight[:, None]
    weighted = rho[:, None] * found.entries
    size, block = weighted.shape[1], found.covariance.shape[3]
    pair = jax.vmap(lambda missing: _pairs(missing, size))(
        chunk.missing.reshape(-1, block, chunk.missing.shape[1])
    )
    spread = (
        jnp.zeros((size * size, rho.shape[1]), rho.dtype)
        .at[pair]
        .add(found.covariance * rho.reshape(-1, 1, 1, block, rho.shape[1]))
    )
    moments = jnp.einsum("pik,pjk->kij", weighted, found.entries) + spread.T.reshape(-1, size, size)
    tie = jnp.zeros((size, rho.shape[1]), rho.dtype).at[chunk.missing].add(rho[:, None] * found.tie)
    products = jnp.einsum("pck,pik->cki", soft, weighted) + masks.last[:, None, None] * tie.T[None]
    return SufficientSums(
        moments,
        masks.all[:, None, None, None] * moments[None],
        products,
        chunk.statistics.T @ rho,
        jnp.sum(weight * found.norm),
    ), score
