r"""
Staged learning: clusters that classify, and how many there are
===============================================================

Rows come from clusters, and each cluster has its own probabilities of the classes. The number of
clusters, the *order*, is unknown: nested sampling fits a model of each order and finds its
evidence, and the evidences weigh the orders. Rows may come in stages: the posterior of a stage is
summarised, and the next stage looks at its own rows alone (Center 2009, *Learning complex
classification models from large data sets*; the paper describes the method, and has no experiment).
"""

# %%
# The story:
#
# .. math::
#    m \sim p(m), \qquad p(x, k \mid \theta) = \sum_{c=1}^{m} \gamma_{ck}\, \beta_c\, \phi(x; \mu_c, \sigma_c), \qquad
#    p(k \mid x) \approx \sum_m p(m \mid \mathrm{data})\, \frac{1}{S} \sum_{s=1}^{S} p(k \mid x, \theta_{ms}).
#
# .. model-source:: zoo.staged_learning.staged_learning
import os
import warnings
from functools import partial
from time import process_time

import arviz as az
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import xarray as xr
from jax import random
from numpyro.infer import Predictive
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier

from diagnostics import plot_evidence, report
from gallery import StagedMixtureClassifier
from inference import Driver, NestedSampler, Staged, StructureError, run_orders
from zoo.staged_learning import family, order_prior

FULL = os.environ.get("ZOO_PAGES") == "full"
LIVE, SWEEPS, ORDERS = (200, 3.0, 5) if FULL else (60, 1.5, 3)
# with the settings of a quick page the last order may be the most probable
warnings.simplefilter("ignore", ConvergenceWarning)

# %%
# Fit
# ---
# Two classes in the plane; the second lies on both sides of the first, so no line separates them.
rng = np.random.default_rng(1)
which = rng.choice(3, 120, p=[0.4, 0.3, 0.3])
x = np.array([[0.0, 0.0], [-2.5, 0.5], [2.5, -0.5]])[which] + rng.normal(size=(120, 2)) * [0.7, 0.9]
y = np.where(which == 0, "inner", "outer")
train, test = slice(0, 80), slice(80, None)
told = {"num_live": LIVE, "num_sweeps": SWEEPS, "random_state": 0}
started = process_time()
fitted = StagedMixtureClassifier(max_order=ORDERS, **told).fit(x[train], y[train])
spent = process_time() - started


def scores(classifier):
    """Log score and accuracy on the rows held out."""
    found = classifier.predict_proba(x[test])[
        np.arange(len(x[test])), np.searchsorted(classifier.classes_, y[test])
    ]
    return (
        f"log score {np.log(np.maximum(found, 1e-9)).mean():.3f}, accuracy "
        f"{classifier.score(x[test], y[test]):.3f}"
    )


TOLD = ["log_evidence", "log_evidence_se", "probability", "probability_se"]
print(fitted.posterior_["orders"].to_dataset()[TOLD].to_dataframe().round(3))
print("clusters, averaged over orders:", scores(fitted))
for rival in (LogisticRegression(), GaussianNB(), KNeighborsClassifier(9)):
    print(f"{type(rival).__name__:31}", scores(rival.fit(x[train], y[train])))

# %%
# Left: how probable each order is. Right: the clusters of twenty draws of the best order, drawn at
# one standard deviation.
figure, (left, right) = plt.subplots(
    1, 2, figsize=(8.5, 3.6), width_ratios=(1, 1.4), layout="constrained"
)
left.bar(fitted.orders_, fitted.order_posterior_, color="C0", label="posterior")
prior = np.exp(np.asarray(order_prior().log_prob(fitted.orders_)))
left.plot(fitted.orders_, prior / prior.sum(), "o--", color="0.4", label="prior")
left.set(xlabel="clusters", ylabel="probability", title="Orders", xticks=fitted.orders_)
left.legend(frameon=False)
best = fitted.posterior_[f"order_{fitted.orders_[fitted.order_posterior_.argmax()]}"]
z = (x - x[train].mean(0)) / x[train].std(0)
for label, color in (("inner", "C1"), ("outer", "C2")):
    right.scatter(*z[train][y[train] == label].T, s=12, color=color, label=label)
angle = np.linspace(0, 2 * np.pi, 60)
drawn = best["posterior"].dataset.isel(chain=0, draw=slice(0, 20))
for mu, sigma in zip(
    drawn["mu"].values.reshape(-1, 2), drawn["sigma"].values.reshape(-1, 2), strict=True
):
    right.plot(
        mu[0] + sigma[0] * np.cos(angle),
        mu[1] + sigma[1] * np.sin(angle),
        color="0.4",
        lw=0.4,
        alpha=0.6,
    )
