"""Walkers of a stage come to where the posterior is; and whatever they find, the evidence is
right.
"""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.scipy.special import logsumexp as logsumexp_of
from scipy import stats
from scipy.special import gammaln, logsumexp

from inference import Driver, Program, Staged
from inference.kernels.staged import peaks
from inference.kernels.staged import search as _search
from inference.kernels.staged.peaks import (
    distinct,
    find_peaks,
    laplace,
    walk_outwards,
    worthwhile,
)
from inference.kernels.staged.search import Begin, Search, StageArrays, Start, component_means
from inference.maths.normal_mixture import NormalMixture, divergence
from inference.reading.stage_rows import StageRows
from tests.inference.nests import line, line_evidence
from tests.inference.stages import DEVIATION, X, Y, begun

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

RNG = np.random.default_rng(4)


def hills(centres):
    """Round hills, each a nat lower than the one before, in two parts as a stage has them."""
    each = lambda z: -0.5 * jnp.sum((z - centres) ** 2, -1) - jnp.arange(len(centres))
    return lambda z: (jnp.zeros(()), jnp.max(each(z)))


CENTRES = np.array([[0.0, 0.0], [6.0, 0.0], [0.0, -9.0]])


def test_walkers_come_to_the_peaks_nearby():
    start = jnp.asarray(CENTRES[[2, 0, 1, 1]] + 0.8 * RNG.normal(size=(4, 2)))
    z, height, evaluations = find_peaks(start, hills, CENTRES)
    np.testing.assert_allclose(z, CENTRES[[2, 0, 1, 1]], atol=1e-4)
    np.testing.assert_allclose(height, [-2, 0, -1, -1], atol=1e-8)
    assert evaluations >= 3 * 4


def test_walkers_stay_when_the_highest_peak_has_been_found_often():
    """There are a hundred; where the highest peak is found by few, all climb."""
    start = lambda often: jnp.asarray(CENTRES[[0] * often + [1] * (100 - often)] + 0.1)
    assert len(find_peaks(start(20), hills, CENTRES)[0]) == peaks.LEAST
    assert len(find_peaks(start(4), hills, CENTRES)[0]) == 100


@pytest.mark.parametrize("value", [jnp.nan, -jnp.inf, jnp.inf])
def test_a_density_that_is_no_number_ends_a_climb(value):
    target = lambda value: lambda z: (jnp.sum(z), value)
    z, height, evaluations = find_peaks(jnp.ones((3, 2)), target, value)
    assert not np.isfinite(height).any()
    assert evaluations < 100  # of 3 walkers
    assert len(distinct(z, height, jnp.ones(2), 8)[0]) == 0


def test_peaks_that_are_the_same_are_one():
    """The same place and height; not where only one of the two is alike."""
    z = jnp.array([[1.0, 1.0], [1.001, 1.0], [-1.0, 1.0], [1.0, 1.0], [5.0, 5.0]])
    kept, height = distinct(z, np.array([3.0, 3.01, 3.0, 1.0, -np.inf]), jnp.ones(2), 8)
    np.testing.assert_allclose(kept, [[1.001, 1.0], [-1.0, 1.0], [1.0, 1.0]])
    np.testing.assert_allclose(height, [3.01, 3.0, 1.0])
    assert len(distinct(z, np.arange(5.0), jnp.ones(2), 2)[0]) == 2


def test_a_clump_has_the_curvature_of_its_peak():
    """Wide ridges are cut to how far walkers began from each other."""
    precision = np.array([[4.0, 1.0], [1.0, 2.0]])
    densities_of = lambda precision: lambda z: (-0.5 * z @ precision @ z, jnp.zeros(()))
    start = jnp.asarray(100 * RNG.normal(size=(50, 2)))
    found = laplace(jnp.zeros(2), start, precision, densities_of)
    np.testing.assert_allclose(found.whitening[0].T @ found.whitening[0], precision, rtol=1e-9)
    flat = laplace(jnp.zeros(2), start, 0 * precision, densities_of)
    np.testing.assert_allclose(np.diag(flat.whitening[0]) ** -2, start.var(0), rtol=1e-6)


