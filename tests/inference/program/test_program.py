"""Every answer of `Program` against NumPyro's or ArviZ's own, or a closed form; every complaint
by name.
"""

import subprocess
import sys
import textwrap

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from arviz_base.io_numpyro import infer_dims
from jax import random
from numpyro.infer.util import log_density, potential_energy, unconstrain_fn

from inference.program.program import Program
from inference.program.sites import StructureError
from tests.by_numpy import by_numpy

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(5, 2)), RNG.normal(size=5)


def continuous(x, y=None, *, scale=1.0):
    """A regression with a simplex, a support that depends on another site, and a factor."""
    spread = numpyro.sample("spread", dist.Gamma(2.0, 1.0))
    with numpyro.plate("feature", x.shape[1]):
        weight = numpyro.sample("weight", dist.Normal(0.0, spread))
    share = numpyro.sample("share", dist.Dirichlet(jnp.ones(3)), infer={"event_dims": ["part"]})
    top = numpyro.sample("top", dist.Uniform(0.0, spread))
    numpyro.factor("penalty", -top * share[0])
    with numpyro.plate("row", x.shape[0]):
        mean = numpyro.deterministic("mean", x @ weight + top)
        numpyro.sample("y", dist.Normal(mean, scale), obs=y)


def mixed(x, y=None):
    """With a discrete site, one for each row."""
    weight = numpyro.sample("weight", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    with numpyro.plate("row", x.shape[0]):
        outlier = numpyro.sample("outlier", dist.Bernoulli(0.2))
        numpyro.sample("y", dist.Normal(x @ weight, 1.0 + 9.0 * outlier), obs=y)


@pytest.fixture
def program():
    return Program(continuous, X, y=Y)


@pytest.fixture
def values(program):
    return by_numpy(program.draw_initial)(random.key(3))


def test_sites_by_kind_in_the_order_of_the_trace(program):
    assert list(program.sites) == ["spread", "weight", "share", "top", "penalty", "mean", "y"]
    assert program.latent == ("spread", "weight", "share", "top")
    assert (program.observed, program.deterministic, program.factors) == (
        ("y",),
        ("mean",),
        ("penalty",),
    )
    assert program.sites["weight"].plates == ("feature",)
    assert program.sites["share"].event_dim == 1
    assert program.sites["top"].support.upper_bound.shape == ()
    assert program.plates["row"] == (5, 5, -1)


def test_wrappers_do_not_hide_the_family():
    def model(y):
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0).expand([3]).to_event(1).mask(True))
        numpyro.sample("y", dist.Normal(mean[0], 1.0), obs=y)

    assert Program(model, 0.5).sites["mean"].family == "Normal"


def test_delta_without_data_is_deterministic():
    def model(y):
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
        twice = numpyro.sample("twice", dist.Delta(2.0 * mean))
        numpyro.sample("y", dist.Normal(twice, 1.0), obs=y)

    program = Program(model, 0.5)
    assert program.latent == ("mean",)
    assert program.deterministics({"mean": jnp.array(3.0)}) == {"twice": 6.0}
    assert (
        program.log_joint({"mean": jnp.array(3.0)})
        == log_density(model, (0.5,), {}, {"mean": 3.0})[0]
    )


def test_data_may_be_looked_at_by_the_model():
    def imputing(x):
        holes = np.argwhere(np.isnan(np.asarray(x)))
        with numpyro.plate("hole", len(holes)):
            missing = numpyro.sample("missing", dist.ImproperUniform(dist.constraints.real, (), ()))
        with numpyro.plate("row", len(x)):
            numpyro.sample(
                "x", dist.Normal(0.0, 1.0), obs=jnp.asarray(x).at[tuple(holes.T)].set(missing)
            )

    program = Program(imputing, np.where(np.arange(5) == 2, np.nan, Y))
    program.check()
    assert program.plates["hole"].size == 1
    np.testing.assert_array_equal(
        program.observed_values["x"], np.where(np.arange(5) == 2, np.nan, Y)
    )
    with pytest.raises(StructureError, match=r"site 'missing'.*ImproperUniform"):
        by_numpy(program.draw_prior)(random.key(0))


