"""Mixtures on Hilbert curves, and stages that use them.

A density has the integral 1. Its draws follow it. Fits agree with scipy and with the truth.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.scipy.special import erf
from scipy import optimize, stats

from inference import Program, Staged
from inference.kernels.staged import hilbert_clumps
from inference.kernels.staged.hilbert_clumps import HilbertClumps, HilbertMixture, spread_on_circle
from inference.maths import hilbert
from inference.maths import normal_mixture as _normal_mixture
from inference.maths.normal_mixture import FitPoints
from inference.reading.density import Split
from tests.inference.kernels.staged.test_kernel import driver_of
from tests.inference.nests import line, line_evidence
from tests.inference.stages import DEVIATION, MEAN, X, Y, check_same

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

SIDES, BITS = (2, 1), 6
BUGS = {
    "normaliser": ("log_circle_mass", lambda spread: jnp.zeros_like(spread)),
    "circle": ("log_circle_mass", lambda spread: jnp.log(spread) + 0.5 * np.log(2 * np.pi)),
    "Jacobian": ("log_uniform_codes", lambda z: jnp.zeros(z.shape[:-1])),
    "variance": ("spread_on_circle", lambda root: spread_on_circle(root) ** 2),
    "moments": ("spread_on_circle", lambda root: root),
}


@pytest.fixture
def planted(bug, monkeypatch):
    """One line of the module is another; no code compiled with one is used with the other."""
    HilbertClumps._em.clear_cache()
    if bug:
        monkeypatch.setattr(hilbert_clumps, *BUGS[bug])
    yield bug
    HilbertClumps._em.clear_cache()


def with_bugs(*bugs):
    return pytest.mark.parametrize("bug", [None, *bugs], ids=["right", *bugs])


def some(shape=HilbertClumps(SIDES, BITS), spreads=((0.02, 0.3), (0.3, 0.2), (10.0, 0.15)), seed=0):  # noqa: B008
    """Three components, narrow, wide and next to uniform.

    Two of them lie across the place where the ends of the curve join.
    """
    rng = np.random.default_rng(seed)
    z = np.array([[-6.0] * sum(shape.blocks), *rng.normal(size=(2, sum(shape.blocks)))])
    return HilbertMixture(
        jnp.log(jnp.array([0.3, 0.5, 0.2])), shape.codes(jnp.asarray(z)), jnp.array(spreads)
    )


def middles():
    """Every cell of the cube, and z of its middle."""
    u = (np.arange(2**BITS) + 0.5) / 2**BITS
    return (lambda u: np.log(u / (1 - u)))(
        np.stack(np.meshgrid(u, u, u, indexing="ij"), -1).reshape(-1, 3)
    )


def said(shape, clumps, z):
    return np.asarray(jax.jit(jax.vmap(lambda z: shape.log_density(clumps, z)))(jnp.asarray(z)))


def log_uniform_codes(z):
    return stats.logistic.logpdf(z).sum(-1)


@pytest.mark.slow_after(1)
@with_bugs("normaliser", "circle", "Jacobian")
def test_the_density_over_all_cells_sums_to_1(planted):
    """Quadrature over the codes of a block of two numbers and one of one; over z the logistic
    measure of a cell is 1 / cells.
    """
    z = middles()
    total = np.exp(said(HilbertClumps(SIDES, BITS), some(), z) - log_uniform_codes(z)).mean()
    assert (abs(total - 1) < 1e-3) == (not planted)


@pytest.mark.slow_after(1)
@with_bugs("normaliser", "circle", "Jacobian")
def test_the_integral_over_z_is_1(planted):
    """By importance sampling from a wide distribution, with the bits that stages use."""
    shape, wide = HilbertClumps(SIDES), stats.t(3, scale=2)
    z = wide.rvs((200_000, 3), random_state=1)
    ratio = np.exp(said(shape, some(shape), z) - wide.logpdf(z).sum(1))
    error = ratio.std() / np.sqrt(len(z))
    # without the Jacobian there is no integral at all
    assert (abs(ratio.mean() - 1) < 4 * error < 0.04) == (not planted)


def drawn(shape, clumps, size):
    return np.asarray(
        jax.jit(jax.vmap(lambda key: shape.draw(key, clumps)))(random.split(random.key(2), size))
    )


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_draws_are_of_the_density(bug):
    """By cells, each eighth of a side; and evenly within a cell.

    The planted bug draws with the square of the spreads.
    """
    shape, clumps, size, z = HilbertClumps(SIDES, BITS), some(), 40_000, middles()
    each = (
        np.exp(said(shape, clumps, z) - log_uniform_codes(z))
        .reshape((8, 8) * 3)
        .sum((1, 3, 5))
        .ravel()
    )
    found = drawn(shape, clumps._replace(spread=clumps.spread**2) if bug else clumps, size)
    u = 1 / (1 + np.exp(-found))
    counts = np.histogramdd(u, [np.linspace(0, 1, 9)] * 3)[0].ravel()
    is_many = each / each.sum() * size > 5
    wanted = np.array([*each[is_many], each[~is_many].sum()]) / each.sum() * size
    chance = stats.chisquare([*counts[is_many], counts[~is_many].sum()], wanted).pvalue
    assert (chance > 1e-3) != bug
    assert stats.kstest((u * 2**BITS % 1).ravel(), "uniform").pvalue > 1e-3


@pytest.mark.slow
def test_a_narrow_clump_keeps_its_digits():
    """Spreads of 1e-13 on a circle of 2^60 cells, and of 1e-30 on one of 2^120, further than
    1e-16 from 0.
    """
    shape = HilbertClumps((3, 6))
    spread = np.array([1e-13, 1e-30])
    centre = shape.codes(random.normal(random.key(0), (1, 9)))
    clumps = HilbertMixture(jnp.zeros(1), centre, jnp.asarray(spread)[None])
    away = (
        np.asarray(hilbert.difference(shape.codes(jnp.asarray(drawn(shape, clumps, 2000))), centre))
        / spread
    )
    for each in away.T:
        assert stats.kstest(each, "norm").pvalue > 1e-3


@pytest.mark.slow
def test_draws_at_the_faces_of_the_cube_are_finite_in_either_precision():
    for is_double in (True, False):
        with jax.enable_x64(is_double):
            shape = HilbertClumps((1, 1))
            z = jnp.array([[40.0, -40.0]])
            clumps = HilbertMixture(jnp.zeros(1), shape.codes(z), jnp.full((1, 2), 1e-5))
            found = drawn(shape, clumps, 500)
            assert np.isfinite(found).all()
            assert (np.abs(found) > 9).all()
            assert np.isfinite(
                said(shape, clumps, np.concatenate([found, z]).astype(found.dtype))
            ).all()


@with_bugs("moments", "variance")
def test_the_spread_is_the_one_of_greatest_likelihood(planted):
    """Against scipy's optimiser, at root mean squares from narrow to next to uniform."""
    roots = np.array([1e-9, 1e-3, 0.05, 0.15, 0.22, 0.27])
    found = np.asarray(hilbert_clumps.spread_on_circle(jnp.asarray(roots)))

    def lost(log_spread, root):
        spread = np.exp(log_spread)
        return 0.5 * (root / spread) ** 2 + np.log(
            spread * (stats.norm.cdf(0.5 / spread) - stats.norm.cdf(-0.5 / spread))
        )

    best = [
        np.exp(
            optimize.minimize_scalar(lost, bracket=(np.log(root), np.log(3 * root)), args=(root,)).x
        )
        for root in roots
    ]
    assert np.allclose(found, best, rtol=1e-5) == (not planted)


