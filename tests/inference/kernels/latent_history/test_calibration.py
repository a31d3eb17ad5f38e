"""The whole sampler of Archipelago, NUTS beside the history: exact draws of the joint stay what
they are.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from numpyro.infer import NUTS, Gibbs

from diagnostics.calibration import Calibration
from inference import LatentHistory, Program
from inference.reading.history import HistorySites
from tests.inference.histories import FEATURES, FIELD, OPTIONS, joint, seen
from zoo.archipelago import archipelago

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("x64", "numpyro_promotion")]

HISTORY = ["num_rejected", "rejected", "rejected_noise"]
PARAMETERS = ["amplitude", "lengthscale"]


def sampler(step_size=0.3):
    nuts = NUTS(
        archipelago,
        step_size=step_size,
        adapt_step_size=False,
        adapt_mass_matrix=False,
        max_tree_depth=3,
    )
    return Gibbs(
        [
            (LatentHistory(archipelago, num_steps=3, num_trajectories=4), [*HISTORY, *FIELD]),
            (nuts, None),
        ]
    )


def started(kernel, state, rng_key, values, program):
    """The state at other values, on other data."""
    history_key, rng_key, *keys = random.split(rng_key, 2 + len(state.block_states))
    free = program.unconstrain(values)
    first, *others = state.block_states
    first = first._replace(
        values={name: values[name] for name in first.values}, rng_key=history_key
    )
    others = [
        one._replace(z={name: free[name] for name in one.z}, rng_key=key)
        for one, key in zip(others, keys, strict=False)
    ]
    z = {name: values[name] if name in first.values else free[name] for name in state.z}
    return state._replace(z=z, block_states=(first, *others), rng_key=rng_key)


def constrained(state, program):
    """NUTS's sites lie in unconstrained space, those of the history do not."""
    return {**program.constrain(state.z), **state.block_states[0].values}


def quantities(values, x, y):
    logs = {f"log {name}": jnp.sum(jnp.log(values[name])) for name in (*PARAMETERS, "scale")}
    logs |= {f"squared log {name}": jnp.sum(jnp.log(values[name]) ** 2) for name in PARAMETERS}
    return {
        **seen(values, x, y),
        **logs,
        "mean": jnp.sum(values["mean"]),
        "correlation": values["root"][1, 0],
        "noise at data": jnp.sum(values["noise"] ** 2),
    }


@cache
def exact(num_replicates, seed=1, persistence=1.0):
    """Exact draws of the joint whose history has room, and did not end at one of its rejections."""
    values, x, y, enough = jax.jit(jax.vmap(joint))(random.split(random.key(seed), num_replicates))
    lasts = np.random.default_rng(seed).random(num_replicates) < persistence ** np.asarray(
        values["num_rejected"]
    )
    return jax.tree.map(lambda leaf: leaf[np.flatnonzero(enough & lasts)], (values, x, y))


def drift(num_replicates=4000, num_sweeps=4):
    """z-scores of how far sweeps from exact draws move means: noise, for a right sampler."""
    values, x, y = exact(num_replicates)
    kernel = sampler()
    state = kernel.init(random.key(0), 0, None, (x[0], y[0]), OPTIONS)

    def moved(key, values, x, y):
        program = Program(archipelago, x, y, **OPTIONS)
        at = started(kernel, state, key, values, program)
        return constrained(
            jax.lax.fori_loop(0, num_sweeps, lambda _, at: kernel.sample(at, (x, y), OPTIONS), at),
            program,
        )

    keys = random.split(random.key(2), len(x))
    ended = jax.jit(lambda at: jax.lax.map(lambda one: moved(*one), at, batch_size=50))(
        (keys, values, x, y)
    )
    before, after = (jax.vmap(quantities)(each, x, y) for each in (values, ended))
    change = {name: np.asarray(after[name] - before[name]) for name in before}
    assert all(np.mean(each != 0) > 0.3 for each in change.values()), "the sampler hardly moves"
    return {
        name: float(each.mean() / each.std() * np.sqrt(len(each))) for name, each in change.items()
    }


def test_sweeps_with_nuts_leave_the_joint_alone():
    found = drift()
    assert max(map(abs, found.values())) < 4, found


def forget_the_orders(patch):
    """The density as it was printed."""
    patch.setattr(HistorySites, "prove", lambda self, program, rng_key: None)
    patch.setattr(
        HistorySites, "log_count", lambda self, program, values: jnp.zeros(self.capacity + 1)
    )


def test_a_count_without_its_orders_moves_it(monkeypatch):
    forget_the_orders(monkeypatch)
    found = drift()
    assert max(map(abs, found.values())) > 5, found


# Simulation-based calibration: chains that start at the values of another data set forget them, and
# rank those that made their own.


def ranked(
    num_replicates=300, num_warmup=60, num_draws=15, thinning=20, persistence=1.0, told=None
):
    """Ranks of what made the data among draws of a chain given them.

    :param told: what the chain takes for the persistence, if not the right one.
    """
    values, x, y = exact(num_replicates, persistence=persistence)
    kernel, options = (
        sampler(0.15),
        OPTIONS | {"persistence": persistence if told is None else told},
    )
    state = kernel.init(random.key(0), 0, None, (x[0], y[0]), options)

    def replicate(key, start, truth, x, y):
        program = Program(archipelago, x, y, **options)
        names = (
            "log amplitude",
            "log lengthscale",
            "log scale",
            "mean",
            "correlation",
            "log count",
            "functions and data",
        )
        look = lambda values: jnp.stack([quantities(values, x, y)[name] for name in names])
        sweep = lambda _, at: kernel.sample(at, (x, y), options)
        at = jax.lax.fori_loop(0, num_warmup, sweep, started(kernel, state, key, start, program))

        def draw(at, _):
            at = jax.lax.fori_loop(0, thinning, sweep, at)
            return at, look(constrained(at, program))

        _, found = jax.lax.scan(draw, at, None, num_draws)
        truth_seen = look(truth)
        # counts may be equal
        lower, ties = jnp.sum(found < truth_seen, 0), jnp.sum(found == truth_seen, 0)
        place = jnp.floor(random.uniform(random.fold_in(key, 1), ties.shape) * (ties + 1)).astype(
            ties.dtype
        )
        return dict(zip(names, lower + place, strict=True))

    keys = random.split(random.key(3), len(x))
    starts = jax.tree.map(lambda leaf: jnp.roll(leaf, 1, 0), values)
    starts |= {
        "mean": x.mean(1),
        "scale": 0.5 + x.std(1),
        "root": jnp.zeros_like(values["root"]) + jnp.eye(FEATURES),
    }  # NUTS stalls far off
    run = jax.jit(lambda at: jax.lax.map(lambda one: replicate(*one), at, batch_size=50))
    ranks = {name: np.asarray(each) for name, each in run((keys, starts, values, x, y)).items()}
    return Calibration("sbc", "archipelago", ranks, num_draws, alpha=0.01)


def test_chains_rank_what_made_their_data_evenly():
    found = ranked()
    assert found.passed, found.text


def test_chains_rank_evenly_what_a_process_made_that_may_end():
    found = ranked(500, persistence=0.9)
    assert found.passed, found.text


def test_ranks_see_that_a_process_was_taken_for_one_without_end():
    found = ranked(500, persistence=0.9, told=1.0)
    assert not found.passed, found.text


def test_ranks_see_a_count_without_its_orders(monkeypatch):
    forget_the_orders(monkeypatch)
    found = ranked()
    assert not found.passed, found.text