def test_peaks_that_are_narrow_and_low_are_not_worth_a_climb():
    """A wide one is that is as low: it may hold as much as a high one."""
    clump = lambda scale: NormalMixture.of(
        jnp.zeros(1), jnp.zeros((1, 4)), scale * jnp.eye(4)[None]
    )
    kept = worthwhile([clump(1.0), clump(1.0), clump(1e6)], np.array([0.0, -40.0, -40.0]))
    assert [float(each.whitening[0, 0, 0]) for each in kept] == [1.0, 1e-6]


@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_walkers_that_go_outwards_come_to_what_is_not_normal(bug, monkeypatch):
    """Exponential to one side, from draws of a narrow Normal.

    The planted bug: they stay where they are.
    """
    if bug:
        stay = lambda key, at, parent, *given, **settings: (at, SimpleNamespace(evaluations=1000))
        monkeypatch.setattr(peaks, "slice_moves", stay)
    z = jnp.asarray(np.abs(0.5 * RNG.normal(size=(600, 1))))
    log_weight = -z[:, 0] - np.asarray(stats.halfnorm(scale=0.5).logpdf(z[:, 0]))
    density = lambda z: jnp.where(z[0] > 0, -z[0], -jnp.inf)
    found, evaluations = walk_outwards(
        random.key(1), z, log_weight, None, lambda _: lambda z: (density(z), jnp.zeros(()))
    )
    assert (stats.kstest(np.asarray(found)[:, 0], "expon").pvalue > 1e-3) != bug
    assert evaluations > 600


