"""Gibbs sampling of an assignment: each conditional against the model's own log density, a
posterior that can be enumerated, runs.
"""

from itertools import combinations, product
from operator import itemgetter

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import random
from jax.scipy import stats
from numpyro.handlers import scope
from numpyro.infer import MCMC
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from scipy.special import betaln, logsumexp

from inference import ConditionalGibbs, Driver, Program, StructureError
from inference.kernels.conditional_gibbs import mixture
from inference.kernels.conditional_gibbs.mixture import MixtureRoute
from inference.kernels.coordinate_ascent.draws import draw_incomplete
from inference.kernels.coordinate_ascent.posterior import (
    agreement,
    blocks_of,
    concentration_given,
    expert_sums,
    gathered,
    group_messages_at,
    message_at,
    sticks_given,
)
from inference.kernels.coordinate_ascent.rows import (
    complete_posterior,
    incomplete_given_soft,
    message_to,
)
from inference.program.compiling import once
from inference.reading.conjugate.pairs import log_sticks
from inference.reading.conjugate.quadratic import (
    common_posterior,
    known_weights,
    precision_of,
    weights_posterior,
)
from inference.reading.stick_mixture.structure import with_class_axis
from tests.inference.mixtures import CASES, TASKS, beta_bernoulli, case, of_tasks
from tests.inference.models import Y, normal_mean
from zoo.iqgme import iqgme

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")


def swept(name):
    """A sweep, the program, and values after some sweeps; every label tells of all soft labels,
    for the others are integrated out.
    """
    model, data = of_tasks(name) if name in TASKS else case(name)
    if "y" in data:
        data = data | {"y": np.where(data["y"] > 0, data.get("num_classes", 2) - 1, 0)}
    program = Program(model, **data)
    sweep = MixtureRoute(program)
    start = once(program.draw_initial, random.key(0))(random.key(0)) | sweep.start(random.key(0))
    turn = lambda i, values: sweep.draw(
        random.fold_in(random.key(1), i), program, values, sweep.buckets
    )[0]
    return sweep, program, once(lambda values: jax.lax.fori_loop(0, 3, turn, values), start)(start)


def of_levels(sweep, sums, values):
    """Log densities of sticks, concentrations and shared groups given all else, by name."""
    found, one = sweep.found, sweep.shape.num_features
    own = sums.moments[:, :, one, one]
    levels = [(found.lower, sweep.prior.concentration, own)]
    if found.upper:
        share = found.share_at(values)
        levels.append((found.upper, sweep.prior.upper, share.sum((0, 1))[None]))
    for level, prior, count in levels:
        alpha = values[level.concentration] if level.concentration else prior[0]
        yield (
            level.sticks,
            lambda V, count=count, alpha=alpha: stats.beta.logpdf(
                jnp.atleast_2d(V), *sticks_given(count, alpha)
            ).sum(),
        )
        if level.concentration:
            a, b = concentration_given(prior, jnp.log1p(-values[level.sticks]))
            yield (
                level.concentration,
                lambda alpha, a=a, b=b: stats.gamma.logpdf(alpha, a, scale=1 / b),
            )
    if found.upper:
        U = values[found.upper.sticks]
        agrees = agreement(group_messages_at(found, sweep.shape, values), sums, one) + log_sticks(
            jnp.log(U), jnp.log1p(-U)
        )
        yield (
            found.upper.site,
            lambda c: jnp.take_along_axis(jax.nn.log_softmax(agrees), c[..., None], -1).sum(),
        )


