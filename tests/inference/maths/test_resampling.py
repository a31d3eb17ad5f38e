"""Resampling schemes against what defines them: expectations, the threshold's equation, and how
evenly children are spread.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from scipy.optimize import brentq

from inference.maths import resampling as _resampling
from inference.maths.resampling import SCHEMES, Chosen, drawn_choices, effective_size, threshold
from tests.by_numpy import by_numpy

pytestmark = pytest.mark.usefixtures("x64")

RUNS = 20_000
threshold_of = jax.jit(threshold, static_argnums=1)
NAMES = sorted(SCHEMES)


def candidates(num_particles=6, num_choices=5, seed=0, spread=2.0):
    """Normalised log weights; the last choice of every other particle is impossible."""
    log_weight = spread * np.random.default_rng(seed).normal(size=(num_particles, num_choices))
    log_weight[::2, -1] = -np.inf
    return log_weight - np.logaddexp.reduce(log_weight, axis=None)


def runs(scheme, log_weight, num_runs=RUNS) -> Chosen:
    """Independent runs, [run, particle]."""
    keys = random.split(random.key(1), num_runs)
    return jax.tree.map(
        np.asarray, by_numpy(jax.vmap(lambda key: scheme(key, jnp.asarray(log_weight))))(keys)
    )


def check_unbiased(scheme, log_weight):
    """Every candidate's expected weight is its weight q; kept at a weight of at most 1 / P, its
    variance is below q / P.
    """
    found = runs(scheme, log_weight)
    given = np.zeros((RUNS, *log_weight.shape))
    np.add.at(
        given, (np.arange(RUNS)[:, None], found.parent, found.choice), np.exp(found.log_weight)
    )
    weight = np.exp(log_weight)
    assert (
        np.abs(given.mean(0) - weight) <= 4 * np.sqrt(weight / len(weight) / RUNS) + 1e-12
    ).all()


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spread", [0.3, 4.0], ids=["even", "uneven"])
def test_expected_weights_are_the_weights(name, spread):
    check_unbiased(SCHEMES[name], candidates(spread=spread))


@pytest.mark.parametrize("num_kept", [1, 3, 10, 29])
def test_threshold_solves_its_equation(num_kept):
    weight = np.exp(candidates()).ravel()
    c = float(threshold_of(weight, num_kept))
    if num_kept >= (weight > 0).sum():
        assert c == 0
        return
    excess = lambda c: np.minimum(weight / c, 1).sum() - num_kept
    np.testing.assert_allclose(
        c, brentq(excess, weight[weight > 0].min() * 1e-3, 1.0, xtol=1e-16), rtol=1e-9
    )


def test_threshold_of_weights_that_all_fit_or_are_all_the_same():
    assert threshold_of(np.array([0.5, 0.5, 0.0]), 2) == 0
    np.testing.assert_allclose(threshold_of(np.full(40, 1 / 40), 10), 0.1)
    np.testing.assert_allclose(threshold_of(np.array([1 - 1e-12, 5e-13, 5e-13]), 2), 1e-12)


def check_optimal(scheme, num_particles=6):
    """Weights of at least c are kept as they are, the others have weight c; no candidate twice,
    and as many as there may be.
    """
    log_weight = candidates(num_particles)
    weight = np.exp(log_weight)
    c = float(threshold_of(weight.ravel(), num_particles))
    found = runs(scheme, log_weight, 500)
    for parent, choice, log_kept in zip(found.parent, found.choice, found.log_weight, strict=True):
        kept = weight[parent, choice]
        np.testing.assert_allclose(np.exp(log_kept), np.maximum(kept, c), rtol=1e-9)
        assert (weight >= c).sum() == (kept >= c).sum()
        assert len(set(zip(parent, choice, strict=True))) == num_particles
    assert found.resampled.all()


def test_optimal_keeps_the_heavy_and_evens_out_the_light():
    check_optimal(SCHEMES["optimal"])


def test_optimal_keeps_everything_while_there_is_room():
    log_weight = np.full((8, 4), -np.inf)
    log_weight[0, :3], log_weight[1, 1] = np.log([0.1, 0.2, 0.3]), np.log(0.4)
    found = jax.tree.map(np.asarray, by_numpy(SCHEMES["optimal"])(random.key(0), log_weight))
    assert not found.resampled
    live = found.log_weight > -np.inf
    assert sorted(zip(found.parent[live], found.choice[live], strict=True)) == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 1),
    ]
    np.testing.assert_allclose(
        found.log_weight[live], log_weight[found.parent[live], found.choice[live]], rtol=1e-12
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_optimal_of_many_candidates_keeps_as_many_as_it_should(dtype):
    """Rounding of a running sum over 32,000 weights loses no particle."""
    log_weight = candidates(1000, 32, spread=3.0).astype(dtype)
    found = by_numpy(SCHEMES["optimal"])(random.key(0), log_weight)
    assert found.log_weight.dtype == dtype
    live = np.asarray(found.log_weight) > -np.inf
    pairs = set(
        zip(
            np.asarray(found.parent)[live].tolist(),
            np.asarray(found.choice)[live].tolist(),
            strict=True,
        )
    )
    assert live.sum() >= 999
    assert len(pairs) == live.sum()
    np.testing.assert_allclose(np.exp(np.asarray(found.log_weight, float)).sum(), 1.0, rtol=1e-5)


def check_spread(scheme):
    """Equal particles, as rejuvenation makes them, whose choices have the chances .3 and .7: all
    but one follow the chances.
    """
    log_weight = np.log(np.tile([0.3, 0.7], (40, 1)) / 40)
    first = (runs(scheme, log_weight, 200).choice == 0).sum(1)
    assert np.abs(first - 12).max() <= 1


def test_optimal_spreads_equal_particles_over_choices():
    check_spread(SCHEMES["optimal"])


@pytest.mark.parametrize("name", ["multinomial", "systematic"])
def test_particles_are_resampled_only_when_their_effective_number_falls_below_half(name):
    num_particles = 10
    for lead, is_uneven in ((0.399, False), (0.401, True)):
        total = np.full(num_particles, (1 - lead) / (num_particles - 1))
        total[0] = lead
        size = float(by_numpy(effective_size)(np.log(total)))
        np.testing.assert_allclose(size, 1 / (total**2).sum())
        assert (size < num_particles / 2) == is_uneven
        found = runs(SCHEMES[name], np.log(total[:, None] * np.array([0.25, 0.75])), 50)
        assert (found.resampled == is_uneven).all()
        wanted = np.full(num_particles, 0.1) if is_uneven else total
        np.testing.assert_allclose(np.exp(found.log_weight), np.tile(wanted, (50, 1)))
        assert (found.parent == np.arange(num_particles)).all() != is_uneven


def check_children(name, scheme):
    """How many children a particle has: at most one away from its share (systematic), binomial
    (multinomial).
    """
    log_weight = candidates(8, spread=4.0)
    share = np.exp(log_weight).sum(1)
    children = (runs(scheme, log_weight).parent[..., None] == np.arange(8)).sum(1)
    np.testing.assert_allclose(children.mean(0), 8 * share, atol=0.06)
    if name == "systematic":
        assert np.abs(children - 8 * share).max() < 1
    else:
        np.testing.assert_allclose(children.var(0), 8 * share * (1 - share), rtol=0.05, atol=0.01)


@pytest.mark.parametrize("name", ["multinomial", "systematic"])
def test_children_are_as_many_as_the_scheme_says(name):
    check_children(name, SCHEMES[name])


def check_independent_choices(scheme):
    """Two children of one particle choose each for itself: they agree with probability sum p^2."""
    chances = np.array([0.5, 0.3, 0.2])
    log_weight = np.log(np.array([[0.998], [0.001], [0.001]]) * chances)
    found = runs(scheme, log_weight)
    siblings = (found.parent[:, 0] == 0) & (found.parent[:, 1] == 0)
    agree = (found.choice[:, 0] == found.choice[:, 1])[siblings]
    wanted = (chances**2).sum()
    assert abs(agree.mean() - wanted) < 4 * np.sqrt(wanted * (1 - wanted) / siblings.sum())


@pytest.mark.parametrize("name", ["multinomial", "systematic"])
def test_children_choose_after_resampling(name):
    check_independent_choices(SCHEMES[name])


def test_drawn_choices_have_their_chances_and_do_not_see_empty_room():
    log_weight = candidates(4, 5)[1:3]
    drawn = by_numpy(jax.vmap(drawn_choices, (0, None)))
    draw = lambda log_weight: np.asarray(drawn(random.split(random.key(0), RUNS), log_weight))
    chances = np.exp(log_weight - np.logaddexp.reduce(log_weight, axis=1, keepdims=True))
    share = (draw(log_weight)[..., None] == np.arange(5)).mean(0)
    assert (np.abs(share - chances) <= 4.5 * np.sqrt(chances * (1 - chances) / RUNS)).all()
    roomy = np.concatenate([log_weight, np.full((2, 11), -np.inf)], axis=1)
    np.testing.assert_array_equal(draw(log_weight), draw(roomy))


# Twins: one thing wrong, at the sample sizes of the tests above.


def chosen_before(rng_key, log_weight):
    """Each particle chooses, and is resampled with its choice."""
    found = SCHEMES["multinomial"](rng_key, log_weight)
    own = drawn_choices(random.fold_in(rng_key, 1), log_weight)
    return found._replace(choice=own[found.parent])


def particle_by_particle(rng_key, log_weight):
    """The systematic pass in another order."""
    found = SCHEMES["optimal"](rng_key, log_weight.T)
    return found._replace(parent=found.choice, choice=found.parent)


def weights_kept(rng_key, log_weight):
    """Resampled particles keep the weight of their parent."""
    found = SCHEMES["multinomial"](rng_key, log_weight)
    total = jax.nn.logsumexp(log_weight, axis=1)[found.parent]
    return found._replace(log_weight=total - jax.nn.logsumexp(total))


def all_even(rng_key, log_weight):
    """Optimal, but the heavy ones lose their weight."""
    found = SCHEMES["optimal"](rng_key, log_weight)
    return found._replace(
        log_weight=jnp.full_like(found.log_weight, -jnp.log(float(len(found.log_weight))))
    )


def heaviest(rng_key, log_weight):
    """The heaviest candidates, and nothing left to chance."""
    value, at = jax.lax.top_k(log_weight.ravel(), len(log_weight))
    return Chosen(
        at // log_weight.shape[1],
        at % log_weight.shape[1],
        value - jax.nn.logsumexp(value),
        jnp.ones((), bool),
    )


@pytest.mark.parametrize("twin", [weights_kept, all_even, heaviest])
def test_a_biased_scheme_is_seen(twin):
    with pytest.raises(AssertionError):
        check_unbiased(twin, candidates(spread=4.0))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("check", "twin"),
    [
        (check_optimal, all_even),
        (check_optimal, SCHEMES["multinomial"]),
        (check_spread, particle_by_particle),
        (check_independent_choices, chosen_before),
        (partial(check_children, "systematic"), SCHEMES["multinomial"]),
        (partial(check_children, "multinomial"), SCHEMES["systematic"]),
    ],
    ids=["weights", "twice", "order", "choice first", "multinomial", "systematic"],
)
def test_a_scheme_that_spreads_otherwise_is_seen(check, twin):
    with pytest.raises(AssertionError):
        check(twin)


def test_a_threshold_that_is_too_low_is_seen(monkeypatch):
    monkeypatch.setattr(
        _resampling, "threshold", lambda weight, num_kept: 0.9 * threshold(weight, num_kept)
    )
    with pytest.raises(AssertionError):
        check_unbiased(SCHEMES["optimal"], candidates())