def test_no_array_is_computed_to_list_the_sites():
    def huge():
        with numpyro.plate("row", 10**6), numpyro.plate("column", 10**6):
            numpyro.sample("x", dist.Normal(0.0, 1.0))

    program = Program(huge)
    with pytest.raises(
        ValueError, match=r"site 'x': found a value of shape \(2,\), wanted \(1000000, 1000000\)"
    ):
        program.log_joint({"x": jnp.zeros(2)})


@pytest.mark.parametrize("model", [continuous, mixed])
def test_dims_are_those_of_arviz(model):
    program = Program(model, X, Y)
    values = by_numpy(lambda key: program.draw_prior(key, 2))(random.key(0))
    wanted = az.from_dict(
        {"posterior": jax.tree.map(lambda v: np.asarray(v)[None], values)},
        dims=infer_dims(model, (X, Y)),
    )
    for name in values:
        assert program.dims[name] == wanted.posterior[name].dims[2:]


def test_dims_follow_position_and_not_only_order():
    def model():
        with numpyro.plate("column", 3, dim=-1):
            unnamed = numpyro.sample("unnamed", dist.Normal(jnp.zeros((2, 1)), 1.0))
            with numpyro.plate("row", 2, dim=-2):
                numpyro.sample(
                    "matrix",
                    dist.Normal(jnp.zeros((2, 3, 4)), 1.0).to_event(1),
                    infer={"event_dims": ["time"]},
                )
            numpyro.deterministic("total", unnamed.sum())

    dims = Program(model).dims
    assert dims["unnamed"] == ("unnamed_dim_0", "column")
    assert dims["matrix"] == ("row", "column", "time")
    assert dims["total"] == ()


def test_too_many_event_dims_are_refused():
    def model():
        numpyro.sample(
            "x", dist.Normal(jnp.zeros(2), 1.0).to_event(1), infer={"event_dims": ["a", "b"]}
        )

    with pytest.raises(ValueError, match=r"site 'x': event_dims \['a', 'b'\]"):
        _ = Program(model).dims


def test_parents_are_what_a_site_is_computed_from(program):
    assert program.parents["weight"] == {"spread"}
    assert program.parents["top"] == {"spread"}
    assert program.parents["share"] == frozenset()
    assert program.parents["penalty"] == {"top", "share"}
    assert program.parents["y"] == program.parents["mean"] == {"weight", "top"}


def test_log_joint_equals_numpyro(program, values):
    wanted = log_density(continuous, (X,), {"y": Y}, values)[0]
    assert jnp.allclose(program.log_joint(values), wanted, rtol=1e-12)
    assert jnp.allclose(by_numpy(program.log_joint)(values), wanted, rtol=1e-12)


def test_log_joint_is_the_sum_of_prior_likelihood_and_factors(program, values):
    prior, likelihood, factors = (
        program.log_prior(values),
        program.log_likelihood(values),
        program.log_factors(values),
    )
    assert list(prior) == ["spread", "weight", "share", "top"]
    assert {name: term.shape for name, term in likelihood.items()} == {"y": (5,)}
    assert factors == {"penalty": -values["top"] * values["share"][0]}
    total = sum(term.sum() for terms in (prior, likelihood, factors) for term in terms.values())
    assert jnp.allclose(total, program.log_joint(values), rtol=1e-12)


def test_scales_and_masks_are_in_the_terms():
    def model(y):
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
        with (
            numpyro.plate("row", 100, subsample_size=5),
            numpyro.handlers.mask(mask=jnp.arange(5) < 3),
        ):
            numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    values = {"mean": jnp.array(0.3), "row": jnp.arange(5)}
    wanted = 20.0 * dist.Normal(0.3, 1.0).log_prob(Y) * (jnp.arange(5) < 3)
    assert jnp.allclose(Program(model, Y).log_likelihood(values)["y"], wanted)


def test_unconstrained_density_equals_numpyro(program, values):
    unconstrained = program.unconstrain(values)
    wanted = unconstrain_fn(continuous, (X,), {"y": Y}, values)
    assert all(jnp.allclose(unconstrained[name], wanted[name]) for name in program.latent)
    assert jnp.allclose(
        program.log_density_unconstrained(unconstrained),
        -potential_energy(continuous, (X,), {"y": Y}, wanted),
        rtol=1e-12,
    )


