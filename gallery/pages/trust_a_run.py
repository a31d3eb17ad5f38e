"""
Whether to trust a run
======================

The same model fitted twice: once so that the sampler fails without stopping, once so that it does
not. This page shows what a failed run looks like, what :func:`diagnostics.report` says of it, and
the questions that stay open after a run is trusted: does the model fit the data, does the prior
decide the answer, is another model better, and is the sampler itself right?
"""

# %%
# The page runs in half a minute on two cores; ``ZOO_PAGES=full`` makes the runs longer.
import os
import warnings

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import reparam
from numpyro.infer import NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.reparam import LocScaleReparam
from numpyro.infer.util import log_density
from numpyro.optim import Adam

from diagnostics import compare, plot_calibration_ecdf, plot_elbo, report, sbc, with_kernel
from inference import Driver

FULL = os.environ.get("ZOO_PAGES") == "full"
DRAWS, STEPS, REPLICATES = (4000, 10_000, 1000) if FULL else (1000, 2000, 100)

WHOLE = {"figure_kwargs": {"figsize": (7.5, 3.4), "layout": "constrained"}}


def title(picture, text, ylabel=""):
    """A title over all of ArviZ's panels; the site takes it as the text for those who do not see
    the picture.
    """
    picture.viz["figure"].item().suptitle(text)
    picture.viz["figure"].item().supylabel(ylabel, fontsize="medium")


