"""What cannot be integrated out is refused by the name of its site; and the proof sees one wrong
term of a family.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers, plate

from inference import Program, StructureError
from inference.distributions import CRP, Missing
from inference.reading import crp_mixture
from inference.reading.conjugate.table import TABLE, BetaBernoulli, NormalInverseGamma
from inference.reading.crp_mixture import read_partition
from zoo.aclass import Axes, aclass, beta_bernoulli, normal_inverse_chi2, normal_inverse_wishart

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")
sample = numpyro.sample

RNG = np.random.default_rng(0)
BITS = (RNG.random((6, 3)) < 0.5).astype(float)
BITS[1, 2] = BITS[4, 0] = np.nan
REAL = RNG.normal(size=(6, 3))
Y = np.array([0, 1, 0, 0, 1, 1])


def read(model, x=BITS, y=Y, **options):
    return read_partition(Program(model, x, y, **options))


def with_chance(prior, chance, wrap=Missing):
    """Binary features whose parameter `p` has another prior, or says something else of a row."""

    def component(x, at):
        with at.classes, at.groups, at.features:
            p = sample("p", prior(at))
        with at.rows, at.features:
            return sample("x", wrap(chance(p, at)), obs=x)

    return component


half = lambda at: dist.Beta(0.5, 0.5)
standard = lambda at: dist.Normal(0.0, 1.0)
by_row = lambda at: jnp.linspace(0.1, 0.9, at.rows.size)[:, None]


def loc_of_its_own(x, at):
    """The prior of `loc` forgets the variance: conjugate in each alone, not in both."""
    with at.classes, at.groups, at.features:
        var = sample("var", dist.InverseGamma(1.0, 1.0))
        loc = sample("loc", dist.Normal(0.0, 3.0))
    with at.rows, at.features:
        return sample("x", Missing(dist.Normal(loc[at.z], jnp.sqrt(var[at.z]))), obs=x)


def variance_alone(x, at):
    with at.classes, at.groups, at.features:
        var = sample("var", dist.InverseGamma(1.0, 1.0))
    with at.rows, at.features:
        return sample("x", Missing(dist.Normal(0.0, jnp.sqrt(var[at.z]))), obs=x)


def penalised(x, at):
    with at.classes, at.groups, at.features:
        p = sample("p", dist.Beta(0.5, 0.5))
        numpyro.factor("penalty", -p)
    with at.rows, at.features:
        return sample("x", Missing(dist.Bernoulli(p[at.z])), obs=x)


def seen_twice(x, at):
    with at.classes, at.groups, at.features:
        p = sample("p", dist.Beta(0.5, 0.5))
    with at.rows, at.features:
        sample("first", Missing(dist.Bernoulli(p[at.z])), obs=x)
        return sample("x", Missing(dist.Bernoulli(p[at.z])), obs=x)


def scaled(x, at):
    with handlers.scale(scale=2.0):
        return beta_bernoulli(x, at)


def shared_by_classes(x, at):
    with at.groups, at.features:
        p = sample("p", dist.Beta(0.5, 0.5))
    with at.rows, at.features:
        return sample("x", Missing(dist.Bernoulli(p[at.z[1]])), obs=x)


def latent_below_z(x, at):
    with at.rows:
        sample("w", dist.Normal(at.z[1][:, None], 1.0))
    return beta_bernoulli(x, at)


def factor_on_z(x, at):
    numpyro.factor("few", -1.0 * at.z[1].max())
    return beta_bernoulli(x, at)


def second_partition(x, at):
    sample("w", CRP(1.0, at.rows.size))
    return beta_bernoulli(x, at)


def latent_by_feature(x, at):
    with at.features:
        a = sample("a", dist.Gamma(2.0, 2.0))
    return beta_bernoulli(x, at, beta=a)


def other_data(x, at):
    """Its term belongs to the model, and would be forgotten."""
    mean = sample("mean", dist.Normal(0.0, 1.0))
    sample("weight", dist.Normal(mean, 1.0), obs=1.3)
    return beta_bernoulli(x, at)


MISSES = "misses the conjugate one by"
COMPONENTS = {
    "logits": (
        with_chance(standard, lambda p, at: dist.Bernoulli(logits=p[at.z])),
        "Logits with 'p' ~ Normal is not in the table",
    ),
    "sigmoid": (
        with_chance(standard, lambda p, at: dist.Bernoulli(jax.nn.sigmoid(p[at.z]))),
        "'p' ~ Normal is not in the table",
    ),
    "known spread": (
        with_chance(standard, lambda p, at: dist.Normal(p[at.z], 1.0)),
        "site 'x': Normal with 'p' ~ Normal is not",
    ),
    "known mean": (
        variance_alone,
        "site 'x': Normal with 'var' ~ InverseGamma is not in the table of conjugate pairs; "
        "register it",
    ),
    "square": (
        with_chance(half, lambda p, at: dist.Bernoulli(p[at.z] ** 2)),
        f"site 'x': read as 'p' -> BernoulliProbs, but .* {MISSES}",
    ),
    "covariate": (
        with_chance(half, lambda p, at: dist.Bernoulli(p[at.z] * by_row(at))),
        f"site 'x': .* {MISSES}",
    ),
    "noise": (
        with_chance(half, lambda p, at: dist.Bernoulli(0.9 * p[at.z] + 0.05)),
        f"site 'x': .* {MISSES}",
    ),
    "group of another class": (
        with_chance(half, lambda p, at: dist.Bernoulli(p[1 - at.z[0], at.z[1]])),
        f"site 'x': .* {MISSES}",
    ),
    "group of another row": (
        with_chance(half, lambda p, at: dist.Bernoulli(p[at.z[0], jnp.roll(at.z[1], 1)])),
        f"site 'x': .* {MISSES}",
    ),
    "prior by group": (
        with_chance(
            lambda at: dist.Beta(jnp.linspace(1.0, 2.0, at.groups.size)[:, None], 0.5),
            lambda p, at: dist.Bernoulli(p[at.z]),
        ),
        "site 'x': .* or whose prior differs between groups",
    ),
    "loc of its own": (
        loc_of_its_own,
        f"site 'x': read as 'var', 'loc' -> Normal, but .* {MISSES}",
    ),
    "scale": (scaled, f"site 'x': .* {MISSES}"),
    "mask": (
        with_chance(
            half,
            lambda p, at: dist.Bernoulli(p[at.z]),
            lambda fn: fn.mask(np.arange(6)[:, None] % 2 == 0),
        ),
        f"site 'x': .* {MISSES}",
    ),
    "forgotten index": (
        with_chance(half, lambda p, at: dist.Bernoulli(p[at.z[0], 0])),
        "site 'z': no observed site depends on it; wanted features, obs=x, whose parameters are "
        "indexed by 'z'",
    ),
    "no parameter": (
        with_chance(half, lambda p, at: dist.Bernoulli(0.5 + 0.0 * at.z[1][:, None])),
        "no group parameter is behind",
    ),
    "factor": (
        penalised,
        "site 'penalty' depends on 'p', a parameter of 'x', which can then not be integrated out",
    ),
    "seen twice": (seen_twice, "site 'x' depends on 'p', a parameter of 'first'"),
    "shared by classes": (
        shared_by_classes,
        r"site 'p': 'x' depends on it, .* wanted a class plate of 2 outside a group plate of 6",
    ),
    "latent below z": (latent_below_z, "site 'w': latent, and depends on 'z'"),
    "factor on z": (factor_on_z, "site 'few': factor, and depends on 'z'"),
    "second partition": (second_partition, r"found 2 partition sites \['z', 'w'\], wanted one"),
    "latent by feature": (
        latent_by_feature,
        r"site 'a': latent, of shape \(3,\), and no parameter of a group",
    ),
    "other data": (
        other_data,
        "site 'weight': observed, but no feature that depends on 'z'; its term would be left out",
    ),
}


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("name", COMPONENTS)
def test_a_component_that_cannot_be_integrated_out_is_refused(name):
    component, message = COMPONENTS[name]
    x = np.where(np.isnan(BITS), 1.0, BITS) if name == "mask" else BITS
    with pytest.raises(StructureError, match=message):
        read(aclass, x, component=component)


@pytest.mark.slow
def test_what_makes_a_group_vary_is_seen_with_a_single_group_too():
    with pytest.raises(StructureError, match=f"site 'x': .* {MISSES}"):
        read(aclass, REAL, component=loc_of_its_own, max_groups=1)
    assert read(aclass, REAL, component=normal_inverse_chi2, max_groups=1).max_groups == 1


def classes(
    weights=lambda n: dist.Categorical(jnp.array([0.3, 0.7])),
    labels=lambda y: y,
    alpha=lambda: 1.0,
    scale=1.0,
    obs=None,
):
    """AClass, one part of which is written differently."""

    def model(x, y):
        with plate("row", len(x)):
            y = sample("y", weights(len(x)), obs=y)
        with handlers.scale(scale=scale):
            z = sample("z", CRP(alpha(), len(x), labels=labels(y), num_classes=2), obs=obs)
        at = (
            plate("class", 2, dim=-3),
            plate("group", len(x), dim=-2),
            plate("row", len(x), dim=-2),
            plate("feature", 3, dim=-1),
        )
        beta_bernoulli(x, Axes(*at, (labels(y), z)))

    return model


def tempered(num_rows):
    share = sample("share", dist.Dirichlet(jnp.ones(2)))
    return dist.Categorical(logits=jnp.log(share) * jnp.linspace(0.5, 1.0, num_rows)[:, None])


def from_two(num_rows):
    first, second = (
        sample("first", dist.Dirichlet(jnp.ones(2))),
        sample("second", dist.Dirichlet(jnp.ones(2))),
    )
    return dist.Categorical((first + second) / 2)


def seen_alpha():
    alpha = sample("alpha", dist.Gamma(1.0, 1.0))
    sample("guess", dist.Normal(alpha, 1.0), obs=0.3)
    return alpha


MODELS = {
    "coin": (
        classes(lambda n: dist.Bernoulli(logits=sample("w", dist.Normal(0.0, 1.0)))),
        "site 'y': .* BernoulliLogits, wanted Categorical",
    ),
    "tempered": (classes(tempered), f"site 'y': read as the class of each row, but .* {MISSES}"),
    "two shares": (
        classes(from_two),
        "site 'y': its class probabilities come from 'first' ~ Dirichlet, 'second' ~ Dirichlet; "
        "wanted one",
    ),
    "other labels": (
        classes(labels=lambda y: 1 - y),
        "site 'y': observed, but no feature that depends on 'z'",
    ),
    "scaled partition": (classes(scale=2.0), f"site 'z': read as the partition, but .* {MISSES}"),
    "seen alpha": (
        classes(alpha=seen_alpha),
        "site 'guess': observed, but no feature that depends on 'z'",
    ),
    "latent vector alpha": (
        classes(alpha=lambda: sample("a", dist.Gamma(1.0, 1.0).expand([2]).to_event(1)).sum()),
        r"site 'a': latent, of shape \(2,\)",
    ),
    "seen partition": (
        classes(obs=np.zeros(6, int)),
        "site 'z': the partition is observed, wanted latent. Leave out its obs",
    ),
    "no partition": (
        lambda x, y: sample("x", dist.Normal(0.0, 1.0), obs=x[0, 0]),
        r"found 0 partition sites \[\], wanted one",
    ),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_no_partition_of_conjugate_groups_is_refused(name):
    model, message = MODELS[name]
    with pytest.raises(StructureError, match=message):
        read(model)


def test_rows_must_follow_from_the_data():
    with pytest.raises(
        StructureError,
        match=r"site 'z': 20 rows remain of 20 when the arguments \['x', 'y'\] are cut to 8",
    ):
        read(lambda x, y: one_group_of(20, x), np.zeros((20, 3)), np.zeros(20, int))


def one_group_of(num_rows, x):
    z = sample("z", CRP(1.0, num_rows))
    numpyro.factor("x", -jnp.sum(x) * z.max())


def put(table, index, value):
    changed = table.copy()
    changed[index] = value
    return changed


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("x", "y", "component", "message"),
    [
        (
            put(REAL, (3, 1), np.nan),
            Y,
            normal_inverse_wishart,
            "site 'x': row 3 misses 1 of 3 features and MultivariateNormal couples them",
        ),
        (put(REAL, (2, 1), np.inf), Y, normal_inverse_chi2, "site 'x': row 2, column 1 is inf"),
        (
            put(BITS, (0, 0), 2.0),
            Y,
            beta_bernoulli,
            "site 'x': row 0, column 0 is 2.0 .* BernoulliProbs takes 0, 1, or NaN",
        ),
        (
            BITS,
            put(Y, 4, 2),
            beta_bernoulli,
            "row 4: found class 2, wanted 0 to 1, or -1 where unlabelled",
        ),
        (BITS, put(Y, 2, -2), beta_bernoulli, "row 2: found class -2, wanted 0 to 1"),
    ],
    ids=["partly missing", "infinite", "two", "class 2", "class -2"],
)
@pytest.mark.filterwarnings("ignore:Out-of-support")
def test_data_that_a_family_cannot_have_are_named_by_row(x, y, component, message):
    with pytest.raises(ValueError, match=message):
        read(aclass, x, y, component=component)


def twin(family, **methods):
    return type("Twin", (type(family),), methods)()


def off(method, change):
    """The method, its result changed."""
    return {
        method: lambda self, hyper, *rest, **more: change(
            getattr(super(type(self), self), method)(hyper, *rest, **more)
        )
    }


more_rate = lambda hyper: hyper._replace(rate=hyper.rate * 1.01)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("family", "component", "x"),
    [
        (
            twin(
                BetaBernoulli(),
                **off("add", lambda h: h._replace(concentration1=h.concentration1 + 0.01)),
            ),
            beta_bernoulli,
            BITS,
        ),
        (
            twin(BetaBernoulli(), **off("log_prior", lambda value: value + 0.01)),
            beta_bernoulli,
            BITS,
        ),
        (
            twin(BetaBernoulli(), **off("log_predictive", lambda value: 1.001 * value)),
            beta_bernoulli,
            BITS,
        ),
        (twin(NormalInverseGamma(), **off("add", more_rate)), normal_inverse_chi2, REAL),
        (twin(NormalInverseGamma(), **off("read", more_rate)), normal_inverse_chi2, REAL),
    ],
    ids=["add", "log_prior", "log_predictive", "add rate", "read rate"],
)
def test_a_family_with_one_wrong_term_fails_the_proof(family, component, x, monkeypatch):
    monkeypatch.setitem(TABLE, (tuple(sorted(family.priors)), family.likelihood), family)
    with pytest.raises(StructureError, match=MISSES):
        read(aclass, x, component=component)


SILENT = {
    "clipped chance": with_chance(half, lambda p, at: dist.Bernoulli(jnp.clip(p[at.z], 0.1, 0.9))),
    "floored rate": with_chance(
        lambda at: dist.Gamma(2.0, 1.0), lambda rate, at: dist.Poisson(jnp.maximum(rate[at.z], 0.3))
    ),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", SILENT)
def test_what_acts_at_some_values_is_refused(name, monkeypatch):
    """It is seen near the bounds of a parameter; not, and so the case has power, in the middle."""
    with pytest.raises(StructureError, match=f"site 'x': .* {MISSES}"):
        read(aclass, component=SILENT[name])
    monkeypatch.setattr(crp_mixture, "SPREADS", (1.0, 1.0))
    read(aclass, component=SILENT[name])


@pytest.mark.slow
def test_single_precision_is_enough_to_see_an_edit():
    with jax.enable_x64(False):
        read(aclass)
        with pytest.raises(StructureError, match=MISSES):
            read(aclass, component=COMPONENTS["noise"][0])
        with pytest.raises(StructureError, match=MISSES):
            read(aclass, component=COMPONENTS["prior by group"][0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "scale", "component"),
    [
        pytest.param(12, 1.0, normal_inverse_wishart, marks=pytest.mark.slow),
        (2, 1e-7, normal_inverse_chi2),
    ],
    ids=["many columns", "a number far from the others"],
)
def test_rounding_is_no_edit(width, scale, component):
    with jax.enable_x64(False):
        x = scale * np.random.default_rng(0).normal(size=(10, width))
        x[0, 0] /= scale**1.3
        read_partition(
            Program(
                aclass, x, np.repeat([0, 1], 5), num_classes=2, component=component, max_groups=1
            )
        )