@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_the_spread_is_about_the_new_centre(bug, monkeypatch):
    """The planted bug is the printed one: differences are from the centre before."""
    shape, old = HilbertClumps((2,)), []
    codes = jax.jit(lambda key: shape.codes(0.02 * random.normal(key, (500, 2)) + 0.9))(
        random.key(0)
    )
    centre = jax.jit(lambda codes: shape._moved(codes[:1], jnp.array([[0.1]])))(codes)
    right = hilbert.difference
    if bug:
        monkeypatch.setattr(
            hilbert_clumps.hilbert,
            "difference",
            lambda code, other: old.append(other) or right(code, old[0]),
        )
    found = jax.jit(lambda codes, centre: shape._improved(codes, jnp.zeros((500, 1)), centre, 1))(
        codes, centre
    )
    spread = jax.jit(
        lambda codes, centre: hilbert_clumps.spread_on_circle(
            jnp.sqrt(jnp.mean(right(codes[:, None], centre[None]) ** 2, 0))
        )
    )
    assert np.allclose(found.spread, spread(codes, found.centre), rtol=1e-6) != bug


@pytest.mark.slow
def test_the_limits_of_a_spread():
    """What is as far apart as uniform, or further, has the widest; a point alone a spread of
    some cells.
    """
    np.testing.assert_allclose(spread_on_circle(jnp.array([12**-0.5, 0.4])), hilbert_clumps.WIDEST)
    shape = HilbertClumps(SIDES)
    one = shape.codes(jnp.broadcast_to(jnp.array([0.3, -0.2, 1.0]), (100, 3)))
    clumps = shape._em(one, 1, 1)
    np.testing.assert_allclose(
        clumps.spread[0], hilbert_clumps.CELLS * 2.0 ** (-20 * np.array(SIDES))
    )
    np.testing.assert_array_equal(clumps.centre[0], one[0])


