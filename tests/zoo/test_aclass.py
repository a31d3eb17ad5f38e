"""AClass against its formula in numpy and scipy for each component, and its simulator against
moments of the model.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer.util import log_density
from scipy import stats

from gallery.datasets import names
from inference import Program
from inference.distributions import Missing
from tests.by_numpy import log_joint, simulated
from zoo.aclass import (
    CARD,
    aclass,
    beta_bernoulli,
    dirichlet_categorical,
    gamma_poisson,
    mixed,
    normal_inverse_chi2,
    normal_inverse_wishart,
    simulate,
)

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

# The formulas, with loops: values of the latent sites `v`, features `x`, and the (class, group) of
# each row `at`.


def seen(x):
    return np.argwhere(~np.isnan(x))


def bernoulli_formula(v, x, at, name="", beta=0.5):
    likelihood = sum(
        stats.bernoulli.logpmf(x[n, d], v[name + "p"][(*at[n], d)]) for n, d in seen(x)
    )
    return stats.beta.logpdf(v[name + "p"], beta, beta).sum() + likelihood


def categorical_formula(v, x, at, name="", beta=0.5):
    p = v[name + "p"]
    prior = sum(
        stats.dirichlet.logpdf(each / each.sum(), np.full(p.shape[-1], beta))
        for each in p.reshape(-1, p.shape[-1])
    )
    return prior + sum(np.log(p[(*at[n], d, int(x[n, d]))]) for n, d in seen(x))


def poisson_formula(v, x, at, name=""):
    likelihood = sum(
        stats.poisson.logpmf(x[n, d], v[name + "mean"][(*at[n], d)]) for n, d in seen(x)
    )
    return stats.gamma.logpdf(v[name + "mean"], 1.0, scale=1 / 0.1).sum() + likelihood


def normal_formula(v, x, at, name="", mean=0.0, kappa=0.1, nu=2.0, scale=1.0):
    var, loc = v[name + "var"], v[name + "loc"]
    prior = stats.invgamma.logpdf(var, nu / 2, scale=nu * scale**2 / 2) + stats.norm.logpdf(
        loc, mean, np.sqrt(var / kappa)
    )
    return prior.sum() + sum(
        stats.norm.logpdf(x[n, d], loc[(*at[n], d)], np.sqrt(var[(*at[n], d)])) for n, d in seen(x)
    )


def wishart_formula(v, x, at, name="", mean=0.0, kappa=0.1, scale=1.0):
    precision, loc, width = v[name + "precision"], v[name + "loc"], x.shape[1]
    covariance = np.linalg.inv(precision)
    total = 0.0
    for cell in np.ndindex(loc.shape[:2]):
        total += stats.wishart.logpdf(
            precision[cell], width + 1, np.eye(width) / ((width + 1) * scale**2)
        )
        total += stats.multivariate_normal.logpdf(
            loc[cell], np.full(width, mean), covariance[cell] / kappa
        )
    for n in range(len(x)):
        kept = np.flatnonzero(~np.isnan(x[n]))
        if len(kept):
            total += stats.multivariate_normal.logpdf(
                x[n, kept], loc[at[n]][kept], covariance[at[n]][np.ix_(kept, kept)]
            )
    return total


def mixed_formula(v, x, at):
    parts = (
        (bernoulli_formula, slice(0, 2), "bits_"),
        (wishart_formula, [2, 4], "pair_"),
        (categorical_formula, [3], "code_"),
    )
    return sum(formula(v, x[:, columns], at, name) for formula, columns, name in parts)


def labels_of(v, data):
    y = np.asarray(data["y"])
    return np.where(y == -1, v["y_unobserved"], y) if (y == -1).any() else y


def formula(component_formula, v, data, alpha=1.0, gamma=1.0):
    """The log joint: `share`, `y`, the CRP's rule row by row, and the component."""
    v = {
        name: np.asarray(value, None if name in ("z", "y_unobserved") else float)
        for name, value in v.items()
    }
    x, y = np.asarray(data["x"]), labels_of(v, data)
    total = (
        stats.dirichlet.logpdf(v["share"] / v["share"].sum(), np.full(len(v["share"]), gamma))
        + np.log(v["share"][y]).sum()
    )
    for n, group in enumerate(v["z"]):
        before = [v["z"][m] for m in range(n) if y[m] == y[n]]
        total += np.log((before.count(group) or alpha) / (len(before) + alpha))
    return total + component_formula(v, x, list(zip(y.tolist(), v["z"].tolist(), strict=True)))


