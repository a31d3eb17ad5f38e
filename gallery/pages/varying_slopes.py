r"""
Groups that are alike: varying slopes
=====================================

Rows come in groups, such as patients of hospitals, and each group has a level and slopes of its
own. They are draws from common distributions whose spreads are learned:

.. math::

    \mathrm{logit}\, p_i = a_{t_i} + x_i^\top b_{t_i}, \quad
    a_t = \alpha + \sigma_a u_t, \quad b_{t d} = \beta_d + \sigma_d v_{t d}, \quad
    u_t, v_{t d} \sim \mathrm{N}(0, 1).

So a group with few rows borrows from the others, and no more than the spreads allow (Gelman and
Hill 2007, chapter 14). The model:

.. model-source:: zoo.varying_slopes.varying_slopes
"""

# %%
# A fit
# -----
# Twelve groups of 6 to 60 rows, drawn from the model, so that the truth is known. With a table of
# your own: ``zoo fit varying_slopes --data table.csv --task hospital``.
import arviz as az
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
from jax import random
from numpyro.infer import NUTS, Predictive
from sklearn.linear_model import LogisticRegression

from diagnostics import report
from inference import Driver
from zoo.varying_slopes import varying_slopes

SIZES = np.array([6, 6, 6, 10, 10, 10, 20, 20, 30, 30, 60, 60])
task = np.repeat(np.arange(len(SIZES)), SIZES)
x = np.random.default_rng(0).normal(size=(len(task), 1))
truth = {
    "level": jnp.array(-0.3),
    "level_spread": jnp.array(0.7),
    "slopes": jnp.array([1.0]),
    "slope_spread": jnp.array([1.2]),
}
fixed = numpyro.handlers.condition(varying_slopes, truth)
drawn = numpyro.handlers.trace(numpyro.handlers.seed(fixed, 3)).get_trace(x, task)
y = np.asarray(drawn["y"]["value"])
driver = Driver(
    NUTS(varying_slopes), num_warmup=300, num_samples=500, num_chains=2, progress_bar=False
)
tree = driver.run(0, x, task, y)
common = ["level", "level_spread", "slopes", "slope_spread"]
print(az.summary(tree, var_names=common, kind="stats"), report(tree).headline, sep="\n\n")

# %%
# The data again
# --------------
# The share of rows of class 1 in each group, and what the posterior predictive distribution expects
# it to be.
draws = {
    name: jnp.asarray(values.values.reshape(-1, *values.shape[2:]))
    for name, values in tree["posterior"].dataset.items()
}
predicted = np.asarray(Predictive(varying_slopes, draws)(random.key(0), x, task)["y"])
share = lambda rows: np.array([rows[..., task == t].mean(-1) for t in range(len(SIZES))])
low, high = np.quantile(share(predicted), [0.055, 0.945], axis=1)
figure, ax = plt.subplots(figsize=(6, 3), layout="constrained")
ax.vlines(np.arange(len(SIZES)), low, high, color="C0", label="predictive, 89 % interval")
ax.plot(share(y), "ko", ms=4, label="observed")
ax.set(
    xticks=range(len(SIZES)),
    xticklabels=SIZES,
    xlabel="group, by its number of rows",
    ylabel="share of rows of class 1",
    title="Posterior predictive distribution",
)
ax.legend()

# %%
# Beside a fit to each group
# --------------------------
# Logistic regression of a group by itself swings widely where rows are few. The slopes of the model
# shrink towards the common slope, and are closer to the truth.
true_slope = truth["slopes"] + truth["slope_spread"] * drawn["slope_shift"]["value"]
true_slope = np.asarray(true_slope)[:, 0]
slope = np.asarray(draws["slopes"][:, None] + draws["slope_spread"][:, None] * draws["slope_shift"])
slope = slope[..., 0]
alone = np.array(
    [
        LogisticRegression(C=100.0).fit(x[task == t], y[task == t]).coef_[0, 0]
        if len(set(y[task == t])) == 2
        else 0.0  # one class says nothing of the slope
        for t in range(len(SIZES))
    ]
)
error = lambda found: np.sqrt(np.mean((found - true_slope) ** 2))
print(f"error of the slopes: {error(slope.mean(0)):.2f}, each group alone {error(alone):.2f}")
figure, ax = plt.subplots(figsize=(6, 3), layout="constrained")
low, high = np.quantile(slope, [0.055, 0.945], axis=0)
ax.vlines(np.arange(len(SIZES)), low, high, color="C0", label="varying slopes, 89 % interval")
ax.plot(alone, "x", color="C1", label="each group alone")
ax.plot(true_slope, "ko", ms=4, label="truth")
ax.set(
    xticks=range(len(SIZES)),
    xticklabels=SIZES,
    xlabel="group, by its number of rows",
    ylabel="slope (logit per standard deviation)",
    ylim=(-4, 8),
    title="Slopes of the groups",
)
ax.legend()

# %%
# Change this line, expect that
# -----------------------------
# *One slope for all groups* (``vary=False``): what differs between groups must then go into the
# level, and the common slope seems to be known better than it is.
single = driver.run(0, x, task, y, vary=False)
for name, each in {"varying slopes": tree, "one slope": single}.items():
    found = each["posterior"]["slopes"]
    print(f"{name:15} common slope {float(found.mean()):.2f} +- {float(found.std()):.2f}")

plt.show()
