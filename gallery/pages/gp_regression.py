r"""
A smooth function of unknown form: Gaussian-process regression
==============================================================

A Gaussian process is a prior of functions. Values at any rows are a multivariate Normal vector, and
rows that are near have values that are alike:

.. math::

    \mathrm{cov}(f(x), f(x')) = a^2 \exp\Bigl(-\tfrac12 \sum_d (x_d - x'_d)^2 / \ell_d^2\Bigr),
    \quad y_i \sim \mathrm{N}(f(x_i), \sigma^2).

The function is integrated out, so that only the amplitude, the noise and a length scale for each
feature are left (Rasmussen and Williams 2006). A long scale says that a feature does not matter.
The model:

.. model-source:: zoo.gp_regression.gp_regression
"""

# %%
# A fit
# -----
# 40 rows of two features; y follows a wave of the first and noise, and knows nothing of the second.
# There is a gap without rows. A log density costs the cube of the number of rows, so that fits are
# for some hundred rows at most. With a table of your own:
# ``zoo fit gp_regression --data table.csv --option scale=70``, where 70 is about the standard
# deviation of the target.
import arviz as az
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from sklearn.linear_model import LinearRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures

from diagnostics import report
from inference import Driver, NestedSampler
from zoo.gp_regression import function_at, gp_regression, matern32, squared_exponential

rng = np.random.default_rng(0)
wave = lambda first: 1.2 * np.sin(2.5 * first)
first = np.concatenate([rng.uniform(-2, -0.3, 22), rng.uniform(0.8, 2, 18)])
x = np.column_stack([first, rng.normal(size=40)])
y = wave(first) + 0.3 * rng.normal(size=40)
driver = Driver(
    NestedSampler(gp_regression, num_live=100, num_sweeps=2.0),
    num_warmup=None,
    num_samples=600,
    num_chains=2,
    progress_bar=False,
)
tree = driver.run(0, x, y)
print(az.summary(tree, kind="stats"), report(tree).headline, sep="\n\n")

# %%
# The function
# ------------
# Each draw of amplitude, noise and length scales gives a Normal distribution of the function at a
# new row; their mixture is the posterior. In the gap the band widens. A polynomial of a well chosen
# degree, fitted by least squares, does as well among the data, but runs off outside them.
grid = np.column_stack([np.linspace(-3, 3, 121), np.zeros(121)])


def band(tree, covariance):
    """Mean and standard deviation of the function on the grid, over 100 posterior draws."""
    draws = {
        name: jnp.asarray(values.values.reshape(-1, *values.shape[2:])[::12])
        for name, values in tree["posterior"].dataset.items()
    }
    each = lambda draw: function_at(grid, x, y, draw, covariance)
    mean, deviation = (np.asarray(found) for found in jax.vmap(each)(draws))
    return mean.mean(0), np.sqrt((deviation**2).mean(0) + mean.var(0))


mean, deviation = band(tree, squared_exponential)
rival = make_pipeline(PolynomialFeatures(6), LinearRegression()).fit(x[:, :1], y)
polynomial = rival.predict(grid[:, :1])
truth = wave(grid[:, 0])
gap = abs(grid[:, 0] - 0.25) < 0.55
parts = {"among the data": abs(grid[:, 0]) < 2, "beyond the data": abs(grid[:, 0]) > 2}
for part, rows in parts.items():
    error = lambda found, rows=rows: np.sqrt(np.mean((found - truth)[rows] ** 2))
    print(
        f"{part:16} error: Gaussian process {error(mean):.2f}, polynomial {error(polynomial):.2f}"
    )
figure, ax = plt.subplots(figsize=(6.5, 3.2), layout="constrained")
ax.fill_between(
    grid[:, 0],
    mean - 1.6 * deviation,
    mean + 1.6 * deviation,
    color="C0",
    alpha=0.25,
    label="Gaussian process, 89 % interval",
)
ax.plot(grid[:, 0], mean, "C0")
ax.plot(grid[:, 0], polynomial, "C1--", label="polynomial of degree 6")
ax.plot(grid[:, 0], truth, "k:", label="truth")
ax.plot(first, y, "k.", ms=4)
ax.set(
    xlabel="first feature",
    ylabel="y",
    ylim=(-4.5, 4.5),
    title="The function, and what is not known",
)
ax.legend(loc="upper left", ncols=2)

# %%
# Which feature matters
# ---------------------
# The scale of the first feature is near that of the wave. Of the second the data say only that it
# is not short.
figure, ax = plt.subplots(figsize=(6, 2.6), layout="constrained")
bins = np.geomspace(0.1, 100, 40)
for feature, label in enumerate(("first feature", "second feature")):
    lengths = tree["posterior"]["lengthscale"].values[..., feature].ravel()
    ax.hist(lengths, bins, histtype="step", color=f"C{feature}", label=label)
ax.set(
    xscale="log",
    xlabel="length scale (unit of the feature)",
    ylabel="draws",
    title="Length scales",
)
ax.legend()

# %%
# Change this line, expect that
# -----------------------------
# *Rougher functions* (``covariance=matern32``): a function has one derivative only. Between rows
# that are far apart it may go anywhere, so the band in the gap is wider. The evidence of the two is
# nearly the same: 40 rows do not tell them apart.
rough = driver.run(0, x, y, covariance=matern32)
for name, each, run in (
    ("squared exponential", deviation, tree),
    ("matern32", band(rough, matern32)[1], rough),
):
    print(
        f"{name:20} standard deviation in the gap {each[gap].mean():.2f}, log evidence "
        f"{run.attrs['log_evidence']:.1f} +- {run.attrs['log_evidence_se']:.1f}"
    )

plt.show()
