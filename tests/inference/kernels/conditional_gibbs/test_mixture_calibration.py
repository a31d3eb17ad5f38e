"""Gibbs sampling of an assignment at the size of its use: it leaves the joint as it is, where
entries and labels are missing.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import Array, random
from numpyro.handlers import condition
from numpyro.infer.mcmc import MCMCKernel

from diagnostics import geweke
from inference import Program
from inference.kernels.conditional_gibbs import mixture
from inference.kernels.conditional_gibbs.mixture import MixtureRoute
from inference.kernels.coordinate_ascent.draws import cut
from zoo.iqgme import iqgme, normal_wishart, probit, soft_probit

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("x64", "numpyro_promotion")]

HOLES = np.array([[0, 1], [1, 0], [0, 0], [1, 1], [0, 1], [0, 0], [0, 0]], bool)
# -1: not known to the kernel
LABELS = {2: np.array([1, 0, 1, 0, -1, 0, -1]), 3: np.array([2, 0, 1, 2, 1, 0, -1])}
NUM_ROWS, NUM_FEATURES = HOLES.shape
X = np.random.default_rng(0).normal(size=HOLES.shape)  # only the shape counts
TOLD: dict[str, Any] = {
    "num_experts": 3,
    "alpha": dist.Gamma(4.0, 3.0),
    "gate": partial(normal_wishart, u0=0.5, nu0=5.0, covariance=1.5, centre=0.3),
}
EXPERT = {"precision": dist.Gamma(3.0, 2.0), "gamma0": 0.7}


def whole(x, y, num_classes):
    """The model of rows that miss nothing, soft labels integrated out."""
    model = condition(iqgme, data={"x": x, "y": y})
    return model(
        shape=(NUM_ROWS, NUM_FEATURES),
        num_classes=num_classes,
        expert=partial(probit, **EXPERT),
        **TOLD,
    )


class State(NamedTuple):
    """`hidden`: missing entries and soft labels."""

    values: dict[str, Array]
    hidden: dict[str, Array]
    rng_key: Array


class Holed(MCMCKernel):
    """The sweep, which does not see some of the entries and labels of `whole`; where data are
    new it takes them as they were drawn.
    """

    sample_field = "values"

    def __init__(self, model, num_classes):
        y = LABELS[num_classes]
        told = TOLD | {"num_classes": num_classes, "expert": partial(soft_probit, **EXPERT)}
        self.model, self.num_classes = model, num_classes
        with jax.ensure_compile_time_eval():  # as a kernel reads within other traced code
            self.sweep = MixtureRoute(Program(iqgme, np.where(HOLES, np.nan, X), y, **told))

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        program = Program(self.model, *model_args, **model_kwargs)
        values = init_params or program.draw_prior(rng_key)
        x, y = (jnp.asarray(program.arguments[name]) for name in "xy")
        own, u = values["w"][:, values["z"]], jnp.concatenate([x, jnp.ones((NUM_ROWS, 1))], 1)
        loc = jnp.einsum("cni,ni->nc", own, u)
        soft = cut(loc, jnp.ones_like(loc), self._signs(y)).sample(rng_key).T
        return State(values, {"x_missing": x[self._places], "t": soft}, random.fold_in(rng_key, 1))

    @property
    def _places(self):
        return tuple(self.sweep.rows.holes.T)

    def _signs(self, y):
        """[row, class]; of all labels, those that the sweep does not see as well."""
        classes = jnp.arange(1, self.num_classes)[None]
        return jnp.where(
            y[:, None] == classes,
            1.0,
            jnp.where((y[:, None] > classes) | (y[:, None] == 0), -1.0, 0.0),
        )

    def sample(self, state, model_args, model_kwargs):
        program = Program(self.model, *model_args, **model_kwargs)
        x, y = (jnp.asarray(program.arguments[name]) for name in "xy")
        u = jnp.concatenate([jnp.where(HOLES, 0.0, x), jnp.ones((NUM_ROWS, 1))], 1)
        signs = self._signs(y) * (LABELS[self.num_classes] >= 0)[:, None]
        data = tuple(one_by_one(bucket, u, signs) for bucket in self.sweep.buckets)
        rng_key, key = random.split(state.rng_key)
        drawn = self.sweep.draw(key, program, state.values | state.hidden, data)[0]
        return State(
            {name: drawn[name] for name in state.values},
            {name: drawn[name] for name in state.hidden},
            rng_key,
        )

    def postprocess_fn(self, model_args, model_kwargs):
        return lambda values: values

    def get_constrain_fn(self, model_args, model_kwargs):
        return lambda values: values

    def get_diagnostics_str(self, state):
        return ""


def one_by_one(bucket, u, signs):
    """Each row in a chunk of its own, so that whom a label tells of may change; with new data."""
    bucket = bucket._replace(task=jnp.broadcast_to(bucket.task[:, None], bucket.row.shape))
    bucket = jax.tree.map(
        lambda leaf: leaf.reshape(leaf.shape[0] * leaf.shape[1], 1, *leaf.shape[2:]), bucket
    )
    at = jnp.minimum(bucket.row, NUM_ROWS - 1)
    return bucket._replace(entries=u[at], signs=signs[at], task=bucket.task[:, 0])


def quantities(program, values):
    """Test quantities of the parameters, by group, and of what the kernel sees."""
    z, V, mu, precision, w = (values[name] for name in ("z", "V", "mu", "Lambda", "w"))
    x, y = jnp.asarray(program.arguments["x"]), jnp.asarray(program.arguments["y"])
    known = LABELS[program.arguments["num_classes"]] >= 0
    gap = jnp.where(HOLES, 0.0, x - mu[z])
    score = jnp.einsum("ni,ni->n", w[0, z], jnp.concatenate([mu[z], jnp.ones((NUM_ROWS, 1))], 1))
    return {
        "alpha": values["alpha"],
        "sticks": V,
        "groups": jnp.sum(jnp.bincount(z, length=3) > 0),
        "sizes": jnp.bincount(z, length=3),
        "together": jnp.sum(z[:, None] == z[None]),
        "mu": mu[0],
        "mu of a row": mu[z[0]],
        "scatter": jnp.linalg.slogdet(precision)[1],
        "gap": jnp.sum(gap**2),
        "lambda": values["lambda"],
        "zeta": values["zeta"][0],
        "w": w[:, 0, 0],
        "w of a row": w[0, z[1]],
        "label": jnp.sum(jnp.where(known, (2.0 * (y > 0) - 1) * jnp.tanh(score), 0.0)),
    }


def calibration(num_classes, num_replicates=600):
    data = {"x": X, "y": np.maximum(LABELS[num_classes], 0)}
    kernel = partial(Holed, num_classes=num_classes)
    settings = {
        "num_replicates": num_replicates,
        "num_steps": 5,
        "functions": quantities,
        "data": {"x": "x", "y": "y"},
    }
    return geweke(whole, kernel, **data, num_classes=num_classes, **settings)


def test_the_joint_is_left_as_it_is():
    found = calibration(3)
    assert found.passed, found.text


PLANTED = {
    "weights without what they have in common": (
        mixture,
        "weights_posterior",
        lambda right: lambda common, *sums: right(common._replace(loc=0 * common.loc), *sums),
    ),
    "missing entries of another group": (
        mixture,
        "draw_incomplete",
        lambda right: lambda *at: right(*at[:-1], 0 * at[-1]),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_changes_the_joint(name, monkeypatch):
    module, attribute, twin = PLANTED[name]
    monkeypatch.setattr(module, attribute, twin(getattr(module, attribute)))
    assert not calibration(3).passed
