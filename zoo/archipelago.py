"""Archipelago: semi-supervised classification with class densities from Gaussian processes.

    g[k]    ~ GaussianProcess(amplitude[k]^2 c(. / lengthscale[k]))        for each class k
    repeat until Q points are accepted:
        x ~ base density
        accepted as class k with probability exp(g[k](x)) / (1 + Lambda(x)), rejected otherwise;  Lambda = sum_k exp(g[k])

Accepted points are the data, and some of them have labels; class k has the density exp(g[k]) base / (1 + Lambda), up to one constant
that is an integral over all x and cannot be computed. It need not be: the points that were rejected on the way are latent sites. There
are C(M + Q - 1, M) orders in which M rejections and Q acceptances can have come, the last one an acceptance, hence

    num_rejected M ~ C(M + Q - 1, M) persistence^M                         on 0 .. capacity
    rejected[m]    ~ base density                                          for m < M
    function = Cholesky factor x noise                                     at all points, the data first; noise ~ Normal(0, 1)

with the terms Lambda / (1 + Lambda) of each accepted point, exp(g[y]) / Lambda of each label, and 1 / (1 + Lambda) of each rejected
point. Slots m >= M stand ready and have no term. Priors are those of features with mean 0 and variance 1.

Where Lambda is small the density of the data depends on its logarithm but for a constant: functions that are lower everywhere say the
same, and only more points are rejected, with no end but the prior's. Hence `persistence`, the chance that a rejection does not end the
attempt, functions and all: M then has the prior NegativeBinomial(Q, persistence), and an integral Z of the density counts as 1 -
persistence + persistence Z. With 1 attempts never end, and all is as in the paper.

Adams and Ghahramani (2009), "Archipelago: nonparametric Bayesian semi-supervised learning", whose Eq. 8 leaves the number of orders
out. It discards labels at random, where a benchmark often gives as many to each class. Cost of a log density: classes x (rows +
capacity)^3, in float64.
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

sample: Any = numpyro.sample  # its declared return type is a number as well, which cannot be indexed

CARD = Card(
    title="Class densities from Gaussian processes",
    paper="Adams and Ghahramani (2009), Archipelago: nonparametric Bayesian semi-supervised learning, ICML",
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
        "lengthscale": "how far apart points are, in a feature, where the function of a class has become another",
        "mean": "where the base density lies",
        "scale": "how wide the base density is",
        "root": "Cholesky factor of the correlations of the base density",
        "num_rejected": "how many points were rejected; many, where the base density is unlike the data",
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
        "base=student_t, or base=mixture: a density that is nearer to the data has fewer points rejected",
        "covariance=matern32: rougher functions, and classes with rougher edges",
        "is_ard=True: features differ in how much they say",
        "amplitude=dist.LogNormal(1.0, 0.5): classes that overlap, and space between them that is not empty",
        "persistence=1.0: the paper's process; where classes fill little of the base density, thousands of points are rejected",
    ),
)

AMPLITUDE = dist.LogNormal(2.0, 0.5)
MOST_PROPOSALS = 8192  # that are waited for: their functions cost the cube of their number
MOST_ATTEMPTS = 10_000  # to simulate


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
    density = base(num_features)
    if lengthscale is None:
        lengthscale = dist.LogNormal(0.5 * np.log(num_features) - 0.5, 0.7)  # distances grow as the root of the features
    width = num_features if is_ard else 1
    with plate("class", num_classes, dim=-1):
        amplitude = sample("amplitude", amplitude)
        scales = {"event_dims": ["feature"]}
        lengthscale = sample("lengthscale", lengthscale.expand([width]).to_event(1), infer=scales if is_ard else {})
    return Process(density, Functions(covariance, amplitude, lengthscale))


def archipelago(x, y=None, *, num_classes: int = 2, capacity: int = 64, persistence: float = 0.9, **options):
    """The model; it returns the functions of the classes at the data.

    :param x: [row, feature], features of mean 0 and variance 1 or about that.
    :param y: [row], 0 .. num_classes - 1, or -1 where unlabelled; None: no row is labelled.
    :param capacity: room for rejected points; `LatentHistory` makes more when it is used up.
    :param persistence: chance that the process goes on after a rejection; with .9 there are some nine rejected points a row, or fewer; with
        1, the paper's, there is no such bound.
    :param options: of the base density and the functions, see `process`: `base`, `covariance`, `is_ard`, and the priors `amplitude` and
        `lengthscale`.
    """
    _refuse_wrong(x, y, num_classes, persistence)
    num_rows, num_features = x.shape
    rows, slots = plate("row", num_rows, dim=-1), plate("slot", capacity, dim=-1)
    density, functions = process(num_features, num_classes, **options)

    orders = jnp.arange(capacity + 1.0)
    log_orders = gammaln(orders + num_rows) - gammaln(orders + 1)
    num_rejected = sample("num_rejected", dist.Categorical(logits=log_orders + orders * jnp.log(persistence)))
    is_used = jnp.arange(capacity) < num_rejected
    standard, of_classes = dist.Normal(0.0, 1.0).expand([num_classes]).to_event(1), {"event_dims": ["class"]}
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
        sample("accepted", dist.Bernoulli(logits=logsumexp(function, -1)), obs=jnp.ones(num_rows, int))
        if y is not None:
            with mask(mask=jnp.asarray(y) >= 0):
                sample("y", dist.Categorical(logits=function), obs=y)
    with slots:
        rejected_function = deterministic("rejected_function", everywhere[num_rows:])
        with mask(mask=is_used):
            sample("rejection", dist.Bernoulli(logits=logsumexp(rejected_function, -1)), obs=jnp.zeros(capacity, int))
    return function


def _refuse_wrong(x, y, num_classes: int, persistence: float) -> None:
    if np.ndim(x) != 2:
        raise ValueError(f"archipelago x: found shape {np.shape(x)}, wanted [row, feature].")
    if y is not None and np.shape(y) != np.shape(x)[:1]:
        raise ValueError(f"archipelago y: found shape {np.shape(y)}, wanted {np.shape(x)[:1]}, one for each row of x.")
    if num_classes < 1:
        raise ValueError(f"archipelago num_classes: found {num_classes}, wanted 1 or more.")
    if not 0 < persistence <= 1:
        raise ValueError(f"archipelago persistence: found {persistence}, wanted a chance above 0, at most 1.")


class Proposals(NamedTuple):
    """What the process proposed, in order, and what became of it."""

    points: Array  # [proposal, feature]
    noise: Array  # [proposal, class]
    outcome: Array  # [proposal]: 0 .. num_classes - 1, or num_classes for a rejection


def propose(rng_key: Array, process: Process, size: int, known: tuple[Array, Array, Array] | None = None) -> Proposals:
    """The first `size` points that the process proposes. Of more of them, the first are the same.

    :param known: points, the noise by which the functions have their values there, and which of them are used; None: nothing is known.
    """
    num_features, num_classes = process.density.event_shape[0], len(process.functions.amplitude)

    def one(i: Array) -> tuple[Array, Array, Array]:
        point_key, noise_key, luck_key = random.split(random.fold_in(rng_key, i), 3)
        luck = random.gumbel(luck_key, (num_classes + 1,))
        return jnp.asarray(process.density.sample(point_key)), random.normal(noise_key, (num_classes,)), luck

    points, noise, luck = jax.vmap(one)(jnp.arange(size))
    if known is None:
        known = jnp.zeros((0, num_features)), jnp.zeros((0, num_classes)), jnp.zeros(0, bool)
    each = (jnp.concatenate(pair) for pair in zip(known, (points, noise, jnp.ones(size, bool)), strict=True))
    new = process.functions.values(*each)[-size:]
    return Proposals(points, noise, jnp.argmax(jnp.pad(new, ((0, 0), (0, 1))) + luck, -1))


def simulate(
    rng_key: Array,
    num_rows: int = 30,
    num_features: int = 2,
    num_classes: int = 2,
    labelled: float = 0.3,
    persistence: float = 0.9,
    **options,
) -> dict[str, Any]:
    """Data from the model itself, by the process and not by the padded model, as the model's keyword arguments.

    :param labelled: chance of a row to keep its label.
    :param persistence: chance to go on after a rejection; where the process ends, all begins anew, functions and all.
    :param options: other arguments of the model; they are returned beside the data.
    """
    known = {name: value for name, value in options.items() if name != "capacity"}

    @partial(jax.jit, static_argnums=1)
    def proposals(attempt: Array, size: int) -> Proposals:
        model_key, run_key = random.split(attempt)
        with seed(rng_seed=model_key):
            return propose(run_key, process(num_features, num_classes, **known), size)

    for attempt in range(MOST_ATTEMPTS):
        attempt_key, life_key, label_key = random.split(random.fold_in(rng_key, attempt), 3)
        most_rejected = np.inf if persistence == 1 else float(random.geometric(life_key, 1 - persistence)) - 1
        found = _first_accepted(partial(proposals, attempt_key), num_rows, num_classes, most_rejected)
        if found is not None:
            y = jnp.where(random.bernoulli(label_key, labelled, (num_rows,)), found.outcome, -1)
            return {"x": found.points, "y": y, "num_classes": num_classes, "persistence": persistence, **options}
    raise RuntimeError(f"archipelago simulate: all of {MOST_ATTEMPTS} attempts at {num_rows} rows ended; wanted a larger persistence.")


def _first_accepted(proposals: Callable[[int], Proposals], num_rows: int, num_classes: int, most_rejected: float) -> Proposals | None:
    """The first points that were accepted, or None where more were rejected before the last of them."""
    size, accepted, was_rejected = num_rows, np.zeros(0, int), np.zeros(0, bool)
    while len(accepted) < num_rows and was_rejected.sum() <= most_rejected:
        size = _twice(size, num_rows)
        found = proposals(size)
        was_rejected = np.asarray(found.outcome) == num_classes
        accepted = np.flatnonzero(~was_rejected)[:num_rows]
    if len(accepted) < num_rows or accepted[-1] + 1 - num_rows > most_rejected:
        return None
    return Proposals(*(each[accepted] for each in found))


def _twice(size: int, wanted: int, of_class: str = "") -> int:
    if 2 * size > MOST_PROPOSALS:
        raise RuntimeError(
            f"archipelago: found fewer than {wanted} points{of_class} among {size} proposals, too rare to wait for; "
            "a base density that is nearer to the data has fewer rejected."
        )
    return 2 * size


def predict(
    rng_key: Array, draws: dict[str, Array], x: Array, x_new: Array, *, knows_density: bool = True, num_values: int = 8, **options
) -> Array:
    """Probabilities of the classes at new points, [row, class], from draws [draw, ...] of the posterior, deterministic sites included.

    Each draw gives softmax(g) at values g of the functions, with the weight base density x (M + Q) / Q x Lambda / (1 + Lambda): how much
    a draw expects a point where this one lies. The second factor is unbiased for the inverse of the integral that cannot be computed.
    Where no draw expects any, because the base density ends before, there is no answer but NaN.

    :param knows_density: whether a new point counts as one more draw from the density; else draws weigh the same, as in the paper.
    :param num_values: values of the functions for each draw.
    :param options: those that the model had.
    """

    def one(at: tuple[Array, dict[str, Array]]) -> Array:
        key, draw = at
        found = _process_at(draw, x.shape[1], options)
        mean, spread = found.functions.given(x_new, *_known(draw, x))
        g = mean + spread * random.normal(key, (num_values, *mean.shape))
        if not knows_density:
            return jnp.asarray(logsumexp(nn.log_softmax(g), 0))
        expected = found.density.log_prob(x_new) + jnp.log1p(draw["num_rejected"] / len(x))
        log_claim = g - nn.softplus(logsumexp(g, -1, keepdims=True))  # log(1 + Lambda)
        return jnp.asarray(expected[:, None] + logsumexp(log_claim, 0))

    keys = random.split(rng_key, len(draws["num_rejected"]))
    claims = logsumexp(lax.map(one, (keys, draws), batch_size=8), 0)
    return jnp.exp(claims - logsumexp(claims, -1, keepdims=True))


def fantasies(
    rng_key: Array, draws: dict[str, Any], x: Array, counts: np.ndarray, label: int | None = None, **options
) -> tuple[np.ndarray, np.ndarray]:
    """New points and their classes, `counts[i]` of draw i: after each draw the process goes on, until enough points of the class are there.

    :param label: the class, None for all of them.
    """

    def one(key: Array, draw: dict[str, Array], size: int) -> Proposals:
        points, _, is_used = _known(draw, x)
        noise = jnp.concatenate([draw["noise"], draw["rejected_noise"]])
        return propose(key, _process_at(draw, x.shape[1], options), size, (points, noise, is_used))

    run = jax.jit(lambda keys, draws, size: lax.map(lambda at: one(*at, size), (keys, draws)), static_argnums=2)
    keys, done, size = random.split(rng_key, len(counts)), {}, 32
    while len(pending := np.array([i for i in np.flatnonzero(counts) if i not in done])):
        size = _twice(size, counts[pending[0]], "" if label is None else f" of class {label}")
        points, _, outcome = map(np.asarray, run(keys[pending], {name: values[pending] for name, values in draws.items()}, size))
        is_wanted = outcome < draws["amplitude"].shape[-1] if label is None else outcome == label
        for i, *found, wanted in zip(pending, points, outcome, is_wanted, strict=True):
            if np.sum(wanted) >= counts[i]:
                done[i] = [each[wanted][: counts[i]] for each in found]
    points, classes = zip(*(done[i] for i in sorted(done)), strict=True)
    return np.concatenate(points), np.concatenate(classes)


def _process_at(draw: dict[str, Array], num_features: int, options: dict[str, Any]) -> Process:
    with seed(rng_seed=0), substitute(data=draw):
        return process(num_features, draw["amplitude"].shape[-1], **options)


def _known(draw: dict[str, Array], x: Array) -> tuple[Array, Array, Array]:
    """Points, values there, and which are used."""
    is_used = jnp.arange(len(draw["rejected"])) < draw["num_rejected"]
    points = jnp.concatenate([x, draw["rejected"]])
    return points, jnp.concatenate([draw["function"], draw["rejected_function"]]), jnp.append(jnp.ones(len(x), bool), is_used)