# %%
# One model, two forms
# --------------------
# Eight schools coached their pupils for a test (Rubin 1981, *Journal of Educational Statistics* 6).
# Each reports an effect and its standard error, in points. The true effects :math:`\theta_j`
# scatter with :math:`\tau` about a mean :math:`\mu`:
#
# .. math:: y_j \sim \mathrm{N}(\theta_j, \sigma_j), \qquad \theta_j \sim \mathrm{N}(\mu, \tau).
effect = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
sigma = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def schools(sigma, effect=None):
    """Coaching effects that are alike."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfNormal(5.0))
    with numpyro.plate("school", len(sigma)):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("effect", dist.Normal(theta, sigma), obs=effect)


# %%
# As it stands, NUTS moves :math:`\theta`. Non-centred, it moves :math:`z = (\theta - \mu) / \tau`
# and the model computes :math:`\theta`. That is the same model: the log joints differ by the
# Jacobian of the map, :math:`8 \log \tau`, and by nothing else.
noncentred = reparam(schools, config={"theta": LocScaleReparam(centered=0.0)})

z = jax.random.normal(jax.random.key(0), sigma.shape)
at = {"mu": jnp.array(4.0), "tau": jnp.array(3.0)}
centred_joint = log_density(
    schools, (sigma, effect), {}, {**at, "theta": at["mu"] + at["tau"] * z}
)[0]
noncentred_joint = log_density(noncentred, (sigma, effect), {}, {**at, "theta_decentered": z})[0]
print(
    f"log joints: {centred_joint + 8 * jnp.log(at['tau']):.4f} centred, with the Jacobian; "
    f"{noncentred_joint:.4f} non-centred"
)

# %%
# The bad run and the good run
# ----------------------------
# The same kernel, settings and seed; ``groups`` asks for what the checks further down need. Both
# runs take somewhat smaller steps than NumPyro's default acceptance of 0.8: with that, the good run
# has a divergence or two with some seeds.
GROUPS = ("log_likelihood", "log_prior", "posterior_predictive", "prior")


def run(model, groups=(), accept=0.9):
    """NUTS on the eight schools."""
    kernel = NUTS(model, target_accept_prob=accept)
    driver = Driver(
        kernel, num_warmup=DRAWS, num_samples=DRAWS, num_chains=4, groups=groups, progress_bar=False
    )
    return driver.run(0, sigma, effect)


bad, good = run(schools), run(noncentred, GROUPS)
print("BAD", report(bad).text, sep="\n")

# %%
# The first line, below the word BAD, is the conclusion: it names the checks that failed. Below it
# each check stands with its figures. Read the failed ones, marked NO; they tell one story.
# *Divergences*: there is a region that the integrator could not enter. *E-BFMI*: the energy drifts
# too slowly from draw to draw. *ESS* and *R-hat*: the effective sample size is small, and the
# chains disagree.
print("GOOD", report(good).text, sep="\n")

# %%
# Where it goes wrong
# -------------------
# Plot an effect against :math:`\log\tau`. When the schools are nearly alike, :math:`\tau` is small
# and all :math:`\theta_j` are squeezed together: a funnel, whose neck is too narrow for a step size
# that suits its mouth. Divergences (orange) gather where the sampler turns back, and below them
# draws are missing that the good run has. Whatever the bad run says about a small :math:`\tau` is
# wrong.
figure, axes = plt.subplots(
    1, 2, sharex=True, sharey=True, figsize=(7.5, 3.4), layout="constrained"
)
figure.suptitle("The funnel: the bad run does not reach its neck")
for ax, name, tree in zip(axes, ("bad: centred", "good: non-centred"), (bad, good), strict=True):
    theta, log_tau = tree.posterior["theta"].sel(school=0), np.log(tree.posterior["tau"])
    diverging = tree.sample_stats["diverging"].astype(bool)
    ax.scatter(theta, log_tau, s=4, alpha=0.4, color="C0", linewidths=0, label="draw")
    ax.scatter(
        theta.values[diverging], log_tau.values[diverging], s=14, color="C1", label="divergence"
    )
    ax.set(title=name, xlabel=r"effect $\theta_0$ of the first school (points)")
axes[0].set_ylabel(r"$\log\,\tau$")
axes[0].legend(loc="lower right", markerscale=1.5)
smallest = [float(tree.posterior["tau"].quantile(0.01)) for tree in (bad, good)]
print("one draw of tau in a hundred lies below {:.3f} (bad), {:.3f} (good)".format(*smallest))

# %%
# Traces show the same in time: bad chains stick to one place for dozens of draws (black ticks:
# divergences), and their densities differ.
for name, tree in (("bad", bad), ("good", good)):
    picture = az.plot_trace_dist(tree, var_names=["mu", "tau"], compact=False, **WHOLE)
    title(picture, f"Traces of the {name} run (points)")

# %%
# Ranks of each chain's draws among all: flat where the chains agree. ArviZ blackens the stretches
# that make them differ.
for name, tree in (("bad", bad), ("good", good)):
    picture = az.plot_rank(tree, var_names=["mu", "tau"], visuals={"remove_axis": False}, **WHOLE)
    title(picture, f"Ranks of the {name} run", "ECDF minus uniform")

# %%
# Energies: where the steps (orange) are much narrower than the whole (blue), the chain takes long
# to cross it. Left: E-BFMI by chain.
for name, tree in (("bad", bad), ("good", good)):
    picture = az.plot_energy(tree, **WHOLE)
    title(picture, f"Energies of the {name} run (nats)")

# %%
# What to do
# ----------
# The report offers two ways. Smaller steps (``target_accept_prob``) treat the symptom, divergences:
# the neck stays as hard to reach. The non-centred form of the model removes the cause. With many
# more data in each school it would be the other way round: there the centred form is the good one.
careful = report(run(schools, accept=0.99))
for name, found in {
    "centred": report(bad),
    "centred, smaller steps": careful,
    "non-centred": report(good),
}.items():
    count, least = found["divergences"].figures["count"], found["bulk ESS"].figures["least"]
    print(
        f"{name:24}{found.conclusion:14}divergences {count:3d}   E-BFMI "
        f"{found['E-BFMI'].figures['least']:.2f}   ESS {least:5.0f}"
    )

# %%
# Does the model fit?
# -------------------
# A trusted run is a right answer, perhaps to a wrong question. Before the data (prior predictive),
# the model should find effects of some tens of points possible, and not of thousands. After them
# (posterior predictive), data that it draws should look like those observed. ArviZ draws both.
for group, when in (("prior_predictive", "Prior"), ("posterior_predictive", "Posterior")):
    seen = {"observed_dist": {"color": "black"}, "title": False, "remove_axis": False}
    picture = az.plot_ppc_dist(good, group=group, num_samples=50, visuals=seen, **WHOLE)
    title(
        picture,
        f"{when} predictive (blue) and observed (black) effects (points)",
        "share of the schools below",
    )

# %%
# Does the prior decide? ArviZ raises the prior, then the likelihood, to a power near one, and
# measures how far the posterior goes. The priors in question are those of :math:`\mu` and
# :math:`\tau`. Above 0.05 is sensitive. Eight schools say little about :math:`\tau`, and they pull
# :math:`\mu` away from its prior's zero: both priors should be defended, or varied.
print(az.psense_summary(good, var_names=["mu", "tau"], prior_var_names=["mu", "tau"]))

# %%
# Is another model better?
# ------------------------
# Complete pooling: one effect for all. The comparison is a table with a column ``unsafe``; read
# that before the ranking.


def pooled(sigma, effect=None):
    """One effect for all schools."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    with numpyro.plate("school", len(sigma)):
        numpyro.sample("effect", dist.Normal(mu, sigma), obs=effect)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it says the same as the column
    table = compare({"schools": good, "pooled": run(pooled, GROUPS[:1])})
