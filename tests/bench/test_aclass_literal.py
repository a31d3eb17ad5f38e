"""The literal filter against all partitions of a few rows; as printed, it fails the same test."""

from functools import cache

import numpy as np
import pytest
from scipy.special import betaln, gammaln

from tests.bench import aclass_literal
from tests.bench.aclass_literal import ALPHA, BETA, Filter, literal, train_crp, train_crp_as_printed

RUNS = 60
NAN = np.nan


def rows(text):
    """A word a row, four equal features a letter; the last row is new."""
    return np.array(
        [
            [{"1": 1, "0": 0, ".": NAN}[letter] for letter in row for _ in range(4)]
            for row in text.split()
        ],
        dtype=float,
    )


# weights become uneven, but never so much that particles are resampled
STEADY = "1.. ..0 110 ... .1. .0. 1.. 101"
# later rows decide what was open: resampled once or twice in a run
UPSET = "1.. ..0 .1. ... 110 101 10. 110"


def partitions(num_rows):
    """Labels in order of appearance."""
    found = [[]]
    for _ in range(num_rows):
        found = [[*labels, new] for labels in found for new in range(max(labels, default=-1) + 2)]
    return np.array(found)


def log_joint(x, labels):
    """CRP prior and marginal likelihood, by gamma and beta functions."""
    sizes = np.bincount(labels)
    prior = (
        len(sizes) * np.log(ALPHA) + gammaln(sizes).sum() + gammaln(ALPHA) - gammaln(ALPHA + len(x))
    )
    ones = np.array([(x[labels == g] == 1).sum(0) for g in range(len(sizes))])
    zeros = np.array([(x[labels == g] == 0).sum(0) for g in range(len(sizes))])
    return prior + (betaln(BETA + ones, BETA + zeros) - betaln(BETA, BETA)).sum()


@cache
def truth(stream):
    """Evidence; evidence x mean number of groups; evidence x predictive of the new row."""
    (evidence, groups), (evidence_of_all, _) = exact(rows(stream)[:-1]), exact(rows(stream))
    return np.array([evidence, evidence * groups, evidence_of_all])


def exact(x):
    """The evidence and the posterior mean of the number of groups."""
    every = partitions(len(x))
    joint = np.exp([log_joint(x, labels) for labels in every])
    return joint.sum(), joint @ (every.max(1) + 1) / joint.sum()


def run(train, x, seed=0, num_particles=40):
    density = Filter.start(num_particles, seed)
    for row in x:
        train(density, row)
    return density


def scaled_errors(train, stream):
    """The errors of the unbiased estimates of `truth`, in standard errors."""
    *x, new = rows(stream)
    densities = [run(train, x, seed) for seed in range(RUNS)]
    predictives = [aclass_literal.predictive_density(each, new) for each in densities]
    found = [
        np.exp(one.log_evidence) * np.array([1, one.num_groups, np.exp(log_p)])
        for one, log_p in zip(densities, predictives, strict=True)
    ]
    return (np.mean(found, axis=0) - truth(stream)) / (
        np.std(found, axis=0, ddof=1) / np.sqrt(RUNS)
    )


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("stream", [STEADY, UPSET])
def test_evidence_groups_and_predictive_are_unbiased(stream):
    assert np.abs(scaled_errors(train_crp, stream)).max() < 3


def test_the_printed_order_and_weights_are_biased():
    assert np.abs(scaled_errors(train_crp_as_printed, STEADY)).min() > 5


def weights_that_stay_after_resampling(density):
    log_w, chosen = density.log_w, RESAMPLED(density)
    density.log_w = log_w[chosen] - np.log(np.exp(log_w[chosen]).sum())
    return chosen


def unweighted_average(density, x):
    equal = Filter(
        density.particles, np.full_like(density.log_w, -np.log(len(density.log_w))), density.rng
    )
    return PREDICTIVE_DENSITY(equal, x)


RESAMPLED, PREDICTIVE_DENSITY = aclass_literal.resampled, aclass_literal.predictive_density


@pytest.mark.parametrize(
    ("name", "bug", "stream"),
    [
        ("resampled", weights_that_stay_after_resampling, UPSET),
        ("predictive_density", unweighted_average, STEADY),
    ],
)
def test_a_planted_bug_is_seen(monkeypatch, name, bug, stream):
    monkeypatch.setattr(aclass_literal, name, bug)
    assert np.abs(scaled_errors(train_crp, stream)).max() > 5


def test_the_first_row_counts():
    density = run(train_crp, rows("1.0"))
    assert density.log_evidence == pytest.approx(-8 * np.log(2))  # eight features seen
    assert density.num_groups == pytest.approx(1)


def test_a_row_without_features_changes_counts_alone():
    density = run(train_crp, rows(STEADY))
    evidence, log_w, counts = (
        density.log_evidence,
        density.log_w,
        [sum(each.n) for each in density.particles],
    )
    train_crp(density, np.full(12, NAN))
    assert density.log_evidence == pytest.approx(evidence, abs=1e-12)
    np.testing.assert_allclose(density.log_w, log_w, atol=1e-12)
    assert [sum(each.n) for each in density.particles] == [count + 1 for count in counts]


def test_classes_are_told_apart():
    rng = np.random.default_rng(0)
    coins = np.array([[0.9] * 10 + [0.1] * 10, [0.1] * 10 + [0.9] * 10, [0.5] * 20])
    y = rng.integers(3, size=150)
    x = (rng.random((150, 20)) < coins[y]).astype(float)
    assert (literal(2)(x[:100], y[:100], x[100:]) == y[100:]).mean() > 0.9