right.set(
    xlabel="first column (deviations)",
    ylabel="second column",
    title="Clusters of the best order, 20 draws",
)
right.legend(frameon=False)

# %%
# Inspect
# -------
# The run of each order is a tree for ArviZ. Labels of clusters are arbitrary (label switching), so
# look at what does not depend on them, such as the largest share of all. Then read the report. The
# line with the question mark needs replicates: one run cannot show by how much runs differ.
# ``walks`` says whether new live points forget where they started; where they do not, the evidence
# may be off by some claimed errors. A mode that no live point has found leaves no trace in any
# check: fit with two seeds and compare.
posterior = best["posterior"].to_dataset()
largest = posterior.assign(largest_share=posterior["beta"].max("cluster"))
print(az.summary(largest, var_names=["largest_share"], kind="stats"))
print(report(best).text)
figure, ax = plt.subplots(figsize=(6, 3.4), layout="constrained")
plot_evidence(best, ax=ax)
ax.set_title("The evidence of the best order over the shrinkage of where it starts")

# %%
# Does it fit?
# ------------
# The model of the best order draws tables after the fit: their first column, next to that of the
# rows learned from.
order = int(fitted.orders_[fitted.order_posterior_.argmax()])
of_draws = {str(name): values.values[0] for name, values in best["posterior"].data_vars.items()}
drawn = Predictive(family(order), of_draws)(random.key(0), shape=x[train].shape)
seen = best["observed_data"].to_dataset()[["x"]]
tables = xr.Dataset({"x": (("chain", "draw", "row", "feature"), np.asarray(drawn["x"])[None])})
picture = az.plot_ppc_dist(
    xr.DataTree.from_dict({"posterior_predictive": tables, "observed_data": seen}),
    coords={"feature": 0},
    kind="kde",
    num_samples=50,
    visuals={"observed_dist": {"color": "black"}, "title": False, "remove_axis": False},
    figure_kwargs={"figsize": (6, 3), "layout": "constrained"},
)
figure = picture.viz["figure"].item()
figure.suptitle("First column: drawn (blue) and observed (black)")
figure.supxlabel("standard deviations", fontsize="medium")
figure.supylabel("density", fontsize="medium")

# %%
# What it costs
# -------------
# A likelihood looks at all rows and all clusters. Where a search has found the posterior, most new
# live points are independent draws from what it found. Where it has not, each new point walks some
# steps for each latent number, and the number of likelihoods grows with the square of the order or
# faster. The number of likelihoods that each order has taken:
number = [int(fitted.posterior_[f"order_{m}"].attrs["num_evaluations"]) for m in fitted.orders_]
print(
    f"{spent:.0f} s of CPU time with the compiler's; likelihoods by order:",
    dict(zip(fitted.orders_.tolist(), number, strict=True)),
)

# %%
# In stages
# ---------
# ``partial_fit`` is one stage: earlier rows are not looked at again. Their posterior is kept as a
# summary, a mixture of normal distributions that is fitted to the slopes of the log posterior as
# well as to its points. What the summary loses, more the fewer the rows, is in the error of the
# evidence, as ``summary_error``; the report says how many nats a summary costs.
#
# ``fit`` may deal its rows out to stages. A stage with too few rows for a good summary then begins
# again with more. Whenever the rows have doubled, some draws are weighed by all rows, so that a run
# that outliers among its first rows have misled begins again. The rows of an earlier
# ``partial_fit`` are gone, and cannot be weighed. Where later rows lead to where nothing was likely
# before, as rows sorted by class do, the earlier ones are forgotten, and a warning says so. Columns
# keep the units of the first call, so the evidence is not that of ``fit``. Later calls learn for
# the orders that the first call has tried, and warn where the highest of them is the most probable.
#
# On a thousand rows in ten stages the evidence of the default was right to .04 nats
# (``tests/bench/staged.md``). The paper's own summary is a set of clumps on the Hilbert curve of
# each site (``Staged(model, summary="code")``); the curve tears round clusters apart, and the
# evidence was off by 39 nats. Streaming variational Bayes was off by 132. ``DataTempering(model)``
# (iterated batch importance sampling) keeps particles in place of a summary and looks at all rows
# so far again; it was right to .7 nats, for forty times the likelihoods. ``MergedStages(drivers)``
# combines what workers have learned from rows of their own.
parts = StagedMixtureClassifier(3, **told)
for part in (slice(0, 40), slice(40, 80)):
    parts.partial_fit(x[part], y[part], classes=["inner", "outer"])
    attrs = parts.posterior_["order_3"].attrs
    evidence = (
        f"log-evidence {attrs['log_evidence']:.1f} ± {attrs['log_evidence_se']:.1f}, of "
        f"which summaries {attrs['summary_error']:.1f}"
    )
    print(f"order 3, {int(attrs['num_stages'])} stage(s): {evidence}; {scores(parts)}")