print(table[["rank", "elpd", "se", "elpd_diff", "dse", "high_k"]].round(2))
for name, reason in table["unsafe"].items():
    print(f"{name}: {reason or 'nothing against its place'}")

# %%
# An approximation of the same model
# ----------------------------------
# SVI climbs the ELBO. That the ELBO has settled says nothing about how good the guide can be; the
# Pareto k-hat of the importance weights :math:`p(x, \theta) / q(\theta)` does. Above the limit the
# guide is too far from the posterior to be mended by weighting. Independent normals cannot bend
# into the funnel of the centred form. The non-centred form is a border case: k-hat, itself an
# estimate, came out between 0.45 and 0.79 in six longer starts. Where it is above the limit by less
# than its own error the report is undecided; start several times, read the worst, and prefer the
# NUTS run where there is one.
for name, model in (("centred", schools), ("non-centred", noncentred)):
    svi = SVI(model, AutoNormal(model), Adam(0.01), Trace_ELBO(num_particles=4))
    driver = Driver(
        svi, num_warmup=STEPS, num_samples=4000, num_chains=2, groups=GROUPS[:2], progress_bar=False
    )
    tree = driver.run(0, sigma, effect)
    found = report(tree)
    print(
        f"{name}: {found.conclusion}; Pareto k-hat {found['Pareto k-hat'].figures['largest']:.2f}: "
        f"{found['Pareto k-hat'].reason}"
    )
ax = plot_elbo(tree)
ax.set(ylim=(-36.0, -30.0))
ax.set_title("ELBO of the guide for the non-centred form, two starts", fontsize="medium")
print(found.text)

# %%
# Is the sampler right?
# ---------------------
# No report can see a sampler that explores the wrong posterior well. NumPyro adds the Jacobian of
# :math:`\tau = e^u` by itself; suppose that someone adds it once more. The run is trusted, and
# wrong.


def twice(model):
    """The model with the Jacobian of a positive site counted a second time."""

    def counted(sigma, effect=None):
        numpyro.factor(
            "jacobian",
            jnp.log(numpyro.handlers.trace(model).get_trace(sigma, effect)["tau"]["value"]),
        )

    return counted


wrong = run(twice(noncentred))
print(
    f"{report(wrong).conclusion}: tau has mean {float(wrong.posterior['tau'].mean()):.1f}, not "
    f"{float(good.posterior['tau'].mean()):.1f}"
)

# %%
# Simulation-based calibration can: draw :math:`(\theta, y)` from the model, fit :math:`y`, and rank
# the :math:`\theta` that made it among the draws. Ranks are uniform when the sampler is right. A
# curve that leaves the band has failed.
for name, kernel in (("right", NUTS), ("wrong", lambda model: NUTS(twice(model)))):
    fit = with_kernel(kernel, num_warmup=200, num_samples=155, thinning=5)
    found = sbc(noncentred, fit, sigma, effect, num_replicates=REPLICATES)
    print(f"{name} sampler:", *found.text.splitlines()[:2])
    picture = plot_calibration_ecdf(found, var_names=["mu", "tau", "log_likelihood"], **WHOLE)
    title(picture, f"Calibration of the {name} sampler", "ECDF minus uniform")

plt.show()
