"""Functions of standard normal noise, read off a model; and their moves by surrogate data,
against closed forms and exact draws.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpy.testing import assert_allclose
from scipy.stats import multivariate_normal

from inference import LatentHistory, Program, StructureError
from inference.kernels.latent_history.surrogate import (
    VARIANCE,
    AffineMap,
    FieldState,
    Whitening,
    _surrogate,
)
from inference.reading.field import Field, read_field
from tests.inference.histories import FIELD, drift
from zoo.archipelago import archipelago, student_t

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

X = np.random.default_rng(0).normal(size=(4, 2))
OWNED = ("noise", "rejected_noise", "amplitude", "lengthscale")
ENOUGH = {
    "num_replicates": 3000,
    "num_sweeps": 2,
    "beside": FIELD,
    "num_rounds": 2,
    "num_steps": 3,
    "num_trajectories": 3,
}


def curves(edit=None):
    """Two functions at four points, one of their lines changed."""
    with numpyro.plate("function", 2):
        height = numpyro.sample("height", dist.LogNormal(0.0, 0.5))
    loc = 0.5 if edit == "noise of another mean" else 0.0
    with numpyro.plate("point", 4):
        noise = numpyro.sample("noise", dist.Normal(loc, 1.0).expand([2]).to_event(1))
    wiggle = jnp.tanh(noise) if edit == "not affine" else noise
    size = height[::-1] if edit == "the other's height" else height
    values = numpyro.deterministic("values", 1.0 + size * jnp.cumsum(wiggle, 0))
    extra = height[0] if edit == "height elsewhere" else 0.0
    with numpyro.plate("point", 4):
        numpyro.sample("y", dist.Normal(values.sum(1) + extra, 1.0), obs=jnp.zeros(4))


def test_field_of_a_model_is_read():
    program = Program(archipelago, X, num_classes=3, capacity=2, base=student_t)
    field = read_field(program, "rejected_noise", OWNED)
    assert set(field.noises) == {"noise", "rejected_noise"}
    assert set(field.functions) == {"function", "rejected_function"}
    assert field.scales == ("amplitude", "lengthscale")
    assert field.proved(program, random.key(0)).is_factorised


@pytest.mark.slow
def test_noise_of_others_is_left_alone():
    program = Program(archipelago, X, capacity=2)
    field = read_field(program, "rejected_noise", ("rejected_noise",))
    assert (field.noises, field.scales) == (("rejected_noise",), ())
    field.proved(program, random.key(0))


def heights(edit=None):
    """Two functions at four points by a Cholesky factor, in several ways."""
    apart = jnp.abs(jnp.arange(4.0)[:, None] - jnp.arange(4.0))
    with numpyro.plate("function", 2):
        size = numpyro.sample("size", dist.LogNormal(0.0, 0.5))
        covariance = jnp.exp(
            -apart / numpyro.sample("length", dist.LogNormal(0.0, 0.5))[:, None, None]
        )
    with numpyro.plate("point", 4):
        noise = numpyro.sample("noise", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    factor = jnp.linalg.cholesky(covariance)
    if edit == "inverse":
        values = jnp.linalg.solve(jnp.swapaxes(factor, 1, 2), noise.T[..., None])[..., 0].T
    elif edit == "uneven":
        values = jnp.arange(1.0, 5.0)[:, None] * jnp.einsum("kij,jk->ik", factor, noise)
    else:
        values = jnp.einsum("kij,jk->ik", factor, size * noise) - 1.0
    if edit == "two":
        values = values + 0.0 * jnp.linalg.cholesky(2.0 * covariance)[:, 0].T
    values = numpyro.deterministic("values", values)
    with numpyro.plate("point", 4):
        numpyro.sample("y", dist.Normal(values.sum(1), 1.0), obs=jnp.zeros(4))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "edit", [None, "inverse", "uneven", "two"], ids=["own", "inverse", "uneven", "two"]
)
def test_covariance_is_the_one_that_the_model_factorises(edit):
    program = Program(partial(heights, edit))
    scales = ("length",) if edit in ("inverse", "uneven") else ("size", "length")
    field = read_field(program, "noise", ("noise", *scales)).proved(program, random.key(0))
    # else the functions have another factor, or nobody knows which of them is theirs
    assert field.is_factorised == (edit is None)
    values = jax.jit(program.draw_initial)(random.key(1))
    both = lambda values: [
        replace(field, is_factorised=flag).affine(program, values)
        for flag in (field.is_factorised, False)
    ]
    (found, wanted), function = jax.jit(
        lambda values: (both(values), field.function(program, values))
    )(values)
    jax.tree.map(partial(assert_allclose, atol=1e-12), found, wanted)
    assert_allclose(
        wanted.level + np.einsum("kij,jk->ik", wanted.root, values["noise"]), function, atol=1e-12
    )


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("edit", "named"),
    [
        ("noise of another mean", r"\['noise'\]: found another prior"),
        ("not affine", r"\['values'\]: found functions that are not affine"),
        ("the other's height", r"\['height'\]: found scales of one function that affect another"),
        (
            "height elsewhere",
            r"\['noise', 'height'\]: found more in the model that depends on them",
        ),
    ],
    ids=["mean", "tanh", "other", "elsewhere"],
)
def test_what_is_no_field_is_refused_by_name(edit, named):
    program = Program(partial(curves, edit))
    with pytest.raises(StructureError, match=named):
        read_field(program, "noise", ("noise", "height")).proved(program, random.key(0))


def test_sites_that_are_no_scales_are_named():
    program = Program(archipelago, X, capacity=2)
    with pytest.raises(StructureError, match=r"'mean', 'scale', 'root'.* NUTS"):
        read_field(program, "rejected_noise", (*OWNED, "mean", "scale", "root"))


SEEN = [0, 2, 3]


def told(seed=0):
    """The map of a field at some values, with surrogate data at three of four points."""
    program = Program(curves)
    field = read_field(program, "noise", ("noise", "height"))
    half = jnp.array([1.0, 0.0, 1.0, 1.0]) / jnp.sqrt(VARIANCE)
    at = AffineMap.of(field, program, program.draw_initial(random.key(seed)), half)
    return at, jnp.where(half[:, None] > 0, 3.0 * random.normal(random.key(9), (4, 2)), at.level)


def test_surrogate_data_tell_of_the_noise_what_a_normal_does():
    at, surrogate = told()
    none = jnp.zeros((2, 4))
    mean, _ = at.given(surrogate, none, none)
    of_before, of_error = jax.jit(
        jax.jacobian(lambda *drawn: at.given(surrogate, *drawn)[0], (0, 1))
    )(none, none)
    for k in range(2):
        effect = np.asarray(at.root[k])[SEEN]
        gain = effect.T @ np.linalg.inv(effect @ effect.T + VARIANCE * np.eye(3))
        assert_allclose(mean[k], gain @ (surrogate[SEEN, k] - at.level[SEEN, k]), atol=1e-10)
        covariance = np.eye(4) - gain @ effect
        assert_allclose(
            sum(each[k, :, k] @ each[k, :, k].T for each in (of_before, of_error)),
            covariance,
            atol=1e-10,
        )
        root = Whitening.of(at).root[k]
        assert_allclose(root @ root.T, np.linalg.inv(covariance), atol=1e-10)
    rest = random.normal(random.key(3), mean.shape)
    assert_allclose(Whitening.of(at).rest(Whitening.of(at).noise(rest)), rest, atol=1e-12)


def test_the_draw_that_surrogate_data_are_told_with_makes_the_noise_that_is_there():
    at, _ = told()
    noise = random.normal(random.key(1), (2, 4))
    *drawn, log_density = _surrogate(random.key(2), FieldState({}, noise, at.function(noise), at))
    found, again = at.given(*drawn)
    assert_allclose(found, noise, atol=1e-12)
    assert_allclose(again, log_density, atol=1e-12)


def test_surrogate_data_have_the_density_of_a_normal():
    gaps = []
    for seed in (0, 1):
        at, surrogate = told(seed)
        _, log_density = at.given(surrogate, jnp.zeros((2, 4)), jnp.zeros((2, 4)))
        for k in range(2):
            effect = np.asarray(at.root[k])[SEEN]
            wanted = multivariate_normal(
                np.asarray(at.level)[SEEN, k], effect @ effect.T + VARIANCE * np.eye(3)
            )
            gaps.append(log_density[k] - wanted.logpdf(np.asarray(surrogate)[SEEN, k]))
    assert_allclose(gaps, gaps[0], atol=1e-9)  # one constant, whatever the scales


@pytest.mark.slow
def test_steps_and_trajectories_leave_the_joint_distribution_alone():
    found = drift(**ENOUGH)
    assert max(map(abs, found.values())) < 4, found


@pytest.mark.slow
@pytest.mark.parametrize(
    "slip", ["density", "Jacobian", "nowhere", "error", "coordinates", "old count"]
)
def test_a_slip_moves_it(slip, monkeypatch):
    given, log_scales, rest, settled, moves = (
        AffineMap.given,
        Field.log_scales,
        Whitening.rest,
        LatentHistory._settled,
        {},
    )
    if slip in ("density", "error"):
        moves = {"num_steps": 12, "num_trajectories": 0}
    if slip == "density":  # of surrogate data, forgotten
        monkeypatch.setattr(AffineMap, "given", lambda *args: (given(*args)[0], jnp.zeros(2)))
    if slip == "Jacobian":
        size = lambda values: jnp.log(values["amplitude"]) + jnp.log(values["lengthscale"][:, 0])
        monkeypatch.setattr(
            Field,
            "log_scales",
            lambda self, program, values: log_scales(self, program, values) - size(values),
        )
    # surrogate data that are not of the functions; a draw that does not make the noise that is
    # there
    if slip in ("nowhere", "error"):

        def wrong(rng_key, at):
            surrogate, before, error, _ = _surrogate(rng_key, at)
            surrogate, error = (
                (jnp.zeros_like(surrogate), error)
                if slip == "nowhere"
                else (surrogate, jnp.zeros_like(error))
            )
            return surrogate, before, error, at.map.given(surrogate, before, error)[1]

        monkeypatch.setattr("inference.kernels.latent_history.surrogate._surrogate", wrong)
    if slip == "coordinates":  # in which a trajectory does not begin where the noise is
        moves = {"num_steps": 1}
        monkeypatch.setattr(Whitening, "rest", lambda self, noise: 1.3 * rest(self, noise))
    # kept, where functions and scales have moved with all counts of the window open
    if slip == "old count":
        moves = {"num_replicates": 8000, "num_sweeps": 3}

        def keeps(self, rng_key, program, history, values, *others):
            moved, *told = settled(self, rng_key, program, history, values, *others)
            return {**moved, history.count: values[history.count]}, *told

        monkeypatch.setattr(LatentHistory, "_settled", keeps)
    found = drift(**ENOUGH | moves)
    assert max(map(abs, found.values())) > 5, found


@pytest.mark.slow
def test_scales_are_stretched_where_they_are_free():
    program = Program(archipelago, X, capacity=2)
    field = read_field(program, "rejected_noise", OWNED)
    values = program.draw_initial(random.key(0))
    steps = {"amplitude": jnp.array([1.0, 0.0]), "lengthscale": jnp.zeros((2, 1))}
    moved = field.stretched(program, values, steps)
    assert_allclose(moved["amplitude"], values["amplitude"] * jnp.exp(steps["amplitude"]))
    still = program.unconstrain(
        values | {name: 0 * values[name] for name in ("noise", "rejected_noise")}
    )
    whole = jax.grad(lambda free: program.log_density_unconstrained(still | {"amplitude": free}))(
        still["amplitude"]
    )
    part = jax.grad(
        lambda free: jnp.sum(field.log_scales(program, values | {"amplitude": jnp.exp(free)}))
    )(jnp.log(values["amplitude"]))
    assert_allclose(whole, part, atol=1e-10)  # functions that are 0 say nothing of their amplitude