def of_blocks(sweep, sums, values):
    """The same of columns and features, and of experts."""
    found = sweep.found
    sums = gathered(sums, found.share_at(values))
    columns, features = blocks_of(found, sweep.shape, sweep.prior, sums)
    for block, hyper in [
        *zip(found.columns, columns, strict=True),
        *([(found.features, features)] if found.features else []),
    ]:
        yield (
            block.priors,
            lambda *drawn, block=block, hyper=hyper: block.family.log_prior(hyper, drawn).sum(),
        )
    if not found.experts:
        return
    experts, prior, w = (
        found.experts,
        sweep.prior.experts,
        with_class_axis(values[found.experts.weights], 3),
    )
    common = common_posterior(prior, known_weights(w))
    scale = lambda precision: 1 / jnp.sqrt(common.gamma * precision)
    precision = (
        with_class_axis(values[experts.precision], 2) if experts.precision else precision_of(prior)
    )
    loc = with_class_axis(values[experts.loc], 2) if experts.loc else prior.loc
    if experts.precision:
        yield (
            experts.precision,
            lambda value: (
                stats.gamma.logpdf(
                    with_class_axis(value, 2), common.concentration, scale=1 / common.rate
                ).sum()
                + (
                    stats.norm.logpdf(loc, common.loc, scale(with_class_axis(value, 2))).sum()
                    if experts.loc
                    else 0.0
                )
            ),
        )
    if experts.loc:
        yield (
            experts.loc,
            lambda value: stats.norm.logpdf(
                with_class_axis(value, 2), common.loc, scale(precision)
            ).sum(),
        )
    infinite = jnp.full_like(loc, jnp.inf)
    mean, covariance = weights_posterior(
        common._replace(loc=loc, concentration=precision, rate=infinite),
        *expert_sums(sweep.shape, sums),
    )
    yield (
        experts.weights,
        lambda value: jax.vmap(jax.vmap(stats.multivariate_normal.logpdf))(
            with_class_axis(value, 3), mean, covariance
        ).sum(),
    )


def moved(values, name, key):
    """Another value of a site, in its support."""
    value = values[name]
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return random.randint(key, value.shape, 0, 2).astype(value.dtype)
    if name == "Lambda" or name == "cov":
        return value * (1 + random.uniform(key))
    if name == "p" and value.ndim == 3:
        return random.dirichlet(key, jnp.ones(value.shape))
    if name in ("V", "U", "p"):
        return random.uniform(key, value.shape, minval=0.1, maxval=0.9)
    return jnp.abs(value) + random.uniform(key, value.shape)


def gaps(sweep, program, values):
    """The gap between the log density of each conditional and that of the model.

    Both are known up to a constant, so that differences between two values of the sites are
    compared.
    """
    sums, found = sweep.sums(values, sweep.buckets), {}
    for names, log_density in [*of_levels(sweep, sums, values), *of_blocks(sweep, sums, values)]:
        names = names if isinstance(names, tuple) else (names,)
        others = {one: moved(values, one, random.key(i)) for i, one in enumerate(names)}
        mine = log_density(*others.values()) - log_density(*(values[one] for one in names))
        model = program.log_joint(values | others) - program.log_joint(values)
        found[", ".join(names)] = jnp.abs(mine - model) / (1 + jnp.abs(model))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*(name for name in CASES if name != "no labels"), "tasks of three classes"]
)
def test_conditionals_of_groups_are_those_of_the_model(name):
    sweep, program, values = swept(name)
    found = once(lambda values: gaps(sweep, program, values), values)(values)
    assert max(found.values()) < 1e-6, found
    assert {one for names in found for one in names.split(", ")} == set(
        program.latent
    ) - sweep.found.of_rows


def of_rows(sweep, program, values, rng_key):
    """Groups, missing entries and soft labels given all else: their log density less the model's
    log joint.
    """
    found = sweep.found
    message = message_at(found, sweep.shape, values)
    z, filled, soft = (
        values[found.z],
        jnp.zeros(sweep.rows.features.shape),
        jnp.zeros(sweep.rows.signs.shape),
    )
    total = -program.log_joint(values) * 0
    for chunk in (
        jax.tree.map(itemgetter(j), bucket)
        for bucket in sweep.buckets
        for j in range(len(bucket.row))
    ):
        said, (rng_key, group_key, hole_key) = (
            message_to(message, chunk.task),
            random.split(rng_key, 3),
        )
        none = jnp.zeros((len(chunk.row), 0, len(said.const)))
        log_rho = incomplete_given_soft(said, chunk, none, none).log_rho
        group = random.categorical(group_key, log_rho)
        experts = said.answers[:, group].swapaxes(0, 1)
        label, value, log_q = draw_incomplete(
            hole_key, said, chunk, none[..., 0], none[..., 0], experts, group
        )
        log_q = log_q + jnp.take_along_axis(log_rho, group[:, None], 1)[:, 0]
        total = total + jnp.where(chunk.row < len(z), log_q, 0).sum()
        z = z.at[chunk.row].set(group.astype(z.dtype), mode="drop")
        filled = filled.at[chunk.row[:, None], chunk.missing].add(value, mode="drop")
        soft = soft.at[chunk.row].set(label, mode="drop")
    drawn = {found.z: z, found.holes: filled[tuple(sweep.rows.holes.T)]}
    if found.experts:
        drawn[found.experts.soft] = soft.T.reshape(values[found.experts.soft].shape)
    return total - program.log_joint(values | drawn)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["binary", "no labels"])
