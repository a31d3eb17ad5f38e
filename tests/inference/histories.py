"""Models with a latent history, and exact draws of their joint distribution, for the tests of
`LatentHistory`.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import gammaln, logsumexp
from numpyro import handlers
from numpyro.infer.gibbs import GIBBS_SITES_KWARG

from inference import LatentHistory
from inference.program.program import Program
from inference.reading.history import read_history
from zoo.archipelago import archipelago, process

ROOM, TOTAL = 40, 8


def orders(most, total):
    """In how many orders that many were lost before the last of `total` arrived, as a prior."""
    m = jnp.arange(most + 1.0)
    return dist.Categorical(logits=gammaln(m + total) - gammaln(m + 1))


def beads(total, *, room=ROOM, prior=orders):
    """`total` beads arrived; how many were lost on the way? The functions at two beads are
    independent, so all is known exactly.
    """
    lost = numpyro.sample("lost", prior(room, total))
    is_used = jnp.arange(room) < lost
    with numpyro.plate("bead", room):
        spark = numpyro.sample("spark", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with numpyro.handlers.mask(mask=is_used):
            where = numpyro.sample("where", dist.Normal(0.0, 1.0))
        height = numpyro.deterministic("height", jnp.stack([where, -where - 1.0], -1) + 0.5 * spark)
        with numpyro.handlers.mask(mask=is_used):
            numpyro.sample(
                "arrived", dist.Bernoulli(logits=logsumexp(height, -1)), obs=jnp.zeros(room, int)
            )


@cache
def loss_of_a_bead():
    """Chance that a bead is lost, and the mean of `where`^2 of one that was, by quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()
    where, one, two = np.meshgrid(nodes, nodes, nodes, indexing="ij")
    weight = weights[:, None, None] * weights[:, None] * weights
    lost = weight / (1 + np.exp(where + 0.5 * one) + np.exp(-where - 1 + 0.5 * two))
    return lost.sum(), (lost * where**2).sum() / lost.sum()


def run(kernel, model, args, kwargs, num_sweeps, fields):
    """Values of some sites, [sweep, ...], in a run of the kernel alone."""
    state = kernel.init(random.key(0), 0, None, args, kwargs)

    def sweep(state, _):
        state = kernel.sample(state, args, kwargs)
        return state, {name: state.values[name] for name in fields}

    return jax.jit(lambda state: jax.lax.scan(sweep, state, None, num_sweeps)[1])(state)


# Exact draws of the joint distribution of a small Archipelago.

ROWS, CAPACITY, CLASSES, FEATURES = 3, 24, 2, 2
# many rejections, which say much of each other
SMOOTH = {"lengthscale": dist.LogNormal(1.0, 0.3), "amplitude": dist.LogNormal(2.0, 0.3)}
OPTIONS = {"num_classes": CLASSES, "capacity": CAPACITY, "persistence": 1.0, **SMOOTH}


def joint(rng_key):
    """(values of all latent sites, x, y, whether so many proposals were enough), by the process
    itself.
    """
    prior_key, point_key, noise_key, outcome_key, label_key = random.split(rng_key, 5)
    traced = handlers.trace(handlers.seed(process, prior_key))
    parameters = {
        name: site["value"]
        for name, site in traced.get_trace(FEATURES, CLASSES, **SMOOTH).items()
        if site["type"] == "sample"
    }
    with handlers.seed(rng_seed=0), handlers.substitute(data=parameters):
        drawn = process(FEATURES, CLASSES, **SMOOTH)
    size = ROWS + CAPACITY
    points = drawn.density.sample(point_key, (size,))
    function = drawn.functions.values(points, random.normal(noise_key, (size, CLASSES)))
    outcome = random.categorical(outcome_key, jnp.pad(function, ((0, 0), (0, 1))))

    place, accepted = jnp.arange(size), outcome < CLASSES
    end = jnp.argmax(jnp.cumsum(accepted) == ROWS)
    # rows, then those rejected before the last of them, then the rest
    group = jnp.where(place > end, 2, jnp.where(accepted, 0, 1))
    order = jnp.argsort(group * size + place)
    points, function, outcome = points[order], function[order], outcome[order]
    values = parameters | {
        "num_rejected": (end + 1 - ROWS).astype(jnp.int64),
        "rejected": points[ROWS:],
    }
    noise = jax.vmap(_whitened, (None, 1, 0, 0), 1)(
        points, function, parameters["amplitude"], parameters["lengthscale"]
    )
    values |= {"noise": noise[:ROWS], "rejected_noise": noise[ROWS:]}
    y = jnp.where(random.bernoulli(label_key, 0.5, (ROWS,)), outcome[:ROWS], -1)
    return values, points[:ROWS], y, jnp.sum(accepted) >= ROWS


