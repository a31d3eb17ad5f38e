"""Archipelago: semi-supervised classification with class densities from Gaussian processes.

    g[k]    ~ GaussianProcess(amplitude[k]^2 c(. / lengthscale[k]))        for each class k
    repeat until Q points are accepted:
        x ~ base density
        accepted as class k with probability exp(g[k](x)) / (1 + Lambda(x)), rejected otherwise;
        Lambda = sum_k exp(g[k])

Accepted points are the data, and some of them have labels; class k has the density exp(g[k]) base /
(1 + Lambda), up to one constant that is an integral over all x and cannot be computed. It need not
be: the points that were rejected on the way are latent sites. There are C(M + Q - 1, M) orders in
which M rejections and Q acceptances can have come, the last one an acceptance, hence

    num_rejected M ~ C(M + Q - 1, M) persistence^M                         on 0 .. capacity
    rejected[m]    ~ base density                                          for m < M
    function = Cholesky factor x noise                                     at all points, the data first; noise ~ Normal(0, 1)

with the terms Lambda / (1 + Lambda) of each accepted point, exp(g[y]) / Lambda of each label, and 1
/ (1 + Lambda) of each rejected point. Slots m >= M stand ready and have no term but that of their
noise. Priors are those of features with mean 0 and variance 1.

Where Lambda is small the density of the data depends on its logarithm but for a constant: functions
that are lower everywhere say the same, and only more points are rejected, with no end but the
prior's. Hence `persistence`, the chance that a rejection does not end the attempt, functions and
all: M then has the prior NegativeBinomial(Q, persistence), and an integral Z of the density counts
as 1 - persistence + persistence Z. With 1 attempts never end, and all is as in the paper.

Adams and Ghahramani (2009), "Archipelago: nonparametric Bayesian semi-supervised learning", whose
Eq. 8 leaves the number of orders out. It discards labels at random, where a benchmark often gives
as many to each class. Cost of a log density: classes x (rows + capacity)^3, in float64.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, lax, nn, random
from jax.scipy.special import gammaln, logsumexp
from numpyro import deterministic, plate
from numpyro.handlers import mask, seed, substitute

from zoo._archipelago_checks import (
    refuse_no_covariance,
    refuse_wrong_data,
    refuse_wrong_numbers,
    refuse_wrong_parts,
)
from zoo._base_densities import gaussian, mixture, student_t
from zoo._gaussian_process import Functions, matern32, matern52, squared_exponential
from zoo.card import Card

__all__ = [
    "CARD",
    "Process",
    "Proposals",
    "archipelago",
    "fantasies",
    "gaussian",
    "matern32",
    "matern52",
    "mixture",
    "predict",
    "process",
    "propose",
    "simulate",
    "squared_exponential",
    "student_t",
]

# its declared return type is a number as well, which cannot be indexed
sample: Any = numpyro.sample

CARD = Card(
    title="Class densities from Gaussian processes",
    paper="Adams and Ghahramani (2009), Archipelago: nonparametric Bayesian semi-supervised "
    "learning, ICML",
    bibtex="""@inproceedings{adams2009archipelago,
  title = {Archipelago: nonparametric {Bayesian} semi-supervised learning},
  author = {Adams, Ryan Prescott and Ghahramani, Zoubin},
  booktitle = {Proceedings of the 26th Annual International Conference on Machine Learning},
  pages = {1--8},
  year = {2009},
}""",
    data=("pinwheel", "wine", "oilflow12"),
    kernels=("LatentHistory", "NUTS"),
    sites={
        "amplitude": "how far the function of a class goes from 0",
        "lengthscale": "how far apart points are, in a feature, where the function of a class has "
        "become another",
        "mean": "where the base density lies",
        "scale": "how wide the base density is",
        "root": "Cholesky factor of the correlations of the base density",
        "num_rejected": "how many points were rejected; many, where the base density is unlike the "
        "data",
        "rejected": "where they were",
        "noise": "what is new in the functions at a point, given the points before it; row by row",
        "rejected_noise": "the same at a rejected point",
        "function": "the functions of the classes at the data",
        "rejected_function": "and at the rejected points",
        "x": "the features of a row",
        "accepted": "that each row was accepted",
        "rejection": "that each rejected point was rejected",
        "y": "the class of a row, -1 in the data where it is unknown",
    },
    edits=(
        "base=student_t, or base=mixture: a density that is nearer to the data has fewer points "
        "rejected",
        "covariance=matern32: rougher functions, and classes with rougher edges",
        "is_ard=True: features differ in how much they say",
        "amplitude=dist.LogNormal(1.0, 0.5): classes that overlap, and space between them that is "
        "not empty",
        "persistence=1.0: the paper's process; where classes fill little of the base density, "
        "thousands of points are rejected",
    ),
)

AMPLITUDE = dist.LogNormal(2.0, 0.5)
MOST_PROPOSALS = 8192  # that are waited for: their functions cost the cube of their number
MOST_ATTEMPTS = 10_000  # to simulate
AT_ONCE, MOST_BARREN = 64, 40  # new rows that each draw proposes at once; how often in vain


class Process(NamedTuple):
    """What generates proposals, and their classes or rejection."""

    density: dist.Distribution
    functions: Functions


def process(
    num_features: int,
    num_classes: int,
    base: Callable = gaussian,
    covariance: Callable = squared_exponential,
    is_ard: bool = False,
    amplitude: Any = AMPLITUDE,
    lengthscale: Any = None,
) -> Process:
    """The base density and the functions, with all their parameters."""
    if lengthscale is None:
        # distances grow as the root of the features
        lengthscale = dist.LogNormal(0.5 * np.log(num_features) - 0.5, 0.7)
    refuse_wrong_parts(
        {"base": base, "covariance": covariance},
        is_ard,
        {"amplitude": amplitude, "lengthscale": lengthscale},
    )
    refuse_no_covariance(covariance, num_features)
    density = base(num_features)
    width = num_features if is_ard else 1
    with plate("class", num_classes, dim=-1):
        amplitude = sample("amplitude", amplitude)
        scales = {"event_dims": ["feature"]}
        lengthscale = sample(
            "lengthscale", lengthscale.expand([width]).to_event(1), infer=scales if is_ard else {}
        )
    return Process(density, Functions(covariance, amplitude, lengthscale))


def archipelago(
    x, y=None, *, num_classes: int = 2, capacity: int = 64, persistence: float = 0.9, **options
):
    """The model; it returns the functions of the classes at the data.

    :param x: [row, feature], features of mean 0 and variance 1 or about that.
    :param y: [row], 0 .. num_classes - 1, or -1 where unlabelled; None: no row is labelled.
    :param capacity: room for rejected points; `LatentHistory` makes more when it is used up.
    :param persistence: chance that the process goes on after a rejection; with .9 there are some
    nine rejected points a row, or fewer; with
        1, the paper's, there is no such bound.
    :param options: of the base density and the functions, see `process`: `base`, `covariance`,
    `is_ard`, and the priors `amplitude` and
        `lengthscale`.
    """
    refuse_wrong_numbers(persistence, num_classes=num_classes, capacity=capacity)
    refuse_wrong_data(x, y, num_classes)
    num_rows, num_features = x.shape
    rows, slots = plate("row", num_rows, dim=-1), plate("slot", capacity, dim=-1)
    density, functions = process(num_features, num_classes, **options)

    orders = jnp.arange(capacity + 1.0)
    log_orders = gammaln(orders + num_rows) - gammaln(orders + 1)
    num_rejected = sample(
        "num_rejected", dist.Categorical(logits=log_orders + orders * jnp.log(persistence))
    )
    is_used = jnp.arange(capacity) < num_rejected
    standard, of_classes = (
        dist.Normal(0.0, 1.0).expand([num_classes]).to_event(1),
        {"event_dims": ["class"]},
    )
    with rows:
        noise = sample("noise", standard, infer=of_classes)
    with slots:
        rejected_noise = sample("rejected_noise", standard, infer=of_classes)
        with mask(mask=is_used):
            rejected = sample("rejected", density, infer={"event_dims": ["feature"]})

    points, all_noise = jnp.concatenate([x, rejected]), jnp.concatenate([noise, rejected_noise])
    everywhere = functions.values(points, all_noise)
    with rows:
        function = deterministic("function", everywhere[:num_rows])
        sample("x", density, obs=x)
        sample(
            "accepted", dist.Bernoulli(logits=logsumexp(function, -1)), obs=jnp.ones(num_rows, int)
        )
        if y is not None:
            with mask(mask=jnp.asarray(y) >= 0):
                sample("y", dist.Categorical(logits=function), obs=y)
    with slots:
        rejected_function = deterministic("rejected_function", everywhere[num_rows:])
        with mask(mask=is_used):
            sample(
                "rejection",
                dist.Bernoulli(logits=logsumexp(rejected_function, -1)),
                obs=jnp.zeros(capacity, int),
            )
    return function


class Proposals(NamedTuple):
    """What the process proposed, in order, and what became of it."""

    points: Array  # [proposal, feature]
    noise: Array  # [proposal, class]
    outcome: Array  # [proposal]: 0 .. num_classes - 1, or num_classes for a rejection


def propose(rng_key: Array, process: Process, size: int) -> Proposals:
    """The first `size` points that the process proposes.

    Of more of them, the first are the same.
    """
    num_classes = len(process.functions.amplitude)

    def one(i: Array) -> tuple[Array, Array, Array]:
        point_key, noise_key, luck_key = random.split(random.fold_in(rng_key, i), 3)
        luck = random.gumbel(luck_key, (num_classes + 1,))
        return (
            jnp.asarray(process.density.sample(point_key)),
            random.normal(noise_key, (num_classes,)),
            luck,
        )

    points, noise, luck = jax.vmap(one)(jnp.arange(size))
    return Proposals(points, noise, _outcome(process.functions.values(points, noise), luck))


def _outcome(function: Array, luck: Array) -> Array:
    """The class that a point is accepted as, or, in place of one more class, its rejection."""
    return jnp.argmax(jnp.pad(function, ((0, 0), (0, 1))) + luck, -1)


def simulate(
    rng_key: Array,
    num_rows: int = 30,
    num_features: int = 2,
    num_classes: int = 2,
    labelled: float = 0.3,
    persistence: float = 0.9,
    **options,
) -> dict[str, Any]:
    """Data from the model itself, by the process and not by the padded model, as the model's
    keyword arguments; in float64.

    :param labelled: chance of a row to keep its label.
    :param persistence: chance to go on after a rejection; where the process ends, all begins anew,
    functions and all.
    :param options: other arguments of the model; they are returned beside the data.
    """
    refuse_wrong_numbers(
        persistence, num_rows=num_rows, num_features=num_features, num_classes=num_classes
    )
    if not 0 <= labelled <= 1:
        raise ValueError(f"archipelago labelled: found {labelled!r}, wanted a chance, from 0 to 1.")
    known = {name: value for name, value in options.items() if name != "capacity"}

    @partial(jax.jit, static_argnums=1)
    def proposals(attempt: Array, size: int) -> Proposals:
        model_key, run_key = random.split(attempt)
        with seed(rng_seed=model_key):
            return propose(run_key, process(num_features, num_classes, **known), size)

    with jax.enable_x64(True):
        for attempt in range(MOST_ATTEMPTS):
            attempt_key, life_key, label_key = random.split(random.fold_in(rng_key, attempt), 3)
            most_rejected = (
                np.inf
                if persistence == 1
                else float(random.geometric(life_key, 1 - persistence)) - 1
            )
            found = _first_accepted(
                partial(proposals, attempt_key), num_rows, num_classes, most_rejected
            )
            if found is not None:
                y = jnp.where(random.bernoulli(label_key, labelled, (num_rows,)), found.outcome, -1)
                return {
                    "x": found.points,
                    "y": y,
                    "num_classes": num_classes,
                    "persistence": persistence,
                    **options,
                }
    raise RuntimeError(
        f"archipelago simulate: all of {MOST_ATTEMPTS} attempts at {num_rows} rows ended; wanted a "
        "larger persistence."
    )


def _first_accepted(
    proposals: Callable[[int], Proposals], num_rows: int, num_classes: int, most_rejected: float
) -> Proposals | None:
    """The first points that were accepted, or None where more were rejected before the last of
    them.
    """
    size, accepted, was_rejected = num_rows, np.zeros(0, int), np.zeros(0, bool)
    while len(accepted) < num_rows and was_rejected.sum() <= most_rejected:
        size *= 2
        if size > MOST_PROPOSALS:
            raise RuntimeError(
                f"archipelago: found fewer than {num_rows} points among {size // 2} proposals, too "
                "rare to wait for; "
                "a base density that is nearer to the data has fewer rejected."
            )
        found = proposals(size)
        was_rejected = np.asarray(found.outcome) == num_classes
        accepted = np.flatnonzero(~was_rejected)[:num_rows]
    if len(accepted) < num_rows or accepted[-1] + 1 - num_rows > most_rejected:
        return None
    return Proposals(*(each[accepted] for each in found))


def predict(
    rng_key: Array,
    draws: dict[str, Array],
    x: Array,
    x_new: Array,
    *,
    knows_density: bool = True,
    num_values: int = 8,
    **options,
) -> Array:
    """Probabilities of the classes at new points, [row, class], from draws [draw, ...] of the
    posterior, deterministic sites included.

    Each draw gives softmax(g) at values g of the functions, with the weight base density x (M + Q)
    / Q x Lambda / (1 + Lambda): how much a draw expects a point where this one lies. The second
    factor is unbiased for what an integral Z counts as, inverted, see above. Where no draw expects
    any, because the base density ends before, there is no answer but NaN.

    :param knows_density: whether a new point counts as one more draw from the density; else draws
    weigh the same, as in the paper.
    :param num_values: values of the functions for each draw.
    :param options: those that the model had.
    """

    def one(at: tuple[Array, dict[str, Array]]) -> Array:
        key, draw = at
        found = _process_at(draw, x.shape[1], options)
        mean, spread = found.functions.given(x_new, *_known(draw, x))
        # for all points: an answer hangs on no other
        g = mean + spread * random.normal(key, (num_values, 1, mean.shape[1]))
        if not knows_density:
            return jnp.asarray(logsumexp(nn.log_softmax(g), 0))
        expected = found.density.log_prob(x_new) + jnp.log1p(draw["num_rejected"] / len(x))
        log_claim = g - nn.softplus(logsumexp(g, -1, keepdims=True))  # log(1 + Lambda)
        return jnp.asarray(expected[:, None] + logsumexp(log_claim, 0))

    keys = random.split(rng_key, len(draws["num_rejected"]))
    claims = logsumexp(lax.map(one, (keys, draws), batch_size=8), 0)
    return jnp.exp(claims - logsumexp(claims, -1, keepdims=True))


def fantasies(
    rng_key: Array,
    draws: dict[str, Any],
    x: Array,
    num_rows: int,
    label: int | None = None,
    **options,
) -> tuple[np.ndarray, np.ndarray]:
    """New rows and their classes, each as if it came next, whatever the others: from the density
    whose classes `predict` tells.

    Each draw proposes as many points; what it accepts counts (M + Q) / Q, as in `predict`, and is
    kept by that in relation to the most.

    :param label: the class, None for all of them.
    """
    weight = 1 + draws["num_rejected"] / len(x)

    @jax.jit
    def proposals(keys: Array) -> tuple[Array, Array]:
        def one(at: tuple[Array, dict[str, Array], Array]) -> tuple[Array, Array]:
            key, draw, is_kept = at
            point_key, noise_key, luck_key, kept_key = random.split(key, 4)
            found = _process_at(draw, x.shape[1], options)
            points = jnp.asarray(found.density.sample(point_key, (AT_ONCE,)))
            mean, spread = found.functions.given(points, *_known(draw, x))
            g = mean + spread * random.normal(noise_key, mean.shape)
            outcome = _outcome(g, random.gumbel(luck_key, (AT_ONCE, mean.shape[1] + 1)))
            return points, jnp.where(
                random.bernoulli(kept_key, is_kept, (AT_ONCE,)), outcome, mean.shape[1]
            )

        return lax.map(one, (keys, draws, weight / weight.max()), batch_size=8)

    rows, classes, barren, num_classes = [], [], 0, draws["amplitude"].shape[-1]
    while sum(map(len, rows)) < num_rows:
        rng_key, key, order_key = random.split(rng_key, 3)
        points, outcome = (
            np.concatenate(each) for each in proposals(random.split(key, len(weight)))
        )
        is_wanted = outcome < num_classes if label is None else outcome == label
        taken = np.asarray(random.permutation(order_key, np.flatnonzero(is_wanted)))
        rows, classes, barren = (
            [*rows, points[taken]],
            [*classes, outcome[taken]],
            0 if len(taken) else barren + 1,
        )
        if barren == MOST_BARREN:
            of_class = "" if label is None else f" of class {label}"
            raise RuntimeError(
                f"archipelago: found no point{of_class} among {barren * len(outcome)} proposals, "
                "too rare to wait for."
            )
    return np.concatenate(rows)[:num_rows], np.concatenate(classes)[:num_rows]


def _process_at(draw: dict[str, Array], num_features: int, options: dict[str, Any]) -> Process:
    with seed(rng_seed=0), substitute(data=draw):
        return process(num_features, draw["amplitude"].shape[-1], **options)


def _known(draw: dict[str, Array], x: Array) -> tuple[Array, Array, Array]:
    """Points, values there, and which are used."""
    is_used = jnp.arange(len(draw["rejected"])) < draw["num_rejected"]
    points = jnp.concatenate([x, draw["rejected"]])
    return (
        points,
        jnp.concatenate([draw["function"], draw["rejected_function"]]),
        jnp.append(jnp.ones(len(x), bool), is_used),
    )