def test_rows_are_drawn_from_what_the_model_says_of_them(name):
    sweep, program, values = swept(name)
    keys = random.split(random.key(0), 4)
    found = once(
        lambda keys: jax.lax.map(lambda key: of_rows(sweep, program, values, key), keys), keys
    )(keys)
    np.testing.assert_allclose(found, found[0], rtol=1e-6)


@pytest.mark.slow
def test_a_row_without_holes_has_the_same_groups_either_way():
    sweep, _, values = swept("binary")
    chunk = jax.tree.map(itemgetter(0), sweep.buckets[-1])
    chunk = chunk._replace(num_missing=0 * chunk.num_missing, entries=chunk.entries + 0.3)
    said = message_to(message_at(sweep.found, sweep.shape, values), chunk.task)
    none = jnp.zeros((len(chunk.row), 0, len(said.const)))
    complete = jax.nn.log_softmax(complete_posterior(said, chunk).log_joint.T)
    np.testing.assert_allclose(
        incomplete_given_soft(said, chunk, none, none).log_rho, complete, atol=1e-9
    )


# A posterior that can be written down: bits, of which every assignment is counted.


BITS = {
    "x": np.array([[1.0, 1, 0], [1, np.nan, 0], [0, 0, 1], [0, 1, 1], [1, 1, 0], [np.nan, 0, 1]]),
    "alpha": 0.7,
    "num_experts": 3,
    "expert": None,
    "gate": beta_bernoulli,
}
ROWS = len(BITS["x"])


def functions(z):
    """Statistics of assignments [draw, row].

    They are the number of groups, the sizes of the first and of the last, and which rows are
    together.
    """
    count = (z[..., None] == np.arange(3)).sum(1)
    pairs = [z[:, i] == z[:, j] for i, j in combinations(range(ROWS), 2)]
    return np.column_stack([(count > 0).sum(1), count[:, 0], count[:, 2], *pairs]).astype(float)


def exact():
    """Means of these, over all assignments, sticks and probabilities integrated out."""
    x, z = BITS["x"], np.array(list(product(range(3), repeat=ROWS)))
    count = (z[..., None] == np.arange(3)).sum(1)
    after = count[:, ::-1].cumsum(1)[:, ::-1]
    log_p = betaln(1 + count[:, :-1], BITS["alpha"] + after[:, 1:]).sum(1)
    for h in range(3):
        ones, zeros = (z == h) @ np.nan_to_num(x), (z == h) @ np.nan_to_num(1 - x)
        log_p += betaln(1.5 + ones, 0.8 + zeros).sum(1)
    return np.exp(log_p - logsumexp(log_p)) @ functions(z)


def errors():
    """The errors of means over a run, in standard errors."""
    kernel = ConditionalGibbs(iqgme, route="mixture")
    tree = Driver(kernel, num_warmup=100, num_samples=4000, num_chains=2, progress_bar=False).run(
        0, **BITS
    )
    each = np.stack([functions(chain) for chain in tree["posterior"]["z"].values])
    np.testing.assert_array_equal(tree["sample_stats"]["num_groups"], each[..., 0])
    ess = np.array([az.ess(one) for one in np.moveaxis(each, -1, 0)])
    return (each.mean((0, 1)) - exact()) / (each.std((0, 1)) / np.sqrt(ess))


@pytest.mark.slow
def test_a_posterior_that_can_be_enumerated():
    assert abs(errors()).max() < 4


