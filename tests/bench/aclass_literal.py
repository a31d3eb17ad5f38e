"""AClass by its pseudo-code, literally: a filter for each class, loops over particles and groups,
NumPy.

    OMP_NUM_THREADS=1 uv run python -m tests.bench.aclass_literal        # points per CPU second

Slow and plain on purpose: the oracle for speed, and a second opinion on what the filter computes.
Features are 0, 1 or NaN.

    prob[g]     n_g / (n + α) · Π_f (β + h_gf)^x_f (β + t_gf)^(1 − x_f) / (2β + h_gf + t_gf), f over
                the features that were seen;
                α / (n + α) · Π_f 1/2 for a new group; h and t count a group's ones and zeros
    w_p         ← w_p Σ_g prob_p[g], then normalised; the sum before it is the factor of the
                evidence
    predictive  Σ_p w_p Σ_g prob_p[g]

`train_crp` corrects the slips of the printed TRAIN-CRP: weights multiply, where print overwrites
them, and particles are resampled before the group is drawn, on which the weight does not depend.
`train_crp_as_printed` keeps both. Class counts, which print never increments, are incremented here.
Resampling is multinomial, where the effective number of particles is below half. Cost: O(P G F) a
row of a class, for P particles and at most G groups; a prediction costs that for every class.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import process_time
from typing import Any

import numpy as np

__all__ = [
    "AClass",
    "Filter",
    "Particle",
    "literal",
    "predictive_density",
    "train_crp",
    "train_crp_as_printed",
]

ALPHA = 1.0  # concentration of the CRP
BETA = 0.5  # of the Beta prior, both sides
GAMMA = 1.0  # of the Dirichlet prior of the classes


@dataclass
class Particle:
    """One hypothesis about which rows belong together."""

    n: list[int] = field(default_factory=list)  # rows of each group
    # of each group, [2, feature]: zeros and ones seen
    stats: list[np.ndarray] = field(default_factory=list)

    def copy(self) -> "Particle":
        """A particle that is extended on its own."""
        return Particle([*self.n], [each.copy() for each in self.stats])


@dataclass
class Filter:
    """The density of one class: weighted particles."""

    particles: list[Particle]
    log_w: np.ndarray  # normalised
    rng: np.random.Generator
    log_evidence: float = 0.0

    @classmethod
    def start(cls, num_particles: int, seed: int = 0) -> "Filter":
        """No rows seen, equal weights."""
        equal = np.full(num_particles, -np.log(num_particles))
        return cls([Particle() for _ in range(num_particles)], equal, np.random.default_rng(seed))

    @property
    def num_groups(self) -> float:
        """The posterior mean of the number of groups."""
        return float(np.exp(self.log_w) @ [len(particle.n) for particle in self.particles])


def train_crp(filter: Filter, x: np.ndarray) -> None:
    """TRAIN-CRP, corrected: takes in a row `x` [feature]."""
    log_probs = [log_prob(particle, x) for particle in filter.particles]
    filter.log_w = filter.log_w + [log_sum(each) for each in log_probs]
    normalise(filter)
    chosen = resampled(filter)
    filter.particles = [
        filter.particles[p] if chosen[p] == p else filter.particles[chosen[p]].copy()
        for p in range(len(chosen))
    ]
    for particle, p in zip(filter.particles, chosen, strict=True):
        add(particle, sample_discrete(log_probs[p], filter.rng), x)


def train_crp_as_printed(filter: Filter, x: np.ndarray) -> None:
    """TRAIN-CRP, as printed: weights are overwritten, the group is drawn before resampling."""
    log_w = np.empty(len(filter.particles))
    for p, particle in enumerate(filter.particles):
        prob = log_prob(particle, x)
        log_w[p] = log_sum(prob)
        add(particle, sample_discrete(prob, filter.rng), x)
    filter.log_w = log_w - np.log(len(log_w))
    normalise(filter)
    filter.particles = [filter.particles[p].copy() for p in resampled(filter)]


def predictive_density(filter: Filter, x: np.ndarray) -> float:
    """PREDICTIVE-DENSITY, its logarithm: the weighted average of the particles."""
    return log_sum(filter.log_w + [log_sum(log_prob(particle, x)) for particle in filter.particles])


def log_prob(particle: Particle, x: np.ndarray) -> np.ndarray:
    """Each group's share times its posterior predictive; the last entry is a new group's."""
    shares = np.log([*particle.n, ALPHA]) - np.log(sum(particle.n) + ALPHA)
    return shares + [
        log_posterior_predictive(stats, x) for stats in (*particle.stats, np.zeros((2, len(x))))
    ]


def log_posterior_predictive(stats: np.ndarray, x: np.ndarray) -> float:
    seen = ~np.isnan(x)
    zeros, ones = stats[:, seen]
    return np.log((BETA + np.where(x[seen] == 1, ones, zeros)) / (2 * BETA + zeros + ones)).sum()


def add(particle: Particle, g: int, x: np.ndarray) -> None:
    """UPDATE-SUFFICIENT-STATISTICS: the row joins group `g`, or opens it."""
    if g == len(particle.n):
        particle.n.append(0)
        particle.stats.append(np.zeros((2, len(x))))
    particle.n[g] += 1
    particle.stats[g] += np.stack([x == 0, x == 1])


def normalise(filter: Filter) -> None:
    increment = log_sum(filter.log_w)
    filter.log_evidence += increment
    filter.log_w = filter.log_w - increment


def resampled(filter: Filter) -> np.ndarray:
    """RESAMPLE-PARTICLES: the particle that each place goes on from.

    Weights become equal where it resamples.
    """
    count, w = len(filter.log_w), np.exp(filter.log_w)
    if 1 / (w @ w) >= count / 2:
        return np.arange(count)
    filter.log_w = np.full(count, -np.log(count))
    return filter.rng.choice(count, size=count, p=w / w.sum())


def sample_discrete(log_weights: np.ndarray, rng: np.random.Generator) -> int:
    total = np.cumsum(np.exp(log_weights - log_weights.max()))
    return int(np.searchsorted(total, rng.random() * total[-1], side="right"))


def log_sum(a: np.ndarray) -> float:
    largest = a.max()
    return float(largest + np.log(np.exp(a - largest).sum()))


class AClass:
    """A filter for each class, and the classes' counts."""

    def __init__(self, num_classes: int, num_particles: int = 40, seed: int = 0):
        self.filters = [Filter.start(num_particles, seed + y) for y in range(num_classes)]
        self.m = np.zeros(num_classes)

    def train(self, y: int, x: np.ndarray) -> None:
        """AClass-TRAIN: a row of class `y`."""
        train_crp(self.filters[y], x)
        self.m[y] += 1

    def test(self, x: np.ndarray) -> np.ndarray:
        """AClass-TEST: the probability of each class."""
        log_joint = np.log(self.m + GAMMA) + [predictive_density(each, x) for each in self.filters]
        return np.exp(log_joint - log_sum(log_joint))