@pytest.mark.slow
@with_bugs("variance", "normaliser")
def test_a_fit_says_of_new_points_what_the_truth_says(planted):
    """The cross-entropy is within .04 nats, from points of three components, one of them wide."""
    shape = HilbertClumps(SIDES)
    truth = some(shape, ((1e-4, 0.003), (0.05, 0.02), (10.0, 0.2)))
    z = drawn(shape, truth, 9000)
    clumps = shape.fitted(random.key(0), FitPoints(z[:5000]), np.zeros(5000), 8)
    with pytest.MonkeyPatch.context() as patch:  # what was fitted is judged by the right density
        patch.setattr(
            hilbert_clumps,
            "log_circle_mass",
            lambda s: jnp.log(s) + 0.5 * np.log(2 * np.pi) + jnp.log(erf(0.5 / np.sqrt(2) / s)),
        )
        lost = (said(shape, truth, z[5000:]) - said(shape, clumps, z[5000:])).mean()
    assert (abs(lost) < 0.04) == (not planted)
    np.testing.assert_allclose(np.exp(np.asarray(clumps.log_weight)).sum(), 1)


@pytest.mark.slow
def test_weights_of_points_count():
    """Weights of points count, and components move around the circle to where they belong."""
    shape, rng = HilbertClumps((1,)), np.random.default_rng(5)
    z = 0.1 * rng.normal(size=(2000, 1)) + np.repeat([-1.0, 2.0], 1000)[:, None]
    clumps = shape.fitted(random.key(0), FitPoints(z), np.repeat([0.0, np.log(3.0)], 1000), 8)
    found = drawn(shape, clumps, 4000)[:, 0]
    assert abs((found > 0.5).mean() - 0.75) < 0.03
    assert abs(np.median(found[found > 0.5]) - 2) < 0.02


class Kernels(NamedTuple):
    """A summary of which the density alone is asked."""

    log_densities: Callable


