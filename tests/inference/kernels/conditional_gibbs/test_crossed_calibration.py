"""Gibbs sampling of crossed predictors at the size of a run: it leaves the joint as it is, and
finds a rank from any start.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from diagnostics import geweke, sbc
from diagnostics.calibration import with_kernel
from inference import ConditionalGibbs, Driver
from inference.kernels.conditional_gibbs import crossed as _crossed
from inference.kernels.conditional_gibbs import crossed_births as _crossed_births
from inference.kernels.conditional_gibbs import crossed_components as _crossed_components
from inference.kernels.conditional_gibbs.crossed_births import anneal
from inference.kernels.conditional_gibbs.crossed_components import rescaled
from zoo.bsvd import binomial_probit, bsvd, ordered_probit, simulate

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("numpyro_promotion")]

LINKS = {
    "gaussian": {},
    "ordered": {"link": partial(ordered_probit, num_levels=2)},
    "binomial": {"link": binomial_probit, "learn_factors": True},
}


def tiny(link):
    """6 x 5, 18 entries, two components that are there with probability 1/2."""
    return simulate(random.key(0), 6, 5, 0.6, 2, **LINKS[link]) | {"a": 1.0}


def quantities(program, values):
    """What does not depend on the order and the sign of components."""
    z, s, u, v = (values[name] for name in "zsuv")
    x = (u * (s * z)) @ v.T
    rows, columns = values["row_weights"], values["column_weights"]
    found = {
        "rank": z.sum(),
        "x": jnp.stack([x[0, 0], x[2, 3]]),
        "size of x": jnp.sum(x**2),
        "amplitudes there": s @ z,
    }
    found |= {
        "lengths": jnp.stack([jnp.sum(s**2), jnp.sum(u**2), jnp.sum(v**2)]),
        "not there": (1 - z) @ jnp.sum(u**2, axis=0),
    }
    found |= {
        "level": values["intercept"],
        "effects": jnp.stack([jnp.sum(rows**2), jnp.sum(columns**2), rows.mean(), rows[0, 0]]),
    }
    found |= {
        name: values[name]
        for name in ("alpha", "alpha_s", "row_precision", "column_precision")
        if name in values
    }
    found |= {
        name: values[name].sum()
        for name in ("u_mean", "v_mean", "u_precision", "v_precision")
        if name in values
    }
    return found | {"log_likelihood": program.log_likelihood(values)["y"].sum()}


def calibration(link):
    return geweke(bsvd, ConditionalGibbs, functions=quantities, data={"y": "value"}, **tiny(link))


@pytest.mark.parametrize("link", LINKS)
def test_the_joint_is_left_as_it_is(link):
    found = calibration(link)
    assert found.passed, found.text


on_only = _crossed_components._switched_on


def no_jacobian(noise, uniform, crossed, *rest):
    """A scale as of one item, whose Jacobian is 1."""
    sides = tuple(side._replace(size=1) for side in crossed.sides)
    return rescaled(noise, uniform, crossed.__class__(**{**vars(crossed), "sides": sides}), *rest)


@pytest.mark.parametrize(
    ("owner", "name", "planted"),
    [
        (
            _crossed_births,
            "anneal",
            lambda *rest: (anneal(*rest)[0], jnp.zeros(()), anneal(*rest)[2]),
        ),
        (_crossed, "rescaled", no_jacobian),
        (
            _crossed_components,
            "_switched_on",
            lambda crossed, values, x: 0 * on_only(crossed, values, x),
        ),
    ],
    ids=["births without their weight", "no Jacobian", "component left in"],
)
def test_a_planted_bug_changes_the_joint(owner, name, planted, monkeypatch):
    monkeypatch.setattr(owner, name, planted)
    assert not calibration("gaussian").passed


def test_a_run_that_goes_on_is_the_longer_run(tmp_path):
    def sampled(num_samples, **options):
        return Driver(
            ConditionalGibbs(bsvd),
            num_warmup=6,
            num_samples=num_samples,
            progress_bar=False,
            **options,
        )

    whole = sampled(8).run(0, **tiny("gaussian"))
    sampled(3, checkpoint=tmp_path).run(0, **tiny("gaussian"))
    resumed = sampled(8, checkpoint=tmp_path).run(0, **tiny("gaussian"))
    assert resumed.attrs["steps_run"] == 5
    for name, values in whole["posterior"].data_vars.items():
        np.testing.assert_array_equal(resumed["posterior"][name], values)


@pytest.mark.parametrize("link", LINKS)
def test_a_run_is_calibrated(link):
    fit = with_kernel(ConditionalGibbs, num_warmup=300, num_samples=63 * 12, thinning=12)
    found = sbc(
        bsvd, fit, quantities=quantities, data={"y": "value"}, num_replicates=200, **tiny(link)
    )
    assert found.passed, found.text


def matrix(rank=5, size=50, observed=0.7, decibels=20):
    """Entries of a matrix of that rank and noise."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(size, rank)) @ rng.normal(size=(rank, size))
    y = x + np.sqrt(np.mean(x**2) / 10 ** (decibels / 10)) * rng.normal(size=x.shape)
    row, column = np.divmod(rng.choice(size**2, int(observed * size**2), replace=False), size)
    return {
        "row": row,
        "column": column,
        "value": y[row, column],
        "shape": x.shape,
        "num_components": size,
    }


def ranks(data, start, num_sweeps):
    """After each sweep, from so many components."""
    kernel, size = ConditionalGibbs(bsvd), data["num_components"]
    state = kernel.init(
        random.key(0), 0, {"z": jnp.where(jnp.arange(size) < start, 1, 0)}, (), data
    )
    arrays = kernel.data((), data)

    def sweep(state, _):
        state = kernel.sample(state, (), data, arrays)
        return state, state.values["z"].sum()

    return np.asarray(
        jax.jit(lambda state: jax.lax.scan(sweep, state, length=num_sweeps)[1])(state)
    )


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("start", [0, 50], ids=["from none", "from all"])
def test_the_rank_is_found_from_any_start(start):
    found = ranks(matrix(), start, 500)
    assert np.bincount(found[250:]).argmax() == 5
    assert (found[250:] == 5).mean() > 0.5