def literal(num_particles: int) -> Callable[[Any, np.ndarray, Any], np.ndarray]:
    """A classifier for `aclass_peers.error_table`."""

    def classify(x_train, y_train, x_test):
        model = AClass(y_train.max() + 1, num_particles)
        for y, x in zip(y_train, np.asarray(x_train), strict=True):
            model.train(y, x)
        return np.array([model.test(x).argmax() for x in np.asarray(x_test)])

    return classify


def points_per_second(model: AClass, x: np.ndarray, y: np.ndarray, predict: bool) -> float:
    """Rows per CPU second: of training, or of predicting each row and then training on it."""
    started = process_time()
    for row, label in zip(x, y, strict=True):
        if predict:
            model.test(row)
        model.train(label, row)
    return len(y) / (process_time() - started)


def streams() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """What the filter is timed on: rows and labels.

    The time grows with the groups, so it says how many there were.
    """
    from tests.bench.aclass_density import Mixture
    from tests.bench.aclass_protocols import repetition

    rows = {
        f"{name}, {missing:.0%} missing": repetition(name, 500, missing)
        for name in ("20news_w100", "synthetic")
        for missing in (0, 0.5)
    }
    rng = np.random.default_rng(0)
    found = {name: (np.asarray(each.x_train), each.y_train) for name, each in rows.items()}
    return found | {
        "one class, 20 components": (
            Mixture.draw(rng, 20, 100).sample(rng, 500),
            np.zeros(500, dtype=int),
        )
    }


if __name__ == "__main__":
    print(
        "| data, 100 features, 40 particles | rows | training, points/CPU s | predict, then train "
        "| groups a class |"
    )
    print("|---|---|---|---|---|")
    for name, (x, y) in streams().items():
        model = AClass(y.max() + 1)
        train = points_per_second(model, x, y, predict=False)
        both = points_per_second(AClass(y.max() + 1), x[:200], y[:200], predict=True)
        groups = " ".join(f"{each.num_groups:.1f}" for each in model.filters)
        print(f"| {name} | {len(y)} | {train:.0f} | {both:.0f} | {groups} |", flush=True)