def test_constrain_inverts_unconstrain_where_supports_depend_on_sites(program):
    there_and_back = by_numpy(lambda values: program.constrain(program.unconstrain(values)))
    draw_initial = by_numpy(program.draw_initial)
    for key in random.split(random.key(0), 5):
        values = draw_initial(key)
        back = there_and_back(values)
        assert all(jnp.allclose(back[name], values[name]) for name in program.latent)
        assert 0 < back["top"] < back["spread"]


def test_discrete_sites_pass_through_unconstrained_space():
    program = Program(mixed, X, Y)
    values = by_numpy(program.draw_initial)(random.key(1))
    unconstrained = program.unconstrain(values)
    assert (unconstrained["outlier"] == values["outlier"]).all()
    assert jnp.allclose(program.log_density_unconstrained(unconstrained), program.log_joint(values))
    assert jnp.allclose(program.constrain(unconstrained)["weight"], values["weight"])


def test_prior_draws_have_the_prior_moments(program):
    draws = jax.tree.map(
        np.asarray, by_numpy(lambda key: program.draw_prior(key, 4000))(random.key(0))
    )
    assert set(draws) == set(program.latent)
    assert abs(draws["spread"].mean() - 2.0) < 5 * (2 / 4000) ** 0.5
    assert abs((draws["top"] / draws["spread"]).mean() - 0.5) < 5 * (1 / 12 / 4000) ** 0.5


def test_prediction_ignores_the_data_and_follows_changed_arguments(program, values):
    predict = by_numpy(jax.vmap(lambda key: program.predict(key, values)))
    drawn = predict(random.split(random.key(0), 4000))
    assert set(drawn) == {"mean", "y"}
    assert (abs(drawn["y"].mean(0) - drawn["mean"][0]) < 5 / 4000**0.5).all()
    elsewhere = program.predict(random.key(1), values, x=X[:3], y=None)
    assert elsewhere["y"].shape == (3,)
    assert jnp.allclose(elsewhere["mean"], X[:3] @ values["weight"] + values["top"])


def test_prediction_draws_latent_sites_that_are_left_out():
    program = Program(mixed, X, Y)
    values = by_numpy(program.draw_initial)(random.key(1))
    with pytest.raises(
        ValueError,
        match=r"site 'outlier': its value has shape \(5,\), the changed arguments ask for \(3,\)",
    ):
        program.predict(random.key(0), values, x=X[:3])
    assert program.predict(random.key(0), {"weight": values["weight"]}, x=X[:3])["y"].shape == (3,)


def test_arguments_by_name_and_rebound():
    def model(first, *others, last=1.0, **options):
        numpyro.sample("x", dist.Normal(first, last))

    program = Program(model, 1.0, 2.0, colour="red")
    assert program.arguments == {"first": 1.0, "others": (2.0,), "colour": "red"}
    changed = program.with_arguments(first=3.0, last=2.0, colour="blue")
    assert changed.arguments == {"first": 3.0, "others": (2.0,), "last": 2.0, "colour": "blue"}
    assert program.arguments["first"] == 1.0


# Rows.


def of_rows(x, labels, names=(), weight=1.0):
    with numpyro.plate("row", len(x)):
        numpyro.sample(
            "x", dist.Normal(numpyro.sample("level", dist.Normal(0.0, 1.0)), weight), obs=x
        )


def test_rows_are_the_entries_of_arguments():
    x, labels = np.arange(40.0).reshape(20, 2), np.repeat(np.arange(4), 5)
    x[17, 1] = np.nan
    program = Program(of_rows, x, jnp.asarray(labels), names=["a"] * 20, weight=np.ones(3))
    assert set(program.by_row(20)) == {"x", "labels"}
    assert set(program.by_row(20, lists=True)) == {"x", "labels", "names"}
    assert set(program.by_row(3)) == {"weight"}
    rows = program.few_rows(20, 9)
    assert len(rows) == 9
    assert set(labels[rows]) == {0, 1, 2, 3}
    assert 17 in rows
    np.testing.assert_array_equal(Program(of_rows, x[:2], labels[:2]).few_rows(2, 4), [0, 1, 1, 1])
    some = program.on_rows(rows, program.by_row(20, lists=True))
    np.testing.assert_array_equal(some.arguments["x"], x[rows])
    assert isinstance(some.arguments["labels"], jax.Array)
    assert len(some.arguments["names"]) == 9


