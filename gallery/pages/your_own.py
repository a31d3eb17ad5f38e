r"""
Your own model, your own kernel
===============================

A model is a function of NumPyro's primitives, a kernel is an ``init`` and a ``sample``; the driver
runs both, and ArviZ and the diagnostics read what comes out. Here are one of each, new and short,
and a test that tells whether the kernel is right.
"""

# %%
# A model
# -------
# Goals of teams: a level that all share, and the skill of each. In a file ``goals.py`` of your own,
# ``zoo fit goals.py:goals --data table.csv`` fits it to a table with the columns ``games`` and
# ``scored``. ``zoo new goals`` writes a file ``zoo/goals.py`` with a model, a function ``simulate``
# and a ``CARD``, which ``zoo list`` shows, and a test.
import os
from typing import NamedTuple

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import lax, random
from numpyro.infer import NUTS
from numpyro.infer.mcmc import MCMCKernel

from diagnostics import plot_calibration_ecdf, report, sbc, with_kernel
from inference import Driver, Program, StructureError
from inference.program.sites import unwrap

FULL = os.environ.get("ZOO_PAGES") == "full"
REPLICATES, DRAWS = (500, 8000) if FULL else (100, 6000)


def goals(games, scored=None):
    """`games` and goals `scored` of each team; None to simulate."""
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    with numpyro.plate("team", len(games)):
        skill = numpyro.sample("skill", dist.Normal(0.0, 0.5))
        return numpyro.sample("scored", dist.Poisson(games * jnp.exp(level + skill)), obs=scored)


games = np.array([5.0, 5.0, 4.0, 2.0, 1.0])
scored = np.array([11, 5, 7, 1, 0])

# %%
# A kernel
# --------
# Elliptical slice sampling (Murray, Adams and MacKay 2010) is for models whose latent sites all
# have Normal priors. It rotates them along an ellipse through a draw from the prior, until the
# likelihood is above a random level. What it must know, it asks the :class:`~inference.Program`:
# the sites, what they are computed from, draws from the prior, the likelihood. It never sees the
# model's formula.


class Ellipse(NamedTuple):
    """A draw, and the key of the next."""

    values: dict
    rng_key: jax.Array


class EllipticalSlice(MCMCKernel):
    """Draws all latent sites of `model`."""

    sample_field = "values"

    def __init__(self, model):
        self.model = model

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        """Refuses, by name, a site that is not Normal beforehand, or whose prior another site
        changes.
        """
        start_key, chain_key = random.split(rng_key)
        program = Program(self.model, *model_args, **model_kwargs)
        trace = program.trace(program.draw_initial(start_key))
        for name in program.latent:
            prior = unwrap(trace[name]["fn"])  # a plate expands it
            if not isinstance(prior, dist.Normal) or program.parents[name]:
                found = f"{type(prior).__name__} given {sorted(program.parents[name]) or 'nothing'}"
                raise StructureError(
                    f"site {name!r}: found {found}, wanted a Normal prior given nothing. Give it "
                    "to NUTS."
                )
        drawn = jax.tree.map(lambda each: each[0], program.draw_prior(start_key, 1))
        return Ellipse(drawn | (init_params or {}), chain_key)

    def height(self, program, values):
        """The log-likelihood."""
        return sum(jnp.sum(each) for each in program.log_likelihood(values).values())

    def sample(self, state, model_args, model_kwargs):
        """One turn."""
        program = Program(self.model, *model_args, **model_kwargs)
        rng_key, prior_key, level_key, angle_key = random.split(state.rng_key, 4)
        trace = program.trace(state.values)
        mean = {name: trace[name]["fn"].mean for name in state.values}
        other = jax.tree.map(lambda each: each[0], program.draw_prior(prior_key, 1))
        turned = lambda angle: jax.tree.map(
            lambda m, x, o: m + (x - m) * jnp.cos(angle) + (o - m) * jnp.sin(angle),
            mean,
            state.values,
            other,
        )
        level = self.height(program, state.values) - random.exponential(level_key)

        def narrowed(at):  # towards angle 0, where the state is
            key, low, high, angle = at
            low, high = jnp.where(angle < 0, angle, low), jnp.where(angle < 0, high, angle)
            key, use = random.split(key)
            return key, low, high, random.uniform(use, minval=low, maxval=high)

        first = random.uniform(angle_key, maxval=2 * jnp.pi)
        start = (random.fold_in(angle_key, 1), first - 2 * jnp.pi, first, first)
        *_, angle = lax.while_loop(
            lambda at: self.height(program, turned(at[-1])) < level, narrowed, start
        )
        return Ellipse(turned(angle), rng_key)


