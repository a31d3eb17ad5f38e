"""
A line through the columns
==========================

What the model is for, and what the page shows.
"""

# %%
# A fit
# -----
# Data that the model itself has drawn, so that the truth is known.
import arviz as az
import matplotlib.pyplot as plt
from jax import random
from numpyro.infer import NUTS

from diagnostics import report
from gallery.pages.text.mine import mine, simulate
from inference import Driver

data = simulate(random.key(0))
driver = Driver(NUTS(mine), num_warmup=300, num_samples=500, num_chains=2, progress_bar=False)
tree = driver.run(0, **data)
print(az.summary(tree, kind="stats"), report(tree).headline, sep="\n\n")
az.plot_forest(tree, var_names=["weights"], figure_kwargs={"layout": "constrained"})
plt.gcf().suptitle("Slopes, with credible intervals")

# %%
# Change this line, expect that
# -----------------------------
# *Half of the rows*: intervals are wider by a factor of about the root of two.
half = {name: value[: len(value) // 2] for name, value in data.items()}
wider = driver.run(0, **half)
deviation = lambda each: each["posterior"]["weights"].std(("chain", "draw")).mean()
print(f"intervals are {float(deviation(wider) / deviation(tree)):.2f} times as wide")
figure, ax = plt.subplots(layout="constrained")
for label, each in {"all rows": tree, "half": wider}.items():
    ax.hist(each["posterior"]["weights"][..., 0].values.ravel(), 40, alpha=0.6, label=label)
ax.set(xlabel="first slope", ylabel="draws", title="The first slope, from all rows and from half")
ax.legend()

plt.show()
