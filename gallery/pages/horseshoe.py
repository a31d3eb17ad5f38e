r"""
Which columns matter: the horseshoe
===================================

Linear regression on many columns, of which few matter. Each weight has a scale of its own,

.. math::

    y_i \sim \mathrm{N}(\alpha + x_i^\top w, \sigma^2), \quad
    w_d \sim \mathrm{N}(0, \sigma^2 \tau^2 \lambda_d^2), \quad
    \lambda_d, \tau \sim \mathrm{C}^+(0, 1),

and the half Cauchy distribution of the scales has both much mass near 0 and a heavy tail. So a
weight shrinks to almost nothing, or hardly at all (Carvalho, Polson and Scott 2010). The share
:math:`1 / (1 + \lambda_d^2)` is beforehand Beta(1/2, 1/2), whose density has the form of a
horseshoe. The model:

.. model-source:: zoo.horseshoe.horseshoe
"""

# %%
# A fit
# -----
# 442 patients, and how far diabetes has progressed after a year. Beside the ten columns of the data
# stand ten of noise. All complete conditionals are of known families, which ConditionalGibbs reads
# off the model; ``zoo fit horseshoe --data diabetes --option num_samples=3000`` does the same.
import arviz as az
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.infer import Predictive
from sklearn.linear_model import LassoCV, LinearRegression

from gallery.datasets import load
from inference import ConditionalGibbs, Driver, StructureError
from zoo.horseshoe import horseshoe

data = load("diabetes")
noise = np.random.default_rng(0).normal(size=data.x.shape)
x = np.column_stack([data.x / data.x.std(0), noise])
columns = [*data.feature_names, *(f"noise {i}" for i in range(10))]
train, test = np.arange(len(x)) % 4 < 2, np.arange(len(x)) % 4 >= 2
x_train, y_train = x[train], data.y[train]
driver = Driver(
    ConditionalGibbs(horseshoe), num_warmup=300, num_samples=1000, num_chains=2, progress_bar=False
)
tree = driver.run(0, x_train, y_train)
print(az.summary(tree, var_names=["intercept", "variance", "weights"], kind="stats"))

# %%
# The data again
# --------------
# Draws of the posterior predictive distribution beside what was observed.
draws = {
    name: jnp.asarray(values.values.reshape(-1, *values.shape[2:])[::40])
    for name, values in tree["posterior"].dataset.items()
}
predicted = np.asarray(Predictive(horseshoe, draws)(random.key(0), x_train)["y"])
figure, ax = plt.subplots(figsize=(6, 3), layout="constrained")
bins = np.linspace(-100, 450, 40)
for each in predicted:
    ax.hist(each, bins, histtype="step", color="C0", alpha=0.15, density=True)
ax.hist(y_train, bins, histtype="step", color="k", density=True, label="observed")
ax.set(
    xlabel="progression of the disease (score)",
    ylabel="density of patients (1 / score)",
    title="Posterior predictive distribution",
)
ax.legend()

# %%
# Beside a lasso
# --------------
# The lasso sets weights to zero, and shrinks the large ones too. The horseshoe leaves those where
# they are. The other half of the patients says how well each predicts.
weights = tree["posterior"]["weights"].values.reshape(-1, len(columns))
intercept = float(tree["posterior"]["intercept"].mean())
rivals = {"least squares": LinearRegression(), "lasso": LassoCV(cv=5)}
for name, rival in rivals.items():
    error = rival.fit(x_train, y_train).predict(x[test]) - data.y[test]
    print(f"{name:14} root mean square error {np.sqrt(np.mean(error**2)):.1f}")
error = intercept + x[test] @ weights.mean(0) - data.y[test]
print(f"{'horseshoe':14} root mean square error {np.sqrt(np.mean(error**2)):.1f}")
figure, ax = plt.subplots(figsize=(6, 4.5), layout="constrained")
places = np.arange(len(columns))
low, high = np.quantile(weights, [0.055, 0.945], axis=0)
ax.hlines(places, low, high, color="C0", label="horseshoe, 89 % interval")
for (name, rival), marker in zip(rivals.items(), "x+", strict=True):
    ax.plot(rival.coef_, places, marker, color="k", label=name)
ax.axvline(0, color="0.7", lw=0.8)
ax.set(
    yticks=places,
    yticklabels=columns,
    xlabel="weight (score per standard deviation of the column)",
    title="Weights of ten columns and of ten of noise",
)
ax.legend()

# %%
# Change this line, expect that
# -----------------------------
# *Rows with outliers*: y gets heavier tails. The conditional of the variance is then of no known
# family. ConditionalGibbs refuses, and names the site; NUTS fits the model.


def with_outliers(x, y=None):
    """Ridge regression whose rows are StudentT."""
    variance = numpyro.sample("variance", dist.InverseGamma(1.0, 1.0))
    with numpyro.plate("feature", x.shape[1]):
        weights = numpyro.sample("weights", dist.Normal(0.0, jnp.sqrt(variance)))
    with numpyro.plate("row", len(x)):
        numpyro.sample("y", dist.StudentT(4.0, x @ weights, jnp.sqrt(variance)), obs=y)


try:
    Driver(ConditionalGibbs(with_outliers), num_warmup=0, num_samples=10, progress_bar=False).run(
        0, x_train, y_train
    )
except StructureError as refusal:
    print(refusal)

plt.show()
