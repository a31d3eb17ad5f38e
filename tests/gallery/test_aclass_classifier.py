"""The classifier against enumeration of all partitions in numpy and scipy, in the units of the
table, and against naive Bayes.
"""

from itertools import product

import jax
import numpy as np
import numpyro.distributions as dist
import pandas as pd
import pytest
from scipy import stats
from scipy.special import betaln, gammaln, logsumexp
from sklearn.naive_bayes import BernoulliNB, CategoricalNB

from gallery import AClassClassifier
from gallery._columns import Columns
from zoo.aclass import gamma_poisson, mixed, normal_inverse_chi2

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

# The oracle. A column is (log marginal of the values in a group, mean of the next value in it).


def bernoulli(values):
    ones = np.sum(values)
    return betaln(0.5 + ones, 0.5 + len(values) - ones) - betaln(0.5, 0.5)


def categorical(num_values):
    def log_marginal(values):
        counts = np.bincount(np.asarray(values, int), minlength=num_values)
        start = gammaln(num_values / 2) - gammaln(num_values / 2 + len(values))
        return start + np.sum(gammaln(0.5 + counts) - gammaln(0.5))

    return log_marginal


class Normal:
    """In the unit of the table: prior mean `mean`, prior scale `scale`, kappa = 1 / 3, nu = 4."""

    def __init__(self, column):
        self.mean, self.scale = np.nanmean(column), np.nanstd(column) / 2

    def posterior(self, values):
        kappa, nu = 1 / 3 + len(values), 4.0 + len(values)
        loc = (self.mean / 3 + np.sum(values)) / kappa
        centre = np.mean(values) if len(values) else self.mean
        square = (
            4 * self.scale**2
            + np.sum((values - centre) ** 2)
            + len(values) / 3 / kappa * (centre - self.mean) ** 2
        )
        return loc, kappa, nu, square

    def __call__(self, values):
        _, kappa, nu, square = self.posterior(np.asarray(values))
        log_gammas = gammaln(nu / 2) - gammaln(2.0) - np.log(3 * kappa) / 2
        return (
            log_gammas
            + 2 * np.log(4 * self.scale**2)
            - nu / 2 * np.log(square)
            - len(values) / 2 * np.log(np.pi)
        )


def partitions(n):
    """Group of each row, in order of appearance."""
    found = [()]
    for _ in range(n):
        found = [(*z, g) for z in found for g in range(max(z, default=-1) + 2)]
    return found


def log_joint(x, z, columns, alpha=1.0):
    """Rows of one class in the groups z, and the partition itself."""
    sizes = np.bincount(z, minlength=1) if z else np.zeros(0, int)
    total = (
        len(sizes) * np.log(alpha) + gammaln(sizes).sum() - np.log(alpha + np.arange(len(z))).sum()
    )
    for group in range(len(sizes)):
        for j, log_marginal in enumerate(columns):
            values = x[np.equal(z, group), j]
            total += log_marginal(values[~np.isnan(values)])
    return total


def log_z(x, y, columns, num_classes):
    """Evidence of rows and labels, the unlabelled ones summed out."""
    free = np.flatnonzero(np.equal(y, -1))
    terms = []
    for filled in product(range(num_classes), repeat=len(free)):
        labels = np.array(y)
        labels[free] = filled
        counts = np.bincount(labels, minlength=num_classes)
        term = gammaln(num_classes) - gammaln(num_classes + len(y)) + gammaln(1 + counts).sum()
        for cls in range(num_classes):
            mine = x[labels == cls]
            term += (
                logsumexp([log_joint(mine, z, columns) for z in partitions(len(mine))])
                if len(mine)
                else 0.0
            )
        terms.append(term)
    return logsumexp(terms)


def log_classes(row, x, y, columns):
    """log p(class, row | rows and labels)."""
    return [
        log_z(np.vstack([x, row]), [*y, cls], columns, 2) - log_z(x, y, columns, 2)
        for cls in range(2)
    ]


# A table of every kind of column, its first row without a label: the filter is then exact. (Classes
# that are known part the filter; at the first label that is missing it draws pairs of their
# particles.)

