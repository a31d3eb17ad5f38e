"""NormalMixture that are fitted to slopes of a density, where points alone are too few; and the slopes
themselves.
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from scipy import stats

from inference import Driver, Program, Staged
from inference.kernels.staged import kernel as staged
from inference.maths.normal_mixture import FitPoints, NormalSummary
from tests.inference.kernels.staged.test_kernel import driver_of, over, said
from tests.inference.nests import line
from tests.inference.stages import MEAN, PRECISION, X, Y, begun

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

SIZE = 20
RNG = np.random.default_rng(1)
LOADING = RNG.normal(size=(SIZE, SIZE)) / np.sqrt(SIZE)
NORMAL = stats.multivariate_normal(np.arange(SIZE), LOADING @ LOADING.T + 0.1 * np.eye(SIZE))


def lost(told, num_clumps=1, of=NORMAL):
    """Nats that a Normal mixture fitted to some points loses at new ones."""
    new = of.rvs(2000, random_state=7)
    clumps = NormalSummary(told.z.shape[1]).fitted(
        random.key(0), told, np.zeros(len(told.z)), num_clumps
    )
    return (of.logpdf(new) - said(clumps, new)).mean()


def normal_points(count, seed=3):
    z = NORMAL.rvs(count, random_state=seed)
    return z, np.linalg.solve(NORMAL.cov, (NORMAL.mean - z).T).T


def test_a_normal_of_few_points_is_exact():
    """The planted bug: moments alone. From 120 points they are off by 20^2 / 480 nats and more."""
    z, slope = normal_points(120)
    assert abs(lost(FitPoints(z, slope))) < 1e-3
    assert lost(FitPoints(z)) > 0.5


class Two:
    """Two Normals, ten deviations apart."""

    def __init__(self):
        self.parts = [
            stats.multivariate_normal(NORMAL.mean + shift, scale * NORMAL.cov)
            for shift, scale in ((0.0, 1.0), (20.0, 0.3))
        ]

    def logpdf(self, z):
        return np.logaddexp(*(np.log(0.5) + part.logpdf(z) for part in self.parts))

    def slope(self, z):
        return np.stack(
            [
                min(
                    (np.linalg.solve(p.cov, p.mean - each) for p in self.parts),
                    key=lambda s: s @ NORMAL.cov @ s,
                )
                for each in z
            ]
        )

    def rvs(self, count, random_state):
        return np.concatenate(
            [
                part.rvs(count // 2, random_state=random_state + i)
                for i, part in enumerate(self.parts)
            ]
        )


@pytest.mark.slow
def test_each_clump_is_fitted_to_the_slopes_of_its_own():
    two = Two()
    z = two.rvs(800, random_state=1)
    assert abs(lost(FitPoints(z, two.slope(z)), 4, two)) < 0.02
    assert lost(FitPoints(z), 4, two) > 0.2


@pytest.mark.parametrize(
    "slope",
    [
        np.zeros,
        lambda shape: np.full(shape, np.nan),
        lambda shape: RNG.normal(size=shape),
        lambda shape: 1e6 * RNG.normal(size=shape),
    ],
    ids=["zero", "NaN", "noise", "much noise"],
)
def test_slopes_that_say_nothing_are_not_believed(slope):
    z, right = normal_points(600)
    assert abs(lost(FitPoints(z, slope(right.shape))) - lost(FitPoints(z))) < 1e-9


def test_points_without_a_slope_are_left_out():
    z, slope = normal_points(150)
    slope[::7] = np.inf
    assert abs(lost(FitPoints(z, slope))) < 1e-3


def slopes_of(*begun):
    told, _, _ = staged.stage_points(*begun)
    return np.asarray(told.score), np.asarray(told.z)


def noisy(x, y, noise):
    """`line` with a given noise."""
    weight = numpyro.sample("weight", dist.Normal(0.0, jnp.array([1.0, 2.0])).to_event(1))
    with numpyro.plate("row", len(x)):
        numpyro.sample("y", dist.Normal(x @ weight, noise), obs=y)


@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_a_kernel_that_has_read_other_settings_has_their_slopes(bug):
    """The planted bug: what was read for the run before."""
    kernel = Staged(noisy, num_stages=1, num_live=40, num_walkers=0)
    before, first, data = begun(kernel, X, Y, 2.0)
    slopes_of(before, first, data)
    state, second, data = begun(kernel, X, Y, 0.5)
    slope, z = slopes_of(state, first if bug else second, data)
    assert np.allclose(slope, (MEAN - z) @ PRECISION) != bug


def test_slopes_of_a_stage_are_those_of_its_posterior():
    slope, z = slopes_of(*begun(Staged(line, num_stages=1, num_live=40), X, Y))
    np.testing.assert_allclose(slope, (MEAN - z) @ PRECISION, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_a_stage_that_is_updated_has_slopes_of_its_own_rows(bug, monkeypatch):
    """The planted bug: of the rows that are new."""
    kernel, seen = Staged(line, num_stages=1, num_live=40, num_walkers=0), []
    stage_points = staged.stage_points
    monkeypatch.setattr(
        staged, "stage_points", lambda *given: seen.append(stage_points(*given)) or seen[-1]
    )
    state, reading, old = begun(kernel, X[:50], Y[:50])
    _, new = reading.more(Program(line, X[40:], Y[40:]))
    kernel.updated(over(state), reading, new, new if bug else old)
    precision = np.diag([1.0, 0.25]) + X[:50].T @ X[:50] / 0.25
    told = seen[0][0]
    right = X[:50].T @ Y[:50] / 0.25 - np.asarray(told.z) @ precision
    assert np.allclose(told.score, right) != bug


@pytest.mark.slow
def test_an_update_tells_of_the_rows_before():
    """The driver knows them, after another update as well."""
    driver, seen = driver_of(num_stages=1, num_live=40), []
    driver.run(0, X[:40], Y[:40])
    updated = driver.kernel.updated
    driver.kernel.updated = lambda *given: seen.append(given[-1]) or updated(*given)
    driver.update(X[40:60], Y[40:60])
    driver.update(X[60:], Y[60:])
    for before, rows in zip(seen, (slice(0, 40), slice(40, 60)), strict=True):
        np.testing.assert_array_equal(before.columns["x"][: before.num_rows], X[rows])


def levels(x):
    """As many unknown numbers as columns, in combinations."""
    with numpyro.plate("column", SIZE):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    with numpyro.plate("row", len(x)):
        numpyro.sample(
            "x", dist.Normal(jnp.asarray(LOADING) @ level, 1.0).to_event(1), obs=jnp.asarray(x)
        )


@pytest.mark.slow
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_many_latent_numbers_lose_nothing_between_stages(bug, monkeypatch):
    """Evidence within its error, and intervals as wide as they should be, of 20 numbers, thirty
    live points and eight stages that are not explored. The planted bug: fit points have no
    slopes.
    """
    if bug:
        fitted = NormalSummary.fitted
        monkeypatch.setattr(
            NormalSummary,
            "fitted",
            lambda self, key, told, *rest: fitted(self, key, told._replace(score=None), *rest),
        )
    x = np.random.default_rng(2).normal(size=(400, SIZE))
    # else what loses much takes all rows at once
    kernel = Staged(levels, num_stages=8, num_live=30, num_walkers=0, most_lost=np.inf)
    tree = Driver(kernel, num_samples=1000, progress_bar=False).run(0, x)
    precision = np.eye(SIZE) + len(x) * LOADING.T @ LOADING
    mean = np.linalg.solve(precision, LOADING.T @ x.sum(0))
    exact = (
        stats.norm.logpdf(x).sum()
        - 0.5 * np.linalg.slogdet(precision)[1]
        + 0.5 * mean @ precision @ mean
    )
    standard = (tree["posterior"]["level"].values[0] - mean) @ np.linalg.cholesky(precision)
    error = tree.attrs["log_evidence"] - exact
    bias, width = np.sqrt(np.mean(standard.mean(0) ** 2)), standard.var(0).mean()
    is_right = abs(error) < 2.5 * tree.attrs["log_evidence_se"] and bias < 0.5 and 0.9 < width < 1.1
    assert is_right != bug, (error, tree.attrs["log_evidence_se"], bias, width)
