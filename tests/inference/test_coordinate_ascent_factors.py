"""Each factor of coordinate ascent is the expectation, under q of all others, of the complete conditional that the model itself has.

The natural parameters of a conditional are read off the model's log joint by differentiation, at draws of q, and averaged: no formula of
the kernel is repeated. It is the test that sees a wrong update, after which the bound is right, of a worse q. Every planted error is one.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from inference import Program
from inference.kernels import _factors, _row_block
from inference.kernels._factors import message_of
from tests.inference.mixtures import case
from tests.inference.test_coordinate_ascent import ascended

pytestmark = [pytest.mark.usefixtures("x64", "numpyro_promotion"), pytest.mark.slow]

DRAWS = 3000


def problem():
    """Every row has a label: a soft label that nothing tells of is no factor."""
    data = case("binary", num_rows=14, missing=0.4)[1]
    return data | {"y": np.maximum(data["y"], 0)}


def readings(program: Program, values: dict[str, Any]) -> dict[str, Any]:
    """Natural parameters of every complete conditional at one setting of all sites."""
    log_joint = lambda **changes: program.log_joint({**values, **changes})
    slope = lambda name, at: jax.grad(lambda value: log_joint(**{name: value}))(at)
    ones = {name: jnp.ones_like(value) for name, value in values.items()}
    experts, size = values["mu"].shape
    identity = jnp.broadcast_to(jnp.eye(size), values["Lambda"].shape)
    at_zero = {"mu": 0 * values["mu"]}
    of_precision = lambda scale: jax.grad(lambda matrix: log_joint(**at_zero, Lambda=matrix))(scale * identity)
    of_mean = lambda at: jax.grad(lambda mu: log_joint(mu=mu, Lambda=identity))(at)
    of_zeta = lambda at: jax.grad(lambda zeta: log_joint(zeta=zeta, **{"lambda": ones["lambda"]}))(at)
    of_lambda = lambda scale: jax.grad(lambda precision: log_joint(zeta=0 * values["zeta"], **{"lambda": precision}))(
        scale * ones["lambda"]
    )
    weights = jnp.eye(values["w"].shape[-1])
    found = {
        "alpha": (slope("alpha", jnp.array(1.0)), slope("alpha", jnp.array(2.0))),
        "V": (slope("V", 0.3 * ones["V"]), slope("V", 0.6 * ones["V"])),
        "mu, Lambda": (of_mean(0 * values["mu"]), of_mean(ones["mu"]), of_precision(1.0), of_precision(2.0)),
        "w": (slope("w", 0 * values["w"]), *(slope("w", jnp.broadcast_to(each, values["w"].shape)) for each in weights)),
        "zeta, lambda": (of_zeta(0 * values["zeta"]), of_zeta(ones["zeta"]), of_lambda(1.0), of_lambda(2.0)),
        "t": (_slope_of_soft_labels(program, values),),
    }
    hole = 0 * values["x_missing"]
    at = lambda h: {"z": jnp.full_like(values["z"], h)}
    by_row = lambda x, h: _by_row(program, values | at(h) | {"x_missing": x})
    curves = [jax.jacfwd(jax.grad(lambda x, h=h: by_row(x, h).sum()))(hole) for h in range(experts)]
    slopes = [jax.grad(lambda x, h=h: by_row(x, h).sum())(hole) for h in range(experts)]
    consts = jnp.stack([by_row(hole, h) for h in range(experts)])
    return found | {"z, x_missing": (consts - consts[:1], jnp.stack(slopes), jnp.stack(curves))}


def _slope_of_soft_labels(program: Program, values: dict[str, Any]):
    """At their own values, which the labels allow: the slope is the location less the value."""
    return jax.grad(lambda t: program.log_joint({**values, "t": t}))(values["t"]) + values["t"]


def _by_row(program: Program, values: dict[str, Any]):
    """The part of the log joint that is of a row [row]."""
    terms = program.log_probs(values)
    return terms["z"] + terms["x"] + terms["t"].sum(0)


def wanted(kernel, state, program) -> dict[str, Any]:
    """The same numbers of the factors of q."""
    factors, data = state.factors, kernel.data(program)
    (a, b), nw, w, common = factors.concentration, factors.features, factors.weights, factors.common
    c1, c0 = (part.reshape(program.sites["V"].shape) for part in factors.sticks)
    beta = lambda v: (c1 - 1) / v - (c0 - 1) / (1 - v)
    size = nw.loc.shape[1]
    outer = nw.rate + nw.kappa[:, None, None] * nw.loc[:, :, None] * nw.loc[:, None]
    free = (nw.concentration - size)[:, None, None] * jnp.eye(size)
    root = jnp.linalg.inv(w.covariance)
    towards = jnp.einsum("ckij,ckj->cki", root, w.mean)
    of_lambda = lambda value: (common.concentration - 0.5) / value - common.rate - common.gamma * common.loc**2 / 2
    (bucket,), (score,) = data.buckets, state.score
    labels = jnp.zeros((1, len(kernel.rows.features))).at[:, bucket.row.ravel()].set(score.reshape(1, -1), mode="drop")
    return {
        "alpha": ((a - 1) - b, (a - 1) / 2 - b),
        "V": (beta(0.3), beta(0.6)),
        "mu, Lambda": (nw.kappa[:, None] * nw.loc, nw.kappa[:, None] * (nw.loc - 1), (free - outer) / 2, (free / 2 - outer) / 2),
        "w": (towards, *(towards - root[..., j] for j in range(root.shape[-1]))),
        "zeta, lambda": (common.gamma * common.loc, common.gamma * (common.loc - 1), of_lambda(1.0), of_lambda(2.0)),
        "t": (labels,),
        "z, x_missing": _row_factor(kernel, state),
    }


def _row_factor(kernel, state):
    """log q(z, x_missing) of each row as a quadratic function of x_missing, by what the messages say."""
    message, rows = message_of(kernel.assignment, kernel.shape, state.factors), kernel.rows
    (bucket,), (score,) = kernel.data(None).buckets, state.score
    t = np.zeros((len(rows.features), 1))
    seated = np.asarray(bucket.row) < len(t)
    t[np.asarray(bucket.row)[seated]] = np.asarray(_row_block.soft_labels(score, bucket.signs)[0])[seated]
    u = np.concatenate([np.nan_to_num(rows.features), np.ones((len(t), 1))], 1)
    consts, slopes, curves = [], [], []
    each = [_row_block.message_to(message, task) for task in rows.task]
    for h in range(message.const.shape[1]):
        forms = np.stack([np.asarray(_row_block.form_of(*at))[h] for at in zip(each, jnp.asarray(rows.signs), strict=True)])
        push = np.einsum("nc,nci->ni", t, np.stack([np.asarray(own.answers)[:, h] for own in each]))
        const = np.array([own.const[h] for own in each])
        consts.append(const - np.einsum("ni,nij,nj->n", u, forms, u) / 2 + (push * u).sum(1))
        slope = push - np.einsum("nij,nj->ni", forms, u)
        row, column = rows.holes.T
        slopes.append(slope[row, column])
        curves.append(-np.array([[forms[i][c, d] if i == j else 0.0 for j, d in rows.holes] for i, c in rows.holes]))
    consts = np.stack(consts)
    return consts - consts[:1], np.stack(slopes), np.stack(curves)


_READ: dict[str, Callable] = {}


def worst(data=None) -> dict[str, float]:
    """Of each factor, by how many standard errors its natural parameters are off; inf where no draw moves them and they are wrong."""
    kernel, state, _, program = ascended(data or problem(), 300)
    drawn = {name: value for name, value in kernel.draw(random.key(2), state, program, DRAWS).items() if name != "log_q"}
    if "read" not in _READ:
        _READ["read"] = jax.jit(lambda drawn: jax.lax.map(lambda values: readings(program, values), drawn, batch_size=100))
    return gaps(*jax.device_get((_READ["read"](drawn), wanted(kernel, state, program))))


def gaps(found: dict[str, Any], right: dict[str, Any]) -> dict[str, float]:
    """Of each factor, by how many standard errors the mean over draws misses it; inf where no draw moves what is wrong."""
    off = {}
    for name in right:
        each = []
        for draws, value in zip(found[name], right[name], strict=True):
            mean, error = draws.mean(0), draws.std(0) / np.sqrt(len(draws))
            fixed = error < 1e-9 * (1 + abs(mean))
            gap = abs(mean - value)
            each.append(np.max(np.where(fixed, np.where(gap < 1e-5 * (1 + abs(mean)), 0, np.inf), gap / np.where(fixed, 1, error))))
        off[name] = max(each)
    return off


def test_natural_parameters():
    assert max(worst().values()) < 4.5, worst()  # the largest of some 400


# Planted errors.


def without_spread(visit, *fields):
    """Omega, the covariance of what is missing, left out of some sums."""

    def twin(message, chunk, score, weight):
        right, after = visit(message, chunk, score, weight)
        place = _row_block.place_rows

        def bare(*at):
            found = place(*at)
            return found._replace(covariance=jnp.zeros_like(found.covariance))

        _row_block.place_rows = bare
        try:
            wrong, _ = visit(message, chunk, score, weight)
        finally:
            _row_block.place_rows = place
        return right._replace(**{field: getattr(wrong, field) for field in fields}), after

    return twin


def without_missing(visit):
    """Missing features are taken for 0 in the sums over rows."""

    def twin(message, chunk, score, weight):
        right, after = visit(message, chunk, score, weight)
        place = _row_block.place_rows(message, chunk, _row_block.soft_labels(score, chunk.signs)[0])
        rho, u = jnp.exp(place.log_rho) * weight[:, None], chunk.entries
        return right._replace(moments=jnp.einsum("pk,pi,pj->kij", rho, u, u)), after

    return twin


def wrong_tail(sticks_of):
    """What a stick leaves is counted with its own rows."""
    return lambda prior, count, concentration: sticks_of(prior, count.at[..., -1].add(1.0), concentration)


def noisy_zeta(common_posterior):
    """N var(zeta) added to the rate of lambda."""

    def twin(prior, weights):
        right = common_posterior(prior, weights)
        return right._replace(rate=right.rate + weights.mean.shape[1] * right.rate / right.concentration / right.gamma / 2)

    return twin


def no_product_with_bias(form):
    def twin(message, signs):
        return form(message._replace(second=message.second.at[..., -1, :-1].set(0).at[..., :-1, -1].set(0)), signs)

    return twin


PLANTED = {
    "Omega not in w": (_row_block, "_visit_incomplete", lambda visit: without_spread(visit, "asked"), "w"),
    "Omega not in Lambda": (_row_block, "_visit_incomplete", lambda visit: without_spread(visit, "moments"), "mu, Lambda"),
    "x observed only": (_row_block, "_visit_incomplete", without_missing, "mu, Lambda"),
    "product with the bias": (_row_block, "form_of", no_product_with_bias, "z, x_missing"),
    "tail of the sticks": (_factors, "sticks_of", wrong_tail, "V"),
    "variance of zeta": (_factors, "common_posterior", noisy_zeta, "zeta, lambda"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_is_seen(name, monkeypatch):
    module, attribute, twin, factor = PLANTED[name]
    monkeypatch.setattr(module, attribute, twin(getattr(module, attribute)))
    assert worst()[factor] > 5