TABLE = pd.DataFrame(
    {
        "age": [np.nan, 31.0, 35.0, 60.0, 57.0, 33.0],
        "smokes": pd.array([False, False, True, None, True, False], dtype="boolean"),
        "place": ["north", "north", "south", "south", None, "south"],
        "grade": pd.Categorical(
            ["low", "low", "low", "high", np.nan, "low"], categories=["low", "middle", "high"]
        ),
    }
)
NEW = pd.DataFrame(
    {
        "age": [40.0, np.nan, 58.0],
        "smokes": pd.array([True, None, None], dtype="boolean"),
        "place": ["south", None, "north"],
        "grade": pd.Categorical(["middle", np.nan, np.nan], categories=["low", "middle", "high"]),
    }
)
LABELS = np.array([-1, "well", "well", "ill", "ill", "well"], object)  # sorted: ill, well
CODES = [-1, 1, 1, 0, 0, 1]
ORACLE = [Normal(TABLE["age"]), bernoulli, categorical(2), categorical(3)]
EVERYTHING = 100  # particles, more than there are partitions


def numbers(table):
    """The table in its own unit, categories as codes."""
    codes = [
        table["place"].map({"north": 0.0, "south": 1.0}),
        table["grade"].cat.codes.replace(-1, np.nan),
    ]
    return np.column_stack(
        [table["age"], table["smokes"].to_numpy(float, na_value=np.nan), *codes]
    ).astype(float)


@pytest.fixture(scope="module")
def fitted():
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        return AClassClassifier(EVERYTHING, random_state=0).partial_fit(TABLE, LABELS)


def check_evidence(classifier):
    np.testing.assert_allclose(
        classifier.log_evidence_, log_z(numbers(TABLE), CODES, ORACLE, 2), rtol=1e-10
    )


def check_probabilities(classifier):
    wanted = np.array([log_classes(row, numbers(TABLE), CODES, ORACLE) for row in numbers(NEW)])
    np.testing.assert_allclose(
        classifier.predict_log_proba(NEW),
        wanted - logsumexp(wanted, axis=1, keepdims=True),
        rtol=1e-9,
    )


@pytest.mark.slow
def test_evidence_is_exact_in_the_units_of_the_table(fitted):
    check_evidence(fitted)


@pytest.mark.slow
def test_evidence_in_other_units_is_seen(monkeypatch):
    monkeypatch.setattr(Columns, "log_units", lambda self, x: 0.0)
    with pytest.raises(AssertionError):
        check_evidence(AClassClassifier(EVERYTHING, random_state=0).partial_fit(TABLE, LABELS))


def test_probabilities_are_exact(fitted):
    check_probabilities(fitted)
    np.testing.assert_allclose(fitted.predict_proba(NEW).sum(1), 1.0, rtol=1e-12)
    np.testing.assert_array_equal(
        fitted.predict(NEW), fitted.classes_[fitted.predict_proba(NEW).argmax(1)]
    )


@pytest.mark.slow
def test_a_row_without_a_label_taken_for_ill_is_seen():
    as_ill = AClassClassifier(EVERYTHING, random_state=0).partial_fit(
        TABLE, np.where(LABELS == -1, "ill", LABELS)
    )
    with pytest.raises(AssertionError):
        check_probabilities(as_ill)


def mixture_of_ages(row, labels):
    """Weight of every class, partition and group for a row, and the values of `age` in the
    group.
    """
    x = np.vstack([numbers(TABLE), row])
    found = []
    for first, last in product(range(2), labels):
        y = np.array([*CODES, last])
        y[0] = first
        counts = np.bincount(y, minlength=2)
        for z, other in product(partitions(counts[last]), partitions(counts[1 - last])):
            mine, ages = x[y == last], x[y == last, 0][np.equal(z, z[-1])]
            weight = (
                gammaln(1 + counts).sum()
                + log_joint(mine, z, ORACLE)
                + log_joint(x[y == 1 - last], other, ORACLE)
            )
            found.append((weight, ages[~np.isnan(ages)]))
    weights = np.array([weight for weight, _ in found])
    return np.exp(weights - logsumexp(weights)), [ages for _, ages in found]


def expected_age(row, labels=(0, 1)):
    weights, ages = mixture_of_ages(row, labels)
    return sum(
        weight * ORACLE[0].posterior(values)[0]
        for weight, values in zip(weights, ages, strict=True)
    )


def most_probable(row, column, values, labels=(0, 1)):
    rows = [np.where(np.arange(4) == column, value, row) for value in range(values)]
    joint = [
        logsumexp(
            [log_z(np.vstack([numbers(TABLE), row]), [*CODES, cls], ORACLE, 2) for cls in labels]
        )
        for row in rows
    ]
    return int(np.argmax(joint))


