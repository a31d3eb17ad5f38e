"""Classes drawn in proportion to their frequency: exact expectations, by enumerating all draws."""

from functools import cache
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro import factor, plate

from inference import AugmentReduce, Program, StructureError
from tests.by_numpy import by_numpy
from tests.inference.reducing import DATA, TOLD, Y, _fitted, estimate, every, flat
from zoo.augment_reduce import augment_reduce

pytestmark = pytest.mark.usefixtures("x64")

THREE = TOLD | {"num_negatives": 3}  # of four other classes


@cache
def read(noise="gumbel"):
    program = Program(augment_reduce, **THREE, noise=noise)
    reading, program, state = _fitted(program, augment_reduce, {"frequencies": "y"})
    return reading, program, state, DATA[reading].classes


def all_draws(classes):
    """Uniform numbers [draw, stratum] that give every draw of classes equally often."""
    of_rows, uniform = (np.arange(num) / num + 0.5 / num for num in (6, 2))
    numbers = [of_rows] * len(classes.rows.low) + [uniform] * len(classes.uniform.low)
    return jnp.asarray(list(product(*numbers)))


def errors(reading, program, state, classes, own):
    """The expected estimate of bound and slopes, less the sum over all classes."""

    def one(u):
        drawn = classes.draw(jnp.broadcast_to(u[:, None], (3, 6)) if own else u)
        index = every(reading) | {"other": drawn}
        return flat(estimate(reading, program, state, index, None, classes.worth[drawn]))

    estimated = by_numpy(one)
    found = np.mean([estimated(u) for u in all_draws(classes)], axis=0)
    exact = np.asarray(
        by_numpy(lambda: flat(estimate(reading, program, state, every(reading), None)))()
    )
    return np.abs(found - exact) / (1 + np.abs(exact))


@pytest.mark.parametrize(
    ("noise", "own"),
    [("gumbel", False), pytest.param("normal", True, marks=pytest.mark.slow)],
)
def test_expected_bound_and_slopes_are_the_whole_sums(noise, own):
    reading, program, state, classes = read(noise)
    assert errors(reading, program, state, classes, own).max() < 1e-10
    uniform = classes._replace(worth=jnp.ones_like(classes.worth))
    assert errors(reading, program, state, uniform, own).max() > 0.05


def test_frequent_classes_are_drawn_more_often():
    """Rows of the class that stands in for others count for classes 1 and 3."""
    *_, classes = read()
    np.testing.assert_array_equal(classes.chosen[:6], [0, 1, 1, 3, 2, 0])
    drawn = np.asarray(jax.vmap(classes.draw)(all_draws(classes)))
    share = np.bincount(drawn.ravel()) / drawn.size
    np.testing.assert_allclose(share, (np.array([2, 2, 1, 1]) / 6 + 2 / 4) / 3, rtol=1e-12)
    np.testing.assert_allclose(classes.worth * share, 1 / 4, rtol=1e-12)


def step_scores(is_weighed):
    """The error of the mean bound that a step reports, in standard errors."""
    reading, _, state, classes = read()
    # the rates of all rows are above their best and stay so, for their step size is 1e-6
    local = {"rate": jnp.full_like(state.local["rate"], 200.0)}
    state = state._replace(local=local, count=jnp.array(2**24 - 2))
    data = DATA[reading]
    if not is_weighed:
        data = data._replace(classes=classes._replace(worth=jnp.ones_like(classes.worth)))
    step = lambda key: reading.kernel.step(key, state, reading, data)[1].elbo
    found = np.asarray(jax.jit(jax.vmap(step))(jax.random.split(jax.random.key(0), 4000)))
    exact = reading.kernel.bound(state, reading, data)
    return abs(found.mean() - exact) / (found.std() / np.sqrt(len(found)))


@pytest.mark.parametrize("is_weighed", [True, False], ids=["weighed", "unweighed, which is seen"])
def test_steps_weigh_the_classes_that_they_draw(is_weighed):
    assert (step_scores(is_weighed) < 4) == is_weighed


def test_a_step_that_sees_all_classes_draws_none_by_frequency():
    program = Program(augment_reduce, **TOLD | {"num_negatives": 4})
    _, data = AugmentReduce(augment_reduce, frequencies="y").read(program)
    assert data.classes is None


def outside(x, y, num_classes=5):
    """A model whose sum over classes is not in their plate."""
    from numpyro import distributions as dist
    from numpyro import sample

    with plate("class", num_classes, dim=-1):
        w = sample("w", dist.Normal(0.0, 1.0).expand((2,)).to_event(1))
    with plate("row", 6, subsample_size=3, dim=-1) as row:
        other = plate("other", num_classes, subsample_size=2, dim=-2)._indices
        factor("chosen", -jax.nn.logsumexp(w[other] @ jnp.asarray(x)[row].T, axis=0))


@pytest.mark.parametrize(
    ("model", "told", "name", "error", "message"),
    [
        (augment_reduce, THREE, "labels", ValueError, "found the argument 'labels' of shape ()"),
        (augment_reduce, THREE, "x", ValueError, "found the argument 'x' of shape (6, 2)"),
        (outside, {"x": THREE["x"], "y": Y}, "y", StructureError, "site 'chosen': it is not in"),
        (
            augment_reduce,
            TOLD | {"num_negatives": None, "augmented": False},
            "y",
            StructureError,
            "the model has no plate of classes",
        ),
    ],
    ids=["no argument", "no integers", "outside of the plate", "no plate"],
)
def test_what_has_no_frequencies_is_refused(model, told, name, error, message):
    with pytest.raises(error) as caught:
        AugmentReduce(model, frequencies=name).read(Program(model, **told))
    assert message in str(caught.value)