def test_a_number_of_rows_that_does_not_follow_from_the_data_is_refused():
    def fixed(x):
        with numpyro.plate("row", 6):
            numpyro.sample("z", dist.Normal(jnp.sum(x), 1.0))

    program = Program(fixed, np.ones(6))
    with pytest.raises(
        StructureError,
        match=r"site 'z': 6 rows remain of 6 when the arguments \['x'\] are cut to 2 rows; .* "
        r"length of",
    ):
        program.on_rows(np.arange(2), program.by_row(6), "z")


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: Program("model"), TypeError, "model: found str"),
        (
            lambda: Program(continuous),
            TypeError,
            r"continuous\(x, y=None, \*, scale=1.0\): missing a required argument: 'x'",
        ),
        (lambda: Program(continuous, X, depth=2), TypeError, "unexpected keyword argument 'depth'"),
        (
            lambda: Program(continuous, X).with_arguments(depth=2),
            TypeError,
            "has no argument 'depth'",
        ),
        (
            lambda: Program(continuous, X, Y).log_joint({}),
            ValueError,
            "needs a value of site 'spread'",
        ),
        (
            lambda: Program(continuous, X, Y).predict(random.key(0), {"spred": 1.0}),
            ValueError,
            "has no site 'spred'",
        ),
    ],
)
def test_wrong_arguments_are_named(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_a_model_that_needs_numbers_from_jax_is_told_to_use_numpy():
    def model(labels):
        with numpyro.plate("group", int(jnp.max(jnp.asarray(labels)))):
            numpyro.sample("x", dist.Normal(0.0, 1.0))

    with pytest.raises(TypeError) as caught:
        _ = Program(model, np.arange(3)).sites
    assert "compute it with numpy" in " ".join(caught.value.__notes__)


FINGERPRINT = """
    import numpy as np, numpyro, numpyro.distributions as dist
    from inference.program.program import Program

    def shrink({argument}):
        return {factor} * {argument}

    TABLE = np.linspace(0.0, {end}, 5)

    def model(x, y, link):
        {local} = numpyro.sample("weight", dist.Normal(0.0, {prior}))  {comment}
        with numpyro.plate("row", len(x)):
            numpyro.sample("y", dist.Normal(link(shrink({local}) * x + TABLE), 1.0), obs=y)

    def link(mean):
        return mean

    program = Program(model, np.arange(5.0), {data}, link=link)
"""
PLAIN = {
    "argument": "value",
    "factor": "0.5",
    "end": "1.0",
    "local": "weight",
    "prior": "1.0",
    "comment": "",
    "data": "np.ones(5)",
}


def _fingerprint(**changes):
    scope = {}
    exec(textwrap.dedent(FINGERPRINT).format(**PLAIN | changes), scope)
    return scope["program"].fingerprint()


@pytest.mark.slow
def test_fingerprint_is_the_same_in_another_process():
    code = textwrap.dedent(FINGERPRINT).format(**PLAIN) + "\nprint(program.fingerprint())"
    code = "import jax; jax.config.update('jax_enable_x64', True)\n" + code
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(_fingerprint())


@pytest.mark.parametrize(
    "changes", [{"argument": "renamed", "local": "other"}, {"comment": "# a prior"}]
)
def test_fingerprint_does_not_see_names_and_comments(changes):
    assert _fingerprint(**changes) == _fingerprint()


@pytest.mark.parametrize("changes", [{"prior": "2.0"}, {"factor": "0.25"}, {"end": "2.0"}])
def test_fingerprint_sees_priors_helpers_and_closures(changes):
    assert _fingerprint(**changes)["model"] != _fingerprint()["model"]
    assert _fingerprint(**changes)["data"] == _fingerprint()["data"]


def test_fingerprint_keeps_data_apart_from_the_model():
    changed = _fingerprint(data="np.zeros(5)")
    assert changed["model"] == _fingerprint()["model"]
    assert [
        name for name in changed["data"] if changed["data"][name] != _fingerprint()["data"][name]
    ] == ["y"]


def test_a_sound_model_passes_the_check(program):
    program.check()
