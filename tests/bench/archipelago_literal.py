"""Archipelago's sampler by the paper's section 3, literally: one change of the number of rejections
a sweep, NumPy.

Slow and plain on purpose: the oracle for speed, and a second opinion on the posterior. A sweep is

    birth or death    of one rejection, equations 9 and 10 with b = 1/2: a new one is accepted with
                      (M + Q) / ((M + 1) (1 + Λ))
    locations         each rejection moves at random nearby, equation 11
    function values   each of the K functions by Hamiltonian Monte Carlo on whitened values,
                      equation 12
    hyper-parameters  (if `learn`) amplitude and length scale by slices with whitened values fixed;
    the base density's mean and covariance
                      from their conjugate conditional given all Q + M points

and whatever needs a Gaussian process factorises all of its covariance anew: O((Q + M)³) for a birth
and for each location, K times that for function values and, with `learn`, tens of times for
hyper-parameters. Q points are seen, M were rejected; a label is −1 where hidden. `simulate` is
Algorithm 1, with Λ and ρ reset for each proposal.
"""

from dataclasses import dataclass, field
from time import process_time

import numpy as np
from scipy.linalg import cho_solve, solve_triangular
from scipy.stats import invwishart, multivariate_normal

__all__ = ["Base", "Hyper", "Sampler", "simulate", "trace"]

JITTER = 1e-6  # of the amplitude's square; part of the covariance function
LEAPFROGS = 10
ACCEPT = 0.8  # share of Hamiltonian moves, to which the step adapts in the warm-up
NEARBY = 0.3  # standard deviation of a location's move
# mean and standard deviation of their normal priors
LOG_AMPLITUDE, LOG_LENGTH = (1.0, 1.0), (0.0, 1.0)


@dataclass
class Hyper:
    """The hyperparameters of the squared-exponential covariance that the K functions share."""

    amplitude: float = 2.0
    length: float = 0.5

    def covariance(self, x: np.ndarray, other: np.ndarray) -> np.ndarray:
        """[row of x, row of other], without jitter."""
        gap = (x[:, None] - other[None]) / self.length
        return self.amplitude**2 * np.exp(-0.5 * (gap**2).sum(-1))

    def root(self, x: np.ndarray) -> np.ndarray:
        """The Cholesky factor of the covariance of values at x."""
        return np.linalg.cholesky(
            self.covariance(x, x) + JITTER * self.amplitude**2 * np.eye(len(x))
        )


@dataclass
class Base:
    """The base density, a normal: covariance ~ inverse Wishart(D + 2, I), mean ~ N(0, covariance
    / weight).
    """

    mean: np.ndarray
    covariance: np.ndarray
    weight = 0.1

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """A location."""
        return self.mean + np.linalg.cholesky(self.covariance) @ rng.normal(size=len(self.mean))

    def log_density(self, x: np.ndarray) -> float:
        return float(multivariate_normal.logpdf(x, self.mean, self.covariance))

    def refreshed(self, x: np.ndarray, rng: np.random.Generator) -> "Base":
        """Drawn given rows [row, feature] from it; none of them: from the prior."""
        count, size = x.shape
        middle = x.mean(0) if count else np.zeros(size)
        total = self.weight + count
        scatter = (
            np.eye(size)
            + (x - middle).T @ (x - middle)
            + self.weight * count / total * np.outer(middle, middle)
        )
        covariance = np.atleast_2d(invwishart.rvs(size + 2 + count, scatter, random_state=rng))
        mean = count / total * middle + np.linalg.cholesky(covariance / total) @ rng.normal(
            size=size
        )
        return Base(mean, covariance)