THREE_CODES = partial(dirichlet_categorical, num_values=3)
PARTS = mixed(
    bits=(slice(0, 2), beta_bernoulli),
    pair=([2, 4], normal_inverse_wishart),
    code=([3], THREE_CODES),
)
COMPONENTS = {
    "beta_bernoulli": (beta_bernoulli, bernoulli_formula),
    "dirichlet_categorical": (THREE_CODES, categorical_formula),
    "gamma_poisson": (gamma_poisson, poisson_formula),
    "normal_inverse_chi2": (normal_inverse_chi2, normal_formula),
    "normal_inverse_wishart": (normal_inverse_wishart, wishart_formula),
    "mixed": (PARTS, mixed_formula),
    "other numbers": (
        partial(normal_inverse_chi2, mean=0.5, kappa=2.0, nu=5.0, scale=1.5),
        partial(normal_formula, mean=0.5, kappa=2.0, nu=5.0, scale=1.5),
    ),
}


@cache
def drawn(component=beta_bernoulli, **options):
    """Data with holes, two rows without a label, the last row wholly missing; and values of the
    latent sites.
    """
    data = simulate(random.key(4), 9, 5, missing=0.25, component=component, **options)
    data = data | {"x": data["x"].at[-1].set(jnp.nan), "y": data["y"].at[jnp.array([1, 5])].set(-1)}
    program = Program(aclass, **data)
    return data, program.draw_prior(random.key(7)), program


def check_formula(component, component_formula, **options):
    data, values, _ = drawn(component, **options)
    found = log_joint(aclass, data, values)
    np.testing.assert_allclose(
        found, formula(component_formula, values, data, **options), rtol=1e-9
    )


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", COMPONENTS)
def test_log_joint_equals_its_formula(name):
    check_formula(*COMPONENTS[name])


def test_alpha_and_gamma_are_where_they_belong():
    check_formula(beta_bernoulli, bernoulli_formula, alpha=2.5, gamma=0.7)


def in_another_class(x, at):
    """Reads the parameters of the other class."""
    return beta_bernoulli(x, at._replace(z=(1 - at.z[0], at.z[1])))


def shared_by_the_classes(x, at):
    """One set of groups for all classes: their parameters are drawn once."""
    with at.groups, at.features:
        p = numpyro.sample("p", dist.Beta(0.5, 0.5))
    with at.rows, at.features:
        return numpyro.sample("x", Missing(dist.Bernoulli(p[at.z[1]])), obs=x)


def independent_of_the_variance(x, at):
    """The prior of `loc` forgets the variance of its group."""
    with at.classes, at.groups, at.features:
        var = numpyro.sample("var", dist.InverseGamma(1.0, 1.0))
        loc = numpyro.sample("loc", dist.Normal(0.0, jnp.sqrt(1 / 0.1)))
    with at.rows, at.features:
        return numpyro.sample("x", Missing(dist.Normal(loc[at.z], jnp.sqrt(var[at.z]))), obs=x)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("twin", "component_formula"),
    [
        (in_another_class, bernoulli_formula),
        (
            shared_by_the_classes,
            lambda v, x, at: bernoulli_formula(v | {"p": np.stack([v["p"], v["p"]])}, x, at),
        ),
        (partial(beta_bernoulli, beta=0.6), bernoulli_formula),
        (independent_of_the_variance, normal_formula),
        pytest.param(
            partial(normal_inverse_wishart, kappa=0.2), wishart_formula, marks=pytest.mark.slow
        ),
        pytest.param(
            partial(normal_inverse_wishart, nu=7.0), wishart_formula, marks=pytest.mark.slow
        ),
        (partial(gamma_poisson, rate=0.2), poisson_formula),
    ],
    ids=["other class", "shared", "beta", "forgets var", "kappa", "nu", "rate"],
)
def test_a_component_with_one_term_wrong_is_seen(twin, component_formula):
    with pytest.raises(AssertionError):
        check_formula(twin, component_formula)


