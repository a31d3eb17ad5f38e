"""The parts of a crossed sweep against the model's own log joint: its second derivative, its
integrals, and what must stay as it is.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from jax.scipy.linalg import block_diag
from scipy import integrate, stats

from inference.kernels.conditional_gibbs import crossed as _crossed
from inference.kernels.conditional_gibbs import crossed_components as _crossed_components
from inference.kernels.conditional_gibbs import crossed_sides as _crossed_sides
from inference.kernels.conditional_gibbs.crossed_components import Tilted, switched
from inference.kernels.conditional_gibbs.crossed_sides import Entries, pad_items
from inference.reading.conditional import conditional, identify
from tests.inference.crossed import CASES, RNG, drawn, indices

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("x64", "numpyro_promotion")]

# The sites of a side: one Normal for each item, whose precision and slope are derivatives of the
# log joint.


def arguments(name, number):
    """The arguments of `steps`, without the key."""
    program, crossed, values, (response, weight, eta), _ = drawn(name)
    side, (index, other) = crossed.sides[number], indices(crossed, program, number)
    table, scale = crossed.unit_table(program, values, side)
    own = jnp.concatenate(
        [(response - eta)[:, None], crossed.shared_slopes(program, values)], axis=1
    )
    plan = pad_items(np.asarray(index), side.size, table.shape[1])
    return (
        Entries.of(table, other, own, weight),
        crossed.flat(values, side),
        crossed.priors(program, values)[number],
        scale,
        plan,
    )


def equations(name, number):
    """Precision and slope of each item, as the kernel computes them."""
    entries, _, (slope, fall), scale, plan = arguments(name, number)
    precision, linear, width = np.array(jax.vmap(jnp.diag)(fall)), np.array(slope), len(scale)
    for block, which in zip(plan.block, plan.entries, strict=True):
        if block == len(plan.items):
            continue
        items, gram = plan.items[block], np.asarray(_crossed_sides.grams(entries, which))
        is_there = items < len(slope)
        precision[items[is_there]] += (scale[:, None] * gram[:, :width, :width] * scale)[is_there]
        linear[items[is_there]] += (scale * gram[:, :width, width])[is_there]
    return precision, linear


def derivatives(name, number):
    """The same of the log joint, all items at once."""
    program, crossed, values, _, joint = drawn(name)
    side = crossed.sides[number]
    at = lambda x: joint({**values, **crossed.unflat(program, side, x.reshape(side.size, -1))})
    start = crossed.flat(values, side)
    return -jax.hessian(at)(start.ravel()), jax.grad(at)(start.ravel()).reshape(start.shape)


def check_equations(name, number):
    (precision, linear), (hessian, slope) = equations(name, number), derivatives(name, number)
    # items are independent of each other
    np.testing.assert_allclose(block_diag(*precision), hessian, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(linear, slope, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("number", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("name", CASES)
def test_equations_of_a_side_are_derivatives_of_the_log_joint(name, number):
    check_equations(name, number)


own = _crossed_sides.grams
WRONG_EQUATIONS = {
    "weight forgotten": lambda entries, which: own(
        Entries.of(entries.table, entries.other[:-1], entries.own[:-1], 1 + 0 * entries.root[:-1]),
        which,
    ),
    "column for row": lambda entries, which: own(
        entries._replace(other=jnp.roll(entries.other, 1)), which
    ),
    "an entry twice": lambda entries, which: own(entries, jnp.minimum(which, 17)),
}


@pytest.mark.parametrize("planted", WRONG_EQUATIONS)
def test_wrong_equations_are_seen(planted, monkeypatch):
    monkeypatch.setattr(_crossed_sides, "grams", WRONG_EQUATIONS[planted])
    with pytest.raises(AssertionError):
        check_equations("gaussian", 0)


def check_steps(num_draws=3000, how=_crossed_sides.steps):
    """Draws of all items, whitened by the Hessian, are standard Normal and independent."""
    given = arguments("binomial", 0)
    step = jax.jit(jax.vmap(lambda noise: how(noise, *given)[0]))
    noise = random.normal(random.key(0), (num_draws, *given[1].shape))
    found = step(noise).reshape(num_draws, -1)
    hessian, slope = derivatives("binomial", 0)
    white = np.asarray(
        (found - jnp.linalg.solve(hessian, slope.ravel())) @ jnp.linalg.cholesky(hessian)
    )
    assert stats.kstest(white.ravel(), "norm").pvalue > 1e-3
    assert np.abs(np.corrcoef(white, rowvar=False) - np.eye(white.shape[1])).max() < 5 / np.sqrt(
        num_draws
    )


@pytest.mark.parametrize("room", [2**20, 30], ids=["whole", "in chunks"])
def test_steps_are_drawn_from_that_normal(room, monkeypatch):
    monkeypatch.setattr(_crossed_sides, "CHUNK", room)
    check_steps()


@pytest.mark.parametrize("planted", ["weight forgotten", "the same noise"])
def test_wrong_steps_are_seen(planted, monkeypatch):
    monkeypatch.setattr(_crossed_sides, "CHUNK", 30)
    how = _crossed_sides.steps
    if planted == "the same noise":
        how = lambda noise, *given: _crossed_sides.steps(0 * noise + noise[0], *given)
    else:
        monkeypatch.setattr(_crossed_sides, "grams", WRONG_EQUATIONS[planted])
    with pytest.raises(AssertionError):
        check_steps(how=how)


LENGTHS = {
    "one item": [7],
    "none for some": [0, 3, 0, 0, 9, 0],
    "very unequal": [1, 400, 2, 0, 30, 31, 9, 8, 7, 100],
    "one each": [1] * 9,
    "only the last": [0, 0, 0, 1],
}


@pytest.mark.parametrize("room", [2**20, 64], ids=["whole", "in chunks"])
@pytest.mark.parametrize("name", LENGTHS)
def test_every_entry_is_once_in_the_layers_of_its_item(name, room, monkeypatch):
    monkeypatch.setattr(_crossed_sides, "CHUNK", room)
    counts = LENGTHS[name]
    index = RNG.permutation(np.repeat(np.arange(len(counts)), counts))
    plan, seen = pad_items(index, len(counts), 2), []
    for block in range(plan.num_blocks):
        layers = slice(plan.ends[block], plan.ends[block + 1])
        assert (plan.block[layers] == block).all()
        for item, entries in zip(
            plan.items[block], np.moveaxis(plan.entries[layers], 1, 0), strict=True
        ):
            entries = entries[entries < len(index)]
            assert (index[entries] == item).all()
            seen.extend(entries)
    assert sorted(seen) == list(range(len(index)))
    assert (plan.entries[plan.ends[-1] :] == len(index)).all()
    assert not np.bincount(index, minlength=len(counts) + 1)[plan.items[plan.num_blocks :]].any()
    np.testing.assert_array_equal(plan.items.ravel()[plan.place], np.arange(len(counts)))


# Switches, amplitudes and shared sites.


def sums_of(name, values=None):
    """The sums of products of slopes, and of slopes and residuals, entry by entry."""
    program, crossed, old, (response, weight, _), _ = drawn(name)
    values = old if values is None else values
    slopes, eta = crossed.slopes(program, values), crossed.predictor(program, values)
    return (slopes * weight[:, None]).T @ slopes, slopes.T @ (weight * (response - eta))


def check_sums(name, number):
    """What is left over from drawing a side is what the entries then say."""
    program, crossed, values, (response, weight, eta), _ = drawn(name)
    sweep = _crossed.CrossedRoute(crossed, program, 0)
    new, _, found, _ = sweep._draw_side(
        sweep._random(random.key(0), program, values).sides[number],
        program,
        values,
        (response, weight, eta),
        number,
        sweep._items[number],
        crossed.priors(program, values)[number],
    )
    for left_over, wanted in zip(found, sums_of(name, new), strict=True):
        np.testing.assert_allclose(left_over, wanted, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("number", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("name", CASES)
def test_sums_left_over_from_a_side_are_those_of_the_entries(name, number):
    check_sums(name, number)


steps = _crossed.steps
WRONG_SUMS = {
    "weight forgotten": (_crossed_sides, "grams", WRONG_EQUATIONS["weight forgotten"]),
    "column for row": (_crossed_sides, "grams", WRONG_EQUATIONS["column for row"]),
    "sites elsewhere": (
        _crossed,
        "steps",
        lambda key, entries, start, *rest: steps(key, entries, start + 0.1, *rest),
    ),
    "no scale": (
        _crossed,
        "steps",
        lambda *given: steps(*given[:-2], 1 + 0 * given[-2], given[-1]),
    ),
}


@pytest.mark.parametrize("planted", WRONG_SUMS)
def test_wrong_sums_are_seen(planted, monkeypatch):
    monkeypatch.setattr(*WRONG_SUMS[planted])
    with pytest.raises(AssertionError):
        check_sums("binomial", 1)


def odds_of_the_kernel(name, monkeypatch):
    """The log odds of the first switch in the kernel.

    They are the largest number at which the switch is on, if the kernel draws that number from the
    logistic distribution.
    """
    program, crossed, values, _, _ = drawn(name)
    found, low, high = sums_of(name), -1e3, 1e3
    prior = crossed.priors(program, values)[2]
    uniform = jnp.full((len(prior[0]), 2), 0.5)

    @jax.jit
    def is_on(number):
        monkeypatch.setattr(_crossed_components, "logit", lambda uniform: number)
        new = switched(uniform, crossed, program, values, prior, found)
        return new[crossed.components.switch][0]

    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if is_on(middle) else (low, middle)
    return low


LEAST = 1e-12  # of an amplitude, whose density NumPyro takes for 0 at 0


def integral(f, low, high):
    """The integral of exp(f) for a smooth function f, by Simpson's rule."""
    x = np.linspace(low, high, 8001)
    return integrate.simpson(np.exp(jax.jit(jax.vmap(f))(x)), x=x)


