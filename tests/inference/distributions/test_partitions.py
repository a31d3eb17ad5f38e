"""Partitions against the seating rule, row by row in fractions; draws against their
probabilities.
"""

from fractions import Fraction
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from jax import random
from jax.scipy.special import gammaln
from numpyro import handlers
from numpyro.distributions import constraints
from scipy import stats

from inference.distributions import CRP, ExchangeablePartition, PitmanYor
from tests.by_numpy import by_numpy

pytestmark = [
    pytest.mark.usefixtures("x64", "numpyro_promotion"),
    pytest.mark.filterwarnings("ignore:Out-of-support"),  # NumPyro's; asked for on purpose
]
A, D = Fraction(7, 10), Fraction(2, 5)
LABELS = [0, 1, 1, 0, 1]
CASES = [(4, None, None), (5, None, None), (6, None, None), (5, LABELS, None)]
CASES += [(n, labels, k) for k in (1, 2, 3) for n, labels in ((4, None), (6, None), (5, LABELS))]


def rule(z, labels, max_groups=None, a=A, d=0):
    """Probability of a partition by the rule for the next row, of rows in their order; 0 for
    anything that is not one.
    """
    chance = Fraction(1)
    for i, group in enumerate(z):
        before = [z[j] for j in range(i) if labels[j] == labels[i]]
        num_groups, size = len(set(before)), before.count(group)
        if group > num_groups or group < 0:
            return Fraction(0)
        bonus = -d if max_groups is None else a / max_groups
        chance *= (size + bonus if size else a - bonus * num_groups) / (len(before) + a)
    return chance


def everything(num_rows):
    """All label vectors, partitions or not."""
    return np.array(list(product(range(num_rows), repeat=num_rows)), np.int32)


def partitions(num_rows, labels=None, max_groups=None, d=0):
    """Those with a positive probability, and their probabilities."""
    labels = labels or [0] * num_rows
    found = [
        (z, rule(z, labels, max_groups, d=d)) for z in product(range(num_rows), repeat=num_rows)
    ]
    return np.array([z for z, p in found if p], np.int32), np.array(
        [float(p) for _, p in found if p]
    )


def made(num_rows, labels=None, max_groups=None, family=CRP, a=float(A), **sizes):
    return family(
        a,
        num_rows,
        labels and jnp.array(labels),
        num_classes=2 if labels else 1,
        max_groups=max_groups,
        **sizes,
    )


class Unordered(CRP):
    """Takes any labels for a partition."""

    support = constraints.independent(constraints.integer_interval(0, 10), 1)


class GroupsWithNames(CRP):
    """Forgets that the K groups have no names: without K! / (K - G)!; unbounded, counts a group
    of n as n! ways.
    """

    def log_prob_of_sizes(self, sizes):
        groups = jnp.sum(sizes > 0, axis=-1)
        extra = jnp.log(jnp.maximum(sizes, 1.0)).sum((-2, -1))
        if self.max_groups is not None:
            extra = -(gammaln(self.max_groups + 1.0) - gammaln(self.max_groups - groups + 1.0)).sum(
                -1
            )
        return super().log_prob_of_sizes(sizes) + extra


class OneClass(CRP):
    """Sits beside rows of any class."""

    def __init__(self, concentration, num_rows, labels, *rest, **more):
        super().__init__(concentration, num_rows, labels, *rest, **more)
        self.labels = jnp.zeros_like(self.labels)


class TwiceAsOpen(CRP):
    """Opens groups as if the concentration were twice as large."""

    def log_seating(self, sizes):
        return CRP(2 * self.concentration, 1, max_groups=self.max_groups).log_seating(sizes)


def pitman_yor(a, num_rows, labels, num_classes, max_groups=None, **sizes):
    return PitmanYor(a, float(D), num_rows, labels, num_classes, **sizes)


