"""Augment and reduce on a few rows and classes: estimates of one step beside the whole sums."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from inference import AugmentReduce, Program
from inference.kernels.augment_reduce.weights import minibatch_of
from zoo.augment_reduce import augment_reduce

X = np.random.default_rng(0).normal(size=(6, 2))
Y = np.array([0, 4, 1, 4, 2, 0])  # of five classes: one is never seen, the last is
TOLD = {"x": X, "y": Y, "num_classes": 5, "batch_size": 3, "num_negatives": 2}


def fitted(noise="gumbel", model=augment_reduce, told=TOLD, **options):
    """What the kernel has read of a program, the program, and a state with weights of size 1 and
    a q(eps) of each row.
    """
    if model is augment_reduce and told is TOLD:
        return _of_the_zoo(noise, **options)
    return _fitted(
        Program(model, **(told | {"noise": noise} if model is augment_reduce else told)),
        model,
        options,
    )


DATA = {}  # by reading


@cache
def _of_the_zoo(noise, **options):
    return _fitted(Program(augment_reduce, **TOLD, noise=noise), augment_reduce, options)


def _fitted(program, model, options):
    kernel = AugmentReduce(model, init_scale=1.0, **options)
    reading, data = kernel.read(program)
    DATA[reading] = data
    state = kernel.init(jax.random.key(3), reading, data)
    rng = np.random.default_rng(2)
    local = {
        name: jnp.asarray(rng.uniform(0.3, 1.2, value.shape)) for name, value in state.local.items()
    }
    return (
        reading,
        program,
        state._replace(
            local={name: value * (5.0 if name == "rate" else 1.0) for name, value in local.items()}
        ),
    )


def step(reading, program, state, seed):
    """State and report after a step on the data of the program."""
    return reading.kernel.step(jax.random.key(seed), state, reading, DATA[reading])


def bound(reading, program, state):
    """The bound on the log likelihood of all rows, with all classes."""
    return reading.kernel.bound(state, reading, reading.kernel.read(program)[1])


def weights_of(reading, state):
    """The weights of each site, where q is a point mass."""
    return {name: value["loc"] for name, value in reading.kernel.values(state, reading).items()}


def utilities(reading, state):
    """psi [row, class], as numpy has it."""
    found = weights_of(reading, state)
    return X @ np.asarray(found["weights"]).T + np.asarray(found["biases"])


def estimate(reading, program, state, index, rng_key, worth=None):
    """What a step would take for the bound on the log likelihood, and its slopes in all weights;
    without a key eps is integrated out. `worth` are importance weights of the classes.
    """
    model = reading.reduced
    view = minibatch_of(reading, program, index, state, None, worth)
    rows = index[model.rows]
    local = jax.tree.map(lambda leaf: leaf[rows], state.local)

    def of(parameters):
        each = reading.bound_of_rows(view.terms(parameters), local, rng_key)
        return each.sum() * (model.sizes[model.rows][0] / len(rows))

    value, slopes = jax.value_and_grad(of)(view.parameters)
    dense = {
        name: view.requests[name].scatter(
            jnp.zeros(model.by_row[name].shape), view.requests[name].merged(slope["loc"])
        )
        for name, slope in slopes.items()
    }
    return value, dense


def every(reading):
    """The index of all rows and classes."""
    return {name: jnp.arange(size[0]) for name, size in reading.reduced.sizes.items()}


def flat(found):
    """Bound and slopes as one vector."""
    return jnp.concatenate(
        [found[0].ravel(), *(found[1][name].ravel() for name in sorted(found[1]))]
    )


def z_scores(reading, program, state, exact=None, num_draws=10_000):
    """The error of the mean over draws of what a step estimates, in standard errors.

    The exact answer is the sum over all rows and classes.
    """

    def one(key):
        index_key, point_key = jax.random.split(key)
        index = reading.reduced.draw_index(index_key, reading.kernel.own_negatives)
        return flat(estimate(reading, program, state, index, point_key))

    exact = np.asarray(whole(reading, program, state)) if exact is None else exact
    found = np.asarray(
        jax.jit(lambda keys: jax.lax.map(one, keys, batch_size=500))(
            jax.random.split(jax.random.key(0), num_draws)
        )
    )
    return (found.mean(0) - exact) / (found.std(0) / np.sqrt(num_draws) + 1e-12)


def whole(reading, program, state):
    """Bound and slopes from all rows and classes."""
    return jax.jit(lambda state: flat(estimate(reading, program, state, every(reading), None)))(
        state
    )
