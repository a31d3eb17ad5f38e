"""The rule by which rows join groups is the distribution's: another rule is followed, and one
that its density does not know is refused.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import plate
from scipy import stats
from scipy.special import logsumexp

from inference import CollapsedGibbs, Driver, ParticleFilter, Program, StructureError
from inference.distributions import CRP, Missing, PitmanYor
from tests.inference.partitions import partitions

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")
sample = numpyro.sample

RNG = np.random.default_rng(0)
BITS = (RNG.random((5, 3)) < np.array([0.1, 0.9, 0.1, 0.9, 0.5])[:, None]).astype(float)
BITS[1, 2] = np.nan
ONE_KIND, KINDS = np.zeros(5, int), np.array([0, 1, 0, 0, 1])


def teams(rule):
    """A mixture whose rows are partitioned by `rule`, by other names than those of the zoo."""

    def model(answers, kind):
        partition = rule(len(answers), labels=kind, num_classes=2)
        team = sample("team", partition)
        person, question = (
            plate("person", len(answers), dim=-2),
            plate("question", answers.shape[1], dim=-1),
        )
        with plate("kinds", 2, dim=-3), plate("teams", partition.capacity, dim=-2), question:
            chance = sample("chance", dist.Beta(0.5, 0.6))
        with person, question:
            sample("answer", Missing(dist.Bernoulli(chance[kind, team])), obs=answers)

    return model


def filtered(model, kind=ONE_KIND, **settings):
    """The tree of a filter that has room for every partition."""
    kernel = ParticleFilter(model, num_particles=52, **settings)
    return Driver(kernel, num_samples=10, progress_bar=False).run(0, BITS, kind)


def log_marginals(model, kind=ONE_KIND, **scalars):
    """log p(partition, data) of every partition, [partition], by the model's own log density:
    p(chance | partition, data) is Beta.
    """
    every = partitions(5)
    if kind is KINDS:  # rows 0, 2, 3 and rows 1, 4, each in all ways
        pairs = [(first, second) for first in partitions(3) for second in partitions(2)]
        every = np.array(
            [[first[0], second[0], first[1], first[2], second[1]] for first, second in pairs]
        )
    chance = np.random.default_rng(1).uniform(0.2, 0.8, (2, 5, 3))
    program = Program(model, BITS, kind)
    log_joint = jax.jit(
        jax.vmap(lambda z: program.log_joint({"team": z, "chance": jnp.asarray(chance), **scalars}))
    )(every)
    member = (kind[:, None, None] == np.arange(2)[:, None]) & (
        every[:, :, None, None] == np.arange(5)
    )
    count = lambda x: np.einsum("zrcg,rd->zcgd", member, np.nan_to_num(x))
    return log_joint - stats.beta.logpdf(chance, 0.5 + count(BITS), 0.6 + count(1 - BITS)).sum(
        (1, 2, 3)
    )


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", [ONE_KIND, KINDS], ids=["no classes", "classes"])
def test_the_filter_follows_another_rule(kind):
    model = teams(partial(PitmanYor, 0.8, 0.3))
    wanted, crp = (
        logsumexp(log_marginals(each, kind)) for each in (model, teams(partial(CRP, 0.8)))
    )
    assert abs(filtered(model, kind).attrs["log_evidence"] - wanted) < 1e-10
    assert abs(crp - wanted) > 1e-2  # so that it says something


@pytest.mark.slow
def test_a_latent_discount_is_learned_over_a_grid():
    model = teams(
        lambda *rows, **more: PitmanYor(0.8, sample("discount", dist.Beta(1.0, 2.0)), *rows, **more)
    )
    grid = np.array([0.1, 0.4, 0.8])
    tree = filtered(model, grid={"discount": grid})
    weight = stats.beta.pdf(grid, 1.0, 2.0) * np.array([0.3, 0.35, 0.4])  # density times spacing
    log_prior = stats.beta.logpdf(grid, 1.0, 2.0)
    each = (
        np.array([logsumexp(log_marginals(model, discount=d)) for d in grid])
        - log_prior
        + np.log(weight / weight.sum())
    )
    assert abs(tree.attrs["log_evidence"] - logsumexp(each)) < 1e-10
    np.testing.assert_allclose(
        tree["grid"]["log_weight_of_point"].squeeze(), each - logsumexp(each), rtol=1e-8
    )


class Tilted(CRP):
    """Its density has a term that its rule does not know: large groups are a little more likely."""

    def log_prob(self, value, intermediates=None):
        sizes = jnp.sum(value[..., None] == jnp.arange(self.capacity), axis=-2)
        return super().log_prob(value) + 0.01 * jnp.sum(sizes**2, axis=-1)


class Crooked(CRP):
    """Its rule has a term that its density does not know."""

    def log_seating(self, sizes):
        return super().log_seating(sizes) + 0.01 * (sizes > 1)


class ForEach(CRP):
    """Its rule gives every free group, and not the first alone, the probability of a new one."""

    def log_seating(self, sizes):
        chance = super().log_seating(sizes)
        return jnp.where(
            sizes == 0,
            jnp.max(jnp.where(sizes == 0, chance, -jnp.inf), axis=-1, keepdims=True),
            chance,
        )


class Masked(CRP):
    """Its rule, and its density by that rule, know no third group: a partition that depends on
    the order of its rows.
    """

    def log_seating(self, sizes):
        is_full = jnp.sum(sizes > 0, axis=-1, keepdims=True) > 1
        return jax.nn.log_softmax(
            jnp.where((sizes == 0) & is_full, -jnp.inf, super().log_seating(sizes)), axis=-1
        )

    def log_prob(self, value, intermediates=None):
        """The log probability of rows that are all of one class."""
        is_mine = value[:, None] == jnp.arange(self.capacity)
        before = jnp.cumsum(is_mine, axis=0) - is_mine
        return jnp.sum(jnp.where(is_mine, self.log_seating(before), 0.0))


WARMUP = {ParticleFilter: {}, CollapsedGibbs: {"num_warmup": 0}}
each_kernel = pytest.mark.parametrize("kernel", WARMUP, ids=lambda kernel: kernel.__name__)
TWINS = {
    "density": (partial(Tilted, 0.8), KINDS),
    "density, bounded": (partial(Tilted, 0.8, max_groups=2), KINDS),
    "density, one class": (partial(Tilted, 0.8), ONE_KIND),
    "rule": (partial(Crooked, 0.8), KINDS),
    "rule, bounded": (partial(Crooked, 0.8, max_groups=2), ONE_KIND),
    "every free group": (partial(ForEach, 0.8), ONE_KIND),
    "the order of the rows": (partial(Masked, 0.8, capacity=2), ONE_KIND),
}
MISSES = (
    "site 'team': read as the partition, but .* misses .* only one of its log_prob and log_seating "
    "has"
)


def check(kernel, model, kind):
    Driver(kernel(model), num_samples=1, progress_bar=False, **WARMUP[kernel]).run(0, BITS, kind)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("twin", TWINS)
@each_kernel
def test_a_density_and_a_rule_that_differ_are_refused(kernel, twin):
    rule, kind = TWINS[twin]
    with pytest.raises(StructureError, match=MISSES):
        check(kernel, teams(rule), kind)


@pytest.mark.slow
@each_kernel
def test_an_edit_of_the_density_in_place_is_refused(kernel, monkeypatch):
    log_prob = CRP.log_prob
    monkeypatch.setattr(
        CRP,
        "log_prob",
        lambda self, value, *rest: log_prob(self, value, *rest) - 0.01 * jnp.max(value, axis=-1),
    )
    with pytest.raises(StructureError, match=MISSES):
        check(kernel, teams(partial(CRP, 0.8)), KINDS)


@pytest.mark.slow
def test_parameters_that_follow_the_rows_are_refused():
    rule = lambda num_rows, **more: PitmanYor(0.8, 1.0 / num_rows, num_rows, **more)
    with pytest.raises(
        StructureError, match="site 'team': the numbers of its prior depend on the rows"
    ):
        check(ParticleFilter, teams(rule), KINDS)