@pytest.mark.slow
def test_one_correlated_feature_is_one_real_feature():
    """normal_inverse_wishart of width 1 is normal_inverse_chi2; the densities of precision and
    variance differ by the Jacobian.
    """
    data = simulate(random.key(0), 6, 1, component=normal_inverse_chi2)
    values = Program(aclass, **data).draw_prior(random.key(1))
    correlated = values | {"precision": 1 / values["var"][..., None]}
    found = log_density(
        aclass,
        (),
        data | {"component": normal_inverse_wishart},
        {k: v for k, v in correlated.items() if k != "var"},
    )[0]
    np.testing.assert_allclose(
        found,
        log_density(aclass, (), data, values)[0] + 2 * jnp.log(values["var"]).sum(),
        rtol=1e-10,
    )


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", COMPONENTS)
def test_gradient_is_finite_beside_missing_entries(name):
    _, values, program = drawn(COMPONENTS[name][0])
    whole = {k: v for k, v in values.items() if not jnp.issubdtype(v.dtype, jnp.inexact)}
    real = {k: v for k, v in values.items() if k not in whole}
    slopes = jax.jit(jax.grad(lambda real: program.log_joint(real | whole)))(real)
    assert all(jnp.isfinite(slope).all() for slope in slopes.values())
    assert all((slope != 0).any() for slope in slopes.values())


ROW, GROUP = ("row", "feature"), ("class", "group", "feature")
DIMS = {
    "beta_bernoulli": {"p": GROUP, "x": ROW},
    "dirichlet_categorical": {"p": (*GROUP, "value"), "x": ROW},
    "gamma_poisson": {"mean": GROUP, "x": ROW},
    "normal_inverse_chi2": {"var": GROUP, "loc": GROUP, "x": ROW},
    "normal_inverse_wishart": {"precision": (*GROUP, "feature_2"), "loc": GROUP, "x": ROW},
    "mixed": {
        "bits_p": ("class", "group", "bits_feature"),
        "bits_x": ("row", "bits_feature"),
        "pair_precision": ("class", "group", "pair_feature", "pair_feature_2"),
        "pair_loc": ("class", "group", "pair_feature"),
        "pair_x": ("row", "pair_feature"),
        "code_p": ("class", "group", "code_feature", "code_value"),
        "code_x": ("row", "code_feature"),
    },
}


@pytest.mark.parametrize("name", DIMS)
def test_sites_plates_and_dims(name):
    program = Program(
        aclass, np.zeros((8, 5)), np.arange(8) % 3, num_classes=3, component=COMPONENTS[name][0]
    )
    assert program.dims == {"share": ("class",), "y": ("row",), "z": ("row",), **DIMS[name]}
    assert set(program.observed) == {"y", *(site for site in DIMS[name] if site.endswith("x"))}
    sizes = {name: plate.size for name, plate in program.plates.items()}
    assert sizes.items() >= {"row": 8, "class": 3, "group": 8, "feature": 5}.items()
    assert (
        sum(program.observed_values[site].shape[1] for site in program.observed if site != "y") == 5
    )


def test_card_has_words_for_exactly_the_sites_and_knows_real_data():
    assert set(CARD.sites) == set(Program(aclass, **simulate(random.key(0), 9, 5)).sites)
    assert set(CARD.data) <= set(names())
    assert CARD.kernels[:2] == ("ParticleFilter", "CollapsedGibbs")


def test_rows_without_a_label_are_latent():
    data, values, program = drawn()
    assert program.latent == ("share", "y_unobserved", "z", "p")
    assert program.observed == ("y_observed", "x")
    assert program.dims["y"] == ("row",)
    # a labelled row keeps its label
    wrong = values | {"y_unobserved": values["y_unobserved"].at[0].add(1)}
    density = jax.jit(program.log_joint)
    assert density(wrong) == density(values)
    labels = program.deterministics(values)["y"]
    nothing = Program(aclass, **data | {"y": None})
    assert nothing.latent == ("share", "y", "z", "p")
    latent = {name: labels if name == "y" else values[name] for name in nothing.latent}
    np.testing.assert_allclose(jax.jit(nothing.log_joint)(latent), density(values))


