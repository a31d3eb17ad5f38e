"""How many experts iQGME finds in three Gaussians, each cut by a line of its own, as in Figures 3.2
to 3.4 of the thesis:

    python -m tests.bench.iqgme_experts FIGURE.png

An expert counts where its weight is more than .005, as in the thesis; the number is that of draws
of the weights from the prior or from the posterior that variational Bayes fits.
"""

import argparse
import warnings
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import multivariate_normal, norm
from sklearn.exceptions import ConvergenceWarning

from gallery import IQGMEClassifier
from gallery.datasets import load
from gallery.generators import COVARIANCES, LINES, MEANS

LEAST, TRUNCATION, DRAWS = 0.005, 20, 2000


def weights(V):
    """[draw, expert]"""
    one = np.ones((len(V), 1))
    return np.hstack([V, one]) * np.hstack([one, np.cumprod(1 - V, 1)])


def distribution(weight):
    """How probable each number of experts is, from 0 on."""
    return np.bincount((weight > LEAST).sum(1), minlength=TRUNCATION + 1) / len(weight)


def of_prior():
    """Draws of alpha and of the weights."""
    rng = np.random.default_rng(0)
    alpha = rng.gamma(0.05, 1 / 0.05, DRAWS)
    return alpha, weights(rng.beta(1, np.maximum(alpha, 1e-300)[:, None], (DRAWS, TRUNCATION - 1)))


def fitted(x, y, **options):
    """The model, and its draws of all sites."""
    model = IQGMEClassifier(TRUNCATION, num_samples=DRAWS, random_state=0, **options).fit(x, y)
    draws = model.posterior_["posterior"].dataset.isel(chain=0)
    return model, {name: draws[name].values for name in ("alpha", "V", "mu", "Lambda", "w")}


def listed(share):
    return ", ".join(f"{k}: {each:.2f}" for k, each in enumerate(share) if each >= 0.005)


def in_own_units(model, draws):
    """Posterior means of each expert's centre, covariance, and line (slope, intercept), of the
    columns as they were.
    """
    shift, scale = model._standardiser.mean, model._standardiser.scale
    covariance = np.linalg.inv(draws["Lambda"]).mean(0) * scale[:, None] * scale
    slopes, bias = draws["w"].mean(0)[0, :, :2] / scale, draws["w"].mean(0)[0, :, 2]
    bias = bias - slopes @ shift
    return (
        draws["mu"].mean(0) * scale + shift,
        covariance,
        np.stack([-slopes[:, 0] / slopes[:, 1], -bias / slopes[:, 1]], 1),
        (slopes, bias),
    )


def drawn_experts(ax, x, y, centres, covariances, lines):
    """Two deviations of each Gaussian, and its line there."""
    ax.scatter(*x.T, c=np.where(y, "tab:red", "tab:blue"), s=5, alpha=0.5)
    turn = np.linspace(0, 2 * np.pi, 100)
    for centre, covariance, (slope, intercept) in zip(centres, covariances, lines, strict=True):
        ax.plot(
            *(centre[:, None] + 2 * np.linalg.cholesky(covariance) @ [np.cos(turn), np.sin(turn)]),
            "k--",
            lw=1,
        )
        reach = 2 * np.sqrt(covariance[0, 0])
        at = centre[0] + np.array([-reach, reach])
        ax.plot(at, slope * at + intercept, "k", lw=1.5)
        ax.plot(*centre, "ko", ms=4)
    ax.set(xlim=(-6, 8), ylim=(-4, 4))


def predicted(ax, probability, title):
    first, second = np.meshgrid(np.linspace(-6, 8, 90), np.linspace(-4, 4, 60))
    value = np.clip(
        probability(np.column_stack([first.ravel(), second.ravel()])).reshape(first.shape), 0, 1
    )
    ax.contourf(first, second, value, np.linspace(0, 1, 11), cmap="RdBu_r")
    ax.contour(first, second, value, [0.5], colors="k", linewidths=1)
    ax.set(title=title)
    return value


