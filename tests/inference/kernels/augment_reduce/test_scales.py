"""`handlers.scale` in a model, by numbers and by arrays, against the model's own log density."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from numpyro import plate, sample
from numpyro.handlers import scale

from inference import AugmentReduce, Program, StructureError
from inference.distributions.noise import Below
from inference.kernels.augment_reduce.weights import minibatch_of
from inference.reading import row_table
from tests.by_numpy import by_numpy
from tests.inference.reducing import TOLD, X, Y, estimate, every, fitted, weights_of

pytestmark = pytest.mark.usefixtures("x64")

OF_ROWS = np.array([0.3, 2.0, 1.0, 0.7, 3.0, 0.01])
OF_CLASSES = np.array([0.02, 1.5, 1.0, 0.5])
GUMBEL = dist.Gumbel(0.0, 1.0)


def weighed(x, y, of_terms, of_prior=1.0, rows_seen=3, seen=2):
    """Augment and reduce in which `of_terms(row, other)` scales the observed site."""
    with plate("class", 5, dim=-1), scale(scale=of_prior):
        w = sample("w", dist.Normal(0.0, 1.0).expand((2,)).to_event(1))
    with plate("row", 6, subsample_size=rows_seen, dim=-1) as row:
        z, own = jnp.asarray(x)[row], jnp.asarray(y)[row]
        eps = sample("eps", GUMBEL)
        with plate("other", 4, subsample_size=seen, dim=-2) as other:
            every = w[jnp.append(other, 4)] @ z.T
            utility = jnp.where(other[:, None] == own[None], every[-1:], every[:-1])
            below = (eps + jnp.sum(w[own] * z, -1))[None] - utility
            with scale(scale=of_terms(row, other)):
                sample("loses", Below(below, GUMBEL), obs=np.ones(below.shape, np.int32))


SCALES = {
    "number": lambda row, other: 0.25,
    "rows": lambda row, other: jnp.asarray(OF_ROWS)[row][None],
    "classes": lambda row, other: jnp.asarray(OF_CLASSES)[other][:, None],
    "both": lambda row, other: (
        jnp.asarray(OF_CLASSES)[other][:, None] * jnp.asarray(OF_ROWS)[row][None]
    ),
}


def read(of_terms, **options):
    return fitted(model=weighed, told={"x": X, "y": Y, "of_terms": of_terms} | options)


def log_joint(reading, program, state):
    """The log joint of each row at eps = log rate, all rows and classes, by the model itself."""
    full = program.with_arguments(rows_seen=None, seen=None)
    at = {"w": jnp.asarray(weights_of(reading, state)["w"]), "eps": jnp.log(state.local["rate"])}
    terms = full.log_probs(at)
    return terms["eps"] + terms["loses"].sum(0)


def gap_of_bound(of_terms):
    reading, program, state = read(of_terms)
    exact = by_numpy(lambda: log_joint(reading, program, state) + 1)().sum()
    index = every(reading)
    found = by_numpy(lambda: estimate(reading, program, state, index, None)[0])()
    return abs(float(found - exact))


@pytest.mark.parametrize("kind", SCALES)
def test_bound_has_the_scales_of_the_model(kind):
    assert gap_of_bound(SCALES[kind]) < 1e-9


def test_one_scale_for_all_terms_is_seen(monkeypatch):
    own = row_table._scale
    monkeypatch.setattr(row_table, "_scale", lambda site: jnp.mean(jnp.asarray(own(site))))
    assert gap_of_bound(SCALES["both"]) > 0.1


def best_rate_gap(of_terms):
    """How far the rate is from minus the slope of the log joint in exp(-eps), after a full step."""
    reading, program, state = read(of_terms)
    view = minibatch_of(reading, program, every(reading), state, None)
    terms = view.terms(view.parameters)
    step = lambda local: reading.q_noise.step(local, terms, terms, 1.0, jax.random.key(0))

    def total(u):
        at = state._replace(local={"rate": 1 / u})
        return jnp.sum(log_joint(reading, program, at) - jnp.log(u))

    best = -by_numpy(jax.grad(total))(jnp.ones(6))
    return np.abs(by_numpy(step)(state.local)["rate"] / best - 1).max()


def test_rates_go_where_scaled_terms_want_them():
    """A class of scale 0.02 must not hold the rate above its best."""
    assert best_rate_gap(SCALES["classes"]) < 1e-9


def test_a_prior_is_scaled():
    slopes = []
    for of_prior in (1.0, 3.0):
        reading, program, state = read(SCALES["rows"], of_prior=of_prior)
        view = minibatch_of(reading, program, every(reading), state, None)
        slopes.append(by_numpy(jax.grad(view.log_prior))(view.parameters)["w"]["loc"])
    np.testing.assert_allclose(slopes[1], 3 * slopes[0], rtol=1e-12)


@pytest.mark.parametrize(
    ("of_terms", "of_prior", "message"),
    [
        (
            lambda row, other: OF_ROWS,
            1.0,
            r"site 'loses': handlers.scale has the shape \(6,\), and its terms \(2, 3\); wanted",
        ),
        (
            SCALES["rows"],
            np.ones(5),
            "site 'w': handlers.scale gives its rows different scales .* scale the observed site",
        ),
    ],
    ids=["not indexed", "prior by row"],
)
def test_scales_that_cannot_be_served_are_refused(of_terms, of_prior, message):
    program = Program(weighed, X, TOLD["y"], of_terms, of_prior)
    with pytest.raises(StructureError, match=message):
        AugmentReduce(weighed).read(program)
