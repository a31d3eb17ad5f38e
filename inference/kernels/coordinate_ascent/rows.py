"""Rows laid out for sweeps: in buckets of rows that miss about as many entries, each cut into
chunks of rows of one task whose labels tell alike.

All chunks of a bucket have one shape, so that a bucket is one compiled loop, and memory is that of
a chunk. A row that misses m entries costs as one that misses the width of its bucket; the widths
are chosen so that this costs least.

The rows of a sweep: group, missing entries and soft labels of each row, jointly: q(z) q(x_missing,
t | z).

Every block that sees a row sends a message, a number and a quadratic form in u = (features, 1,
extras) for each group h. The experts send the mean w and the covariance C of the weights, which are
0 where they see no entry. Their sum, under q of the parameters, is

    s_h(u, t) = const_h - u' (Q_h + C_h) u / 2 + log Normal(t | w_h . u, 1),     t on the side of 0 that the label says,       (1)

so that given the group t and the missing entries m are jointly Normal, t cut at 0. With A = (Q_h +
C_h)_mm, c = -(Q_h + C_h)_mo u_o, omega = A^-1, the entries x = omega c as if the label were not
known, g = omega w_m, and of t the location a = w_h . (x, u_o) and the variance v = 1 + w_m . g,

    log q(h) = s_h without t at x_m = 0, + (c . omega c - log |A| + |m| log 2 pi) / 2 + log Phi(+-a
    / sqrt(v)) + const,
    t | h       is Normal(a, v), cut at 0; its mean is b and its variance v (1 - lost),                                        (2)
    x_m | h     has the mean x + g (b - a) / v and the covariance omega - g g' lost / v,   cov(t, x_m | h) = g (1 - lost).

Where several soft labels are asked for, classes are independent given the group and what the row
shows; so without holes (2) holds of each. With holes it would take orthants of as many dimensions,
so only the last class that is asked stays tied to the missing entries: the soft labels of the
others are factors q(t_c | z) of their own, Normal(score_ch, 1) cut at 0, E t_c w_c adds to c and
w_c w_c' to Q_h.

Nothing else of a row is needed than its part in the sums over rows of rho u u', rho t u, and rho F
of the columns, expected under (2).

A row without holes costs K D^2 / 2 multiplications twice, as one matrix product each, over the
products of its entries; a row with m of them 2 K D^2 and K m^3 / 2, by sweeps that run over many
rows at once, all groups side by side.
"""

import math
from itertools import combinations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from inference.distributions.truncated_normal import one_sided
from inference.reading.stick_mixture.structure import Rows

__all__ = [
    "BLOCK",
    "LONGEST_CHUNK",
    "Asked",
    "Bucket",
    "Complete",
    "Message",
    "Place",
    "Sums",
    "asked",
    "form_of",
    "inverse",
    "lay_out",
    "message_to",
    "place_complete",
    "place_given",
    "place_rows",
    "score_of",
    "soft_labels",
    "sum_rows",
]

MOST_BUCKETS = 5
BLOCK = 16  # places whose missing entries are worked out together
OVERHEAD = 2e5  # of a bucket, which is compiled, in the multiplications of a group
MANY_ROWS = 500
LONGEST_CHUNK = {"complete": 1024, "incomplete": 256}


class Bucket(NamedTuple):
    """All arrays [chunk, place, ...], but for the task."""

    row: Array  # number of the row, or that of all rows where the place is empty
    entries: Array  # u = (features, 1, extras), 0 where missing
    statistics: Array  # of the columns, one block after the other
    signs: Array  # [..., class]: the side of 0 on which a soft label lies; 0 where nothing is known
    missing: Array  # [..., hole]: which entries are missing, 0 where there are fewer
    num_missing: Array
    task: Array  # of all rows of a chunk [chunk]