@dataclass
class Sampler:
    """The state of a chain: rows of `x` and `g` are the points that were seen and then the
    rejections.
    """

    x: np.ndarray  # [Q + M, feature]
    g: np.ndarray  # [Q + M, class]
    y: np.ndarray  # [Q]
    hyper: Hyper
    base: Base
    rng: np.random.Generator
    learn: bool = False
    persistence: float = 1.0  # chance to go on after a rejection; the paper's
    step: float = 0.1  # of the Hamiltonian moves
    # acceptance probabilities of Hamiltonian moves
    accepted: list[float] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        x: np.ndarray,
        y: np.ndarray,
        hyper: Hyper,
        base: Base,
        seed: int = 0,
        learn: bool = False,
    ) -> "Sampler":
        """No rejections, all functions zero."""
        return cls(
            x.copy(),
            np.zeros((len(x), y.max() + 1)),
            y,
            hyper,
            base,
            np.random.default_rng(seed),
            learn,
        )

    @property
    def num_rejections(self) -> int:
        """M."""
        return len(self.x) - len(self.y)

    def sweep(self, warming: bool = False) -> None:
        """All moves once."""
        self.birth_or_death()
        self.relocate()
        for k in range(self.g.shape[1]):
            self.move_function(k, warming)
        if self.learn:
            self.move_hyper()
            self.base = self.base.refreshed(self.x, self.rng)

    def values_at(self, new: np.ndarray) -> np.ndarray:
        """The functions [class] at a new location, given what is known of them."""
        root = self.hyper.root(self.x)
        weights = cho_solve((root, True), self.hyper.covariance(self.x, new[None]))[:, 0]
        variance = (
            self.hyper.amplitude**2 * (1 + JITTER)
            - self.hyper.covariance(new[None], self.x)[0] @ weights
        )
        return weights @ self.g + np.sqrt(max(variance, 0)) * self.rng.normal(size=self.g.shape[1])

    def odds(self, m: int) -> float:
        """The odds of a history with m + 1 rejections to one with m, without 1 / (1 + Λ).

        They count the orders that end on an acceptance.
        """
        return self.persistence * (m + len(self.y)) / (m + 1)

    def birth_or_death(self) -> None:
        """Equations 9 and 10, one proposal."""
        m, seen = self.num_rejections, len(self.y)
        if self.rng.random() < 0.5:
            new = self.base.draw(self.rng)
            g = self.values_at(new)
            if self.rng.random() < self.odds(m) * np.exp(-log_total(g)):
                self.x, self.g = np.vstack([self.x, new]), np.vstack([self.g, g])
        elif m:
            gone = seen + self.rng.integers(m)
            if self.rng.random() * self.odds(m - 1) * np.exp(-log_total(self.g[gone])) < 1:
                self.x, self.g = np.delete(self.x, gone, axis=0), np.delete(self.g, gone, axis=0)

    def relocate(self) -> None:
        """Equation 11 with a symmetric proposal, each rejection in turn."""
        for row in range(len(self.y), len(self.x)):
            new = self.x[row] + NEARBY * self.rng.normal(size=self.x.shape[1])
            g = self.values_at(new)
            log_ratio = self.base.log_density(new) - self.base.log_density(self.x[row])
            log_ratio += log_total(self.g[row]) - log_total(g)
            if np.log(self.rng.random()) < log_ratio:
                self.x[row], self.g[row] = new, g

    def log_likelihood(self, g: np.ndarray) -> float:
        """Equation 8 without the Gaussian processes, the base density and the number of orders."""
        seen = len(self.y)
        chosen = np.where(
            self.y >= 0, g[np.arange(seen), self.y], np.logaddexp.reduce(g[:seen], axis=1)
        )
        return chosen.sum() - log_total(g).sum()

    def slope(self, g: np.ndarray, k: int) -> np.ndarray:
        """The gradient of the log likelihood in function k, [Q + M]."""
        seen = len(self.y)
        slope = -np.exp(g[:, k] - log_total(g))
        slope[:seen] += np.where(
            self.y >= 0, self.y == k, np.exp(g[:seen, k] - np.logaddexp.reduce(g[:seen], axis=1))
        )
        return slope

    def move_function(self, k: int, warming: bool) -> None:
        """Equation 12: Hamiltonian Monte Carlo on the whitened values of one function."""
        root = self.hyper.root(self.x)
        white = solve_triangular(root, self.g[:, k], lower=True)
        momentum, g, step = (
            self.rng.normal(size=len(white)),
            self.g.copy(),
            self.step * self.rng.uniform(0.7, 1.3),
        )
        energy = lambda white, momentum, g: (
            0.5 * (white @ white + momentum @ momentum) - self.log_likelihood(g)
        )
        before = energy(white, momentum, g)
        for _ in range(LEAPFROGS):
            momentum = momentum + 0.5 * step * (root.T @ self.slope(g, k) - white)
            white = white + step * momentum
            g[:, k] = root @ white
            momentum = momentum + 0.5 * step * (root.T @ self.slope(g, k) - white)
        accept = float(np.exp(min(0.0, before - energy(white, momentum, g))))
        if self.rng.random() < accept:
            self.g = g
        self.accepted.append(accept)
        if warming:
            self.step *= np.exp(0.1 * (accept - ACCEPT))

    def move_hyper(self) -> None:
        """A slice (Neal 2003, stepping out) of each logarithm; the values follow their whitened
        ones.
        """
        white = solve_triangular(self.hyper.root(self.x), self.g, lower=True)
        for name, (mean, std) in (("amplitude", LOG_AMPLITUDE), ("length", LOG_LENGTH)):

            def density(log_value, name=name, mean=mean, std=std):
                setattr(self.hyper, name, float(np.exp(log_value)))
                return (
                    self.log_likelihood(self.hyper.root(self.x) @ white)
                    - 0.5 * ((log_value - mean) / std) ** 2
                )

            sliced(density, np.log(getattr(self.hyper, name)), self.rng)
        self.g = self.hyper.root(self.x) @ white


