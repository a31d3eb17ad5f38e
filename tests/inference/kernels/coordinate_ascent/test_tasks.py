"""Coordinate ascent over several tasks: its bound against draws, each factor against the model's
conditional, planted errors.
"""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import random

from inference import CoordinateAscent, Driver, Program
from inference.kernels.coordinate_ascent import posterior as _posterior
from inference.kernels.coordinate_ascent.posterior import gathered, spread
from inference.kernels.coordinate_ascent.start import start_groups, start_sums
from inference.reading.stick_mixture.structure import MixtureRows
from tests.inference.kernels.coordinate_ascent import test_posterior as of_one_task
from tests.inference.kernels.coordinate_ascent.test_kernel import ascended, gap_to_draws
from tests.inference.mixtures import of_tasks
from zoo.iqgme_tasks import iqgme_tasks

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

DRAWS = 3000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["binary tasks", "tasks of three classes", "tasks of bits"])
def test_bound_is_that_of_the_model_and_never_falls(name):
    model, data = of_tasks(name)
    kernel, state, elbo, program, read = ascended(data, model=model)
    assert np.diff(elbo).min() > -1e-9
    assert elbo[-1] - elbo[-2] < 1e-5 < elbo[-1] - elbo[0]
    assert abs(gap_to_draws(kernel, state, program, read, 20_000)) < 3


def without_forms(agreement):
    """What a shared group says of rows lacks the forms of the features."""
    return lambda message, sums, one: agreement(
        message._replace(matrix=0 * message.matrix), sums, one
    )


def careless(spread):
    """A group of a task is taken for the shared one that it is most likely under."""

    return lambda message, log_weights, share: spread(
        message, log_weights, jnp.eye(share.shape[-1])[share.argmax(-1)]
    )


def last_task_missing(gathered):
    """The rows of the last task are not counted."""
    return lambda sums, share: gathered(sums, share.at[-1].set(0.0))


def last_stick_missing(sticks_of):
    """What a stick leaves is counted without the last group."""
    return lambda prior, count, *others: sticks_of(prior, count.at[..., -1].set(0.0), *others)


PLANTED = {
    "forms not in the shares": (_posterior, "agreement", without_forms, "c"),
    "shares not in the messages": (_posterior, "spread", careless, of_one_task.ROW),
    "a task not in the sums": (_posterior, "gathered", last_task_missing, "mu, Lambda"),
    "tail of the upper sticks": (_posterior, "sticks_of", last_stick_missing, "U"),
    "tail of the lower sticks": (_posterior, "sticks_of", last_stick_missing, "V"),
}


def problem() -> dict[str, Any]:
    """Every row has a label; and it is not certain which shared group a group of a task is
    under.
    """
    data = of_tasks("binary tasks", num_rows=8, num_tasks=3, missing=0.3, num_groups=3)[1]
    return data | {
        "y": np.maximum(data["y"], 0),
        "alpha": dist.Gamma(20.0, 10.0),
        "beta": dist.Gamma(30.0, 10.0),
    }


def readings(program: Program, values: dict[str, Any]) -> dict[str, Any]:
    """Natural parameters of every complete conditional at one setting of all sites."""
    slope = lambda name, at: jax.grad(lambda value: program.log_joint({**values, name: value}))(at)
    ones = {name: jnp.ones_like(values[name]) for name in ("U", "V")}
    found = {
        "beta": (slope("beta", jnp.array(1.0)), slope("beta", jnp.array(2.0))),
        "U": (slope("U", 0.3 * ones["U"]), slope("U", 0.6 * ones["U"])),
        "c": (_of_index(program, values),),
    }
    return of_one_task.readings(program, values) | found


def _of_index(program: Program, values: dict[str, Any]):
    """Log joint with each index set to each shared group, less that of the first [task, group,
    shared group - 1].
    """
    places, groups = np.argwhere(np.ones(values["c"].shape)), len(values["mu"])
    at = lambda place, s: program.log_joint(
        {**values, "c": values["c"].at[place[0], place[1]].set(s)}
    )
    each = jax.lax.map(
        lambda place: jax.lax.map(lambda s: at(place, s), jnp.arange(groups)), jnp.asarray(places)
    )
    return (each[:, 1:] - each[:, :1]).reshape(*values["c"].shape, groups - 1)


def wanted(reading, state) -> dict[str, Any]:
    """The same numbers of the factors of q."""
    upper = state.factors.upper
    (a, b), (c1, c0), log_share = *upper[:2], upper.log_share
    beta = lambda v: (c1 - 1) / v - (c0 - 1) / (1 - v)
    found = {
        "beta": ((a - 1) - b, (a - 1) / 2 - b),
        "U": (beta(0.3), beta(0.6)),
        "c": (log_share[..., 1:] - log_share[..., :1],),
    }
    return of_one_task.wanted(reading, state) | found


@pytest.fixture(scope="module")
def fitted():
    """A kernel at its optimum, and what the model says there."""
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        kernel, state, _, program, read = ascended(problem(), 400, iqgme_tasks)
        drawn = {
            name: value
            for name, value in kernel.draw(random.key(2), state, *read, DRAWS).items()
            if name != "log_q"
        }
        found = jax.jit(
            lambda drawn: jax.lax.map(
                lambda values: readings(program, values), drawn, batch_size=100
            )
        )(drawn)
        return kernel, state, read, jax.device_get(found)


