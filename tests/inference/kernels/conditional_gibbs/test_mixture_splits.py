"""Splits and merges of groups: what is integrated out, chains that only splits can move."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from scipy.special import betaln

from inference import ConditionalGibbs, Driver, Program
from inference.kernels.conditional_gibbs import mixture as _assignment_sweep
from inference.kernels.conditional_gibbs import mixture_splits as _assignment_splits
from inference.kernels.conditional_gibbs.mixture import AssignmentSweep
from inference.kernels.conditional_gibbs.mixture_splits import log_marginal_at
from inference.program.compiling import once
from tests.inference.mixtures import CASES, beta_bernoulli, case
from zoo.iqgme import iqgme, normal_wishart

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")


@cache
def swept(name):
    model, data = case(name)
    return AssignmentSweep(program := Program(model, **data)), program


def marginals(name):
    """log m of all rows as one group, and of the first three, phi taken from each group."""
    sweep, program = swept(name)
    found = sweep.found
    start = found.start(program, 0)

    def at(start):
        values = program.constrain(start)
        rows = sweep._seen(values, sweep.buckets)
        each = jax.vmap(rows.sums)(jnp.arange(len(rows.task)))
        some = [
            jax.tree.map(lambda leaf, num=num: leaf[:num].sum(0), each)
            for num in (len(rows.task), 3)
        ]
        of = lambda group: log_marginal_at(found, sweep.shape, sweep.prior, values, group)
        return jnp.stack(
            [jnp.stack([of(group)(sums) for sums in some]) for group in range(found.num_groups)]
        )

    return once(at, start)(start)


@pytest.mark.parametrize(
    "name",
    ["binary", *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != "binary")],
)
def test_the_marginal_is_the_same_at_any_parameters(name):
    """So prior, likelihood and posterior belong together."""
    found = marginals(name)
    np.testing.assert_allclose(found, np.broadcast_to(found[:1], found.shape), rtol=1e-8)
    assert abs(found[0, 0] - found[0, 1]) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attribute", "twin"),
    [
        (
            "weights_log_density",
            lambda right: (
                lambda common, moments, products, w: right(common, moments, 0.9 * products, w)
            ),
        ),
        (
            "blocks_of",
            lambda right: (
                lambda found, shape, prior, sums: right(found, shape, prior, sums.times(0.9))
            ),
        ),
    ],
    ids=["soft labels", "features"],
)
def test_a_planted_bug_makes_the_marginal_follow_the_parameters(attribute, twin, monkeypatch):
    monkeypatch.setattr(_assignment_splits, attribute, twin(getattr(_assignment_splits, attribute)))
    found = marginals("binary")
    assert abs(found - found[:1]).max() > 1e-3


def test_the_marginal_of_bits_is_that_of_the_beta_distribution():
    x = np.array([[1.0, 0], [1, np.nan], [0, 1]])
    sweep = AssignmentSweep(
        program := Program(iqgme, x, expert=None, gate=beta_bernoulli, num_experts=3, alpha=1.0)
    )
    start = sweep.found.start(program, 0)

    def log_marginal(start):
        values = program.constrain(start)
        rows = sweep._seen(values, sweep.buckets)
        sums = jax.tree.map(lambda *leaves: sum(leaves), *(rows.sums(row) for row in range(3)))
        return log_marginal_at(sweep.found, sweep.shape, sweep.prior, values, jnp.array(0))(sums)

    ones, zeros = np.array([2, 1]), np.array([1, 1])
    np.testing.assert_allclose(
        once(log_marginal, start)(start),
        (betaln(1.5 + ones, 0.8 + zeros) - betaln(1.5, 0.8)).sum(),
        rtol=1e-9,
    )


# A chain whose rows do not leave their groups one by one: two halves far apart in many columns, in
# one group at the start.


APART = {
    "x": np.random.default_rng(0).normal(size=(30, 12)) + np.repeat([[2.0], [-2.0]], 15, axis=0),
    "alpha": 1.0,
    "num_experts": 4,
    "expert": None,
    "gate": partial(normal_wishart, nu0=40.0),
}


def numbers(num_splits, monkeypatch):
    """Groups with rows in each draw."""
    monkeypatch.setattr(_assignment_sweep, "NUM_SPLITS", num_splits)
    start, kernel = {"z": jnp.zeros(30, int)}, ConditionalGibbs(iqgme, route="mixture")
    tree = Driver(kernel, num_warmup=0, num_samples=40, progress_bar=False).run(
        random.key(0), init_params=start, **APART
    )
    return tree["sample_stats"]["num_groups"].values.ravel()


@pytest.mark.slow
def test_halves_that_are_apart_split(monkeypatch):
    assert (numbers(4, monkeypatch)[20:] == 2).mean() > 0.9


@pytest.mark.slow
def test_without_splits_they_stay_together(monkeypatch):
    assert (numbers(0, monkeypatch) == 1).all()