def log_total(g: np.ndarray) -> np.ndarray:
    """log(1 + Λ) of values [..., class]."""
    return np.logaddexp(0, np.logaddexp.reduce(g, axis=-1))


def sliced(log_density, start: float, rng: np.random.Generator, width: float = 1.0) -> float:
    """A draw; the last place at which `log_density` was asked is the draw."""
    level = log_density(start) + np.log(rng.random())
    low = start - width * rng.random()
    high = low + width
    while log_density(low) > level:
        low -= width
    while log_density(high) > level:
        high += width
    while log_density(new := rng.uniform(low, high)) <= level:
        low, high = (new, high) if new < start else (low, new)
    return new


def simulate(num_points: int, num_classes: int, hyper: Hyper, base: Base, seed: int = 0) -> Sampler:
    """Algorithm 1: points, their labels and the history that gave them, as a chain that starts
    in the truth.
    """
    rng = np.random.default_rng(seed)
    nothing = np.zeros((0, len(base.mean))), np.zeros((0, num_classes))
    chain = Sampler(*nothing, np.zeros(0, int), hyper, base, rng)
    labels = []
    while sum(label < num_classes for label in labels) < num_points:
        new = base.draw(rng)
        g = chain.values_at(new)
        chain.x, chain.g = np.vstack([chain.x, new]), np.vstack([chain.g, g])
        rho = np.cumsum(np.exp(g)) / (1 + np.exp(g).sum())
        labels.append(int(np.searchsorted(rho, rng.random())))  # K where it is rejected
    order = np.argsort(np.array(labels) == num_classes, kind="stable")  # rejections last
    chain.x, chain.g, chain.y = chain.x[order], chain.g[order], np.array(labels)[order][:num_points]
    return chain


def trace(chain: Sampler, num_warmup: int, num_sweeps: int) -> tuple[np.ndarray, float]:
    """M after each sweep, and the CPU seconds of these sweeps."""
    for _ in range(num_warmup):
        chain.sweep(warming=True)
    started, found = process_time(), []
    for _ in range(num_sweeps):
        chain.sweep()
        found.append(chain.num_rejections)
    return np.array(found), process_time() - started


def pinwheel_chain(data: str, labels: int, learn: bool, persistence: float) -> Sampler:
    """A chain on one of the protocol's draws, of a process that may end as ours; the base
    density starts at the moments of its rows.
    """
    from tests.bench.archipelago_protocols import Cell, draw

    x, y, *_ = draw(Cell(data, labels), seed=0)
    chain = Sampler.start(x, y, Hyper(), Base(x.mean(0), np.cov(x.T)), learn=learn)
    chain.persistence = persistence
    return chain