def odds_by_quadrature(name):
    """The log odds of the first switch, with its amplitude integrated out by quadrature."""
    _, crossed, values, _, joint = drawn(name)
    switch, amplitude, _ = crossed.components
    at = lambda on, x: joint(
        {**values, switch: values[switch].at[0].set(on), amplitude: values[amplitude].at[0].set(x)}
    )
    least = at(0, LEAST)
    one, zero = (integral(lambda x, on=on: at(on, x) - least, LEAST, 60.0) for on in (1, 0))
    return np.log(one / zero)


def check_odds(name, monkeypatch):
    np.testing.assert_allclose(
        odds_of_the_kernel(name, monkeypatch), odds_by_quadrature(name), rtol=1e-6
    )


@pytest.mark.parametrize("name", CASES)
def test_odds_of_a_switch_equal_an_integral(name, monkeypatch):
    check_odds(name, monkeypatch)


log_mass, on_only = Tilted.log_mass, _crossed_components._switched_on
WRONG_ODDS = {
    # the print's slip: what the component itself adds is not taken out
    "component left in": (
        _crossed_components,
        "_switched_on",
        lambda crossed, values, x: 0 * on_only(crossed, values, x),
    ),
    "no mass of the prior": (
        Tilted,
        "log_mass",
        lambda self: jnp.where(self.q > 1.001 * PRIOR_FALL, log_mass(self), 0.0),
    ),
    "no bound at 0": (Tilted, "log_mass", lambda self: log_mass(self._replace(low=-jnp.inf))),
}
PRIOR_FALL = 1 / 1.5**2  # of the amplitudes of `shop`