@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_a_point_of_much_weight_is_not_on_both_sides(bug):
    """Kernel densities, ever narrower.

    The planted bug: halves of what was drawn by weight, which have copies of the same points.
    """
    rng = np.random.default_rng(0)
    z, log_weight = rng.normal(size=(40, 1)), np.zeros(40)
    if bug:
        z, log_weight = z[rng.integers(0, 40, 2000)], np.zeros(2000)
    fits = [lambda told, width=0.3 / count**4: (told.z, width) for count in (1, 2, 4, 8)]
    log_densities = lambda kernel, z: np.logaddexp.reduce(
        stats.norm.logpdf(z, kernel[0].T, kernel[1]), axis=1
    )
    kernels: Any = Kernels(log_densities)
    _, width = _normal_mixture.cross_validated(
        random.key(0), FitPoints(z), log_weight, fits, kernels
    )
    assert (width == 0.3) != bug


def test_blocks_are_the_latent_sites_in_the_order_of_the_vector():
    def model():
        numpyro.sample("c", dist.Dirichlet(jnp.ones(3)))
        numpyro.sample("b", dist.Normal(jnp.zeros((2, 2)), 1.0).to_event(2))
        numpyro.sample("a", dist.Normal(0.0, 1.0))

    split = Split(Program(model))
    assert split.blocks == (1, 4, 2)
    zero = split.values(jnp.zeros(7))
    for begin, end, site in ((0, 1, "a"), (1, 5, "b"), (5, 7, "c")):
        moved = split.values(jnp.zeros(7).at[begin:end].set(1.0))
        assert [name for name in zero if not np.allclose(zero[name], moved[name])] == [site]


# whatever it costs, for else all rows would be one stage
CODE = {"summary": "code", "most_lost": np.inf}


def test_the_summary_may_be_an_object():
    """The string stands for the usual one; another has fewer bits."""
    named, own = Staged(line, summary="code"), Staged(line, summary=HilbertClumps(bits=10))
    assert named.num_clumps == own.num_clumps == 64
    families = [each.read(Program(line, X, Y))[0].search.family for each in (named, own)]
    assert families == [HilbertClumps((2,)), HilbertClumps((2,), bits=10)]
    with pytest.raises(ValueError, match="summary: found 'codes', wanted 'state' or 'code'"):
        Staged(line, summary="codes")


@pytest.mark.slow
@with_bugs("variance")
def test_stages_add_up_to_all_rows_at_once(planted):
    """Within the error of nested sampling: what summaries cost is claimed as well, and the
    planted bug costs much, or has no bound.
    """
    tree = driver_of(**CODE).run(0, X, Y)
    attrs = tree.attrs
    assert (attrs["ended"], attrs["num_stages"]) == ("finished", 3)
    drawn = tree["posterior"]["weight"].values[0]
    claimed = np.sqrt(attrs["log_evidence_se"] ** 2 - attrs["summary_error"] ** 2)
    is_right = abs(attrs["log_evidence"] - line_evidence(X, Y)) < 3.5 * claimed < np.inf
    assert is_right == (not planted)
    assert (np.abs(drawn.mean(0) - MEAN) < 0.7 * DEVIATION).all() == (not planted)


@pytest.mark.slow
def test_an_update_is_one_more_stage_and_a_run_is_resumed_bit_for_bit(tmp_path):
    """The second stage of two, from a checkpoint within it; then new rows."""
    settings = {"num_stages": 2, "num_live": 40, **CODE}
    whole = driver_of(**settings)
    wanted = whole.run(0, X[:60], Y[:60])
    steps = int((wanted["sample_stats"]["stage"].values[0] < 1).sum()) + 5
    driver_of(checkpoint=tmp_path / "run", num_warmup=steps, **settings).run(0, X[:60], Y[:60])
    resumed = driver_of(checkpoint=tmp_path / "run", **settings)
    found = resumed.run(0, X[:60], Y[:60])
    assert found.attrs["steps_run"] == wanted.attrs["steps"] - steps
    check_same(found, wanted)
    for one in (whole, resumed):
        one.update(X[60:], Y[60:])
    check_same(resumed.tree(), whole.tree())
    attrs = whole.tree().attrs
    assert attrs["num_stages"] == 3
    assert abs(attrs["log_evidence"] - line_evidence(X, Y)) < 3.5 * attrs["log_evidence_se"]