def _whitened(points, function, amplitude, lengthscale):
    apart = jnp.sum((points[:, None] - points[None]) ** 2, -1) / lengthscale**2
    return solve_triangular(
        jnp.linalg.cholesky(jnp.exp(-0.5 * apart) + 1e-6 * jnp.eye(len(points))),
        function / amplitude,
        lower=True,
    )


def seen(values, x, y):
    """What is compared between exact draws and moved ones."""
    is_used = jnp.arange(CAPACITY) < values["num_rejected"]
    inside = lambda x: jnp.sum(jnp.where(is_used[:, None], x, 0.0))
    found = Program(archipelago, x, y, **OPTIONS).deterministics(values)
    return {
        "functions": inside(found["rejected_function"]),
        "functions and data": inside(found["rejected_function"] * jnp.mean(found["function"], 0)),
        "log count": jnp.log1p(values["num_rejected"]),
        "places": inside(values["rejected"] ** 2),
        "places and functions": inside(values["rejected"] * values["rejected_noise"]),
        "noise": inside(values["rejected_noise"]),
        "squared noise": inside(values["rejected_noise"] ** 2 - 1),
        "first slot": values["rejected_noise"][0, 0] ** 2 * is_used[0],
        "amplitude": jnp.log(values["amplitude"][0]),
        "length scale": jnp.log(values["lengthscale"][-1, 0]),
        "squared length scale": jnp.log(values["lengthscale"][0, 0]) ** 2,
        "amplitude and length scale": jnp.sum(
            jnp.log(values["amplitude"]) * jnp.log(values["lengthscale"][:, 0])
        ),
        "amplitude and count": jnp.log(values["amplitude"][0]) * jnp.log1p(values["num_rejected"]),
        "noise of data": jnp.mean(values["noise"] ** 2),
        "scale and function": jnp.log(values["amplitude"][0]) * jnp.abs(found["function"][0, 0]),
        "length scale and curve": jnp.log(values["lengthscale"][0, 0])
        * (found["function"][0, 0] - found["function"][1, 0]) ** 2,
    }


OF_FIELD = (
    "amplitude",
    "length scale",
    "squared length scale",
    "amplitude and length scale",
    "amplitude and count",
    "noise of data",
)
OF_FIELD = (*OF_FIELD, "scale and function", "length scale and curve")


FIELD = ("noise", "amplitude", "lengthscale")


def drift(num_replicates=8000, num_sweeps=6, beside=(), **options):
    """z-scores of how far sweeps from exact draws of the joint move the means of what is seen:
    noise, for a right kernel.

    :param beside: the history, which sites the kernel draws.
    """
    # cheaper than by default
    kernel = LatentHistory(archipelago, **{"num_steps": 2, "num_trajectories": 4} | options)
    keys = random.split(random.key(1), num_replicates)
    values, x, y, enough = jax.jit(jax.vmap(joint))(keys)
    own = (*read_history(Program(archipelago, x[0], y[0], **OPTIONS)).sites, *beside)
    others = lambda values: {name: value for name, value in values.items() if name not in own}
    first = jax.tree.map(lambda leaf: leaf[0], values)
    start = kernel.init(
        keys[0],
        0,
        {name: first[name] for name in own},
        (x[0], y[0]),
        OPTIONS | {GIBBS_SITES_KWARG: others(first)},
    )

    def moved(key, values, x, y):
        state = start._replace(values={name: values[name] for name in own}, rng_key=key)
        kwargs = OPTIONS | {GIBBS_SITES_KWARG: others(values)}
        return jax.lax.fori_loop(
            0, num_sweeps, lambda _, at: kernel.sample(at, (x, y), kwargs), state
        ).values

    ended = jax.jit(lambda at: jax.lax.map(lambda one: moved(*one), at, batch_size=100))(
        (keys, values, x, y)
    )
    before, after = (jax.vmap(seen)(each, x, y) for each in (values, {**values, **ended}))
    change = {name: np.asarray(after[name] - before[name])[np.asarray(enough)] for name in before}
    change = {name: each for name, each in change.items() if beside or name not in OF_FIELD}
    assert all(np.mean(each != 0) > 0.3 for each in change.values()), "the kernel hardly moves"
    return {
        name: float(each.mean() / each.std() * np.sqrt(len(each))) for name, each in change.items()
    }