def test_missing_numbers_get_their_exact_expectation(fitted):
    row = numbers(NEW)[1]
    np.testing.assert_allclose(fitted.impute(NEW)["age"][1], expected_age(row), rtol=1e-9)
    as_ill = fitted.impute(NEW, ["ill"] * 3)["age"][1]
    np.testing.assert_allclose(as_ill, expected_age(row, labels=[0]), rtol=1e-9)
    assert as_ill > fitted.impute(NEW, ["well"] * 3)["age"][1] + 1


@pytest.mark.parametrize(("label", "labels"), [(-1, (0, 1)), ("ill", (0,)), ("well", (1,))])
def test_missing_categories_get_the_most_probable_value(fitted, label, labels):
    filled = fitted.impute(NEW, np.array([label] * 3, object))
    for row, x in enumerate(numbers(NEW)):
        for column, (name, values) in enumerate(
            {
                "smokes": (False, True),
                "place": ("north", "south"),
                "grade": ("low", "middle", "high"),
            }.items(),
            1,
        ):
            wanted = (
                NEW[name][row]
                if pd.notna(NEW[name][row])
                else values[most_probable(x, column, len(values), labels)]
            )
            assert filled[name][row] == wanted


def check_probabilities_of_codes(found):
    """The probabilities of the missing grade of the last row are those by enumeration."""
    x = numbers(NEW)[2]
    rows = [np.where(np.arange(4) == 3, code, x) for code in range(3)]
    joint = np.array([logsumexp(log_classes(row, numbers(TABLE), CODES, ORACLE)) for row in rows])
    np.testing.assert_allclose(found, np.exp(joint - logsumexp(joint)), rtol=1e-9)


def test_probabilities_of_codes_are_mixed_over_groups(fitted):
    found = fitted._kernel.mean_rows(
        fitted._states[0], fitted._driver.reading, fitted._program(*fitted._read(NEW))
    )["category3_x"]
    assert found.shape == (3, 1, 3)
    check_probabilities_of_codes(found[2, 0])
    modes = np.eye(3)[found[2, 0].argmax()]
    with pytest.raises(AssertionError):
        check_probabilities_of_codes(0.9 * modes + 0.1 / 3)


def test_imputed_table_is_the_given_one_where_that_is_complete(fitted):
    filled = fitted.impute(NEW)
    assert not filled.isna().any(axis=None)
    assert (filled.dtypes == NEW.dtypes).all()
    assert ((filled == NEW) | NEW.isna()).all(axis=None)
    assert NEW.isna().any(axis=None), "the table that was given is untouched"


def check_drawn_numbers(drawn):
    weights, ages = mixture_of_ages(np.full(4, np.nan), (0, 1))
    each = [ORACLE[0].posterior(values) for values in ages]
    t = [
        stats.t(nu, loc, np.sqrt(square / nu * (1 + 1 / kappa))) for loc, kappa, nu, square in each
    ]
    cdf = lambda values: sum(
        weight * one.cdf(values) for weight, one in zip(weights, t, strict=True)
    )
    assert stats.kstest(drawn, cdf).pvalue > 1e-3


def check_drawn_categories(drawn, labels):
    outcomes = list(product((False, True), ("north", "south"), ("ill", "well")))
    found = [
        np.sum((drawn["smokes"] == smokes) & (drawn["place"] == place) & (labels == label))
        for smokes, place, label in outcomes
    ]
    rows = [[np.nan, smokes, float(place == "south"), np.nan] for smokes, place, _ in outcomes]
    wanted = [
        np.exp(log_classes(row, numbers(TABLE), CODES, ORACLE)[int(label == "well")])
        for row, (*_, label) in zip(rows, outcomes, strict=True)
    ]
    np.testing.assert_allclose(sum(wanted), 1.0)
    assert stats.chisquare(found, len(drawn) * np.array(wanted)).pvalue > 1e-3


@pytest.mark.slow
def test_samples_have_the_predictive_distribution(fitted):
    drawn, labels = fitted.sample(4096)
    check_drawn_numbers(drawn["age"])
    check_drawn_categories(drawn, labels)
    with pytest.raises(AssertionError):
        check_drawn_numbers(drawn["age"] / TABLE["age"].std(ddof=0))
    with pytest.raises(AssertionError):
        check_drawn_categories(drawn, labels[::-1])