def check_rule(case, family=CRP, d=0):
    """All vectors of labels have the probability of the rule, and so they sum to 1."""
    num_rows, labels, max_groups = case
    every = everything(num_rows)
    found = np.exp(by_numpy(made(*case, family=family, capacity=num_rows).log_prob)(every))
    wanted = np.array(
        [float(rule(z, labels or [0] * num_rows, max_groups, d=d)) for z in every.tolist()]
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    np.testing.assert_allclose(found.sum(), 1.0, rtol=1e-12)


def check_frequencies(case, family=CRP, num_draws=20_000, d=0):
    """Draws are partitions, as often as the rule says."""
    every, chances = partitions(*case, d=d)
    crp = made(*case, family=family)
    draws = np.asarray(by_numpy(lambda key: crp.sample(key, (num_draws,)))(random.key(3)))
    index = {tuple(z): i for i, z in enumerate(every.tolist())}
    counts = np.bincount([index[tuple(z)] for z in draws.tolist()], minlength=len(every))
    common = chances * num_draws >= 5
    counts, wanted = ([*x[common], x[~common].sum()] for x in (counts, chances * num_draws))
    if wanted[-1] == 0:
        counts, wanted = counts[:-1], wanted[:-1]
    assert len(wanted) == 1 or stats.chisquare(counts, wanted).pvalue > 1e-3


@pytest.mark.slow_after(10)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_partition_has_the_probability_of_the_seating_rule(case):
    check_rule(case)


@pytest.mark.parametrize("twin", [Unordered, GroupsWithNames])
@pytest.mark.parametrize("case", [(4, None, None), (5, LABELS, 2)], ids=str)
def test_a_wrong_density_is_seen(case, twin):
    with pytest.raises(AssertionError):
        check_rule(case, twin)


@pytest.mark.parametrize(
    "case",
    [(5, None, None), (5, LABELS, None), (5, None, 1), (5, None, 3), (5, LABELS, 2)],
    ids=str,
)
def test_draws_are_as_frequent_as_the_rule_says(case):
    check_frequencies(case)


@pytest.mark.parametrize(
    ("case", "twin"),
    [((5, None, None), TwiceAsOpen), ((5, LABELS, 2), TwiceAsOpen), ((5, LABELS, None), OneClass)],
    ids=str,
)
def test_a_wrong_draw_is_seen(case, twin):
    with pytest.raises((AssertionError, KeyError)):  # a frequency, or no partition at all
        check_frequencies(case, twin)


OF_PITMAN_YOR = pytest.mark.parametrize("case", [(5, None, None), (5, LABELS, None)], ids=str)


@OF_PITMAN_YOR
def test_a_discount_is_one_more_term_of_the_rule(case):
    check_rule(case, pitman_yor, D)
    check_frequencies(case, pitman_yor, d=D)


@OF_PITMAN_YOR
def test_a_forgotten_discount_is_seen(case):
    with pytest.raises(AssertionError):
        check_rule(case, CRP, D)
    with pytest.raises(AssertionError):
        check_frequencies(case, CRP, d=D)


@pytest.mark.parametrize("max_groups", [None, 3])
def test_without_a_discount_pitman_yor_is_the_crp(max_groups):
    """And a bound on the groups is a discount below 0."""
    every, _ = partitions(5, None, max_groups)
    crp = CRP(0.7, 5, max_groups=max_groups)
    same = PitmanYor(0.7, -0.7 / max_groups if max_groups else 0.0, 5, validate_args=False)
    np.testing.assert_allclose(
        by_numpy(crp.log_prob)(every), by_numpy(same.log_prob)(every), rtol=1e-12
    )


@pytest.mark.parametrize(("family", "max_groups"), [(CRP, None), (CRP, 3), (pitman_yor, None)])
def test_the_next_row_is_seated_by_the_rule(family, max_groups):
    """A log probability for each group, for the first that is free, and none for the other free
    ones; for many sizes at once.
    """
    partition, d = made(6, None, max_groups, family), D if family is pitman_yor else 0
    before = [[0, 0, 1, 2, 1], [0, 0, 0, 0, 0], []]
    sizes = np.array([np.bincount(z, minlength=5) for z in before])
    chance = lambda z, group: (
        rule([*z, group], [0] * 6, max_groups, d=d) / rule(z, [0] * 6, max_groups, d=d)
    )
    wanted = [[float(chance(z, group)) for group in range(5)] for z in before]
    np.testing.assert_allclose(np.exp(partition.log_seating(sizes)), wanted, rtol=1e-12)
    free = jnp.array([0, 2, 0, 1])  # the first that is free need not be the last
    [first, _, third, _] = np.exp(partition.log_seating(free))
    assert (first, third) == (pytest.approx(float(chance([0, 0, 1], 2))), 0.0)


def test_a_rule_without_rows_is_its_parameters():
    for labels in (None, np.array(LABELS)):
        rule = PitmanYor(0.7, 0.4, 5, labels, 1 if labels is None else 2).without_rows()
        assert sorted(jax.tree.leaves(rule)) == [0.4, 0.7]
    many = jax.vmap(lambda a, d: PitmanYor(a, d, 5).without_rows())(
        np.array([0.5, 0.7]), np.array([0.1, 0.4])
    )
    sizes = jnp.array([3.0, 1.0, 0.0, 0.0])
    found = jax.vmap(lambda rule: rule.log_seating(sizes))(many)
    np.testing.assert_array_equal(
        found, [PitmanYor(a, d, 5).log_seating(sizes) for a, d in ((0.5, 0.1), (0.7, 0.4))]
    )


def test_a_base_has_no_rule():
    for ask in (ExchangeablePartition(3).log_seating, ExchangeablePartition(3).log_prob_of_sizes):
        with pytest.raises(NotImplementedError):
            ask(np.zeros(3))


def masked(z, max_groups=2, a=float(A)):
    """A bound by brute force: a new group is no candidate once there are K.

    It depends on the order of the rows.
    """
    chance = 1.0
    for i, group in enumerate(z):
        before = list(z[:i])
        weight = a if len(set(before)) < max_groups else 0.0
        chance *= (before.count(group) or weight) / (i + weight)
    return np.log(chance)


def check_exchangeable(log_prob, max_groups):
    """Rows in another order, and groups relabelled as they then appear, are as probable."""
    rng = np.random.default_rng(0)
    every, _ = partitions(6, None, max_groups)
    for order in (rng.permutation(6) for _ in range(5)):
        moved = [
            [list(dict.fromkeys(z)).index(group) for group in z] for z in every[:, order].tolist()
        ]
        np.testing.assert_allclose(log_prob(np.array(moved)), log_prob(every), rtol=1e-12)


@pytest.mark.parametrize("max_groups", [None, 2])
def test_rows_are_exchangeable(max_groups):
    check_exchangeable(by_numpy(made(6, None, max_groups).log_prob), max_groups)


def test_rows_would_not_be_if_the_bound_were_a_mask():
    with pytest.raises(AssertionError):
        check_exchangeable(lambda many: [masked(z) for z in many], 2)


def test_the_bound_fades_as_it_grows():
    z = np.array([0, 1, 0, 2, 1, 3])
    bounded, free = by_numpy(
        lambda z: (made(6, max_groups=10**8).log_prob(z), made(6).log_prob(z))
    )(z)
    np.testing.assert_allclose(bounded, free, atol=1e-6)


def test_number_of_groups_has_the_mean_of_the_formula():
    """E[groups] = sum of a / (a + i), i < n: not log a, as the paper has it."""
    draws = by_numpy(lambda key: CRP(2.0, 100).sample(key, (1000,)))(random.key(0))
    groups = np.asarray(draws).max(-1) + 1
    wanted = sum(2.0 / (2.0 + i) for i in range(100))
    assert abs(groups.mean() - wanted) < 4 * groups.std() / np.sqrt(len(groups))


def test_gradient_in_the_concentration_equals_a_difference():
    z, labels = np.array([0, 0, 1, 1, 2]), np.array(LABELS)
    for k in (None, 4):
        log_prob = by_numpy(lambda a, k=k: CRP(a, 5, labels, 2, max_groups=k).log_prob(z))
        slope = (log_prob(0.7 + 1e-5) - log_prob(0.7 - 1e-5)) / 2e-5
        np.testing.assert_allclose(by_numpy(jax.grad(log_prob))(0.7), slope, rtol=1e-8)


@pytest.mark.parametrize("k", [None, 1, 4])
@pytest.mark.parametrize("z", [[0, 0, 0, 0], [0, 2, 0, 0], [-1, 9, 0, 0], [0, 1, 2, 3]])
def test_gradient_is_finite_whatever_the_labels(z, k):
    log_prob = lambda a: CRP(a, 4, max_groups=k).log_prob(np.array(z))
    assert np.isfinite(by_numpy(jax.grad(log_prob))(0.7))


def test_labels_and_concentration_may_be_traced_and_keys_mapped():
    labels, z = np.array(LABELS), np.array([0, 0, 1, 1, 0])
    wanted = by_numpy(CRP(0.7, 5, labels, 2).log_prob)(z)
    np.testing.assert_allclose(
        by_numpy(lambda a, labels, z: CRP(a, 5, labels, 2).log_prob(z))(0.7, labels, z),
        wanted,
        rtol=1e-12,
    )
    keys = random.split(random.key(0), 7)
    drawn = by_numpy(jax.vmap(lambda key, labels: CRP(0.7, 5, labels, 2).sample(key), (0, None)))(
        keys, labels
    )
    assert (drawn.shape, drawn.dtype) == ((7, 5), jnp.int32)
    np.testing.assert_array_equal(drawn[3], by_numpy(CRP(0.7, 5, labels, 2).sample)(keys[3]))
    many = jax.vmap(lambda a: CRP(a, 5, jnp.asarray(labels), 2))(np.array([0.5, 0.7]))
    np.testing.assert_allclose(by_numpy(jax.vmap(lambda crp: crp.log_prob(z)))(many)[1], wanted)


def test_batches_of_partitions():
    """A plate around the site, a vector of concentrations and a matrix of labels all make
    independent partitions.
    """
    labels = np.array([[0, 1, 1, 0], [0, 0, 0, 1]])
    z = np.array([[0, 0, 1, 1], [0, 1, 0, 0]])
    many = CRP(np.array([0.5, 2.0]), 4, labels, 2)
    assert by_numpy(lambda key: many.sample(key, (3,)))(random.key(0)).shape == (3, 2, 4)
    single = by_numpy(
        lambda z: [CRP(a, 4, labels[i], 2).log_prob(z[i]) for i, a in enumerate((0.5, 2.0))]
    )(z)
    np.testing.assert_allclose(by_numpy(many.log_prob)(z), single)

    def model():
        with numpyro.plate("view", 2):
            numpyro.sample("z", CRP(0.5, 4))

    z[1, 1] = 0
    trace = handlers.trace(handlers.substitute(handlers.seed(model, 0), {"z": z})).get_trace()
    np.testing.assert_allclose(
        by_numpy(trace["z"]["fn"].log_prob)(trace["z"]["value"]), by_numpy(CRP(0.5, 4).log_prob)(z)
    )
    drawn = by_numpy(
        lambda key: handlers.trace(handlers.seed(model, key)).get_trace()["z"]["value"]
    )(random.key(0))
    assert drawn.shape == (2, 4)


def test_it_is_a_tree_and_keeps_what_a_kernel_reads():
    crp = CRP(0.7, 5, jnp.array(LABELS), 2, capacity=4, max_groups=3)
    copy = jax.tree.unflatten(*jax.tree.flatten(crp)[::-1])
    assert (copy.num_rows, copy.num_classes, copy.capacity, copy.max_groups) == (5, 2, 4, 3)
    assert (copy.concentration, copy.labels.tolist()) == (0.7, LABELS)
    assert copy.support == crp.support
    assert copy.support != CRP(0.7, 5, jnp.array(LABELS), 2).support
    assert (
        CRP(0.7, 5).capacity,
        CRP(0.7, 5, max_groups=3).capacity,
        CRP(0.7, 5).labels.tolist(),
    ) == (5, 3, [0] * 5)


def test_support_is_where_the_probability_is_positive():
    for case in ((4, None, None), (4, [0, 1, 0, 1], 2)):
        crp = made(*case)
        np.testing.assert_array_equal(
            by_numpy(lambda z, crp=crp: crp.support(z))(everything(4)),
            np.isfinite(by_numpy(crp.log_prob)(everything(4))),
        )
    assert by_numpy(lambda z: crp.support(z))(crp.support.feasible_like(np.zeros(4, np.int32)))
    assert crp.support.is_discrete
    with pytest.warns(UserWarning, match="Out-of-support"):
        assert CRP(0.7, 3, validate_args=True).log_prob(jnp.array([0, 2, 1])) == -jnp.inf
    with pytest.raises(ValueError, match="invalid concentration"):
        CRP(-1.0, 3, validate_args=True)


def test_a_class_out_of_range_has_no_partition():
    for wrong in (-1, 2):
        assert (
            by_numpy(CRP(1.0, 3, np.array([0, wrong, 0]), 2).log_prob)(np.zeros(3, np.int32))
            == -np.inf
        )


def test_capacity_truncates_nothing():
    """Partitions that fit keep their probability, the others have none; a draw without room is
    never a wrong partition.
    """
    every, chances = partitions(6)
    fits = every.max(1) < 2
    crp = CRP(float(A), 6, capacity=2)
    np.testing.assert_allclose(
        np.exp(by_numpy(crp.log_prob)(every)), np.where(fits, chances, 0.0), rtol=1e-12
    )
    with pytest.raises(
        ValueError,
        match=r"CRP capacity: there is room for 2 groups, and a draw has more\. .* max_groups=2",
    ):
        crp.sample(random.key(0), (100,))
    draws = np.asarray(by_numpy(lambda key: crp.sample(key, (20_000,)))(random.key(0)))
    assert set(np.unique(draws)) == {0, 1, 2}
    np.testing.assert_array_equal(np.isfinite(by_numpy(crp.log_prob)(draws)), draws.max(1) < 2)
    share = chances[fits].sum()
    assert abs((draws.max(1) < 2).mean() - share) < 4 * np.sqrt(share * (1 - share) / len(draws))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.0, 0), "CRP num_rows: found 0"),
        ((1.0, 3, None, 1, 0), "CRP capacity: found 0"),
        ((1.0, 3, None, 1, None, 2.0), r"CRP max_groups: found 2\.0"),
        (
            (1.0, 3, jnp.zeros(2, int)),
            r"CRP labels: found int\d+\[2\], wanted the class of each row, integers \[3\]",
        ),
        ((1.0, 3, jnp.zeros(3)), r"CRP labels: found float\d+\[3\]"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        CRP(*arguments)


def test_in_single_precision_and_with_strict_types():
    """The probabilities of the rule, and draws, where JAX promotes no type."""
    every, chances = partitions(5, LABELS, 2)
    with jax.enable_x64(False), jax.numpy_dtype_promotion("strict"):
        crp = CRP(float(A), 5, np.array(LABELS), 2, max_groups=2)
        assert by_numpy(lambda key: crp.sample(key, (3,)))(random.key(0)).dtype == jnp.int32
        np.testing.assert_allclose(np.exp(by_numpy(crp.log_prob)(every)), chances, rtol=1e-5)


NEGATIVE = Fraction(-1, 5)  # a concentration above minus the discount


def test_a_discount_allows_a_negative_concentration():
    every = everything(5)
    for labels in (None, LABELS):
        found = PitmanYor(float(NEGATIVE), float(D), 5, labels and jnp.array(labels), 2)
        chance = lambda z, labels=labels: float(rule(z, labels or [0] * 5, a=NEGATIVE, d=D))
        np.testing.assert_allclose(
            np.exp(by_numpy(found.log_prob)(every)), [*map(chance, every.tolist())], rtol=1e-12
        )
    sizes = jnp.array([[0, 0, 0], [2, 1, 0]])
    wanted = [[1, 0, 0], [float(p) / 2.8 for p in (2 - D, 1 - D, NEGATIVE + 2 * D)]]
    np.testing.assert_allclose(np.exp(found.log_seating(sizes)), wanted, rtol=1e-12)
    slope = jax.grad(lambda a: PitmanYor(a, float(D), 5).log_prob(np.array([0, 0, 1, 0, 2])))
    assert np.isfinite(slope(float(NEGATIVE)))
    assert np.isfinite(slope(0.0))


def test_a_concentration_below_minus_the_discount_is_refused():
    with pytest.raises(ValueError, match="invalid concentration parameter: found -0.5, wanted"):
        PitmanYor(-0.5, 0.4, 3, validate_args=True)


@pytest.mark.parametrize("family", [CRP, PitmanYor])
def test_leaves_have_the_same_order_in_every_process(family):
    """JAX's persistent cache then finds code that takes them."""
    names = family.gather_pytree_data_fields()
    assert list(names) == sorted(names)
