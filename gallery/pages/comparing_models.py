r"""
Comparing models: evidence, LOO, held-out score
===============================================

Four classifiers on one table, asked three questions. How probable does a model find the table as a
whole (evidence)? How well does it predict each label from the others (LOO)? How well does it
predict rows that it has not seen (held-out score)? The three need not agree: the first asks about
the features too, the others about the labels alone.
"""

# %%
# Data
# ----
# Wine, and with ``ZOO_PAGES=full`` the breast cancer table as well. Half of the rows are for
# learning; columns are standardised by them.
import os
import warnings

import matplotlib.pyplot as plt
import numpy as np
from numpyro.infer import NUTS

from diagnostics import accuracy, compare, log_score
from gallery import AClassClassifier, AugmentReduceClassifier, IQGMEClassifier
from gallery.datasets import load
from inference import Driver
from zoo.augment_reduce import augment_reduce

FULL = os.environ.get("ZOO_PAGES") == "full"
SETS, DRAWS = (("wine", "wdbc"), 500) if FULL else (("wine",), 60)


def halves(name):
    """Rows to learn from and rows to be asked, and their classes."""
    data = load(name)
    order = np.random.default_rng(0).permutation(len(data.y))
    train, test = order[::2], order[1::2]
    x = (data.x - data.x[train].mean(0)) / data.x[train].std(0)
    return x[train], data.y[train], x[test], data.y[test]


# %%
# Held-out score
# --------------
# AClass, AClass with one group a class (naive Bayes), local experts, and a softmax. The log score
# is the mean log probability of the true class: it punishes confident errors.
classifiers = {
    "AClass": lambda: AClassClassifier(random_state=0),
    "naive Bayes": lambda: AClassClassifier(1, num_orders=1, max_groups=1, random_state=0),
    "iQGME": lambda: IQGMEClassifier(truncation=6, tolerance=1e-4, random_state=0),
    "softmax": lambda: AugmentReduceClassifier(max_iter=3000, random_state=0),
}
fitted, scores = {}, {}
for data in SETS:
    x, y, x_new, y_new = halves(data)
    for name, make in classifiers.items():
        fitted[data, name] = make().fit(x, y)
        found = fitted[data, name].predict_proba(x_new)
        scores[data, name] = log_score(y_new, found), accuracy(y_new, found)
        print(
            f"{data:6}{name:14}log score {scores[data, name][0]:.3f}, accuracy "
            f"{scores[data, name][1]:.3f}"
        )
figure, axes = plt.subplots(
    1, len(SETS), figsize=(4 + 2.5 * len(SETS), 2.8), layout="constrained", squeeze=False
)
figure.suptitle("Rows that were held out")
for ax, data in zip(axes[0], SETS, strict=True):
    ax.barh(list(classifiers), [scores[data, name][0] for name in classifiers], color="C0")
    ax.set(xlabel="mean log score (nats)", title=data)

# %%
# Evidence
# --------
# The density of rows and labels together, with the parameters integrated out. AClass estimates it
# (without bias, before the logarithm); that of naive Bayes is exact; iQGME gives a lower bound. The
# softmax is a model of labels given features and has no density of rows. Its evidence is not
# comparable, so it is not in this table.
evidence = {
    (data, name): getattr(each, "log_evidence_", getattr(each, "elbo_", np.nan))
    for (data, name), each in fitted.items()
    if name != "softmax"
}
for (data, name), value in evidence.items():
    print(f"{data:6}{name:14}{'at least' if name == 'iQGME' else ''} {value:.1f} nats")

# %%
# Change this line, expect that
# -----------------------------
# *One group a class* is one argument of AClass. The difference of the log-evidences says what
# groups within the classes are worth, in nats: positive where the data support them, negative where
# one group is enough.
for data in SETS:
    print(
        f"{data}: groups are worth {evidence[data, 'AClass'] - evidence[data, 'naive Bayes']:.1f} "
        "nats"
    )

# %%
# LOO
# ---
# Two variants of one model of labels, a softmax and a model with normal noise, run by NUTS with the
# log-likelihood of each row kept. :func:`~diagnostics.compare` ranks them by the expected log
# predictive density. Its column ``unsafe`` says which ranks cannot be trusted; with the few draws
# that this page makes by default, no rank can.
x, y, *_ = halves(SETS[0])
driver = Driver(
    NUTS(augment_reduce),
    num_warmup=DRAWS,
    num_samples=2 * DRAWS,
    groups=("log_likelihood",),
    progress_bar=False,
)
trees = {
    noise: driver.run(0, x, y, num_classes=int(y.max()) + 1, noise=noise, augmented=False)
    for noise in ("gumbel", "normal")
}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it says what the column says
    table = compare(trees)
print(table[["rank", "elpd", "se", "elpd_diff", "dse", "high_k"]].round(2))
for name, reason in table["unsafe"].items():
    print(f"{name}: {reason or 'nothing against its place'}")

# %%
# *Another prior* of the weights (``prior_scale``) is a third variant: LOO says what it costs or
# gains in prediction.
trees["gumbel, wide"] = driver.run(
    0, x, y, num_classes=int(y.max()) + 1, prior_scale=3.0, augmented=False
)
figure, ax = plt.subplots(figsize=(6, 2.6), layout="constrained")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    table = compare(trees)
ax.errorbar(table["elpd"], np.arange(len(table)), xerr=table["se"], fmt="o", capsize=3)
ax.set(
    yticks=range(len(table)),
    yticklabels=list(table.index),
    xlabel="expected log predictive density (nats)",
    title="LOO, with its error",
)
print(table[["elpd", "se"]].round(2))

plt.show()