@pytest.mark.slow
def test_samples_come_in_the_columns_of_the_table_and_of_the_class_that_is_asked_for(fitted):
    drawn, labels = fitted.sample(4096, "ill")
    assert (labels == "ill").all()
    wanted = np.exp(
        [
            log_classes([np.nan, smokes, np.nan, np.nan], numbers(TABLE), CODES, ORACLE)[0]
            for smokes in (0, 1)
        ]
    )
    assert stats.binomtest(int(drawn["smokes"].sum()), 4096, wanted[1] / wanted.sum()).pvalue > 1e-3
    assert (drawn.dtypes == TABLE.dtypes).all()
    assert list(fitted.sample(2, ["well", "ill"])[1]) == ["well", "ill"]
    with pytest.raises(ValueError, match="n: found 3 rows and 2 classes"):
        fitted.sample(3, ["well", "ill"])


@pytest.mark.slow
def test_a_row_of_which_nothing_is_known_has_the_probabilities_of_the_classes():
    x = np.array([[0.0, 1.0], [np.nan, np.nan], [1.0, 1.0], [0.0, np.nan]])
    classifier = AClassClassifier(random_state=0).fit(x, [0, 1, 1, 1])
    np.testing.assert_allclose(classifier.predict_proba([[np.nan, np.nan]]), [[2 / 6, 4 / 6]])
    assert AClassClassifier(random_state=0).fit(x[[1]], [0]).log_evidence_ == 0.0


def rows_of_bits(num_rows=40, num_values=2):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, num_rows)
    return (
        rng.integers(0, num_values, (num_rows, 5)) + y[:, None] * (rng.random((num_rows, 5)) < 0.4)
    ) % num_values, y


@pytest.mark.slow
def test_one_group_a_class_is_naive_bayes():
    x, y = rows_of_bits()
    prior = (1 + np.bincount(y[:30])) / (3 + 30)
    peer = BernoulliNB(alpha=0.5, class_prior=prior).fit(x[:30], y[:30])
    ours = AClassClassifier(max_groups=1, random_state=0).fit(x[:30], y[:30])
    np.testing.assert_allclose(ours.predict_proba(x[30:]), peer.predict_proba(x[30:]), rtol=1e-10)
    many = AClassClassifier(random_state=0).fit(x[:30], y[:30])
    assert np.abs(many.predict_proba(x[30:]) - peer.predict_proba(x[30:])).max() > 0.01


@pytest.mark.slow
def test_one_group_a_class_is_naive_bayes_of_texts():
    x, y = rows_of_bits(num_values=3)
    names = np.array(["a", "b", "c"], object)[x]
    prior = (1 + np.bincount(y[:30])) / (3 + 30)
    peer = CategoricalNB(alpha=0.5, class_prior=prior, min_categories=3).fit(x[:30], y[:30])
    ours = AClassClassifier(max_groups=1, random_state=0).fit(names[:30], y[:30])
    np.testing.assert_allclose(
        ours.predict_proba(names[30:]), peer.predict_proba(x[30:]), rtol=1e-10
    )


@pytest.mark.slow
def test_a_component_of_ones_own_reads_numbers_as_they_are():
    """Counts, and a number in its own unit beside them: E[rate] = (1 + sum) / (0.1 + n) in one
    group.
    """
    x = np.array([[3.0, 210.0], [np.nan, 190.0], [5.0, 200.0]])
    component = mixed(count=([0], gamma_poisson), level=([1], normal_inverse_chi2))
    classifier = AClassClassifier(component=component, max_groups=1, random_state=0).fit(
        x, [7, 7, 7]
    )
    assert list(classifier.classes_) == [7]
    np.testing.assert_allclose(classifier.impute([[np.nan, np.nan]]), [[9 / 2.1, 600 / 3.1]])
    np.testing.assert_array_equal(classifier.predict([[np.nan, 1.0]]), [7])
    with pytest.raises(ValueError, match=r"site 'count_x': .*row 0.*Poisson takes whole numbers"):
        classifier.predict([[0.5, 1.0]])


@pytest.mark.slow
def test_concentration_learned_over_a_grid_is_the_average_of_its_points():
    x, y = rows_of_bits(6)
    points = [0.2, 1.0, 5.0]
    each = [
        AClassClassifier(EVERYTHING, alpha=point, random_state=0).fit(x, y % 2).log_evidence_
        for point in points
    ]
    weight = np.exp(dist.Gamma(1.0, 1.0).log_prob(np.array(points))) * np.gradient(points)
    learned = AClassClassifier(
        EVERYTHING, alpha=dist.Gamma(1.0, 1.0), grid={"alpha": points}, random_state=0
    ).fit(x, y % 2)
    np.testing.assert_allclose(
        learned.log_evidence_, logsumexp(each, b=weight / weight.sum()), rtol=1e-10
    )