def lay_out(
    rows: Rows, statistics: np.ndarray, dtype: str, shuffled: bool = False
) -> tuple[Bucket, ...]:
    """`statistics` are [row, statistic]; rows are in their order, or in one drawn at random, the
    same each time.
    """
    is_missing = np.isnan(rows.features)
    count = is_missing.sum(1)
    ones = np.ones((len(count), 1))
    entries = np.concatenate([np.where(is_missing, 0, rows.features), ones, rows.extras], 1)
    order = np.argsort(~is_missing, axis=1, kind="stable")  # missing entries first
    kinds = np.unique(np.column_stack([rows.task, rows.signs != 0]), axis=0, return_inverse=True)[
        1
    ].reshape(-1)
    found, narrower = [], -1
    for width in _widths(count, entries.shape[1]):
        chosen = np.flatnonzero((count > narrower) & (count <= width))
        chosen = np.random.default_rng(0).permutation(chosen) if shuffled else chosen
        narrower = width
        groups = [chosen[kinds[chosen] == kind] for kind in np.unique(kinds[chosen])]
        row = _places(groups, LONGEST_CHUNK["incomplete" if width else "complete"], len(count))
        # an empty place looks like some row, and counts for nothing
        at = np.minimum(row, len(count) - 1)
        missing = np.where(np.arange(width) < count[at][..., None], order[at, :width], 0)
        numbers = (
            jnp.asarray(part, dtype) for part in (entries[at], statistics[at], rows.signs[at])
        )
        row, missing, num_missing, task = (
            jnp.asarray(part, jnp.int32) for part in (row, missing, count[at], rows.task[row[:, 0]])
        )
        found.append(Bucket(row, *numbers, missing, num_missing, task))
    return tuple(found)


