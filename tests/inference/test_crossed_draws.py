"""The parts of a crossed sweep against the model's own log joint: its second derivative, its integrals, and what must stay as it is."""

from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.scipy.linalg import block_diag
from scipy import integrate, stats

from inference._crossed_reading import read_crossed
from inference.kernels import _crossed_births, _crossed_components, _crossed_sides
from inference.kernels._crossed_births import _component, _Proposal
from inference.kernels._crossed_components import Tilted, switched
from inference.kernels._crossed_sides import buckets
from inference.latent_normal import respond
from inference.structure import conditional, identify
from tests.inference.crossed import EDITS, NOTES, RNG, shop, small

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("x64", "numpyro_promotion")]

CASES = {
    "gaussian": lambda: small(),
    "ordered": lambda: small("ordered"),
    "binomial": lambda: small("binomial", learn_factors=True),
    "features": lambda: small(row_features=RNG.normal(size=(6, 2)), column_features=RNG.normal(size=(5, 1))),
    "renamed": lambda: shop(NOTES),
    "masked": lambda: shop(**EDITS["half is masked"]),
}


def as_normal(response, weight):
    """The link of given latent Normals."""

    def link(predictor, value, trials, entries):
        with entries:
            numpyro.sample("y", dist.Normal(predictor, 1 / jnp.sqrt(weight)), obs=response)

    return link


@cache
def drawn(name):
    """Program, structure, values with the first component on and the second off, entries; and the log joint given the latent Normals."""
    program = CASES[name]()
    crossed = read_crossed(program, random.key(0))
    values = program.draw_prior(random.key(1))
    values[crossed.components.switch] = jnp.array([1, 0, 1])
    site = program.trace(values)[crossed.observed]
    response, weight = respond(random.key(2), site["fn"], site["value"])
    normal = program.with_arguments(link=as_normal(response, weight)) if name in ("ordered", "binomial") else program
    joint = lambda at: normal.log_joint({site: at[site] for site in normal.latent})
    return program, crossed, values, (response, weight, crossed.predictor(program, values)), joint


def indices(crossed, program, side):
    """To which item an entry belongs, of a side and of the other one."""
    return (jnp.asarray(program.arguments[crossed.sides[i].index]) for i in (side, 1 - side))


# The sites of a side: one Normal for each item, whose precision and slope are derivatives of the log joint.


