"""The rivals of augment and reduce against their formulas: with all rows and classes, at random
weights.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference import Program
from inference.kernels.augment_reduce.weights import minibatch_of
from tests.bench.augment_reduce_rivals import UMax, exact_softmax, one_vs_each, sampled_softmax
from tests.inference.reducing import TOLD, Y, every, fitted, step, utilities, whole
from zoo.augment_reduce import augment_reduce

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")


def gaps(reading, state):
    """psi_k - psi_y [row, class]."""
    psi = utilities(reading, state)
    return psi - psi[np.arange(6), Y][:, None]


def log_softmax(reading, state):
    return -np.log(np.exp(gaps(reading, state)).sum(1))


def all_others(reading, state):
    """Sum of log sigmoid(psi_y - psi_k) over k != y."""
    return -np.log1p(np.exp(gaps(reading, state))).sum(1) + np.log(2)


@pytest.mark.parametrize(
    ("model", "formula"),
    [(exact_softmax, log_softmax), (sampled_softmax, log_softmax), (one_vs_each, all_others)],
    ids=["exact", "sampled", "one-vs-each"],
)
def test_with_all_classes_a_rival_is_its_formula(model, formula):
    reading, program, state = fitted(model=model, told=TOLD)
    assert reading.q_noise is None
    assert float(whole(reading, program, state)[0]) == pytest.approx(
        formula(reading, state).sum(), rel=1e-10
    )
    assert all_others(reading, state).sum() < log_softmax(reading, state).sum()


def test_a_sampled_softmax_draws_its_classes():
    reading, program, state = fitted(model=sampled_softmax, told=TOLD | {"batch_size": 6})
    assert reading.reduced.sizes == {"row": (6, 6), "other": (4, 2)}
    elbo = jax.jit(lambda seed: step(reading, program, state, seed)[1].elbo)
    found = {float(elbo(seed)) for seed in range(12)}
    assert len(found) == 4  # a class of each half of the others


def test_u_max_rests_at_the_best_rate():
    program = Program(augment_reduce, **TOLD)
    kernel = UMax(augment_reduce, init_scale=1.0)
    reading, data = kernel.read(program)
    state = kernel.init(jax.random.key(3), reading, data)
    view = minibatch_of(reading, program, every(reading), state, None)
    terms, best = view.terms(view.parameters), np.exp(gaps(reading, state)).sum(1)
    rate_after = jax.jit(
        lambda local: reading.q_noise.step(local, terms, terms, jnp.asarray(1.0), jax.random.key(0))
    )
    np.testing.assert_allclose(rate_after({"rate": jnp.asarray(best)})["rate"], best, rtol=1e-10)
    local = state.local
    for _ in range(60):
        local = rate_after(local)
    np.testing.assert_allclose(local["rate"], best, rtol=1e-3)