@pytest.mark.parametrize("planted", WRONG_ODDS)
def test_wrong_odds_are_seen(planted, monkeypatch):
    monkeypatch.setattr(*WRONG_ODDS[planted])
    with pytest.raises(AssertionError):
        check_odds("renamed", monkeypatch)


NUM_DRAWS = 3000


def check_sweep():
    """Every component and then every shared site, drawn once in turn: each is uniform under its
    conditional distribution function, given those before it as they now are and those after it as
    they were.
    """
    program, crossed, values, _, joint = drawn("renamed")
    switch, amplitude, _ = crossed.components
    found = sums_of("renamed")
    prior = crossed.priors(program, values)[2]
    draw = jax.jit(jax.vmap(lambda x: switched(x, crossed, program, values, prior, found)))
    new = draw(random.uniform(random.key(3), (NUM_DRAWS, len(prior[0]), 2)))
    grid = jnp.linspace(LEAST, 16.0, 801)

    def u_of_component(k, new, share):
        at = {**values, switch: jnp.where(jnp.arange(3) < k, new[switch], values[switch])}
        at |= {amplitude: jnp.where(jnp.arange(3) < k, new[amplitude], values[amplitude])}
        put = lambda on, x: joint(
            {**at, switch: at[switch].at[k].set(on), amplitude: at[amplitude].at[k].set(x)}
        )
        off, on = jnp.exp(
            jax.vmap(jax.vmap(put, (None, 0)), (0, None))(jnp.arange(2), grid) - put(0, LEAST)
        )
        below = lambda density: jnp.append(0.0, jnp.cumsum(density[1:] + density[:-1])) / 2
        in_prior = jnp.interp(new[amplitude][k], grid, below(off)) / below(off)[-1]
        both = jnp.where(
            new[switch][k],
            below(off)[-1] + jnp.interp(new[amplitude][k], grid, below(on)),
            share * below(off)[-1],
        )
        return both / (below(off)[-1] + below(on)[-1]), jnp.where(new[switch][k], share, in_prior)

    share = random.uniform(random.key(4), (NUM_DRAWS,))
    for k in range(3):
        for u in jax.jit(jax.vmap(lambda new, share, k=k: u_of_component(k, new, share)))(
            new, share
        ):
            assert stats.kstest(np.asarray(u), "uniform").pvalue > 1e-3
    family = identify(program, "level", values, random.key(0))
    rest = {switch: new[switch], amplitude: new[amplitude]}
    of_level = jax.vmap(lambda rest: conditional(program, "level", {**values, **rest}, family)[0])(
        rest
    )
    assert stats.kstest(np.asarray(of_level.cdf(new["level"])), "uniform").pvalue > 1e-3


def test_components_and_shared_sites_are_drawn_in_turn():
    check_sweep()


@pytest.mark.parametrize("planted", ["component left in", "no mass of the prior"])
def test_components_drawn_otherwise_are_seen(planted, monkeypatch):
    monkeypatch.setattr(*WRONG_ODDS[planted])
    with pytest.raises(AssertionError):
        check_sweep()