def equations(name, number):
    """Precision and slope of each item, as the kernel computes them."""
    program, crossed, values, (response, weight, eta), _ = drawn(name)
    side, (index, other) = crossed.sides[number], indices(crossed, program, number)
    table, (slope, fall) = crossed.table(program, values, side), crossed.prior(program, values, side)
    precision, linear = np.array(jax.vmap(jnp.diag)(fall)), np.array(slope)
    for bucket in buckets(np.asarray(index), side.size, table.shape[1]):
        for items, entries in zip(bucket.items, bucket.entries, strict=True):
            found = _crossed_sides.normal_equations(table, other, response - eta, weight, entries)
            for total, part in zip((precision, linear), found, strict=True):
                total[items[items < side.size]] += part[items < side.size]
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
    np.testing.assert_allclose(block_diag(*precision), hessian, rtol=1e-8, atol=1e-8)  # items are independent of each other
    np.testing.assert_allclose(linear, slope, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("number", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("name", CASES)
def test_equations_of_a_side_are_derivatives_of_the_log_joint(name, number):
    check_equations(name, number)


own = _crossed_sides.normal_equations
WRONG_EQUATIONS = {
    "weight forgotten": lambda table, other, residual, weight, entries: own(table, other, residual, weight * 0 + 1, entries),
    "column for row": lambda table, other, residual, weight, entries: own(table, jnp.roll(other, 1), residual, weight, entries),
    "an entry twice": lambda table, other, residual, weight, entries: own(table, other, residual, weight, jnp.minimum(entries, 17)),
}


@pytest.mark.parametrize("planted", WRONG_EQUATIONS)
def test_wrong_equations_are_seen(planted, monkeypatch):
    monkeypatch.setattr(_crossed_sides, "normal_equations", WRONG_EQUATIONS[planted])
    with pytest.raises(AssertionError):
        check_equations("gaussian", 0)


def check_steps(num_draws=3000):
    """Draws of all items, whitened by the Hessian, are standard Normal and independent."""
    program, crossed, values, (response, weight, eta), _ = drawn("binomial")
    side, (index, other) = crossed.sides[0], indices(crossed, program, 0)
    table, prior = crossed.table(program, values, side), crossed.prior(program, values, side)
    plan = buckets(np.asarray(index), side.size, table.shape[1])
    step = jax.jit(jax.vmap(lambda key: _crossed_sides.steps(key, table, other, response - eta, weight, prior, plan)))
    found = step(random.split(random.key(0), num_draws)).reshape(num_draws, -1)
    hessian, slope = derivatives("binomial", 0)
    white = np.asarray((found - jnp.linalg.solve(hessian, slope.ravel())) @ jnp.linalg.cholesky(hessian))
    assert stats.kstest(white.ravel(), "norm").pvalue > 1e-3
    assert np.abs(np.corrcoef(white, rowvar=False) - np.eye(white.shape[1])).max() < 5 / np.sqrt(num_draws)


@pytest.mark.parametrize("room", [2**20, 30], ids=["whole", "in chunks"])
def test_steps_are_drawn_from_that_normal(room, monkeypatch):
    monkeypatch.setattr(_crossed_sides, "CHUNK", room)
    check_steps()


@pytest.mark.parametrize("planted", ["weight forgotten", "the same noise"])
def test_wrong_steps_are_seen(planted, monkeypatch):
    monkeypatch.setattr(_crossed_sides, "CHUNK", 30)
    if planted == "the same noise":
        one = SimpleNamespace(
            normal=random.normal, fold_in=random.fold_in, split=lambda key, num: random.split(key, num)[jnp.zeros(num, int)]
        )
        monkeypatch.setattr(_crossed_sides, "random", one)
    else:
        monkeypatch.setattr(_crossed_sides, "normal_equations", WRONG_EQUATIONS[planted])
    with pytest.raises(AssertionError):
        check_steps()


LENGTHS = {
    "one item": [7],
    "none for some": [0, 3, 0, 0, 9, 0],
    "very unequal": [1, 400, 2, 0, 30, 31, 9, 8, 7, 100],
    "one each": [1] * 9,
    "only the last": [0, 0, 0, 1],
}


@pytest.mark.parametrize("room", [2**20, 64], ids=["whole", "in chunks"])
@pytest.mark.parametrize("name", LENGTHS)
def test_every_entry_is_once_in_the_bucket_of_its_item(name, room, monkeypatch):
    monkeypatch.setattr(_crossed_sides, "CHUNK", room)
    counts = LENGTHS[name]
    index = RNG.permutation(np.repeat(np.arange(len(counts)), counts))
    seen, items = [], []
    for bucket in buckets(index, len(counts), 2):
        assert bucket.items.shape == bucket.entries.shape[:2]
        for item, entries in zip(bucket.items.ravel(), bucket.entries.reshape(bucket.items.size, -1), strict=True):
            entries = entries[entries < len(index)]
            assert (index[entries] == item).all()
            seen.extend(entries)
            items.append(item)
    assert sorted(seen) == list(range(len(index)))
    assert sorted(item for item in items if item < len(counts)) == list(range(len(counts)))


# Switches, amplitudes and shared sites.


def sums_of(name):
    program, crossed, values, entries, _ = drawn(name)
    return _crossed_components.sums(crossed, program, values, *entries)


def odds_of_the_kernel(name, monkeypatch):
    """Of the first switch: the largest number at which it is on, if that number is drawn from the logistic distribution."""
    program, crossed, values, _, _ = drawn(name)
    found, low, high = sums_of(name), -1e3, 1e3

    @jax.jit
    def is_on(number):
        monkeypatch.setattr(_crossed_components.random, "logistic", lambda key, dtype: number)
        return switched(random.key(0), crossed, program, values, found)[crossed.components.switch][0]

    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if is_on(middle) else (low, middle)
    return low


LEAST = 1e-12  # of an amplitude, whose density NumPyro takes for 0 at 0


def integral(f, low, high):
    """Of a smooth function, by Simpson's rule."""
    x = np.linspace(low, high, 8001)
    return integrate.simpson(np.exp(jax.jit(jax.vmap(f))(x)), x=x)


def odds_by_quadrature(name):
    """Of the first switch, its amplitude integrated out."""
    _, crossed, values, _, joint = drawn(name)
    switch, amplitude, _ = crossed.components
    at = lambda on, x: joint({**values, switch: values[switch].at[0].set(on), amplitude: values[amplitude].at[0].set(x)})
    least = at(0, LEAST)
    one, zero = (integral(lambda x, on=on: at(on, x) - least, LEAST, 60.0) for on in (1, 0))
    return np.log(one / zero)


def check_odds(name, monkeypatch):
    np.testing.assert_allclose(odds_of_the_kernel(name, monkeypatch), odds_by_quadrature(name), rtol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_odds_of_a_switch_equal_an_integral(name, monkeypatch):
    check_odds(name, monkeypatch)


log_mass, sums, on_only = Tilted.log_mass, _crossed_components.sums, _crossed_components._switched_on
WRONG_ODDS = {
    # the print's slip: what the component itself adds is not taken out
    "component left in": (_crossed_components, "_switched_on", lambda crossed, values, x: 0 * on_only(crossed, values, x)),
    "weight forgotten": (_crossed_components, "sums", lambda c, p, v, y, weight, eta: sums(c, p, v, y, weight * 0 + 1, eta)),
    "no mass of the prior": (Tilted, "log_mass", lambda self: jnp.where(self.q > 1.001 * PRIOR_FALL, log_mass(self), 0.0)),
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
    """Every component and then every shared site, drawn once in turn: each is uniform under its conditional distribution function, given
    those before it as they now are and those after it as they were."""
    program, crossed, values, _, joint = drawn("renamed")
    switch, amplitude, _ = crossed.components
    found = sums_of("renamed")
    draw = jax.jit(jax.vmap(lambda key: switched(key, crossed, program, values, found)))
    new = draw(random.split(random.key(3), NUM_DRAWS))
    grid = jnp.linspace(LEAST, 16.0, 801)

    def u_of_component(k, new, share):
        at = {**values, switch: jnp.where(jnp.arange(3) < k, new[switch], values[switch])}
        at |= {amplitude: jnp.where(jnp.arange(3) < k, new[amplitude], values[amplitude])}
        put = lambda on, x: joint({**at, switch: at[switch].at[k].set(on), amplitude: at[amplitude].at[k].set(x)})
        off, on = jnp.exp(jax.vmap(jax.vmap(put, (None, 0)), (0, None))(jnp.arange(2), grid) - put(0, LEAST))
        below = lambda density: jnp.append(0.0, jnp.cumsum(density[1:] + density[:-1])) / 2
        in_prior = jnp.interp(new[amplitude][k], grid, below(off)) / below(off)[-1]
        both = jnp.where(new[switch][k], below(off)[-1] + jnp.interp(new[amplitude][k], grid, below(on)), share * below(off)[-1])
        return both / (below(off)[-1] + below(on)[-1]), jnp.where(new[switch][k], share, in_prior)

    share = random.uniform(random.key(4), (NUM_DRAWS,))
    for k in range(3):
        for u in jax.jit(jax.vmap(lambda new, share, k=k: u_of_component(k, new, share)))(new, share):
            assert stats.kstest(np.asarray(u), "uniform").pvalue > 1e-3
    family = identify(program, "level", values, random.key(0))
    rest = {switch: new[switch], amplitude: new[amplitude]}
    of_level = jax.vmap(lambda rest: conditional(program, "level", {**values, **rest}, family)[0])(rest)
    assert stats.kstest(np.asarray(of_level.cdf(new["level"])), "uniform").pvalue > 1e-3


def test_components_and_shared_sites_are_drawn_in_turn():
    check_sweep()


WRONG_SUMS = {
    "components as they were": lambda *rest: (jnp.diag(jnp.diag(sums(*rest)[0])), sums(*rest)[1]),
    "an entry missed": lambda c, p, v, y, weight, eta: sums(c, p, v, y, weight.at[0].set(0.0), eta),
}


@pytest.mark.parametrize("planted", [*WRONG_SUMS, "component left in", "no mass of the prior"])
def test_components_drawn_otherwise_are_seen(planted, monkeypatch):
    monkeypatch.setattr(*WRONG_ODDS.get(planted, (_crossed_components, "sums", WRONG_SUMS.get(planted))))
    with pytest.raises(AssertionError):
        check_sweep()


# Births.


def birth(name, k=1):
    """A component that is off, the priors of its parts, its odds, and what the entries are without it."""
    program, crossed, values, (response, weight, eta), _ = drawn(name)
    old, prior, odds = _component(crossed, crossed.components, program, values, k)
    assert not old.is_on
    return old, prior, odds, [jnp.asarray(program.arguments[side.index]) for side in crossed.sides], response - eta, weight


def check_evidence(name):
    """log_joint(there, v) - log_joint(not there, v) = odds + evidence + log q(v) - log prior(v), at any v."""
    _, crossed, values, _, joint = drawn(name)
    old, prior, odds, index, residual, weight = birth(name)
    switch, _, (_, right) = crossed.components
    given = prior.v.given(old.s * old.u[index[0]], index[1], residual, weight)
    evidence = jnp.sum(given.log_mass() - prior.v.log_mass())
    for key in random.split(random.key(5), 3):
        v = random.normal(key, old.v.shape)
        at = lambda on, v=v: joint({**values, switch: values[switch].at[1].set(on), right: values[right].at[:, 1].set(v)})
        told = odds + evidence + jnp.sum(given.log_prob(v) - prior.v.log_prob(v))
        np.testing.assert_allclose(told, at(1) - at(0), rtol=1e-8)


@pytest.mark.parametrize("name", CASES)
def test_the_evidence_of_a_birth_is_a_ratio_of_log_joints(name):
    check_evidence(name)


@pytest.mark.parametrize("name", CASES)
def test_priors_of_a_component_are_the_models(name):
    program, crossed, values, *_ = drawn(name)
    old, prior, *_ = birth(name)
    terms = program.log_probs(values)
    for part, site in zip(("s", "u", "v"), (crossed.components.amplitude, *crossed.components.factors), strict=True):
        np.testing.assert_allclose(getattr(prior, part).log_prob(getattr(old, part)), terms[site][..., 1], rtol=1e-8)


given = Tilted.given


@pytest.mark.parametrize(
    "planted",
    [
        lambda self, x, index, residual, weight: given(self, x, index, residual, weight * 0 + 1),
        lambda self, x, index, residual, weight: given(self, x, jnp.roll(index, 1), residual, weight),
        lambda self, x, index, residual, weight: given(self, jnp.abs(x), index, residual, weight),
    ],
    ids=["weight forgotten", "column for row", "sign lost"],
)
def test_a_wrong_evidence_is_seen(planted, monkeypatch):
    monkeypatch.setattr(Tilted, "given", planted)
    with pytest.raises(AssertionError):
        check_evidence("renamed")


def check_proposal():
    """Two rows and an amplitude: the density integrates to 1, and draws have its moments."""
    prior_u, prior_v = Tilted(jnp.array([0.3, 0.0]), jnp.array([3.0, 2.0])), Tilted(jnp.zeros(3), jnp.full(3, 2.0))
    index, residual = [np.array([0, 0, 0, 1, 1]), np.array([0, 1, 2, 0, 2])], jnp.array([1.0, -0.5, 0.2, 0.8, -0.3])
    prior = _crossed_births._One(False, None, prior_u, prior_v)
    proposal = _Proposal.at(random.key(0), prior, index, residual, jnp.array([2.0, 1.0, 1.0, 3.0, 1.0]))
    s, u = jax.jit(jax.vmap(proposal.draw))(random.split(random.key(1), 10_000))
    t, x = jnp.linspace(-2.2, 2.2, 61), jnp.linspace(-4.0, 4.0, 141)  # logarithm of the amplitude; row factors
    grid = [axis.ravel() for axis in jnp.meshgrid(proposal.size * jnp.exp(t), x, x, indexing="ij")]
    # One amplitude after the other: XLA's compiler for CPUs (jaxlib 0.12.0.1) mixes up logarithms of long arrays.
    at = lambda s: jax.vmap(lambda u: proposal.log_prob(s, u))(jnp.stack(jnp.meshgrid(x, x, indexing="ij"), -1).reshape(-1, 2))
    density = jnp.exp(jax.lax.map(at, proposal.size * jnp.exp(t))).ravel() * grid[0] * (t[1] - t[0]) * (x[1] - x[0]) ** 2
    np.testing.assert_allclose(density.sum(), 1.0, rtol=1e-6)
    for f in (lambda s, a, b: jnp.log(s), lambda s, a, b: s, lambda s, a, b: a, lambda s, a, b: a * b, lambda s, a, b: s * a * a):
        found = f(s, *u.T)
        assert abs(found.mean() - density @ f(*grid)) < 5 * found.std() / np.sqrt(len(found))


def test_the_density_of_a_proposal_is_that_of_its_draws():
    check_proposal()


propose, density_of = _Proposal.draw, _Proposal.log_prob


@pytest.mark.parametrize(
    ("method", "planted"),
    [
        ("log_prob", lambda self, s, u: density_of(self, s, u) + jnp.log(s)),
        ("log_prob", lambda self, s, u: density_of(self, s, u) + jnp.log(2)),
        ("draw", lambda self, key: (propose(self, key)[0] * 1.05, propose(self, key)[1])),
        ("draw", lambda self, key: (propose(self, key)[0], jnp.abs(propose(self, key)[1]))),
    ],
    ids=["amplitude for its logarithm", "one sign", "longer", "all positive"],
)
def test_a_wrong_density_of_a_proposal_is_seen(method, planted, monkeypatch):
    monkeypatch.setattr(_Proposal, method, planted)
    with pytest.raises(AssertionError):
        check_proposal()