# %%
# Run both
# --------
# The driver takes the kernel as it takes NUTS. The two agree.
run = lambda kernel: Driver(
    kernel(goals), num_warmup=200, num_samples=DRAWS, num_chains=2, progress_bar=False
).run(0, games, scored)
trees = {"elliptical slice": run(EllipticalSlice), "NUTS": run(NUTS)}
for name, tree in trees.items():
    print(name, az.summary(tree, var_names=["level", "skill"], kind="stats"), sep="\n")
print("elliptical slice:", report(trees["elliptical slice"]).conclusion)
figure, ax = plt.subplots(figsize=(6, 3.2), layout="constrained")
for (name, tree), shift in zip(trees.items(), (-0.1, 0.1), strict=True):
    skill = tree.posterior["skill"].stack(all=("chain", "draw")).transpose("all", ...).values
    ax.errorbar(
        np.arange(len(games)) + shift, skill.mean(0), 2 * skill.std(0), fmt="o", ms=4, label=name
    )
ax.axhline(0, color="0.7", lw=0.8, zorder=0)
ax.set(xlabel="team", ylabel="skill (log rate), two deviations", title="Two kernels, one posterior")
ax.legend()

# %%
# Is it right?
# ------------
# Simulation-based calibration: draw values from the prior and data from the model, fit the data,
# and rank the values among the draws. The same test of a kernel with a planted bug, which sees half
# of the log-likelihood, must fail.


class Slip(EllipticalSlice):
    """Sees half of the log-likelihood."""

    def height(self, program, values):
        """Half of it."""
        return super().height(program, values) / 2


for name, kernel in (("the kernel", EllipticalSlice), ("with a slip", Slip)):
    fit = with_kernel(kernel, num_warmup=50, num_samples=155, thinning=5)
    found = sbc(goals, fit, games, scored, num_replicates=REPLICATES)
    print(f"{name}:", *found.text.splitlines()[:2])
    picture = plot_calibration_ecdf(
        found, var_names=["level", "log_likelihood"], figure_kwargs={"layout": "constrained"}
    )
    picture.get_viz("figure").suptitle(f"Calibration: {name}")

# %%
# Change this line, expect that
# -----------------------------
# *More spread of the skills* (``dist.Normal(0.0, 2.0)``): the kernel follows, for it reads the
# prior off the model. The skills of teams with few games change most.


def wide(games, scored=None):
    """`goals` with skills that differ more."""
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    with numpyro.plate("team", len(games)):
        skill = numpyro.sample("skill", dist.Normal(0.0, 2.0))
        return numpyro.sample("scored", dist.Poisson(games * jnp.exp(level + skill)), obs=scored)


changed = Driver(
    EllipticalSlice(wide), num_warmup=200, num_samples=DRAWS, num_chains=2, progress_bar=False
).run(0, games, scored)
deviation = lambda tree: (
    tree.posterior["skill"].std(("chain", "draw")).values.astype(float).round(2).tolist()
)
print(
    "deviations of the skills:",
    deviation(trees["elliptical slice"]),
    "with the wide prior:",
    deviation(changed),
)

# %%
# *Skills whose spread is learned*: their prior then depends on another site. The kernel refuses,
# and names it.


def learned(games, scored=None):
    """`goals` with a latent spread."""
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    with numpyro.plate("team", len(games)):
        skill = numpyro.sample("skill", dist.Normal(0.0, spread))
        return numpyro.sample("scored", dist.Poisson(games * jnp.exp(skill)), obs=scored)


try:
    Driver(EllipticalSlice(learned), num_warmup=0, num_samples=10, progress_bar=False).run(
        0, games, scored
    )
except StructureError as refusal:
    print(refusal)

plt.show()