@pytest.mark.slow
def test_natural_parameters(fitted):
    _, state, (reading, _), found = fitted
    off = of_one_task.gaps(found, jax.device_get(wanted(reading, state)))
    assert max(off.values()) < 4.5, off


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_is_seen(name, fitted, monkeypatch):
    """At the optimum every factor is what the others say; a step with an error in it moves the
    factor away from that.
    """
    module, attribute, twin, factor = PLANTED[name]
    monkeypatch.setattr(module, attribute, twin(getattr(module, attribute)))
    kernel, state, read, found = fitted
    moved, _ = jax.jit(lambda state: kernel.step(jax.random.key(0), state, *read))(state)
    off = of_one_task.gaps(found, jax.device_get(wanted(read[0], moved)))
    assert off[factor] > 5, off


# What sums and messages are to each other.


def test_what_is_said_of_rows_and_summed_over_them_is_the_same():
    """sum_jh <message of a group of a task, its sums> = sum_s <message of a shared group, the
    sums of its rows>.
    """
    rng = np.random.default_rng(0)
    tasks, own, groups, classes, size, statistics = 2, 3, 4, 2, 3, 5
    random_of = lambda *shape: jnp.asarray(rng.normal(size=shape))
    message = _posterior.Message(
        random_of(groups), random_of(groups, size, size), random_of(classes, groups, size), random_of(classes, groups, size, size),
        random_of(statistics, groups),
    )  # fmt: skip
    sums = _posterior.SufficientSums(
        random_of(tasks, own, size, size), random_of(tasks, classes, own, size, size), random_of(tasks, classes, own, size),
        random_of(tasks, statistics, own), jnp.zeros(()),
    )  # fmt: skip
    pair = (jnp.ones(3), jnp.ones(3))
    upper = _posterior.Upper(pair, pair, jax.nn.log_softmax(random_of(tasks, own, groups)))
    agrees = _posterior.agreement(message, sums, size - 1)
    by_task = spread(message, jnp.zeros((tasks, own)), _posterior.share_of(upper))
    of_task = lambda j: _posterior.agreement(
        jax.tree.map(lambda leaf: leaf[j], by_task),
        jax.tree.map(lambda leaf: leaf[j][None] if leaf.ndim else leaf, sums),
        size - 1,
    )
    one = sum(jnp.trace(of_task(j)[0]) for j in range(tasks))
    pooled = jax.tree.map(
        lambda leaf: leaf[None] if leaf.ndim else leaf, gathered(sums, _posterior.share_of(upper))
    )
    np.testing.assert_allclose(jnp.sum(jnp.exp(upper.log_share) * agrees), one)
    np.testing.assert_allclose(jnp.trace(_posterior.agreement(message, pooled, size - 1)[0]), one)


# Where it starts.


def test_a_start_counts_each_row_once_in_a_group_of_its_task():
    """Tasks may have two groups each of four: rows of smaller ones go to the nearest."""
    centre, task = (
        np.array([0.0, 1.0, 10.0, 11.0])[np.array([0, 0, 0, 1, 2, 2, 3, 3, 3, 3])],
        np.repeat([0, 1], [6, 4]),
    )
    x, nothing = centre[:, None], np.zeros((10, 0))
    rows = MixtureRows(x, np.zeros((0, 2), int), (), nothing, (), nothing, task)
    of = SimpleNamespace(num_own=2, num_groups=4, upper=True)
    sums, share = start_sums(rows, nothing, of, 2, "kmeans", np.random.default_rng(1))
    count, total = np.asarray(sums.moments[:, :, 1, 1]), np.asarray(sums.moments[:, :, 0, 1])
    np.testing.assert_array_equal(count, [[4, 2], [4, 0]])
    np.testing.assert_allclose(total, [[1, 20], [44, 0]])
    assert (share.sum(-1) == 1).all()
    chosen = share.argmax(-1)
    assert chosen[0, 0] != chosen[0, 1]
    assert chosen[1, 0] not in chosen[0]


# In the driver.


@pytest.mark.slow
def test_tree_of_a_run():
    model, data = of_tasks("binary tasks")
    tree = Driver(CoordinateAscent(model), num_warmup=60, num_samples=20).run(0, **data)
    posterior = tree["posterior"].dataset
    assert posterior["c"].dims == ("chain", "draw", "task", "group")
    assert posterior["V"].dims == ("chain", "draw", "task", "stick")
    parameters = tree["variational_parameters"].dataset
    assert {"U_concentration1", "beta_rate", "c_probs", "V_concentration0", "mu_rate"} <= set(
        parameters.data_vars
    )
    np.testing.assert_allclose(parameters["c_probs"].sum(parameters["c_probs"].dims[-1]), 1)


@pytest.mark.parametrize("most", [5, 2])
def test_a_start_by_task(most):
    """Rows of a task are together; each task is under a shared group of its own, or with its
    like where these are fewer.
    """
    rng = np.random.default_rng(0)
    task = rng.permutation(np.repeat([0, 1, 2], 6))
    x = np.where(task == 1, 5.0, 0.0)[:, None] + rng.normal(size=(18, 2))
    found: Any = SimpleNamespace(num_own=2, num_groups=most, upper=True)
    rows: Any = SimpleNamespace(features=x, task=task)
    group, share = start_groups(rows, np.zeros((18, 0)), found, 3, "task", rng)
    assert (group == 0).all()
    assert share is not None
    assert share.shape == (3, 2, most)
    own = share[:, 0].argmax(-1)
    np.testing.assert_array_equal(share[:, 0], np.eye(most)[own])
    np.testing.assert_allclose(share[:, 1], 1 / most)
    if most == 5:
        np.testing.assert_array_equal(own, np.arange(3))
    else:
        assert own[0] == own[2] != own[1]