PLANTED = {
    "sticks of other groups": (
        mixture,
        "sticks_given",
        lambda right: lambda count, alpha: right(count[..., ::-1], alpha),
    ),
    "columns that keep their numbers": (
        mixture,
        "_in_order",
        lambda right: lambda sums, order: right(sums, order)._replace(columns=sums.columns),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_changes_the_posterior(name, monkeypatch):
    module, attribute, twin = PLANTED[name]
    monkeypatch.setattr(module, attribute, twin(getattr(module, attribute)))
    assert abs(errors()).max() > 6


# In the driver.


SHORT = {"num_warmup": 3, "num_samples": 8, "progress_bar": False}


def bits(**options):
    return Driver(ConditionalGibbs(iqgme), **SHORT | options).run(0, **BITS)


@pytest.mark.slow
def test_tree_of_a_run_that_takes_the_route_by_itself(tmp_path):
    tree = bits(num_chains=2, groups=("log_likelihood",), checkpoint=tmp_path)
    assert tree["posterior"]["p"].dims == ("chain", "draw", "expert", "feature")
    assert set(tree["sample_stats"].data_vars) >= {"lp", "num_groups", "residual"}
    assert tree["sample_stats"]["residual"].max() < 1e-9
    assert tree["log_likelihood"]["x"].dims[:2] == ("chain", "draw")
    assert tree.attrs["route"] == "mixture"
    hidden = {
        name
        for name, values in tree["posterior"].data_vars.items()
        if values.attrs.get("not_identified")
    }
    assert hidden == {"V", "p", "z"}
    program = Program(iqgme, **BITS)
    draw = {
        name: jnp.asarray(values[1, 4].values)
        for name, values in tree["posterior"].data_vars.items()
    }
    np.testing.assert_allclose(tree["sample_stats"]["lp"][1, 4], program.log_joint(draw), rtol=1e-9)


@pytest.mark.slow
def test_a_run_that_was_cut_goes_on_bit_for_bit(tmp_path):
    whole = bits()
    bits(num_samples=5, checkpoint=tmp_path)
    again = bits(checkpoint=tmp_path)
    assert again.attrs["steps_run"] == 3
    for name, values in whole["posterior"].data_vars.items():
        np.testing.assert_array_equal(again["posterior"][name], values)


@pytest.mark.slow
def test_a_run_of_the_paper_with_holes_and_labels():
    """Its sites renamed."""
    _, data = case("binary", num_rows=30)
    tree = Driver(ConditionalGibbs(scope(iqgme, prefix="a", divider=".")), **SHORT).run(0, **data)
    assert np.isfinite(tree["sample_stats"]["lp"]).all()
    assert tree["sample_stats"]["residual"].max() < 1e-9
    assert tree["posterior"]["a.w"].attrs["not_identified"]


@pytest.mark.slow
def test_numpyro_runs_it_too():
    sampler = MCMC(
        ConditionalGibbs(iqgme),
        num_warmup=3,
        num_samples=4,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    sampler.run(random.key(0), **BITS)
    assert sampler.get_samples()["z"].shape == (8, ROWS)


# What is refused.


def test_what_is_no_assignment_is_refused_where_that_route_is_asked_for():
    with pytest.raises(StructureError, match="found 0 latent Categorical sites of rows"):
        ConditionalGibbs(normal_mean, route="mixture").init(random.key(0), 0, None, (Y,), {})


def test_an_edit_that_is_not_conjugate_is_refused_by_name():
    with pytest.raises(StructureError, match="site 'V'.*Use SVI with an autoguide"):
        Driver(ConditionalGibbs(iqgme, route="mixture"), **SHORT).run(
            0, **BITS | {"alpha": dist.LogNormal(0.0, 1.0)}
        )


def test_sites_of_another_kernel_are_refused():
    others = {GIBBS_SITES_KWARG: {"p": jnp.full((3, 3), 0.5)}}
    with pytest.raises(StructureError, match=r"its sites \['p'\] are drawn by another kernel"):
        ConditionalGibbs(iqgme, route="mixture").init(random.key(0), 0, None, (), BITS | others)


def test_data_that_are_not_known_yet_are_refused():
    def start(alpha):
        return ConditionalGibbs(iqgme, route="mixture").init(
            random.key(0), 0, None, (), BITS | {"alpha": alpha}
        )

    with pytest.raises(StructureError, match="its data are traced"):
        jax.jit(start)(0.7)