@pytest.mark.slow
def test_labels_may_be_traced_when_it_is_said_whether_all_are_there():
    data, values, program = drawn()
    y = data["y"]
    traced = jax.jit(
        lambda y: log_density(aclass, (), data | {"y": y, "all_labelled": False}, values)[0]
    )
    np.testing.assert_allclose(traced(y), program.log_joint(values))
    full, rest = (
        program.deterministics(values)["y"],
        {name: value for name, value in values.items() if name != "y_unobserved"},
    )
    both = jax.vmap(
        lambda y: log_density(aclass, (), data | {"y": y, "all_labelled": True}, rest)[0]
    )(jnp.stack([full, full]))
    wanted = [log_density(aclass, (), data | {"y": full}, rest)[0]] * 2
    np.testing.assert_allclose(both, wanted)
    with pytest.raises(jax.errors.TracerArrayConversionError) as error:
        jax.jit(lambda y: log_density(aclass, (), data | {"y": y}, values)[0])(y)
    assert "all_labelled=True or False" in error.value.__notes__[0]


@pytest.mark.slow
def test_hyper_parameters_may_be_latent_sites():
    component = partial(beta_bernoulli, beta=dist.Gamma(2.0, 4.0))
    data = simulate(random.key(0), 8, 3, component=component, alpha=dist.Gamma(1.0, 1.0))
    program = Program(aclass, **data)
    assert program.latent == ("share", "alpha", "z", "beta", "p")
    values = program.draw_prior(random.key(1))
    beta, alpha = float(values["beta"]), float(values["alpha"])
    wanted = formula(partial(bernoulli_formula, beta=beta), values, data, alpha=alpha)
    wanted += stats.gamma.logpdf(beta, 2.0, scale=1 / 4) + stats.gamma.logpdf(alpha, 1.0)
    np.testing.assert_allclose(program.log_joint(values), wanted, rtol=1e-9)
    slope = jax.grad(lambda a: program.log_joint(values | {"alpha": a}))(alpha)
    assert jnp.isfinite(slope)
    parts = mixed(bits=([0, 1, 2], component))
    assert "bits_beta" in Program(aclass, **data | {"component": parts}).latent


@pytest.mark.slow
def test_room_for_groups_changes_no_term():
    data = simulate(random.key(0), 8, 3)
    small, large = (Program(aclass, **data, num_groups=n) for n in (4, None))
    values = large.draw_prior(random.key(2)) | {
        "z": jnp.array([0, 0, 1, 0, 0, 1, 0, 0], jnp.int32) * 0
    }
    fewer = values | {"p": values["p"][:, :4]}
    for site in ("z", "x"):
        np.testing.assert_allclose(small.log_probs(fewer)[site], large.log_probs(values)[site])


def test_one_group_a_class_is_naive_bayes():
    data = simulated(simulate, 0, 9, 5, max_groups=1)
    program = Program(aclass, **data)
    values = jax.jit(program.draw_prior)(random.key(1))
    assert program.sites["p"].shape == (2, 1, 5)
    assert program.log_probs(values)["z"] == 0
    assert not values["z"].any()


def check_pairs(**options):
    """Two rows share a group with probability 2/3 x 1/(1 + alpha), and then their bits covary by
    Var Beta(1/2, 1/2) = 1/8.
    """

    def draw(key):
        data = simulate(key, 2, 1, **options)
        return data["x"][:, 0], data["y"]

    x, y = map(np.asarray, jax.jit(jax.vmap(draw))(random.split(random.key(0), 40_000)))
    together = y[:, 0] == y[:, 1]
    assert abs(together.mean() - 2 / 3) < 4 * np.sqrt(2 / 9 / len(y))
    product = (x[:, 0] - 0.5) * (x[:, 1] - 0.5)
    assert abs(product.mean() - 2 / 3 / 2 / 8) < 4 * product.std() / np.sqrt(len(y))


