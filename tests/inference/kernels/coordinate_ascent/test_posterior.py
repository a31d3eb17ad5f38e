"""Each factor of coordinate ascent is the expectation, under q of all others, of the complete
conditional that the model itself has.

The natural parameters of a conditional are read off the model's log joint by differentiation, at
draws of q, and averaged: no formula of the kernel is repeated. It is the test that sees a wrong
update, after which the bound is right, of a worse q. Every planted error is one.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from inference import Program
from inference.kernels.coordinate_ascent import posterior
from inference.kernels.coordinate_ascent import rows as _rows
from inference.kernels.coordinate_ascent.posterior import message_of
from tests.inference.kernels.coordinate_ascent.test_kernel import ascended, forgets
from tests.inference.mixtures import case

pytestmark = [pytest.mark.usefixtures("x64", "numpyro_promotion"), pytest.mark.slow]

DRAWS = 3000
ROW = "z, x_missing, t"


def problem(name="binary"):
    """Every label tells of all soft labels, for one that nothing tells of is no factor: it is of
    the first class or the last.
    """
    data = case(name, num_rows=14, missing=0.4)[1]
    return data | {"y": np.where(data["y"] > 0, data.get("num_classes", 2) - 1, 0)}


def readings(program: Program, values: dict[str, Any]) -> dict[str, Any]:
    """Natural parameters of every complete conditional at one setting of all sites."""
    log_joint = lambda **changes: program.log_joint({**values, **changes})
    slope = lambda name, at: jax.grad(lambda value: log_joint(**{name: value}))(at)
    ones = {name: jnp.ones_like(value) for name, value in values.items()}
    size = values["mu"].shape[1]
    identity = jnp.broadcast_to(jnp.eye(size), values["Lambda"].shape)
    at_zero = {"mu": 0 * values["mu"]}
    of_precision = lambda scale: jax.grad(lambda matrix: log_joint(**at_zero, Lambda=matrix))(
        scale * identity
    )
    of_mean = lambda at: jax.grad(lambda mu: log_joint(mu=mu, Lambda=identity))(at)
    of_zeta = lambda at: jax.grad(lambda zeta: log_joint(zeta=zeta, **{"lambda": ones["lambda"]}))(
        at
    )
    of_lambda = lambda scale: jax.grad(
        lambda precision: log_joint(zeta=0 * values["zeta"], **{"lambda": precision})
    )(scale * ones["lambda"])
    weights = jnp.eye(values["w"].shape[-1])
    found = {
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
        "zeta, lambda": (
            of_zeta(0 * values["zeta"]),
            of_zeta(ones["zeta"]),
            of_lambda(1.0),
            of_lambda(2.0),
        ),
    }
    return found | {ROW: _of_rows(program, values)}


def _of_rows(program: Program, values: dict[str, Any]) -> tuple[Any, ...]:
    """The log joint of each row and group, quadratic in missing entries and soft labels.

    Returned are its constant, its slope and its curvature.
    """
    start, shape = (
        jnp.concatenate([0 * values["x_missing"], 0 * values["t"].ravel()]),
        values["t"].shape,
    )
    num_holes = len(values["x_missing"])

    def by_row(both, h):
        changes = {
            "z": jnp.full_like(values["z"], h),
            "x_missing": both[:num_holes],
            "t": both[num_holes:].reshape(shape),
        }
        terms = program.log_probs(values | changes)
        return terms["z"] + terms["x"] + terms["t"].sum(0)

    each = range(len(values["mu"]))
    curves = [jax.jacfwd(jax.grad(lambda both, h=h: by_row(both, h).sum()))(start) for h in each]
    slopes = [jax.grad(lambda both, h=h: by_row(both, h).sum())(start) for h in each]
    consts = jnp.stack([by_row(start, h) for h in each])
    return consts - consts[:1], jnp.stack(slopes), jnp.stack(curves)


def wanted(reading, state) -> dict[str, Any]:
    """The same numbers of the factors of q."""
    factors = state.factors
    (a, b), nw, w, common = factors.concentration, factors.features, factors.weights, factors.common
    c1, c0 = (part.reshape(reading.found.few.sites["V"].shape) for part in factors.sticks)
    beta = lambda v: (c1 - 1) / v - (c0 - 1) / (1 - v)
    size = nw.loc.shape[1]
    outer = nw.rate + nw.kappa[:, None, None] * nw.loc[:, :, None] * nw.loc[:, None]
    free = (nw.concentration - size)[:, None, None] * jnp.eye(size)
    root = jnp.linalg.inv(w.covariance)
    towards = jnp.einsum("ckij,ckj->cki", root, w.mean)
    of_lambda = lambda value: (
        (common.concentration - 0.5) / value - common.rate - common.gamma * common.loc**2 / 2
    )
    found = {
        "alpha": ((a - 1) - b, (a - 1) / 2 - b),
        "V": (beta(0.3), beta(0.6)),
        "mu, Lambda": (
            nw.kappa[:, None] * nw.loc,
            nw.kappa[:, None] * (nw.loc - 1),
            (free - outer) / 2,
            (free / 2 - outer) / 2,
        ),
        "w": (towards, *(towards - root[..., j] for j in range(root.shape[-1]))),
        "zeta, lambda": (
            common.gamma * common.loc,
            common.gamma * (common.loc - 1),
            of_lambda(1.0),
            of_lambda(2.0),
        ),
    }
    return found | ({ROW: _row_factor(reading, state)} if len(w.mean) == 1 else {})


def _row_factor(reading, state):
    """log q(z, x_missing, t) of each row as a quadratic function of x_missing and t, by what the
    messages say.
    """
    message, rows = message_of(reading.found, reading.shape, state.factors), reading.rows
    u = np.concatenate([np.nan_to_num(rows.features), np.ones((len(rows.features), 1))], 1)
    num_rows, num_holes, (row, column) = len(u), len(rows.holes), rows.holes.T
    each = [_rows.message_to(message, task) for task in rows.task]
    of = [_rows.class_masks(jnp.asarray(signs)) for signs in rows.signs]
    consts, slopes, curves = [], [], []
    for h in range(message.const.shape[1]):
        w = np.stack([np.asarray(own.answers)[0, h] for own in each])
        forms = (
            np.stack([np.asarray(_rows.form_of(*at))[h] for at in zip(each, of, strict=True)])
            + w[:, :, None] * w[:, None]
        )
        consts.append(
            np.array([own.const[h] for own in each]) - np.einsum("ni,nij,nj->n", u, forms, u) / 2
        )
        slopes.append(
            np.concatenate([-np.einsum("nij,nj->ni", forms, u)[row, column], (w * u).sum(1)])
        )
        curve = -np.eye(num_holes + num_rows)
        curve[:num_holes, :num_holes] = -np.where(
            row[:, None] == row, forms[row[:, None], column[:, None], column], 0
        )
        curve[np.arange(num_holes), num_holes + row] = curve[
            num_holes + row, np.arange(num_holes)
        ] = w[row, column]
        curves.append(curve)
    consts = np.stack(consts)
    return consts - consts[:1], np.stack(slopes), np.stack(curves)


_READ: dict[str, Callable] = {}


def worst(name="binary") -> dict[str, float]:
    """How many standard errors the natural parameters of each factor are off.

    The number is inf where no draw moves them and they are wrong.
    """
    kernel, state, _, program, read = ascended(problem(name), 300)
    drawn = {
        site: value
        for site, value in kernel.draw(random.key(2), state, *read, DRAWS).items()
        if site != "log_q"
    }
    if name not in _READ:
        _READ[name] = jax.jit(
            lambda drawn: jax.lax.map(
                lambda values: readings(program, values), drawn, batch_size=100
            )
        )
    return gaps(*jax.device_get((_READ[name](drawn), wanted(read[0], state))))


def gaps(found: dict[str, Any], right: dict[str, Any]) -> dict[str, float]:
    """How many standard errors the mean over draws is off, for each factor.

    The number is inf where no draw moves what is wrong.
    """
    off = {}
    for name in right:
        each = []
        for draws, value in zip(found[name], right[name], strict=True):
            mean, error = draws.mean(0), draws.std(0) / np.sqrt(len(draws))
            fixed = error < 1e-9 * (1 + abs(mean))
            gap = abs(mean - value)
            each.append(
                np.max(
                    np.where(
                        fixed,
                        np.where(gap < 1e-5 * (1 + abs(mean)), 0, np.inf),
                        gap / np.where(fixed, 1, error),
                    )
                )
            )
        off[name] = max(each)
    return off


def test_natural_parameters():
    assert max(worst().values()) < 4.5, worst()  # the largest of some 600


def test_natural_parameters_of_several_classes():
    """The natural parameters of all factors but those of rows are right with three classes.

    A row whose label bounds several soft labels has several factors.
    """
    found = worst("three classes")
    assert max(found.values()) < 4.5, found


# Planted errors.


def without_spread(visit, *fields):
    """Omega, the covariance of what is missing, left out of some sums."""

    def twin(message, chunk, score, weight):
        right, after = visit(message, chunk, score, weight)
        place = _rows.incomplete_posterior

        def bare(*at):
            found = place(*at)
            return found._replace(
                covariance=jnp.zeros_like(found.covariance), tie=jnp.zeros_like(found.tie)
            )

        _rows.incomplete_posterior = bare
        try:
            wrong, _ = visit(message, chunk, score, weight)
        finally:
            _rows.incomplete_posterior = place
        return right._replace(**{field: getattr(wrong, field) for field in fields}), after

    return twin


def without_missing(visit):
    """Missing features are taken for 0 in the sums over rows."""

    def twin(message, chunk, score, weight):
        right, after = visit(message, chunk, score, weight)
        place = _rows.incomplete_posterior(message, chunk, score)
        rho, u = jnp.exp(place.log_rho) * weight[:, None], chunk.entries
        return right._replace(moments=jnp.einsum("pk,pi,pj->kij", rho, u, u)), after

    return twin


def untied(incomplete_posterior):
    """The soft label and the missing entries are taken for independent in the sums over rows."""

    def twin(*at):
        found = incomplete_posterior(*at)
        return found._replace(tie=jnp.zeros_like(found.tie))

    return twin


def uncut(one_sided):
    """What the label says of the soft label does not make the missing entries more certain."""

    def twin(ratio):
        found = one_sided(ratio)
        return found._replace(lost=jnp.zeros_like(found.lost))

    return twin


def wrong_tail(sticks_of):
    """What a stick leaves is counted with its own rows."""
    return lambda prior, count, *others: sticks_of(prior, count.at[..., -1].add(1.0), *others)


def noisy_zeta(common_posterior):
    """N var(zeta) added to the rate of lambda."""

    def twin(prior, weights, is_seen):
        right = common_posterior(prior, weights, is_seen)
        return right._replace(
            rate=right.rate
            + weights.mean.shape[1] * right.rate / right.concentration / right.gamma / 2
        )

    return twin


def no_product_with_bias(form):
    return lambda message, of: form(forgets(message), of)


PLANTED = {
    "Omega not in w": (
        _rows,
        "_visit_incomplete",
        lambda visit: without_spread(visit, "asked", "products"),
        "w",
    ),
    "Omega not in Lambda": (
        _rows,
        "_visit_incomplete",
        lambda visit: without_spread(visit, "moments"),
        "mu, Lambda",
    ),
    "x observed only": (_rows, "_visit_incomplete", without_missing, "mu, Lambda"),
    "t not tied to x": (_rows, "incomplete_posterior", untied, "w"),
    "t not cut": (_rows, "one_sided", uncut, "w"),
    "product with the bias": (_rows, "form_of", no_product_with_bias, ROW),
    "tail of the sticks": (posterior, "sticks_of", wrong_tail, "V"),
    "variance of zeta": (posterior, "common_posterior", noisy_zeta, "zeta, lambda"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_is_seen(name, monkeypatch):
    module, attribute, twin, factor = PLANTED[name]
    monkeypatch.setattr(module, attribute, twin(getattr(module, attribute)))
    assert worst()[factor] > 5
