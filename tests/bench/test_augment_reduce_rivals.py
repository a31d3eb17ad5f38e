"""The rivals of augment and reduce against their formulas: with all rows and classes, at random weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference import Program
from tests.bench.augment_reduce_rivals import UMax, exact_softmax, one_vs_each, sampled_softmax
from tests.inference.reducing import TOLD, Y, every, fitted, utilities, whole
from zoo.augment_reduce import augment_reduce

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")


def gaps(kernel, state):
    """psi_k - psi_y [row, class]."""
    psi = utilities(kernel, state)
    return psi - psi[np.arange(6), Y][:, None]


def log_softmax(kernel, state):
    return -np.log(np.exp(gaps(kernel, state)).sum(1))


def all_others(kernel, state):
    """Sum of log sigmoid(psi_y - psi_k) over k != y."""
    return -np.log1p(np.exp(gaps(kernel, state))).sum(1) + np.log(2)


@pytest.mark.parametrize(
    ("model", "formula"),
    [(exact_softmax, log_softmax), (sampled_softmax, log_softmax), (one_vs_each, all_others)],
    ids=["exact", "sampled", "one-vs-each"],
)
def test_with_all_classes_a_rival_is_its_formula(model, formula):
    kernel, program, state = fitted(model=model, told=TOLD)
    assert kernel.reads is None
    assert float(whole(kernel, program, state)[0]) == pytest.approx(formula(kernel, state).sum(), rel=1e-10)
    assert all_others(kernel, state).sum() < log_softmax(kernel, state).sum()


def test_a_sampled_softmax_draws_its_classes():
    kernel, program, state = fitted(model=sampled_softmax, told=TOLD | {"batch_size": 6})
    assert kernel.reduced.sizes == {"row": (6, 6), "other": (4, 2)}
    step = jax.jit(kernel.step)
    found = {float(step(jax.random.key(seed), state, kernel.data(program))[1].elbo) for seed in range(12)}
    assert len(found) == 4  # a class of each half of the others


def test_u_max_rests_at_the_best_rate():
    program = Program(augment_reduce, **TOLD)
    kernel = UMax(augment_reduce, init_scale=1.0)
    state = kernel.init(jax.random.key(3), program)
    view = kernel._view(program, every(kernel), state, None)
    terms, best = view.terms(view.parameters), np.exp(gaps(kernel, state)).sum(1)
    step = jax.jit(lambda local: kernel.reads.step(local, terms, terms, jnp.asarray(1.0), jax.random.key(0)))
    np.testing.assert_allclose(step({"rate": jnp.asarray(best)})["rate"], best, rtol=1e-10)
    local = state.local
    for _ in range(60):
        local = step(local)
    np.testing.assert_allclose(local["rate"], best, rtol=1e-3)