def three(target):
    """Prints what is inferred beside the truth, and draws it."""
    data = load("three_gaussians", num_rows=600, seed=1)
    model, draws = fitted(data.x, data.y, tolerance=1e-6, max_iter=3000)
    weight, (alpha, prior) = weights(draws["V"]), of_prior()
    mean, deviation = weight.mean(0), weight.std(0)
    kept = np.argsort(-mean)[: (mean > LEAST).sum()]
    centres, covariances, lines, (slopes, bias) = in_own_units(model, draws)
    print("| weight | centre | slope, intercept | truth |\n|---|---|---|---|")
    for h in kept:
        true = np.argmin(((MEANS - centres[h]) ** 2).sum(1))
        told = lambda pair: ", ".join(f"{value:.2f}" for value in pair)
        print(
            f"| {mean[h]:.3f} ± {deviation[h]:.3f} | {told(centres[h])} | {told(lines[h])} | "
            f"{told(MEANS[true])}; {told(LINES[true])} |"
        )
    print(
        f"number of experts, prior: {listed(distribution(prior))}\nposterior: "
        f"{listed(distribution(weight))}"
    )
    for name, values in (("prior", alpha), ("posterior", draws["alpha"])):
        print(
            f"quartiles of alpha, {name}: "
            + ", ".join(f"{each:.2g}" for each in np.quantile(values, (0.25, 0.5, 0.75)))
        )

    figure = Figure(figsize=(15, 6), layout="constrained")
    axes = figure.subplots(2, 4)
    drawn_experts(axes[0, 0], data.x, data.y, MEANS, COVARIANCES, LINES)
    axes[0, 0].set(title="truth")
    drawn_experts(axes[0, 1], data.x, data.y, centres[kept], covariances[kept], lines[kept])
    axes[0, 1].set(title="experts that were found")
    axes[0, 2].errorbar(np.arange(TRUNCATION) + 1, mean, deviation, fmt="o", ms=4)
    axes[0, 2].set(title="weights", xlabel="expert")
    for name, share, offset in (
        ("prior", distribution(prior), -0.2),
        ("posterior", distribution(weight), 0.2),
    ):
        axes[0, 3].bar(np.arange(len(share)) + offset, share, 0.4, label=name)
    for name, values in (("prior", alpha), ("posterior", draws["alpha"])):
        axes[1, 0].hist(np.log10(np.maximum(values, 1e-6)), 40, density=True, alpha=0.6, label=name)
    axes[0, 3].set(title="number of experts")
    axes[1, 0].set(title="log10 of alpha (less than -6 at -6)")
    axes[0, 3].legend()
    axes[1, 0].legend()

    def at_means(x):
        density = (
            np.stack(
                [mean[h] * multivariate_normal.pdf(x, centres[h], covariances[h]) for h in kept], 1
            )
            + 1e-300
        )
        return (
            density / density.sum(1, keepdims=True) * norm.cdf(x @ slopes[kept].T + bias[kept])
        ).sum(1)

    whole = predicted(
        axes[1, 1], lambda x: model.predict_proba(x)[:, 1], "class 1, by the posterior"
    )
    plain = predicted(axes[1, 2], at_means, "class 1, by posterior means")
    sure = [np.mean(abs(value - 0.5) > 0.45) for value in (whole, plain)]
    print(
        f"share of the plane where a class is surer than .95: by the posterior {sure[0]:.2f}, by "
        f"posterior means {sure[1]:.2f}"
    )
    axes[1, 3].boxplot([draws["w"][:, 0, h, j] for h in kept for j in range(3)], showfliers=False)
    axes[1, 3].set_xticklabels([f"{k + 1}{entry}" for k in range(len(kept)) for entry in "xyb"])
    axes[1, 3].set(title="weights of the linear classifiers")
    figure.savefig(target, dpi=110)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figure", type=Path)
    told = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)
    three(told.figure)


if __name__ == "__main__":
    main()
