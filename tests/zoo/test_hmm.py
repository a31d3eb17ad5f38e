"""The hidden Markov model against a sum over all paths of states, its draws against the transition
probabilities, and simulation-based calibration; the same test of a model with a planted bug fails.
"""

from itertools import pairwise, product

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import NUTS
from scipy import stats
from scipy.special import logsumexp

from diagnostics import sbc, with_kernel
from inference import Program
from tests.by_numpy import by_numpy, simulated
from zoo.hmm import CARD, HiddenMarkov, hmm, simulate, state_probabilities

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

DATA = {"y": np.array([0.3, -1.2, 2.0, 1.4, -0.1]), "num_states": 3}
VALUES = {
    "means": np.array([-0.9, 0.2, 1.5]),
    "deviations": np.array([0.5, 0.8, 1.1]),
    "rows": np.array([[0.7, 0.2, 0.1], [0.3, 0.6, 0.1], [0.05, 0.15, 0.8]]),
}


def paths(y, means, deviations, rows):
    """All paths of states, and the log joint density of the series with each."""
    num_states = len(means)
    found = list(product(range(num_states), repeat=len(y)))
    log_joint = [
        -np.log(num_states)
        + sum(np.log(rows[before, after]) for before, after in pairwise(path))
        + sum(stats.norm.logpdf(y, means[list(path)], deviations[list(path)]))
        for path in found
    ]
    return np.array(found), np.array(log_joint)


def formula(means, deviations, rows, stay=5.0):
    """The log joint, a path after the other."""
    gaps = np.diff(means)
    prior = stats.norm.logpdf(means[0]) + stats.lognorm.logpdf(gaps, 1).sum()
    prior += stats.lognorm.logpdf(deviations, 0.5, scale=np.exp(-0.5)).sum()
    prior += sum(
        stats.dirichlet.logpdf(p, 1 + stay * own) for p, own in zip(rows, np.eye(3), strict=True)
    )
    return prior + logsumexp(paths(DATA["y"], means, deviations, rows)[1])


@pytest.mark.parametrize("stay", [5.0, 0.5])
def test_log_joint_is_the_sum_over_all_paths(stay):
    found = Program(hmm, **DATA, stay=stay).log_joint(VALUES)
    np.testing.assert_allclose(found, formula(**VALUES, stay=stay), rtol=1e-6)
    other = VALUES | {"rows": VALUES["rows"][::-1]}
    assert abs(found - formula(**other, stay=stay)) > 0.1  # those of other states would be seen


def test_states_given_the_series_are_those_of_all_paths():
    found = by_numpy(lambda draw: state_probabilities(DATA["y"], draw))(VALUES)
    path, log_joint = paths(DATA["y"], **VALUES)
    weight = np.exp(log_joint - logsumexp(log_joint))
    expected = [[weight[path[:, t] == k].sum() for k in range(3)] for t in range(len(DATA["y"]))]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_density_of_several_series_is_that_of_each():
    series = np.stack([DATA["y"], DATA["y"][::-1]])
    model = HiddenMarkov(
        VALUES["rows"], dist.Normal(VALUES["means"], VALUES["deviations"]), series.shape[1]
    )
    found = by_numpy(model.log_prob)(series)
    expected = [logsumexp(paths(each, **VALUES)[1]) for each in series]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_draws_move_by_the_transition_probabilities():
    """Deviations are so small that values tell the states."""
    emission = dist.Normal(np.arange(3.0), np.full(3, 1e-3))
    drawn = HiddenMarkov(VALUES["rows"], emission, 4).sample(random.key(0), (1000,))
    states = np.round(np.asarray(drawn)).astype(int)
    first = np.bincount(states[:, 0], minlength=3)
    assert stats.chisquare(first, np.full(3, 1000 / 3)).pvalue > 0.01

    def gap(rows):
        moves = np.zeros((3, 3))
        np.add.at(moves, (states[:, :-1].ravel(), states[:, 1:].ravel()), 1)
        return max(
            stats.chisquare(n, n.sum() * p).statistic for n, p in zip(moves, rows, strict=True)
        )

    assert gap(VALUES["rows"]) < stats.chi2(2).ppf(0.999)
    assert gap(VALUES["rows"][::-1, ::-1]) > stats.chi2(2).ppf(0.999)  # others would be seen


def test_the_card_describes_every_site():
    assert set(CARD.sites) == set(Program(hmm, **DATA).sites)


def test_simulate_returns_arguments_of_the_model():
    data = simulated(simulate, 1, num_steps=7, num_states=3)
    assert (data["y"].shape, data["num_states"]) == ((7,), 3)
    assert set(data) == {"y", "num_states"}


def test_means_rise():
    drawn = Program(hmm, **DATA).draw_prior(random.key(0), 100)
    assert (np.diff(np.asarray(drawn["means"])) > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "is_right"), [(1.0, True), (0.5, False)])
def test_calibration(scale, is_right):
    """The fit is of the model, or of one with half of its log densities."""
    kernel = lambda model: NUTS(numpyro.handlers.scale(model, scale=scale), max_tree_depth=6)
    fit = with_kernel(kernel, num_warmup=100, num_samples=62, thinning=2)
    series = {"y": np.zeros(20)}
    assert sbc(hmm, fit, **series, num_replicates=100).passed == is_right