# %%
# Change this line, expect that
# -----------------------------
# *Clusters with far outliers*: ``cluster`` is the density of a cluster, a function of the model's
# plates. In place of ``DiagonalNormal(mu, sigma)`` take a Student's t: the sampler follows, and the
# evidence says whether these data asked for it. (They are normal, so it should not be higher by
# much.)


def heavy(at, loc=0.0, scale=3.0):
    """Columns of a cluster are Student's t."""
    return dist.StudentT(4.0, at.where(loc, scale), at.width(-0.5, 0.6)).to_event(1)


other = StagedMixtureClassifier(3, cluster=heavy, **told).fit(x[train], y[train])
for name, found in (("normal", fitted), ("Student's t", other)):
    attrs = found.posterior_["order_3"].attrs
    print(
        f"three clusters, {name:11} log-evidence {attrs['log_evidence']:.1f} ± "
        f"{attrs['log_evidence_se']:.1f}, {scores(found)}"
    )

# %%
# *Another family*: a function of the order that returns a NumPyro model may stand in place of the
# mixture. Here it is a network with one hidden layer, whose order is the number of its nodes. The
# bump that it learns goes up and down again, which takes two nodes. Nodes may change places, as
# clusters may (label switching), and the sampler relabels them.


def network(nodes):
    """A network of some nodes."""

    def model(place, height):
        with numpyro.plate("node", nodes):
            slope = numpyro.sample("slope", dist.HalfNormal(3.0))
            offset = numpyro.sample("offset", dist.Normal(0.0, 3.0))
            weight = numpyro.sample("weight", dist.Normal(0.0, 1.0))
        with numpyro.plate("row", len(place)):
            numpyro.sample(
                "height", dist.Normal(outputs(place, slope, offset, weight), 0.2), obs=height
            )

    return model


def outputs(place, slope, offset, weight):
    """The output of the network at each place."""
    return jnp.tanh(slope * place[:, None] + offset) @ weight


place = rng.uniform(-3, 3, 40)
height = np.exp(-(place**2)) + 0.2 * rng.normal(size=40)
kernel = partial(NestedSampler, num_live=LIVE, num_sweeps=SWEEPS)
learned = run_orders(
    0,
    network,
    order_prior(),
    place,
    height,
    kernel=kernel,
    most=ORDERS,
    settings={"progress_bar": False},
)
print(learned["orders"].to_dataset()[TOLD].to_dataframe().round(3))

# %%
# Twenty draws of each order, over the points that it has learned from.
figure, axes = plt.subplots(1, ORDERS, figsize=(8.5, 2.8), sharey=True, layout="constrained")
grid = np.linspace(-3, 3, 200)
for nodes, ax in enumerate(axes, 1):
    draws = learned[f"order_{nodes}"]["posterior"].dataset.isel(chain=0, draw=slice(0, 20))
    for values in zip(*(draws[name].values for name in ("slope", "offset", "weight")), strict=True):
        ax.plot(grid, outputs(grid, *values), color="C0", lw=0.5, alpha=0.6)
    ax.plot(place, height, ".", color="0.2", ms=4)
    ax.set_title(
        f"{nodes} node{'s' * (nodes > 1)}: "
        f"{learned['orders']['probability'].sel(order=nodes).item():.2f}"
    )
figure.suptitle("Networks, and how probable each number of nodes is")

# %%
# *A weight for each row*, such as a level of its own, would be another parameter in every stage, of
# which no later stage could learn: ``Staged`` refuses it, by the name of the site.


def levels(x):
    """Each row has its own level."""
    with numpyro.plate("row", len(x)):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        numpyro.sample("x", dist.Normal(level, 1.0), obs=x)


try:
    Driver(Staged(levels, num_stages=2), progress_bar=False).run(0, x[:, 0])
except StructureError as refusal:
    print(refusal)

# %%
# *An assignment for each row*, as mixtures are often written, is a discrete site: nested sampling
# refuses that too. The zoo's model carries out the sum over clusters.


def assigned(x):
    """Two clusters, and which of them each row is from."""
    with numpyro.plate("row", len(x)):
        k = numpyro.sample("k", dist.Bernoulli(0.5))
        numpyro.sample("x", dist.Normal(4.0 * k, 1.0), obs=x)


try:
    Driver(NestedSampler(assigned), progress_bar=False).run(0, x[:, 0])
except StructureError as refusal:
    print(refusal)

plt.show()
