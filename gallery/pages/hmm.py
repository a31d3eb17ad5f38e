r"""
A series that switches: a hidden Markov model
=============================================

A machine runs or stalls, a market is calm or wild, an animal rests or feeds. The state is not seen;
the series has another mean and spread in each state, and states last:

.. math::

    s_t \sim \mathrm{Categorical}(A_{s_{t-1}}), \quad y_t \sim \mathrm{N}(\mu_{s_t}, \sigma_{s_t}^2),
    \quad \mu_0 < \mu_1 < \dots

The forward algorithm sums over all paths of states (Rabiner 1989), so that only means, deviations
and transition probabilities are left, and any kernel for continuous sites fits the model. Means are
in rising order; otherwise each labelling of the states would be a mode. The model:

.. model-source:: zoo.hmm.hmm
"""

# %%
# A fit
# -----
# 200 steps of two states that overlap. With a table of your own, whose rows are steps and whose
# column ``y`` is the series: ``zoo fit zoo/hmm.py:hmm --data table.csv``. The priors suit a series
# of mean 0 and variance 1.
import arviz as az
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from numpyro.infer import NUTS
from sklearn.mixture import GaussianMixture

from diagnostics import report
from inference import Driver, NestedSampler
from zoo.hmm import hmm, state_probabilities

rng = np.random.default_rng(0)
states = np.zeros(200, int)
for t in range(1, 200):
    states[t] = rng.choice(2, p=[[0.95, 0.05], [0.1, 0.9]][states[t - 1]])
y = np.array([-0.6, 0.9])[states] + np.array([0.6, 0.9])[states] * rng.normal(size=200)
driver = Driver(NUTS(hmm), num_warmup=300, num_samples=500, num_chains=2, progress_bar=False)
tree = driver.run(0, y)
print(az.summary(tree, kind="stats"), report(tree).headline, sep="\n\n")

# %%
# The states
# ----------
# The probability of a state at a step, given the whole series, is the derivative of the log density
# by the log emission density of this state. A mixture of two Normal distributions sees each value
# by itself, and takes every outlier for a switch.
draws = {
    name: jnp.asarray(values.values.reshape(-1, *values.shape[2:])[::10])
    for name, values in tree["posterior"].dataset.items()
}
upper = np.asarray(jax.vmap(lambda draw: state_probabilities(y, draw))(draws))[..., 1].mean(0)
mixture = GaussianMixture(2, random_state=0).fit(y[:, None])
alone = mixture.predict_proba(y[:, None])[:, np.argmax(mixture.means_[:, 0])]
for name, found in {"hidden Markov model": upper, "mixture": alone}.items():
    print(
        f"{name:20} right at {np.mean((found > 0.5) == states):.0%} of the steps, "
        f"{np.abs(np.diff(found > 0.5)).sum()} switches of {np.abs(np.diff(states)).sum()}"
    )
figure, axes = plt.subplots(2, 1, figsize=(7, 4), sharex=True, layout="constrained")
axes[0].plot(y, "k.-", lw=0.5, ms=3)
axes[0].set(ylabel="y", title="A series of two states; the upper one is grey")
axes[1].plot(alone, "C1", lw=0.8, label="mixture")
axes[1].plot(upper, "C0", label="hidden Markov model")
axes[1].set(xlabel="step", ylabel="P(upper state)", title="The state, given the whole series")
for ax in axes:
    low, high = ax.get_ylim()
    ax.fill_between(
        np.arange(200), low, high, where=states == 1, color="0.88", step="mid", zorder=0
    )
    ax.set(ylim=(low, high), xlim=(0, 199))
axes[1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5))

# %%
# How long a state lasts
# ----------------------
# A state that goes on with probability p lasts 1 / (1 - p) steps on average.
rows = tree["posterior"]["rows"].values.reshape(-1, 2, 2)
figure, ax = plt.subplots(figsize=(6, 2.6), layout="constrained")
bins = np.geomspace(2, 200, 40)
for state, (label, last) in enumerate({"lower state": 20, "upper state": 10}.items()):
    lasts = 1 / (1 - rows[:, state, state])
    ax.hist(lasts, bins, histtype="step", color=f"C{state}", label=label)
    ax.axvline(last, color=f"C{state}", ls=":", label=f"{label}, truth")
ax.set(xscale="log", xlabel="steps", ylabel="draws", title="How long a state lasts on average")
ax.legend()

# %%
# Change this line, expect that
# -----------------------------
# *One more state* (``num_states=3``): the evidence, by nested sampling, says whether it is needed.
# Here it is about the same for two and three states: the third explains no more than it costs.
nested = Driver(
    NestedSampler(hmm, num_live=50, num_sweeps=2.0),
    num_warmup=None,
    num_samples=200,
    num_chains=1,
    progress_bar=False,
)
for num_states in (2, 3):
    found = nested.run(0, y, num_states=num_states).attrs
    print(
        f"{num_states} states: log evidence {found['log_evidence']:.1f} "
        f"+- {found['log_evidence_se']:.1f}"
    )

plt.show()