def search_of(kernel, *args):
    """How a kernel looks for what a stage may go over, and the arrays of its first stage; the
    terms of rows may depend on their number.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageRows, "prove", lambda self, split: None)
        reading, _ = kernel.read(Program(kernel.model, *args))
    program = reading.rows.program
    rows = {name: jnp.asarray(program.arguments[name]) for name in reading.rows.names}
    return reading.search, StageArrays(reading.search.nothing.mixture, rows)


def evidence(model=line, data=(X, Y), **settings):
    """The log-evidence of one stage, and its claimed error."""
    kernel = Staged(model, **({"num_stages": 1, "num_live": 100, "num_walkers": 100} | settings))
    attrs = Driver(kernel, num_samples=1, progress_bar=False).run(0, *data).attrs
    return attrs["log_evidence"], attrs["log_evidence_se"]


@pytest.mark.slow
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_what_is_missed_changes_no_evidence(bug, monkeypatch):
    """What is gone over lies three deviations from the posterior.

    The planted bug: the likelihood is left as it is, though what is drawn from is not the prior.
    """
    joined = _search.combined
    lost = lambda *given: (clumps := joined(*given))._replace(mean=clumps.mean + 3 * DEVIATION)
    monkeypatch.setattr(_search, "combined", lost)
    monkeypatch.setattr(_search, "LITTLE", np.inf)
    if bug:
        right = Start.nested_densities

        def wrong(self, arrays, proposal):
            both = right(self, arrays, proposal)
            return lambda z: (both(z)[0], self.densities(arrays)(z)[1])

        monkeypatch.setattr(Start, "nested_densities", wrong)
    found, error = evidence()
    assert (abs(found - line_evidence(X, Y)) < 3.5 * error) != bug


@pytest.mark.parametrize("value", [jnp.nan, -jnp.inf])
def test_a_likelihood_that_is_no_number_is_refused_by_its_site(value, monkeypatch):
    """However a stage is explored, also where a start with a density was found."""
    monkeypatch.setattr(Program, "check", lambda self, start=None: None)

    def model(x):
        place = numpyro.sample("place", dist.Normal(0.0, 1.0))
        with numpyro.plate("row", len(x)):
            numpyro.sample("x", dist.Delta(x, log_density=value + 0 * place), obs=x)

    with pytest.raises(ValueError, match=r"'x': its (likelihood|log probability) is"):
        begun(Staged(model, num_stages=1, num_live=40), X[:, 0])


def square(y):
    """The sign of the latent site is not known, and draws from the prior do not tell that it has
    two.
    """
    root = numpyro.sample("root", dist.Normal(0.0, 1.0))
    with numpyro.plate("row", len(y)):
        numpyro.sample("y", dist.Normal(5 * root**2, 1.0), obs=y)


SQUARES = 5 + RNG.normal(size=20)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_both_of_two_modes_are_found(bug, monkeypatch):
    """The planted bug: one peak alone is gone on from."""
    if bug:
        monkeypatch.setattr(_search, "MOST_PEAKS", 1)
    state, _, _ = begun(Staged(square, num_stages=1, num_live=40), SQUARES)
    weight, mean = (
        np.exp(np.asarray(state.proposal.log_weight)),
        np.asarray(state.proposal.mixture.mean)[:, 0],
    )
    # from where is drawn: .04 is what 200 draws tell
    assert (abs(weight[mean > 0].sum() - 0.5) < 0.15) != bug


def spiked(x):
    """A narrow peak of much more mass on the side of a wide one, to which most climbs come."""
    place = numpyro.sample("place", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    log_density = jnp.logaddexp(-2 * jnp.sum(place**2), 7 - 100 * jnp.sum((place - 0.6) ** 2))
    with numpyro.plate("row", len(x)):
        numpyro.sample("x", dist.Delta(x, log_density=log_density / len(x)), obs=x)


@pytest.mark.slow
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_draws_of_a_peak_tell_of_a_better_one_within_it(bug, monkeypatch):
    """The planted bug: nobody looks at the heaviest."""
    monkeypatch.setattr(_search, "FRESH", 0)
    if bug:
        monkeypatch.setattr(Search, "near_heaviest", lambda self, *given: None)
    search, arrays = search_of(Staged(spiked, num_stages=1, num_live=40), X[:, 0])
    found = search.searched(random.key(2), arrays, Begin(search.nothing, jnp.zeros((1, 2))))
    assert (
        any(abs(mean - 0.6).max() < 0.05 for mean in np.asarray(component_means(found.proposal)))
        != bug
    )


@pytest.mark.slow
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_what_is_found_of_few_rows_is_where_more_are_searched_from(bug, monkeypatch):
    """Beside some walkers from anywhere. The planted bug: nobody looks there."""
    state, reading, data = begun(Staged(line, num_stages=1, num_live=40), X, Y)
    search = reading.search
    arrays = StageArrays(state.proposal.mixture, reading.rows.cut(data, state.rows))
    found = search.searched(random.key(1), arrays, Begin(state.proposal))
    np.testing.assert_allclose(
        found.peaks, component_means(found.proposal), atol=0.2 * DEVIATION.min()
    )
    seen, right = [], _search.find_peaks
    climb = lambda start, *given, **least: (
        seen.append((start, right(start, *given, **least))) or seen[-1][1]
    )
    monkeypatch.setattr(_search, "find_peaks", climb)
    search.searched(random.key(2), arrays, Begin(search.nothing, None if bug else found.peaks))
    start, climbed = seen[0]
    assert np.array_equal(start[: len(found.peaks)], found.peaks) != bug
    # the one peak was found often; else at least twenty climb
    assert (len(climbed[0]) == len(found.peaks) + _search.FRESH) != bug


GRID = np.random.default_rng(6).permutation(
    np.stack(np.meshgrid(*2 * [np.linspace(-1.5, 1.5, 7)]), -1).reshape(-1, 2)
)


def rugged(x):
    """Narrow hills on a grid, each higher than the one before, in no order."""
    place = numpyro.sample("place", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    log_density = logsumexp_of(jnp.arange(49.0) - 300 * jnp.sum((place - GRID) ** 2, -1))
    with numpyro.plate("row", len(x)):
        numpyro.sample("x", dist.Delta(x, log_density=log_density / len(x)), obs=x)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_where_more_rows_are_searched_walkers_go_on_until_the_highest_peak_has_been_found_often(
    bug,
):
    """The planted bug: there are five, beside what fewer rows had."""
    search, arrays = search_of(Staged(rugged, num_stages=1, num_live=40, num_walkers=400), X[:, 0])
    known = Begin(search.nothing, jnp.asarray(GRID[:1]), most_fresh=_search.FRESH if bug else None)
    highest = [search.near_peaks(random.key(seed), arrays, known).peaks[0] for seed in range(4)]
    assert (abs(np.array(highest) - GRID[-1]).max() < 0.1) != bug


def pair(x):
    """Two exchangeable clusters."""
    with numpyro.plate("cluster", 2):
        place = numpyro.sample("place", dist.Normal(0.0, 4.0))
    with numpyro.plate("row", len(x)):
        numpyro.sample(
            "x",
            dist.MixtureSameFamily(
                dist.Categorical(jnp.array([0.5, 0.5])), dist.Normal(place, 1.0)
            ),
            obs=x,
        )


TWO = np.concatenate([np.linspace(-3, -1, 8), np.linspace(1.5, 3.5, 8)])


def pair_evidence(x=TWO):
    """By a sum over a grid."""
    grid = np.linspace(-16, 16, 801)
    each = np.exp(-0.5 * (x[:, None] - grid) ** 2) / np.sqrt(2 * np.pi)
    log_likelihood = np.log(0.5 * each[:, :, None] + 0.5 * each[:, None, :]).sum(0)
    log_prior = -0.5 * (grid / 4) ** 2 - np.log(4 * np.sqrt(2 * np.pi))
    return np.log(
        np.exp(log_likelihood + log_prior[:, None] + log_prior[None]).sum()
        * (grid[1] - grid[0]) ** 2
    )


@pytest.mark.slow
def test_the_evidence_of_members_without_names_is_that_of_all_places():
    found, error = evidence(pair, (TWO,), num_live=400, num_walkers=400)
    assert abs(found - pair_evidence()) < 3.5 * error
    assert error < 0.15


def line_of(order):
    """So many exchangeable clusters on a line, as far apart as `pair` has them."""

    def model(x):
        with numpyro.plate("cluster", order):
            place = numpyro.sample("place", dist.Normal(0.0, 3.0 * order))
        with numpyro.plate("row", len(x)):
            shares = dist.Categorical(jnp.full(order, 1 / order))
            numpyro.sample("x", dist.MixtureSameFamily(shares, dist.Normal(place, 1.0)), obs=x)

    return model, np.concatenate([9 * number + np.linspace(-1, 1, 9) for number in range(order)])


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
@pytest.mark.parametrize("order", [2, 7])
def test_members_without_names_are_found_in_one_arrangement_that_stands_for_all(
    order, bug, monkeypatch
):
    """Clusters that are far apart are Normal each by itself, so that their evidence is known but
    for the tails. The planted bug: it is that of one arrangement, as the prior has it.
    """
    model, x = line_of(order)
    kernel = Staged(model, num_stages=1)
    reading, data = kernel.read(Program(model, x))
    if bug:
        monkeypatch.setattr(reading.nesting.exchange, "log_copies", 0.0)
    state = kernel.init(random.key(0), reading, data)
    start, given = reading.search.start, (state.mixture, state.proposal)
    z = start.draws(np.random.default_rng(1), 2000, given)
    arrays = StageArrays(state.mixture, {"x": jnp.asarray(x)})
    _, log_weight, _ = start.nested_values(arrays, state.proposal, z)
    found, weight = logsumexp(log_weight) - np.log(len(z)), np.exp(log_weight - np.max(log_weight))
    error = weight.std() / weight.mean() / np.sqrt(len(z))
    assert error < 0.05
    assert (abs(found - apart_evidence(order, x)) < 4 * error) != bug


@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_clumps_of_other_places_are_moved_to_those_of_the_heaviest(bug, monkeypatch):
    """Components are relabelled to the canonical copy of the heaviest.

    Two components have opposite labels. The second is canonical after it was moved, and its density
    is that of moved draws. The planted bug leaves it.
    """
    model, x = line_of(3)
    search, _ = search_of(Staged(model, num_stages=1), x)
    if bug:
        monkeypatch.setattr(_search, "pushed_forward", lambda clumps, to: clumps)
    mean = jnp.array([[0.0, 9.0, 18.0], [19.0, 10.0, -1.0]])
    roots = jnp.stack([jnp.eye(3), jnp.array([[0.5, 0.0, 0.0], [0.4, 0.5, 0.0], [0.0, 0.0, 1.5]])])
    named = search.labelled(
        random.key(0), NormalMixture.of(jnp.log(jnp.array([0.6, 0.4])), mean, roots)
    )
    alike = [
        bool(search.start.exchange.is_canonical(each, named.reference))
        for each in named.mixture.mean
    ]
    assert all(alike) != bug
    if not bug:
        np.testing.assert_allclose(named.mixture.mean[1], [-1, 10, 19], atol=1e-6)
        spread = jnp.linalg.inv(named.mixture.whitening[1])
        np.testing.assert_allclose(
            spread @ spread.T, (roots[1] @ roots[1].T)[::-1, ::-1], atol=1e-6
        )


def apart_evidence(order, x):
    """Where each row can only be of the cluster that is near: m! times the product over
    clusters.
    """
    parts = x.reshape(order, -1)
    count, scale = parts.shape[1], 3.0 * order
    covariance = np.eye(count) + scale**2
    normal = stats.multivariate_normal(np.zeros(count), covariance)
    return float(
        gammaln(order + 1) + sum(normal.logpdf(part) for part in parts) - len(x) * np.log(order)
    )


@pytest.mark.slow
def test_less_is_left_to_find_out():
    """Claimed errors with walkers are smaller than without."""
    assert evidence()[1] < 0.7 * evidence(num_walkers=0)[1]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("little", "places"), [(np.inf, 8), (-1.0, 0)], ids=["always", "never"])
def test_what_clumps_cannot_say_is_not_gone_over(little, places, monkeypatch):
    """A state keeps what was found where it is believed; evaluations of the search count in any
    case.
    """
    monkeypatch.setattr(_search, "LITTLE", little)
    monkeypatch.setattr(_search, "PART", 0.0)
    kernel = Staged(line, num_stages=1, num_live=40, num_walkers=50)
    state, _, _ = begun(kernel, X, Y)
    assert len(state.proposal.log_weight) == places
    assert int(state.nest.num_evaluations) > 500


def test_nats_that_are_left():
    """The divergence of two Normals of variance 1 is half their squared distance."""
    np.testing.assert_allclose(divergence(jnp.zeros(10)), 0, atol=1e-12)
    np.testing.assert_allclose(divergence(jnp.array([0.0, 0.0, -jnp.inf, -800.0])), np.log(2))
    assert np.isnan(divergence(jnp.full(3, -jnp.inf)))
    z = stats.norm.ppf((np.arange(20_000) + 0.5) / 20_000)
    np.testing.assert_allclose(divergence(jnp.asarray(0.8 * z)), 0.32, rtol=0.01)


@pytest.mark.parametrize("num_walkers", [-1, 5, True, 30.0, "many"])
def test_a_wrong_number_of_walkers_is_refused(num_walkers):
    with pytest.raises(
        ValueError, match=r"num_walkers: found .*, wanted None, 0, or an integer, at least 20"
    ):
        Staged(line, num_walkers=num_walkers)
