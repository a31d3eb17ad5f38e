"""Rows with an exact posterior, and models that cannot be learned in stages: shared by the tests
of kernels that learn so.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from inference import Driver, Program, StructureError
from inference.run import store as _store
from inference.run.loop import Step

RNG = np.random.default_rng(5)
X = RNG.normal(size=(90, 2))
Y = X @ [1.0, -0.5] + 0.5 * RNG.normal(size=90)
PRECISION = np.diag([1.0, 0.25]) + X.T @ X / 0.25
MEAN, DEVIATION = (
    np.linalg.solve(PRECISION, X.T @ Y / 0.25),
    np.sqrt(np.diag(np.linalg.inv(PRECISION))),
)


def begun(kernel, *args, seed=0, **kwargs):
    """The first state, the reading and the data."""
    reading, data = kernel.read(Program(kernel.model, *args, **kwargs))
    return kernel.init(jax.random.key(seed), reading, data), reading, data


def check_same(found, wanted):
    """Two runs, bit for bit."""
    for name, values in wanted["sample_stats"].data_vars.items():
        np.testing.assert_array_equal(found["sample_stats"][name], values)
    np.testing.assert_array_equal(found["posterior"]["weight"], wanted["posterior"]["weight"])
    for name in ("log_evidence", "log_evidence_se", "num_stages", "num_row_evaluations"):
        assert found.attrs[name] == wanted.attrs[name]


def forget(monkeypatch, field, other):
    """A planted bug: of a state that is loaded, a field is another."""
    load = _store.Store.load
    changed = lambda step: step._replace(
        state=step.state._replace(**{field: other(getattr(step.state, field))})
    )

    def forgetful(store, states):
        commit = load(store, states)
        return commit and commit._replace(
            states=jax.tree.map(changed, commit.states, is_leaf=lambda node: isinstance(node, Step))
        )

    monkeypatch.setattr(_store.Store, "load", forgetful)


def lonely(x, y=0.0):
    """Nothing is in a plate."""
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(level, 1.0), obs=y)


def fixed(x, y=None):
    """Its rows are as many as they are, whatever the data."""
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    with numpyro.plate("row", 90):
        numpyro.sample("y", dist.Normal(level, 1.0), obs=jnp.zeros(90))


def own(x, y=None):
    """Each row has a level of its own."""
    with numpyro.plate("row", len(x)):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(level, 1.0), obs=jnp.asarray(x)[:, 0])


def weighted(x, y=None):
    """A factor beside the rows."""
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    numpyro.factor("known", -3.0)
    with numpyro.plate("row", len(x)):
        numpyro.sample("y", dist.Normal(level, 1.0), obs=jnp.asarray(x)[:, 0])


def centred(x, y):
    """What a row says depends on the others."""
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("row", len(x)):
        numpyro.sample("y", dist.Normal(slope * (x[:, 0] - x[:, 0].mean()), 1.0), obs=y)


def following(x, y):
    """And here on the one before."""
    keeps = numpyro.sample("keeps", dist.Normal(0.0, 1.0))
    with numpyro.plate("row", len(y)):
        numpyro.sample(
            "y", dist.Normal(keeps * jnp.concatenate([jnp.zeros(1), y[:-1]]), 1.0), obs=y
        )


def within(x, group, y):
    """And here on the others of its group, of which there are many."""
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    mean = jnp.zeros(len(MANY) // 2).at[group].add(x) / jnp.maximum(
        1.0, jnp.zeros(len(MANY) // 2).at[group].add(1.0)
    )
    with numpyro.plate("row", len(y)):
        numpyro.sample("y", dist.Normal(slope * (x - mean[group]), 1.0), obs=y)


def scaled(x, y, scale):
    """Its scales are as many as its rows by chance."""
    weight = numpyro.sample("weight", dist.Normal(0.0, scale).to_event(1))
    with numpyro.plate("row", len(y)):
        numpyro.sample("y", dist.Normal(x @ weight, 1.0), obs=y)


MANY = RNG.normal(size=200)
PAIRS = np.arange(200) // 2
SHUFFLED = np.random.default_rng(0).permutation(PAIRS)
DEPENDS = r"sites \['y'\]: the log probability of a row, .* changes with the other rows"
REFUSED = [  # by every kernel that learns in stages: a model, its arguments, and the message
    pytest.param(
        own,
        (X,),
        r"site 'level': its shape is \(90,\) with 90 rows, \(45,\) with 45; .* Integrate it out",
        id="latent by row",
    ),
    pytest.param(weighted, (X,), "site 'known': a factor is none of the rows", id="factor"),
    pytest.param(lonely, (X,), r"sites \['y'\]: they share no plate", id="no plate"),
    pytest.param(
        fixed, (X,), "plate 'row': its size does not follow from the arguments", id="fixed size"
    ),
    pytest.param(centred, (X, Y), DEPENDS, id="rows that depend"),
    pytest.param(following, (X, Y), DEPENDS, id="rows that follow"),
    pytest.param(within, (MANY, PAIRS, MANY), DEPENDS, id="neighbours in pairs"),
    pytest.param(within, (MANY, SHUFFLED, MANY), DEPENDS, id="pairs anywhere"),
    pytest.param(
        scaled,
        (X[:2], Y[:2], np.ones(2)),
        r"arguments \['scale', 'x', 'y'\]: each has 2 entries",
        id="as long by chance",
    ),
]


def check_refused(kernel, arguments, message):
    """Before anything is learned, even where all rows are one stage."""
    with pytest.raises(StructureError, match=message):
        Driver(kernel, progress_bar=False).run(0, *arguments)