def _places(groups: list[np.ndarray], longest: int, num_rows: int) -> np.ndarray:
    """Row numbers [chunk, place], each chunk of one group."""
    size = max(map(len, groups))
    if size < MANY_ROWS:  # no chunk of the longest size: code for it takes long to compile
        longest = max(longest // 2, 1)
    size = size if size <= BLOCK else min(longest, size + -size % BLOCK)
    padded = [np.pad(group, (0, -len(group) % size), constant_values=num_rows) for group in groups]
    return np.concatenate(padded).reshape(-1, size)


def _widths(count: np.ndarray, size: int) -> tuple[int, ...]:
    """The largest number of missing entries of each bucket, by what a sweep then costs; `size`
    is that of u.
    """
    sizes, how_many = _thinned(*np.unique(count, return_counts=True))

    def cost(widths: tuple[int, ...]) -> float:
        width = np.asarray(widths)[np.searchsorted(widths, sizes)]
        each = np.where(width == 0, size**2, 2 * size**2 + (width + 2.0) ** 3)
        return float(how_many @ each) + OVERHEAD * len(widths)

    inner = (
        chosen
        for number in range(MOST_BUCKETS)
        for chosen in combinations(sizes[:-1].tolist(), min(number, len(sizes) - 1))
    )
    return min(((*chosen, int(sizes[-1])) for chosen in inner), key=cost)


def _thinned(
    sizes: np.ndarray, how_many: np.ndarray, most: int = 20
) -> tuple[np.ndarray, np.ndarray]:
    """Fewer sizes to choose among; the first and the last are kept."""
    ends = np.unique(np.linspace(0, len(sizes) - 1, min(most, len(sizes))).round().astype(int))
    return sizes[ends], np.add.reduceat(how_many, np.concatenate([[0], ends[:-1] + 1]))


MOST_UNROLLED = 24  # holes; with more of them the code would be long


class Message(NamedTuple):
    """What all blocks say of a row of each group; of several tasks each array has one more axis
    in front.
    """

    const: Array  # [group], the log weight in it
    matrix: Array  # [group, entry, entry]: the features' part of Q
    answers: Array  # E w in the place of its entries, [class, group, entry]
    covariance: Array  # of w, [class, group, entry, entry]
    columns: Array  # E eta [statistic, group]

    def second(self) -> Array:
        """E w w'."""
        return self.covariance + self.answers[..., :, None] * self.answers[..., None, :]


class Sums(NamedTuple):
    """Over rows; of several tasks each array but the bound has one more axis in front."""

    moments: Array  # rho u u' [group, entry, entry]
    asked: Array  # the same over the rows that a class is asked about [class, group, entry, entry]
    products: Array  # rho t u [class, group, entry]
    columns: Array  # rho F [statistic, group]
    bound: Array  # what the rows add to the evidence bound

    def plus(self, other: "Sums") -> "Sums":
        """Of the rows of both."""
        return jax.tree.map(jnp.add, self, other)

    def times(self, factor: Any) -> "Sums":
        """As if each row were there so many times."""
        return jax.tree.map(lambda leaf: leaf * jnp.asarray(factor, leaf.dtype), self)

    def plus_task(self, other: "Sums", task: Array) -> "Sums":
        """With those of rows of one task."""
        parts = (mine.at[task].add(own) for mine, own in zip(self[:-1], other[:-1], strict=True))
        return Sums(*parts, self.bound + other.bound)


class Asked(NamedTuple):
    """Which classes the rows of a chunk are asked about, 0 and 1 [class]."""

    all: Array
    last: Array  # the one whose soft label stays tied to missing entries
    others: Array


class Place(NamedTuple):
    """q(z, x_missing, t) of the rows of a chunk."""

    log_rho: Array  # [place, group]
    entries: Array  # u, expected [place, entry, group]
    # of the missing entries [block of places, hole, hole, place of the block, group]
    covariance: Array
    soft: Array  # expected soft label of the last class that is asked [place, group]
    tie: Array  # its covariance with the missing entries [place, hole, group]
    norm: Array  # log of the sum of exp(s) over the groups [place]


def soft_labels(score: Array, signs: Array) -> tuple[Array, Array]:
    """Mean of Normal(score, 1) on the side of 0 that the sign says; and what a row adds to the
    bound for it. 0 where nothing is asked.
    """
    is_asked, cut = signs != 0, one_sided(signs * score)
    mean = score + signs * cut.shift
    return jnp.where(is_asked, mean, 0), jnp.where(
        is_asked, cut.log_mass + score**2 / 2 - score * mean, 0
    )


def asked(signs: Array) -> Asked:
    """Of rows with these signs [class], or rather of those that are asked the same."""
    every = (signs != 0).astype(signs.dtype)
    last = every * (jnp.cumsum(every[::-1])[::-1] == 1).astype(signs.dtype)
    return Asked(every, last, every - last)


def message_to(message: Message, task: Array) -> Message:
    """What is said of the rows of a task."""
    return jax.tree.map(lambda leaf: leaf[task], message)


def form_of(message: Message, of: Asked) -> Array:
    """Q + C of rows with holes, and what the soft labels that are factors of their own add:
    [group, entry, entry].
    """
    tied = jnp.einsum("c,cki,ckj->kij", of.others, message.answers, message.answers)
    return _form(message, of) + tied


def score_of(message: Message, chunk: Bucket, score: Array) -> Array:
    """Of soft labels that are factors of their own, [place, class, group]; rows that miss
    nothing have the best there is at once.
    """
    at_entries = jnp.einsum("pi,cki->pck", chunk.entries, message.answers[: score.shape[1]])
    return jnp.where((chunk.num_missing == 0)[:, None, None], at_entries, score)


def _form(message: Message, of: Asked) -> Array:
    return message.matrix + jnp.einsum("c,ckij->kij", of.all, message.covariance)


def sum_rows(message: Message, bucket: Bucket, score: Array, num_rows: int) -> tuple[Sums, Array]:
    """The rows of a bucket: their sums; and `score` afterwards, of soft labels that are factors of
    their own [chunk, place, class, group].

    `message` and the sums are [task, ...]. Rows without holes have no such factors, and the last
    class is none.
    """
    visit = _visit_incomplete if bucket.missing.shape[-1] else _visit_complete
    zero = _nothing(message, packed=not bucket.missing.shape[-1])

    def one(total: Sums, chunk: tuple[Bucket, Array]) -> tuple[Sums, Array]:
        task = chunk[0].task
        sums, score = visit(
            message_to(message, task), *chunk, (chunk[0].row < num_rows).astype(message.const.dtype)
        )
        return total.plus_task(sums, task), score

    total, score = lax.scan(one, zero, (bucket, score))
    return (
        total if bucket.missing.shape[-1] else _unpacked(total, message.matrix.shape[-1])
    ), score


def _nothing(message: Message, packed: bool) -> Sums:
    tasks, classes, groups, size = message.answers.shape
    entries = (size * (size + 1) // 2,) if packed else (size, size)
    zeros = lambda *shape: jnp.zeros((tasks, *shape), message.const.dtype)
    moments, asked, products = (
        zeros(groups, *entries),
        zeros(classes, groups, *entries),
        zeros(classes, groups, size),
    )
    return Sums(
        moments,
        asked,
        products,
        jnp.zeros_like(message.columns),
        jnp.zeros((), message.const.dtype),
    )


# Rows without holes, places last.


class Complete(NamedTuple):
    """q(z, t) of the rows of a chunk, which miss nothing."""

    log_joint: Array  # s of (2), [group, place]
    soft: Array  # expected soft labels, 0 where nothing is asked [class, group, place]
    products: Array  # of entries [pair of entries, place]


def place_complete(message: Message, chunk: Bucket) -> Complete:
    """Rows without holes: the soft labels of all classes are independent given the group."""
    u, of, signs = chunk.entries.T, asked(chunk.signs[0]), chunk.signs.T[:, None]
    products = jnp.concatenate([u[i : i + 1] * u[i:] for i in range(len(u))])
    log_joint = (
        message.const[:, None]
        + _packed(_form(message, of)) @ products
        + message.columns.T @ chunk.statistics.T
    )
    loc, is_asked = jnp.einsum("cki,ip->ckp", message.answers, u), of.all[:, None, None]
    cut = one_sided(signs * loc)
    return Complete(
        log_joint + jnp.sum(is_asked * cut.log_mass, 0),
        is_asked * (loc + signs * cut.shift),
        products,
    )


def _visit_complete(
    message: Message, chunk: Bucket, score: Array, weight: Array
) -> tuple[Sums, Array]:
    place = place_complete(message, chunk)
    total = jax.nn.logsumexp(place.log_joint, axis=0)
    rho = jnp.exp(place.log_joint - total[None]) * weight[None]
    moments = rho @ place.products.T
    is_asked = asked(chunk.signs[0]).all[:, None, None]
    products = (
        jnp.einsum("ckp,pi->cki", place.soft * rho[None], chunk.entries)
        if len(is_asked)
        else jnp.zeros_like(message.answers)
    )
    return Sums(
        moments,
        is_asked * moments[None],
        products,
        chunk.statistics.T @ rho.T,
        jnp.sum(weight * total),
    ), score


def _packed(matrix: Array) -> Array:
    """-u' Q u / 2 as coefficients of the products of entries."""
    size = matrix.shape[-1]
    whole = [
        jnp.concatenate([matrix[:, i, i : i + 1] / 2, matrix[:, i, i + 1 :]], 1)
        for i in range(size)
    ]
    return -jnp.concatenate(whole, 1)


def _unpacked(sums: Sums, size: int) -> Sums:
    above = [(i, j) for i in range(size) for j in range(i, size)]
    place = jnp.zeros((size, size), jnp.int32)
    rows, columns = (jnp.array(index) for index in zip(*above, strict=True))
    place = place.at[rows, columns].set(jnp.arange(len(above), dtype=jnp.int32))
    place = place.at[columns, rows].set(jnp.arange(len(above), dtype=jnp.int32))
    return sums._replace(moments=sums.moments[..., place], asked=sums.asked[..., place])


# Rows with holes, groups last.


class _Holes(NamedTuple):
    """Missing entries, the last soft label not yet known; see (2)."""

    mean: Array  # x, [place, hole, group]
    covariance: Array  # omega, [block of places, hole, hole, place of the block, group]
    gain: Array  # the three terms in brackets, halved [place, group]
    pull: Array  # g, [place, hole, group]
    score: Array  # w_m . x, [place, group]
    variance: Array  # w_m . g, [place, group]


def place_rows(message: Message, chunk: Bucket, score: Array) -> Place:
    """q(z, x_missing, t) of the rows of a chunk; soft labels that are factors of their own have
    the locations `score`.
    """
    signs = (chunk.signs * asked(chunk.signs[0]).others[None])[:, : score.shape[1], None]
    return place_given(message, chunk, *soft_labels(score_of(message, chunk, score), signs))


def place_given(message: Message, chunk: Bucket, soft: Array, term: Array) -> Place:
    """The same where all soft labels but the last that is asked for are known, or their means:
    `soft` [place, class, group], with 0 where nothing else is asked, and what they add to the log
    joint.
    """
    u, of, num = chunk.entries, asked(chunk.signs[0]), soft.shape[1]
    matrix, experts = (
        form_of(message, of).transpose(1, 2, 0),
        jnp.einsum("c,cki->ik", of.last, message.answers),
    )
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
    # Now the last soft label, where there is one; else the experts are 0.
    sign, is_tied = (chunk.signs @ of.last)[:, None], of.last.sum()
    loc, scale = u @ experts + holes.score, jnp.sqrt(1 + holes.variance)
    cut = one_sided(sign * loc / scale)
    log_joint = log_joint + holes.gain + is_tied * cut.log_mass
    total = jax.nn.logsumexp(log_joint, axis=1)
    mean = holes.mean + holes.pull * (sign * cut.shift / scale)[:, None]
    # 0 beyond the holes
    entries = (
        jnp.broadcast_to(u[:, :, None], form.shape)
        .at[jnp.arange(len(u))[:, None], chunk.missing]
        .add(mean)
    )
    blocks, _, width, block, _ = holes.covariance.shape
    g = holes.pull.reshape(blocks, block, width, groups).swapaxes(1, 2)
    covariance = holes.covariance - g[:, :, None] * g[:, None] * (cut.lost / scale**2).reshape(
        blocks, 1, 1, block, groups
    )
    tie = holes.pull * (1 - cut.lost)[:, None]
    return Place(
        log_joint - total[:, None], entries, covariance, loc + sign * scale * cut.shift, tie, total
    )


def _holes(chunk: Bucket, matrix: Array, slope: Array, experts: Array | None) -> _Holes:
    """Some rows at a time, which stay in the cache."""
    rows, block = len(chunk.missing), math.gcd(len(chunk.missing), BLOCK)
    split = lambda leaf: leaf.reshape(rows // block, block, *leaf.shape[1:])
    parts = jax.tree.map(split, (chunk.missing, chunk.num_missing, slope))
    is_unrolled = rows >= LONGEST_CHUNK["incomplete"] and chunk.missing.shape[1] <= MOST_UNROLLED
    found = lax.map(lambda part: _holes_of_block(*part, matrix, experts, is_unrolled), parts)
    joined = jax.tree.map(
        lambda leaf: leaf.reshape(rows, *leaf.shape[2:]), found._replace(covariance=None)
    )
    return joined._replace(covariance=found.covariance)


def _holes_of_block(
    missing: Array,
    num_missing: Array,
    slope: Array,
    matrix: Array,
    experts: Array | None,
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
    gain = (jnp.sum(c * mean, 1) - log_det + constant) / 2
    covariance = jnp.where(both, covariance, 0)
    if experts is None:
        return _Holes(
            mean, covariance, gain, jnp.zeros_like(mean), jnp.zeros_like(gain), jnp.zeros_like(gain)
        )
    w = of_holes(jnp.broadcast_to(experts[None], slope.shape))
    pull = solved(w)
    return _Holes(mean, covariance, gain, pull, jnp.sum(w * mean, 1), jnp.sum(w * pull, 1))


def _pairs(missing: Array, size: int) -> Array:
    """Where each pair of missing entries is in a matrix laid out in a row [hole, hole, place]."""
    return missing.T[:, None] * size + missing.T[None]


def inverse(matrix: Array, is_unrolled: bool = False) -> tuple[Array, Array]:
    """Inverse and log determinant of positive definite matrices [i, j, ...], all of them at once.

    Unrolled it is three times as fast, and slow to compile.
    """
    return (_eliminated if is_unrolled or not len(matrix) else _swept)(matrix)


def _swept(matrix: Array) -> tuple[Array, Array]:
    """By the sweep operator, which at each index turns the pivot p and column v to -1 / p and v
    / p, and the rest to rest - v v' / p.
    """
    size = len(matrix)

    def sweep(j: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
        matrix, log_det = at
        column = lax.dynamic_index_in_dim(matrix, j, 0, keepdims=False)
        pivot = lax.dynamic_index_in_dim(column, j, 0, keepdims=False)
        unit = (jnp.arange(size) == j).astype(matrix.dtype).reshape(size, *(1,) * (matrix.ndim - 2))
        column = column - unit
        return matrix - column[:, None] * (column / pivot[None])[None] - 2 * unit[:, None] * unit[
            None
        ], log_det + jnp.log(pivot)

    negative, log_det = lax.fori_loop(
        0, size, sweep, (matrix, jnp.zeros(matrix.shape[2:], matrix.dtype))
    )
    return -negative, log_det


def _eliminated(matrix: Array) -> tuple[Array, Array]:
    """Down: the complement of the first row and column is their pivot's, v = column / pivot.

    Up: with the inverse Z of the complement and y = Z v, the inverse is ((1 / pivot + v . y, -y'),
    (-y, Z)). Each step is a loop of its own, or XLA would compute steps again and again.
    """
    rest, pivots, steps = matrix, [], []
    for _ in range(len(matrix)):
        pivots.append(rest[0, 0])
        steps.append(lax.optimization_barrier(rest[1:, 0] / rest[:1, 0]))
        rest = lax.optimization_barrier(rest[1:, 1:] - rest[1:, :1] * steps[-1][None])
    found = rest
    for pivot, step in zip(reversed(pivots), reversed(steps), strict=True):
        y = lax.optimization_barrier(jnp.sum(found * step[None], 1))
        corner = 1 / pivot + jnp.sum(step * y, 0)
        top = jnp.concatenate([corner[None], -y])
        found = lax.optimization_barrier(
            jnp.concatenate([top[None], jnp.concatenate([-y[:, None], found], 1)])
        )
    return found, sum(
        (jnp.log(pivot) for pivot in pivots), start=jnp.zeros(matrix.shape[2:], matrix.dtype)
    )


def _visit_incomplete(
    message: Message, chunk: Bucket, score: Array, weight: Array
) -> tuple[Sums, Array]:
    of, num, place = asked(chunk.signs[0]), score.shape[1], place_rows(message, chunk, score)
    score = jnp.einsum("pik,cki->pck", place.entries, message.answers[:num])
    others = soft_labels(score, (chunk.signs * of.others[None])[:, :num, None])[0]
    soft = (
        jnp.pad(others, ((0, 0), (0, len(of.last) - num), (0, 0)))
        + of.last[None, :, None] * place.soft[:, None]
    )
    rho = jnp.exp(place.log_rho) * weight[:, None]
    weighted = rho[:, None] * place.entries
    size, block = weighted.shape[1], place.covariance.shape[3]
    pair = jax.vmap(lambda missing: _pairs(missing, size))(
        chunk.missing.reshape(-1, block, chunk.missing.shape[1])
    )
    weighed = place.covariance * rho.reshape(-1, 1, 1, block, rho.shape[1])
    spread = jnp.zeros((size * size, rho.shape[1]), rho.dtype).at[pair].add(weighed)
    moments = jnp.einsum("pik,pjk->kij", weighted, place.entries) + spread.T.reshape(-1, size, size)
    tie = jnp.zeros((size, rho.shape[1]), rho.dtype).at[chunk.missing].add(rho[:, None] * place.tie)
    products = jnp.einsum("pck,pik->cki", soft, weighted) + of.last[:, None, None] * tie.T[None]
    asked_about = of.all[:, None, None, None] * moments[None]
    return Sums(
        moments, asked_about, products, chunk.statistics.T @ rho, jnp.sum(weight * place.norm)
    ), score
