r"""
Times that were not seen to the end: survival
=============================================

How long until a machine fails, a patient relapses, a customer leaves? For some rows the study ends
before the event. Their time is censored: it is known to be longer than what was seen. The Weibull
model says

.. math::

    \log t_i = \alpha + x_i^\top \beta + \epsilon_i / k, \quad
    P(t_i > t) = \exp\bigl(-(t / e^{\alpha + x_i^\top \beta})^k\bigr),

and a censored row enters by the second formula, an event by the density (Kalbfleisch and Prentice
2002). A feature stretches time: larger by 1, it makes a life :math:`e^\beta` times as long. The
model:

.. model-source:: zoo.survival.survival
"""

# %%
# A fit
# -----
# 200 rows, drawn from the model, so that the truth is known; the study ends when half of them have
# had the event. With a table of your own, whose columns are ``time``, ``event`` (1, or 0 where the
# row is censored) and features: ``zoo fit zoo/survival.py:survival --data table.csv``.
import arviz as az
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
from numpyro.infer import NUTS
from sklearn.linear_model import LinearRegression

from diagnostics import report
from inference import Driver
from zoo.survival import survival

rng = np.random.default_rng(1)
x = np.column_stack([np.arange(200) % 2, rng.normal(size=200)])
columns = ["treated", "age"]
truth = {"intercept": jnp.array(2.0), "slopes": jnp.array([0.8, -0.5]), "shape": jnp.array(1.5)}
whole = numpyro.handlers.seed(numpyro.handlers.condition(survival, truth), 1)(x, 1, None)
end = np.median(whole)
event, time = np.asarray(whole <= end).astype(int), np.minimum(whole, end)
driver = Driver(NUTS(survival), num_warmup=300, num_samples=500, num_chains=2, progress_bar=False)
tree = driver.run(0, x, event, time)
print(az.summary(tree, kind="stats"), report(tree).headline, sep="\n\n")

# %%
# The data again
# --------------
# The share of rows that live longer, by the model and by the estimate of Kaplan and Meier, which
# has no model. It ends where the study ends; the model goes on, and its band widens.
draws = {
    name: values.values.reshape(-1, *values.shape[2:])
    for name, values in tree["posterior"].dataset.items()
}


def longer(t, group, intercept, slopes, shape):
    """Mean probability to live longer than t, over the rows of a group."""
    scale = np.exp(intercept[..., None] + slopes @ x[x[:, 0] == group].T)[..., None]
    return np.exp(-((t / scale) ** shape[..., None, None])).mean(-2)


def kaplan_meier(time, event):
    """Times of events, and the share of rows that live longer."""
    at = np.unique(time[event == 1])
    died = np.array([(time[event == 1] == t).sum() / (time >= t).sum() for t in at])
    return at, np.cumprod(1 - died)


grid = np.linspace(0.01, 3 * end, 80)
known = {name: np.asarray(value, float)[None] for name, value in truth.items()}
figure, ax = plt.subplots(figsize=(6, 3.2), layout="constrained")
for group, label in enumerate(("not treated", "treated")):
    low, high = np.quantile(longer(grid, group, **draws), [0.055, 0.945], axis=0)
    ax.fill_between(grid, low, high, color=f"C{group}", alpha=0.3, label=f"{label}, 89 % interval")
    at, share = kaplan_meier(time[x[:, 0] == group], event[x[:, 0] == group])
    ax.step(np.r_[0, at, end], np.r_[1, share, share[-1]], color=f"C{group}", where="post")
    ax.plot(grid, longer(grid, group, **known)[0], "k:", label="truth" if group else None)
ax.axvline(end, color="0.5", lw=0.8, label="end of the study")
ax.set(
    xlabel="time (steps: Kaplan and Meier)",
    ylabel="share of rows that live longer",
    ylim=(0, 1.03),
    title="Survival, seen and extrapolated",
)
ax.legend()

# %%
# Beside least squares
# --------------------
# Least squares of the log of time has two ways out, and both are wrong: to take a censored time for
# an event, or to leave such rows out. Either way long lives look short, so slopes shrink.
rivals = {
    "censored as events": LinearRegression().fit(x, np.log(time)),
    "censored left out": LinearRegression().fit(x[event == 1], np.log(time[event == 1])),
}
figure, ax = plt.subplots(figsize=(7.5, 2.2), layout="constrained")
places = np.arange(len(columns))
low, high = np.quantile(draws["slopes"], [0.055, 0.945], axis=0)
ax.hlines(places, low, high, color="C0", label="survival, 89 % interval")
for (name, rival), marker in zip(rivals.items(), "x+", strict=True):
    print(f"{name:20} slopes {rival.coef_.round(2)}")
    ax.plot(rival.coef_, places, marker, color="C1", label=f"least squares, {name}")
print(
    f"{'survival':20} slopes {draws['slopes'].mean(0).round(2)}, truth {known['slopes'][0].round(2)}"
)
ax.plot(known["slopes"][0], places, "ko", ms=4, label="truth")
ax.axvline(0, color="0.7", lw=0.8)
ax.set(
    yticks=places,
    yticklabels=columns,
    ylim=(-0.6, 1.6),
    xlabel="slope (log of time)",
    title="By how much a feature stretches time",
)
ax.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))

# %%
# Change this line, expect that
# -----------------------------
# *Forget that rows are censored* (``event=1``): the model believes that the rest has failed at the
# end of the study. Lives seem shorter, and the hazard seems to rise faster than it does.
careless = driver.run(0, x, 1, time)
for name, each in {"survival": tree, "event=1": careless}.items():
    scale, shape = np.exp(each["posterior"]["intercept"]), each["posterior"]["shape"]
    print(f"{name:10} scale of time {float(scale.mean()):.1f}, shape {float(shape.mean()):.2f}")
print(f"{'truth':10} scale of time {np.exp(2.0):.1f}, shape 1.50")

plt.show()
