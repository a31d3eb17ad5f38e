"""Coordinate ascent among common factors: its bound against draws and an evidence, its factors
against conditionals of the model itself.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from scipy.special import logsumexp

from inference import CoordinateAscent, Driver, Program
from inference.kernels.coordinate_ascent import factor_rows as _factor_rows
from inference.kernels.coordinate_ascent import factors as _factors
from inference.kernels.coordinate_ascent.factors import factor_message
from inference.reading.conjugate.loadings import loading_moments, row_forms
from tests.inference.factor_mixtures import factor_case
from tests.inference.kernels.coordinate_ascent.test_kernel import ascended, gap_to_draws
from tests.inference.kernels.coordinate_ascent.test_posterior import gaps
from zoo.iqgme_factors import iqgme_factors, linear_features, normal_factors

pytestmark = [pytest.mark.usefixtures("x64", "numpyro_promotion"), pytest.mark.slow]

DRAWS = 3000


@pytest.mark.parametrize("name", ["three classes", "all factors"])
def test_bound_is_that_of_the_model_and_never_falls(name):
    model, data = factor_case(name)
    kernel, state, elbo, program, read = ascended(data, 300, model)
    assert np.diff(elbo).min() > -1e-9
    assert elbo[-1] - elbo[-2] < 1e-5 < elbo[-1] - elbo[0]
    if name != "all factors":
        assert state.linear.shown[:, :-1].min() < 0.3
        assert state.linear.shown[:, :-1].max() > 0.9
    assert abs(gap_to_draws(kernel, state, program, read, 20_000)) < 3


def test_a_bound_with_a_wrong_term_is_seen(monkeypatch):
    """log E psi in the place of E log psi."""
    right = _factors.loading_moments

    def wrong(linear):
        found = right(linear)
        return found._replace(log_noise=jnp.log(found.noise))

    monkeypatch.setattr(_factors, "loading_moments", wrong)
    model, data = factor_case("no labels")
    kernel, state, _, program, read = ascended(data, 300, model)
    assert abs(gap_to_draws(kernel, state, program, read, 20_000)) > 5


def test_bound_stays_below_the_evidence_and_not_far():
    """The evidence is the mean likelihood of draws from the prior."""
    x = np.array([[0.9, -0.4], [-1.1, np.nan]])
    features = partial(linear_features, precision=2.0, noise=1.0, a0=1.0, b0=1.0)
    told = {
        "num_experts": 2,
        "num_factors": 2,
        "alpha": 0.7,
        "expert": None,
        "features": features,
        "gate": partial(normal_factors, u0=1.0),
    }
    _, _, elbo, program, _ = ascended({"x": x, **told}, 200, iqgme_factors)

    def likelihood(key):
        return jnp.nansum(program.log_likelihood(program.draw_prior(key))["x"])

    drawn = np.asarray(
        jax.jit(lambda keys: jax.lax.map(likelihood, keys, batch_size=500))(
            random.split(random.key(0), 40_000)
        )
    )
    evidence = logsumexp(drawn) - np.log(len(drawn))
    error = np.exp(drawn - evidence).std() / np.sqrt(len(drawn))
    assert error < 0.02
    assert evidence - 4 < elbo[-1] < evidence + 3 * error


def test_a_run():
    _, data = factor_case("known numbers")
    tree = Driver(CoordinateAscent(iqgme_factors), num_samples=50).run(0, **data)
    assert (tree["sample_stats"]["elbo"].diff("step") > -1e-9).all()
    assert tree.attrs["route"] == "factors"
    assert tree["posterior"]["A"].dims == ("chain", "draw", "factor", "feature")
    assert tree["posterior"]["s"].dims == ("chain", "draw", "row", "factor")
    assert {"V_concentration1", "mu_rate", "A_loc", "b_probs", "psi_rate"} <= set(
        tree["variational_parameters"].data_vars
    )


# Natural parameters, by differentiation of the model's log joint at draws of q.


def readings(program: Program, values: dict[str, Any]) -> dict[str, Any]:
    """Natural parameters of complete conditionals at one setting of all sites."""
    log_joint = lambda **changes: program.log_joint({**values, **changes})
    slope = lambda name, at: jax.grad(lambda value: log_joint(**{name: value}))(at)
    num_factors, num_features = values["A"].shape
    experts = len(values["mu"])
    towards = jax.grad(lambda entries: log_joint(A=entries[:-1], c=entries[-1]))
    entries = jnp.eye(num_factors + 1)[:, :, None] * jnp.ones((1, 1, num_features))
    identity = jnp.broadcast_to(jnp.eye(num_factors), values["Lambda"].shape)
    of_mean = lambda at: jax.grad(lambda mu: log_joint(mu=mu, Lambda=identity))(at)
    of_precision = lambda scale: jax.grad(
        lambda matrix: log_joint(mu=0 * values["mu"], Lambda=matrix)
    )(scale * identity)
    weights, ones = (
        jnp.eye(values["w"].shape[-1]),
        {name: jnp.ones_like(value) for name, value in values.items()},
    )
    prior_odds = jnp.log(values["pi"]) - jnp.log1p(-values["pi"])
    flipped = lambda h, k, to: log_joint(b=values["b"].at[h, k].set(to))
    odds = jnp.array(
        [[flipped(h, k, 1) - flipped(h, k, 0) for k in range(num_factors)] for h in range(experts)]
    )
    by_row = lambda s, t, h: _by_row(
        program, values | {"s": s, "t": t, "z": jnp.full_like(values["z"], h)}
    )
    s, t = 0 * values["s"], 0 * values["t"]
    each = range(experts)
    consts = jnp.stack([by_row(s, t, h) for h in each])
    slopes = jnp.stack([jax.grad(lambda s, h=h: by_row(s, t, h).sum())(s) for h in each])
    curves = jnp.stack(
        [
            jax.vmap(jax.hessian(lambda own, i, h=h: by_row(s.at[i].set(own), t, h)[i]))(
                s, jnp.arange(len(s))
            )
            for h in each
        ]
    )
    ties = jnp.stack([jax.grad(lambda s, h=h: by_row(s, t + 1, h).sum())(s) for h in each]) - slopes
    at_once = jnp.stack([by_row(s, t + 1, h) - by_row(s, t, h) + 0.5 for h in each])
    return {
        "alpha": (slope("alpha", jnp.array(1.0)), slope("alpha", jnp.array(2.0))),
        "V": (slope("V", 0.3 * ones["V"]), slope("V", 0.6 * ones["V"])),
        "mu, Lambda": (
            of_mean(0 * values["mu"]),
            of_mean(ones["mu"]),
            of_precision(1.0),
            of_precision(2.0),
        ),
        "w": (
            slope("w", 0 * values["w"]),
            *(slope("w", jnp.broadcast_to(each, values["w"].shape)) for each in weights),
        ),
        "A, c": (towards(jnp.zeros(entries.shape[1:])), *(towards(each) for each in entries)),
        "beta": (slope("beta", ones["beta"]), slope("beta", 2 * ones["beta"])),
        "psi": (slope("psi", ones["psi"]), slope("psi", 2 * ones["psi"])),
        "b": (odds - prior_odds,),
        "z, s, t": (consts - consts[:1], slopes, curves, ties, at_once),
    }


def _by_row(program: Program, values: dict[str, Any]):
    """The part of the log joint that is of a row [row]."""
    terms = program.log_probs(values)
    return terms["z"] + terms["s"] + terms["x"].sum(1) + terms["t"].sum(0)


def wanted(ascent, state) -> dict[str, Any]:
    """The same numbers of the factors of q."""
    factors, linear = state.factors, state.linear
    (a, b), nw, w = factors.concentration, factors.features, factors.weights
    c1, c0 = (part[0] for part in factors.sticks)
    beta = lambda v: (c1 - 1) / v - (c0 - 1) / (1 - v)
    gamma = lambda pair, value: (pair[0] - 1) / value - pair[1]
    outer = nw.rate + nw.kappa[:, None, None] * nw.loc[:, :, None] * nw.loc[:, None]
    free = (nw.concentration - nw.loc.shape[1])[:, None, None] * jnp.eye(nw.loc.shape[1])
    root, of_features = jnp.linalg.inv(w.covariance), jnp.linalg.inv(linear.covariance)
    towards, up = (
        jnp.einsum("ckij,ckj->cki", root, w.mean),
        jnp.einsum("pij,pj->pi", of_features, linear.mean).T,
    )
    share = ascent.found.prior.share
    logit = lambda p: jnp.log(p) - jnp.log1p(-p)
    return {
        "alpha": ((a - 1) - b, (a - 1) / 2 - b),
        "V": (beta(0.3), beta(0.6)),
        "mu, Lambda": (
            nw.kappa[:, None] * nw.loc,
            nw.kappa[:, None] * (nw.loc - 1),
            (free - outer) / 2,
            (free / 2 - outer) / 2,
        ),
        "w": (towards, *(towards - root[..., j] for j in range(root.shape[-1]))),
        "A, c": (up, *(up - of_features[..., j].T for j in range(len(up)))),
        "beta": (gamma(linear.beta, 1.0), gamma(linear.beta, 2.0)),
        "psi": (gamma(linear.noise, 1.0), gamma(linear.noise, 2.0)),
        "b": (logit(linear.shown[:, :-1]) - logit(share),),
        "z, s, t": _row_factor(ascent, state),
    }


def _row_factor(ascent, state):
    """log q of a row, at s = 0 and t = 0, by what its parts say."""
    said = factor_message(ascent.found, ascent.shape, state.factors)
    at_once = loading_moments(state.linear)
    x = jnp.asarray(ascent.rows.features)
    _, matrix, slope = row_forms(at_once, jnp.nan_to_num(x), (~jnp.isnan(x)).astype(float))
    second = said.second()[0]
    quadratic = (said.matrix + second)[:, None] + at_once.both[:, None] * matrix[None]
    linear = at_once.shown[:, None] * slope[None]
    consts = said.const[:, None] + linear[..., -1] - quadratic[..., -1, -1] / 2
    ties = jnp.broadcast_to(said.answers[0, :, None, :-1], linear[..., :-1].shape)
    return (
        consts - consts[:1],
        linear[..., :-1] - quadratic[..., :-1, -1],
        -quadratic[..., :-1, :-1],
        ties,
        jnp.broadcast_to(said.answers[0, :, -1:], consts.shape),
    )


_READ: dict[str, Callable] = {}


def worst() -> dict[str, float]:
    """How many standard errors the natural parameters of each factor are off.

    Every row has a label, so that t is a factor.
    """
    model, data = factor_case("binary")
    data = data | {"y": np.maximum(data["y"], 0)}
    kernel, state, _, program, read = ascended(data, 400, model)
    drawn = {
        name: value
        for name, value in kernel.draw(random.key(2), state, *read, DRAWS).items()
        if name != "log_q"
    }
    if "read" not in _READ:
        _READ["read"] = jax.jit(
            lambda drawn: jax.lax.map(
                lambda values: readings(program, values), drawn, batch_size=100
            )
        )
    found, right = jax.device_get((_READ["read"](drawn), wanted(read[0], state)))
    # a choice so sure that its probability is 1 to the last digit has no odds
    is_open = np.isfinite(right["b"][0])
    found["b"], right["b"] = (found["b"][0][:, is_open],), (right["b"][0][is_open],)
    return gaps(found, right)


def test_natural_parameters():
    found = worst()
    assert max(found.values()) < 4.5, found  # the largest of some 800


# Planted errors.


def no_spread_of_factors(loading_sums):
    """The loadings see factors as if they were known."""

    def twin(moments, chunk, found, rho):
        known = found._replace(second=found.mean[..., :, None] * found.mean[..., None, :])
        return loading_sums(moments, chunk, known, rho)

    return twin


def no_tie(factor_posterior):
    """The covariance of a soft label and the factors is left out."""

    def twin(message, moments, chunk, score):
        found = factor_posterior(message, moments, chunk, score)
        return found._replace(products=found.products[..., -1:] * found.mean[:, None])

    return twin


def each_by_itself(shown_posterior):
    """A factor is chosen as if it were the only one."""

    def twin(prior, before, moments, products):
        diagonal = jnp.eye(moments.shape[-1])[None] * moments
        last = moments[..., -1] * jnp.append(jnp.ones(moments.shape[-1] - 1), 0.0)[None]
        return shown_posterior(prior, before, diagonal, products - last)

    return twin


PLANTED = {
    "covariance of factors": (_factors, "loading_sums", no_spread_of_factors, "A, c"),
    "tie of a soft label": (_factor_rows, "factor_posterior", no_tie, "w"),
    "other factors": (_factors, "shown_posterior", each_by_itself, "b"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_is_seen(name, monkeypatch):
    module, attribute, twin, factor = PLANTED[name]
    monkeypatch.setattr(module, attribute, twin(getattr(module, attribute)))
    assert worst()[factor] > 5
