"""The evidence of `zoo.staged_learning` without nested sampling, for the tables of
`tests/bench/nested.md`:

    python -m tests.bench.mixture_evidence mixture iris

Gibbs chains with an allocation for each row, each from another start (what k-means finds from
random centres), their clusters in the order of one feature; a Student's t around their draws;
importance sampling from it where clusters are in that order, times m!. The model is written a
second time here, on purpose. A mode that no chain has found is not in it; a line a chain shows
whether they found the same.
"""

import argparse
from math import lgamma
from typing import NamedTuple

import numpy as np
from scipy import stats
from scipy.special import logsumexp
from sklearn.cluster import KMeans
from sklearn.datasets import load_iris

ORDER, CHAINS, SWEEPS, WARMUP, PROPOSALS = 3, 4, 2000, 500, 40_000


class Rows(NamedTuple):
    """Data, and the feature by which clusters are put in order."""

    x: np.ndarray
    y: np.ndarray | None
    num_classes: int
    feature: int


def iris() -> Rows:
    """Standardised, with its classes."""
    x, y = load_iris(return_X_y=True)
    return Rows((x - x.mean(0)) / x.std(0), y, 3, 2)


def mixture() -> Rows:
    """The mixture of `tests.bench.nested`."""
    r = np.random.default_rng(20240607)
    k = r.choice(3, 100, p=[0.5, 0.3, 0.2])
    centre, scale = (
        np.array([[-2, 0], [1.5, 1.5], [2, -2]]),
        np.array([[0.8, 1], [1, 0.6], [0.6, 0.6]]),
    )
    return Rows(centre[k] + scale[k] * r.normal(size=(100, 2)), None, 0, 0)


def free(share: np.ndarray) -> np.ndarray:
    """Log-ratios to the last of shares."""
    return np.log(share[..., :-1]) - np.log(share[..., -1:])


def log_share(ratio: np.ndarray) -> np.ndarray:
    """The way back."""
    whole = np.concatenate([ratio, np.zeros((*ratio.shape[:-1], 1))], -1)
    return whole - logsumexp(whole, axis=-1, keepdims=True)


def log_claims(
    rows: Rows, mu: np.ndarray, s: np.ndarray, log_gamma: np.ndarray | None
) -> np.ndarray:
    """[draw, row, cluster]"""
    claims = stats.norm.logpdf(rows.x[:, None], mu[:, None], np.exp(s)[:, None]).sum(-1)
    return claims if log_gamma is None else claims + log_gamma[..., rows.y].transpose(0, 2, 1)


def log_joint(rows: Rows, z: np.ndarray) -> np.ndarray:
    """[draw], at vectors of log-ratios, centres, log widths, log-ratios of classes; -inf where
    clusters are out of order.
    """
    m, d, c = ORDER, rows.x.shape[1], rows.num_classes
    ratio, mu, s, classes = np.split(z, np.cumsum([m - 1, m * d, m * d]), axis=1)
    mu, s, log_beta = mu.reshape(-1, m, d), s.reshape(-1, m, d), log_share(ratio)
    found = (
        lgamma(m)
        + log_beta.sum(-1)
        + stats.norm(0, 3).logpdf(mu).sum((1, 2))
        + stats.norm(-0.5, 0.6).logpdf(s).sum((1, 2))
    )
    log_gamma = log_share(classes.reshape(-1, m, c - 1)) if c else None
    found += 0.0 if log_gamma is None else m * lgamma(c) + log_gamma.sum((1, 2))
    found += logsumexp(log_beta[:, None] + log_claims(rows, mu, s, log_gamma), axis=-1).sum(-1)
    return np.where((np.diff(mu[..., rows.feature], axis=1) > 0).all(1), found, -np.inf)


def chain(rows: Rows, r: np.random.Generator, start: np.ndarray) -> np.ndarray:
    """Draws [sweep, size] of a Gibbs chain from the allocations `start`; widths by Metropolis
    steps.
    """
    m, (num_rows, d), c = ORDER, rows.x.shape, rows.num_classes
    k, s, drawn = start, np.full((m, d), -0.5), []
    for _ in range(SWEEPS):
        member = np.eye(m)[k]
        count = member.sum(0)[:, None]
        beta = r.dirichlet(1 + count[:, 0])
        gamma = (
            np.array([r.dirichlet(1 + np.bincount(rows.y[k == j], minlength=c)) for j in range(m)])
            if c
            else None
        )
        precision = 1 / 9 + count * np.exp(-2 * s)
        mu = member.T @ rows.x * np.exp(-2 * s) / precision + r.normal(size=(m, d)) / np.sqrt(
            precision
        )
        square = np.einsum("nk,nkd->kd", member, (rows.x[:, None] - mu) ** 2)
        s = moved_widths(r, s, count, square)
        log_claim = (
            np.log(beta)
            + log_claims(rows, mu[None], s[None], np.log(gamma)[None] if c else None)[0]
        )
        k = np.argmax(log_claim + r.gumbel(size=(num_rows, m)), axis=1)
        order = np.argsort(mu[:, rows.feature])
        parts = [
            free(beta[order]),
            mu[order].ravel(),
            s[order].ravel(),
            free(gamma[order]).ravel() if c else [],
        ]
        drawn.append(np.concatenate(parts))
    return np.array(drawn[WARMUP:])


def moved_widths(
    r: np.random.Generator, s: np.ndarray, count: np.ndarray, square: np.ndarray
) -> np.ndarray:
    """Log widths [cluster, feature] after some Metropolis steps, given the sums of squares about
    the centres.
    """
    log_density = lambda s: -count * s - square / 2 * np.exp(-2 * s) - (s + 0.5) ** 2 / (2 * 0.6**2)
    for _ in range(5):
        new = s + 2 / np.sqrt(1 / 0.36 + 2 * count) * r.normal(size=s.shape)
        s = np.where(np.log(r.random(s.shape)) < log_density(new) - log_density(s), new, s)
    return s


def evidence(rows: Rows, r: np.random.Generator, draws: np.ndarray) -> tuple[float, float, float]:
    """The log-evidence around some draws, its error, and the effective number of proposals."""
    proposal = stats.multivariate_t(draws.mean(0), np.cov(draws.T), df=8)
    z = proposal.rvs(PROPOSALS, random_state=r)
    log_weight = np.concatenate(
        [log_joint(rows, part) for part in np.array_split(z, 50)]
    ) - proposal.logpdf(z)
    found = logsumexp(log_weight) - np.log(PROPOSALS)
    weight = np.exp(log_weight - found)
    return (
        found + lgamma(ORDER + 1),
        weight.std() / np.sqrt(PROPOSALS),
        weight.sum() ** 2 / (weight**2).sum(),
    )


def main() -> None:
    """A line a chain."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("problems", nargs="+", choices=["mixture", "iris"])
    for name in parser.parse_args().problems:
        rows, r = {"mixture": mixture, "iris": iris}[name](), np.random.default_rng(0)
        centres = [
            KMeans(ORDER, n_init=1, init="random", random_state=seed).fit_predict(rows.x)
            for seed in range(CHAINS)
        ]
        for number, start in enumerate(centres):
            draws = chain(rows, r, start)
            print(
                f"{name}, chain {number}: log joint {log_joint(rows, draws[-500:]).mean():.1f}, ",
                end="",
            )
            print(
                "log Z {:.3f} +- {:.3f}, {:.0f} effective proposals".format(
                    *evidence(rows, r, draws)
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
