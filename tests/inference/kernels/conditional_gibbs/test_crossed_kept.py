"""Every move of a crossed sweep keeps the joint distribution: values and entries are drawn from the
model, and moments after the move are those before it. Moves along what the entries cannot tell
apart leave the predictor where it is.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import random

from inference import Program
from inference.kernels.conditional_gibbs import crossed_births as _crossed_births
from inference.kernels.conditional_gibbs import crossed_components as _crossed_components
from inference.kernels.conditional_gibbs import crossed_sides as _crossed_sides
from inference.kernels.conditional_gibbs.crossed import CrossedRoute
from inference.kernels.conditional_gibbs.crossed_births import birth_or_death, num_random
from inference.kernels.conditional_gibbs.crossed_components import (
    Tilted,
    lower_bound,
    rescaled,
    shifted,
    switched,
    uniforms,
)
from inference.reading.crossed import read_crossed, respond
from tests.inference.crossed import EDITS, shelves
from zoo.bsvd import binomial_probit, bsvd, gaussian, ordered_probit, simulate

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("x64", "numpyro_promotion")]

NUM_REPLICATES, NUM_MOVES = 2000, 4
LINKS = {
    "gaussian": {"link": partial(gaussian, alpha=4.0)},
    "ordered": {"link": partial(ordered_probit, num_levels=2)},
    "binomial": {"link": binomial_probit, "learn_factors": True},
}


@cache
def tiny(link="gaussian"):
    """9 entries of 4 x 3, two components that are there with probability 1/2; its structure, and
    draws of values and entries.
    """
    data = simulate(random.key(0), 4, 3, 0.75, 2, alpha_s=1.0, precision=1.0, **LINKS[link]) | {
        "a": 1.0
    }
    program = Program(bsvd, **data)
    return program, read_crossed(program, random.key(0)), draws_of(program, "value", "y")


def draws_of(program, argument, site):
    """Draws of all latent sites, and of the entries given them."""
    unseen = Program(program.model, *program.args, **program.kwargs).with_arguments(
        **{argument: None}
    )
    draw = lambda key: {
        name: message["value"]
        for name, message in unseen.trace({}, key).items()
        if name in (*program.latent, site)
    }
    values = jax.jit(jax.vmap(draw))(random.split(random.key(1), NUM_REPLICATES))
    return values, values.pop(site)


@cache
def edited(name):
    """The same of a model of the test's own, 9 entries of 4 x 3."""
    model = partial(shelves, sizes=(4, 3), num_topics=2, **ALSO[name])
    cells = np.delete(np.arange(12), [0, 4, 11])
    program = Program(model, cells // 3, cells % 3, np.zeros(9))
    return program, read_crossed(program, random.key(0)), draws_of(program, "stars", "stars")


ALSO = {
    "whole": {},
    "amplitudes of either sign": EDITS["amplitudes of either sign"],
    "moods about the level": {"mood": lambda level: dist.Normal(level, 1.0)},
}


def side(number):
    def move(key, crossed, program, values):
        sweep = CrossedRoute(crossed, program, 0)
        return sweep._draw_side(
            sweep._random(key, program, values).sides[number],
            program,
            values,
            entries(crossed, program, values),
            number,
            sweep._items[number],
            crossed.priors(program, values)[number],
        )[0]

    return move


def entries(crossed, program, values):
    site = program.trace(values)[crossed.observed]
    return *respond(random.key(0), site["fn"], site["value"]), crossed.predictor(program, values)


def components(key, crossed, program, values):
    (response, weight, eta), slopes = (
        entries(crossed, program, values),
        crossed.slopes(program, values),
    )
    found = (slopes * weight[:, None]).T @ slopes, slopes.T @ (weight * (response - eta))
    prior = crossed.priors(program, values)[2]
    uniform = random.uniform(key, (len(prior[0]), 2))
    return values | switched(uniform, crossed, program, values, prior, found)


def births(key, crossed, program, values):
    """A birth or death, and then the parts of what is switched off from their priors."""
    birth_key, uniform_key, *keys = random.split(key, 4)
    priors = crossed.priors(program, values)
    new, eta = birth_or_death(
        *uniforms(birth_key, num_random(crossed, program), float),
        crossed,
        crossed.components,
        program,
        values,
        entries(crossed, program, values),
        priors,
    )
    gap = jnp.abs(eta - crossed.predictor(program, new)).max()
    (switch, amplitude, factors), (slope, fall) = crossed.components, priors[2]
    num = len(new[switch])
    low = lower_bound(program, crossed.components)
    s = Tilted(slope[:num] + fall[:num] * values[amplitude], fall[:num], low)
    drawn = {amplitude: s.icdf(random.uniform(uniform_key, (num,)))}
    for site, side, (slope, fall), key in zip(factors, crossed.sides, priors, keys, strict=False):
        columns = crossed.factor_columns(program, side)
        x = Tilted((slope + fall * crossed.flat(values, side))[:, columns], fall[:, columns])
        drawn[site] = x.at(random.normal(key, values[site].shape))
    off = {site: jnp.where(new[switch] > 0, new[site], one) for site, one in drawn.items()}
    return {**new, **off, "gap": gap}


def whole(key, crossed, program, values):
    sweep = CrossedRoute(crossed, program, 1.5)
    return sweep.draw(
        key,
        program,
        values,
        sweep.data(program) | {"arguments": {"value": program.arguments["value"]}},
    )[0]


def scales(key, crossed, program, values):
    noise_key, uniform_key = random.split(key)
    shape = 2, len(values[crossed.components.switch])
    return rescaled(
        random.normal(noise_key, shape),
        random.uniform(uniform_key, shape),
        crossed,
        crossed.components,
        program,
        values,
    )


def levels(key, crossed, program, values):
    noise = random.normal(key, (len(crossed.intercepts),))
    return shifted(noise, crossed, program, values)


MOVES = {
    "rows": side(0),
    "columns": side(1),
    "components": components,
    "births": births,
    "scales": scales,
    "levels": levels,
}


def after(move, program, crossed, values, y, argument="value"):
    """Values after a few moves."""

    def one(key, values, y):
        own = program.with_arguments(**{argument: y})

        def step(old, key):
            new = move(key, crossed, own, old)
            return {name: new[name].astype(old[name].dtype) for name in old}, None

        return jax.lax.scan(step, values, random.split(key, NUM_MOVES))[0]

    return jax.jit(jax.vmap(one))(random.split(random.key(2), NUM_REPLICATES), values, y)


def moments(program, crossed, values, y):
    """Functions of values and entries that slips change."""
    (switch, amplitude, (left, right)), (shared, *_) = crossed.components, crossed.shared
    z, s, u, v, level = (values[name] for name in (switch, amplitude, left, right, shared))
    rows, columns = (values[crossed.sides[i].sites[1]].mean() for i in (0, 1))
    eta = crossed.predictor(program, values)
    lengths = jnp.stack([s**2, (u**2).mean(0), (v**2).mean(0)])
    found = [
        z.sum(),
        z[0] * z[1],
        s @ z,
        s.sum(),
        lengths @ z,
        lengths @ (1 - z),
        jnp.log(jnp.abs(s)).sum(),
        jnp.abs(u[0] * v[0]).sum(),
    ]
    found += [level, level**2, rows**2, columns**2, level * rows, level * columns, rows * columns]
    found += [
        eta.mean(),
        eta[0] ** 2,
        eta[0] * eta[4],
        eta @ y,
        program.log_joint(values),
        (u[0, 0] * v[1, 0] * z[0]) ** 2,
    ]
    return jnp.concatenate([jnp.ravel(x) for x in found])


def check_kept(move, program, crossed, values, y, argument="value", most=4.5):
    """Differences of moments have mean zero, in standard errors."""
    new = after(move, program, crossed, values, y, argument)
    both = jax.jit(
        jax.vmap(
            lambda values, y: moments(program.with_arguments(**{argument: y}), crossed, values, y)
        )
    )
    gap = np.asarray(both(new, y) - both(values, y))
    assert np.isfinite(gap).all()
    assert np.abs(gap.mean(0)).max() > 0  # it moves
    assert np.abs(gap.mean(0) / (gap.std(0) / np.sqrt(len(gap)) + 1e-12)).max() < most
    return new


@pytest.mark.parametrize("name", MOVES)
def test_a_move_keeps_the_joint(name):
    check_kept(MOVES[name], *tiny()[:2], *tiny()[2])


@pytest.mark.slow
@pytest.mark.parametrize("link", LINKS)
def test_a_sweep_keeps_the_joint(link):
    check_kept(whole, *tiny(link)[:2], *tiny(link)[2])


@pytest.mark.parametrize(
    ("edit", "move"),
    [
        ("whole", "components"),
        ("amplitudes of either sign", "components"),
        ("amplitudes of either sign", "births"),
        ("moods about the level", "levels"),
    ],
)
def test_a_move_keeps_the_joint_of_an_edit(edit, move):
    program, crossed, draws = edited(edit)
    check_kept(MOVES[move], program, crossed, *draws, "stars")


def test_births_and_deaths_happen_and_keep_the_predictor_up_to_date():
    program, crossed, (values, y) = tiny()
    one = jax.jit(
        jax.vmap(
            lambda key, values, y: births(key, crossed, program.with_arguments(value=y), values)
        )
    )
    new = one(random.split(random.key(2), NUM_REPLICATES), values, y)
    change = np.asarray(new["z"].sum(1) - values["z"].sum(1))
    assert min((change == 1).mean(), (change == -1).mean()) > 0.02
    assert set(change) == {-1, 0, 1}
    assert new["gap"].max() < 1e-10


@pytest.mark.parametrize("name", ["scales", "levels"])
def test_what_the_entries_cannot_tell_leaves_the_predictor(name):
    program, crossed, (values, y) = tiny()
    new = after(MOVES[name], program, crossed, values, y)
    eta = jax.jit(jax.vmap(lambda values: crossed.predictor(program, values)))
    np.testing.assert_allclose(eta(new), eta(values), atol=1e-10)
    moved = {"scales": ("s", "u", "v"), "levels": ("intercept", "row_weights", "column_weights")}[
        name
    ]
    for site in values:
        share = np.mean(np.asarray(new[site] != values[site]))
        assert share > 0.5 if site in moved else share == 0


mass, terms = Tilted.log_mass, _crossed_components._log_priors
walk, path, guess, amplitude = (
    getattr(_crossed_births, name) for name in ("anneal", "schedule", "mean_field", "LogNormal")
)
step, of, part = _crossed_sides._step, _crossed_sides.Entries.of, _crossed_births._component


def longer(crossed):
    """A structure that counts one item too many: the Jacobian of a scale has the power I, not I
    - 1.
    """
    return crossed.__class__(
        **{
            **vars(crossed),
            "sides": tuple(side._replace(size=side.size + 1) for side in crossed.sides),
        }
    )


def not_taken_out(*rest):
    """The entries keep what the component adds to them: the print's slip."""
    old, priors, odds = part(*rest)
    return (
        old._replace(parts=old.parts._replace(s=jnp.where(old.is_on, 0.0, old.parts.s))),
        priors,
        odds,
    )


def weighed_by(log_prob):
    """An amplitude whose density is another."""

    class Other(amplitude):
        def log_prob(self, value):
            return log_prob(super(), value)

    return Other


TWINS = {
    "rows, steps too short": ("rows", _crossed_sides, "_step", lambda *rest: 0.9 * step(*rest)),
    "columns, weight forgotten": (
        "columns",
        _crossed_sides.Entries,
        "of",
        lambda t, o, r, w: of(t, o, r, w * 0 + 1),
    ),
    "columns, row for column": (
        "columns",
        _crossed_sides.Entries,
        "of",
        lambda t, o, *rest: of(t, jnp.roll(o, 1), *rest),
    ),
    "components, no mass of the prior": (
        "components",
        Tilted,
        "log_mass",
        lambda self: jnp.where(self.q > 1.001, mass(self), 0.0),
    ),
    "births, the walk not weighed": (
        "births",
        _crossed_births,
        "anneal",
        lambda *rest: (walk(*rest)[0], jnp.zeros(()), walk(*rest)[2]),
    ),
    "births, the walk not turned round": (
        "births",
        _crossed_births,
        "schedule",
        lambda is_dying, *rest: path(False, *rest),
    ),
    "births, amplitude's density forgotten": (
        "births",
        _crossed_births,
        "LogNormal",
        weighed_by(lambda of, s: jnp.zeros(())),
    ),
    "births, an amplitude for its logarithm": (
        "births",
        _crossed_births,
        "LogNormal",
        weighed_by(lambda of, s: of.log_prob(s) + jnp.log(s)),
    ),
    "births, one sign": ("births", _crossed_births, "NUM_SIGNS", 1),
    "births, not taken out": ("births", _crossed_births, "_component", not_taken_out),
    "births, no odds": (
        "births",
        _crossed_births,
        "_component",
        lambda *rest: (*part(*rest)[:2], jnp.log(0.5)),
    ),
    "scales, one prior": (
        "scales",
        _crossed_components,
        "_log_priors",
        lambda program, values, names: terms(program, values, names[:1]),
    ),
}


@pytest.mark.parametrize("name", TWINS)
def test_a_slip_changes_the_joint(name, monkeypatch):
    move, *planted = TWINS[name]
    monkeypatch.setattr(*planted)
    with pytest.raises(AssertionError):
        check_kept(MOVES[move], *tiny()[:2], *tiny()[2])


def test_a_guess_that_knows_the_component_changes_the_joint(monkeypatch):
    """It knows it closely: the walk makes up for a vague guess."""
    seen = []

    def remembered(*rest):
        seen.append(part(*rest)[0])
        return part(*rest)

    def knowing(*rest):
        near, old = guess(*rest), seen[-1]
        more = jnp.where(old.is_on, 300.0, 0.0) * near.u.q
        return near._replace(u=near.u.times(more * old.parts.u, more))

    monkeypatch.setattr(_crossed_births, "_component", remembered)
    monkeypatch.setattr(_crossed_births, "mean_field", knowing)
    with pytest.raises(AssertionError):
        check_kept(MOVES["births"], *tiny()[:2], *tiny()[2])


def test_a_wrong_jacobian_of_a_scale_changes_the_joint():
    wrong = lambda key, crossed, *rest: scales(key, longer(crossed), *rest)
    with pytest.raises(AssertionError):
        check_kept(wrong, *tiny()[:2], *tiny()[2])


def test_a_level_drawn_by_one_prior_alone_changes_the_joint():
    def wrong(key, crossed, program, values):
        step = random.normal(key, ()) - values["intercept"]
        return {
            **values,
            "intercept": values["intercept"] + step,
            "row_weights": values["row_weights"] - step,
        }

    with pytest.raises(AssertionError):
        check_kept(wrong, *tiny()[:2], *tiny()[2])