@pytest.mark.slow
def test_simulated_rows_covary_as_the_model_says():
    check_pairs()


OTHERS = {"alpha": 2.0, "max_groups": 1, "component": partial(beta_bernoulli, beta=1.0)}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{name: value} for name, value in OTHERS.items()], ids=OTHERS)
def test_rows_of_another_model_are_seen(options):
    with pytest.raises(AssertionError):
        check_pairs(**options)


def test_simulate_returns_the_arguments_of_the_model():
    data = simulate(
        random.key(0), 50, 20, num_classes=3, missing=0.3, unlabelled=0.4, alpha=2.0, num_groups=5
    )
    assert list(data) == ["x", "y", "num_classes", "alpha", "num_groups"]
    assert abs(np.isnan(data["x"]).mean() - 0.3) < 0.06
    assert abs((np.asarray(data["y"]) == -1).mean() - 0.4) < 0.2
    Program(aclass, **data).check()
    np.testing.assert_array_equal(
        data["x"],
        simulate(random.key(0), 50, 20, num_classes=3, missing=0.3, unlabelled=0.4, alpha=2.0)["x"],
    )


@pytest.mark.slow
def test_mixed_simulates_its_columns_in_place():
    x = np.asarray(simulate(random.key(0), 9, 5, component=PARTS)["x"])
    assert set(np.unique(x[:, :2])) == {0.0, 1.0}
    assert set(np.unique(x[:, 3])) <= {0.0, 1.0, 2.0}
    assert not np.isin(x[:, [2, 4]], [0.0, 1.0, 2.0]).any()


@pytest.mark.slow
def test_tables_of_numpy_in_single_precision():
    """As the gallery hands them over: float64 and int64, in a session of float32."""
    with jax.enable_x64(False):
        data = simulate(random.key(0), 8, 3)
        tables = {"x": np.asarray(data["x"], float), "y": np.asarray(data["y"], np.int64)}
        for y in (tables["y"], np.where(np.arange(8) == 2, -1, tables["y"])):
            program = Program(aclass, tables["x"], y, num_groups=8)
            values = program.draw_prior(random.key(1))
            np.testing.assert_allclose(
                program.log_joint(values),
                formula(bernoulli_formula, values, {"x": tables["x"], "y": y}),
                rtol=1e-4,
            )
            assert (
                program.fingerprint() == Program(aclass, tables["x"], y, num_groups=8).fingerprint()
            )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": None}, r"aclass: found x of shape None; wanted x .*, or shape="),
        ({"x": np.zeros(4)}, r"aclass: found x of shape \(4,\)"),
        (
            {"x": np.zeros((0, 3)), "y": np.zeros(0, int)},
            r"aclass: found x of shape \(0, 3\); wanted .* at least one of each",
        ),
        (
            {"y": np.array([0, 1])},
            r"aclass: found y of shape \(2,\) beside x of shape \(4, \d\); wanted one label a row",
        ),
        (
            {"y": np.array([0, 1]), "all_labelled": False},
            r"aclass: found y of shape \(2,\) beside x of shape \(4, \d\)",
        ),
        (
            {"y": np.array([0, 1, -2, 1])},
            r"site 'y': 1 of its observations are outside the support.*the first is -2 at \(2,\)",
        ),
        pytest.param(
            {"y": np.array([0, 1, 2, -1])},
            r"site 'y_observed': 1 of its observations are outside the support",
            marks=pytest.mark.slow,
        ),
        (
            {"x": np.full((4, 2), 0.5)},
            r"site 'x': 8 of its observations are outside the support Boolean\(\) or NaN",
        ),
        (
            {"component": mixed(a=([0], beta_bernoulli))},
            r"mixed: found the columns \{'a': \[0\]\}, wanted each of 0 to 1 in one part",
        ),
        (
            {"component": mixed(a=([0], beta_bernoulli), b=([0, 1], beta_bernoulli))},
            "mixed: found the columns",
        ),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    data = {"x": np.zeros((4, 2)), "y": np.array([0, 1, 0, 1]), "num_classes": 2}
    with pytest.raises(ValueError, match=message):
        Program(aclass, **data | changes).check()
