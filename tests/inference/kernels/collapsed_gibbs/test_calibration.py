"""Collapsed Gibbs at the size of its use: it leaves the joint as it is, agrees with the particle
filter, and serves beside NUTS.
"""

from functools import cache, partial

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import pytest

# after arviz, `import numpyro.distributions` would load it twice
from numpyro import distributions as dist
from numpyro.infer import NUTS, Gibbs
from scipy import stats
from scipy.special import betaln, logsumexp

from diagnostics import geweke
from inference import CollapsedGibbs, Driver, ParticleFilter, Program
from inference.kernels.collapsed_gibbs import kernel as collapsed_gibbs
from tests.inference import partitions
from zoo.aclass import aclass, beta_bernoulli

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("numpyro_promotion")]
QUIET = {"progress_bar": False}


def plant(monkeypatch, module, name, planted):
    monkeypatch.setattr(module, name, planted)
    # what was compiled has no bug
    monkeypatch.setattr(collapsed_gibbs, "sweep", collapsed_gibbs.sweep.__wrapped__)


in_order = collapsed_gibbs.in_order
prior_of = collapsed_gibbs._prior
features_stay = lambda rules, prior, table, cls, group, x: table._replace(
    count=table.count.at[cls, group].add(-(group >= 0).astype(int))
)


def double_alpha(*of_what):
    prior = prior_of(*of_what)
    return prior._replace(seating=jax.tree.map(lambda leaf: 2 * leaf, prior.seating))


groups_mixed_up = lambda seats, table: (in_order(seats, table)[0], table)


# The joint-distribution test, on classes, groups, shares and parameters.

# only the shape counts, and what is missing
FEW = np.array([[0, 0], [np.nan, 0], [0, 0], [0, 0]], np.float32)


def quantities(program, values):
    y, z = values["y"], values["z"]
    together = (y[:, None] == y) & (z[:, None] == z)
    opens = jnp.argmax(together, axis=1) == jnp.arange(len(y))
    return {
        "groups": opens.sum(),
        "pairs together": together.sum(),
        "rows of class 1": y.sum(),
        "share": values["share"][0],
        "p of a row": values["p"][y[0], z[0]],
        "p of a group": values["p"][1, 0],
        "log_likelihood": program.log_likelihood(values)["x"].sum(),
        "log_joint": program.log_joint(values),
    }


def calibration():
    model = partial(aclass, alpha=2.0, component=partial(beta_bernoulli, beta=0.8))
    return geweke(
        model,
        partial(CollapsedGibbs, parameters=True),
        FEW,
        num_replicates=1000,
        num_steps=6,
        functions=quantities,
    )


def test_the_joint_is_left_as_it_is():
    found = calibration()
    assert found.passed, found.text


@pytest.mark.parametrize(
    ("module", "name", "planted"),
    [
        (collapsed_gibbs, "_prior", double_alpha),
        (collapsed_gibbs, "_without", features_stay),
        (collapsed_gibbs, "in_order", groups_mixed_up),
    ],
    ids=["alpha doubled", "the features are not taken out", "the groups are in another order"],
)
def test_a_planted_bug_changes_the_joint(module, name, planted, monkeypatch):
    plant(monkeypatch, module, name, planted)
    assert not calibration().passed


# Beside NUTS, against sums over all partitions and integrals over a grid.

X = np.array([[1, 1, 0], [1, 1, 1], [0, 0, 1], [0, np.nan, 0], [1, 0, 0]])
GRID = np.linspace(0.005, 25.0, 2500)
# far up the tail of alpha, which is forgotten
START = {"alpha": jnp.log(8.0), "beta": jnp.zeros(())}


def exact():
    """Posterior of alpha and of beta on the grid. They are independent given the partition."""

    @cache
    def log_density(rows):
        ones, zeros = np.nansum(X[list(rows)], 0)[:, None], np.nansum(1 - X[list(rows)], 0)[:, None]
        return (betaln(GRID + ones, GRID + zeros) - betaln(GRID, GRID)).sum(0)

    each = partitions.partitions(len(X))
    log_alpha = stats.gamma.logpdf(GRID, 2.0) + np.array(
        [partitions.log_crp(np.bincount(z), GRID) for z in each]
    )
    log_beta = np.array(
        [sum(log_density(tuple(np.flatnonzero(z == g))) for g in range(z.max() + 1)) for z in each]
    )
    log_beta += stats.gamma.logpdf(GRID, 2.0, scale=1 / 2)
    marginal = lambda mine, other: logsumexp(mine + logsumexp(other, axis=1, keepdims=True), axis=0)
    found = {"alpha": marginal(log_alpha, log_beta), "beta": marginal(log_beta, log_alpha)}
    return {name: np.exp(log_p - logsumexp(log_p)) for name, log_p in found.items()}


def beside_nuts():
    own = CollapsedGibbs(aclass, parameters=True), ["z", "share", "p"]
    kernel = Gibbs([own, (NUTS(aclass, find_heuristic_step_size=False), ["alpha", "beta"])])
    settings = {"num_warmup": 500, "num_samples": 3000, "num_chains": 2, **QUIET}
    start = {name: jnp.stack([value, value]) for name, value in START.items()}
    model = {
        "num_classes": 1,
        "alpha": dist.Gamma(2.0, 1.0),
        "component": partial(beta_bernoulli, beta=dist.Gamma(2.0, 2.0)),
    }
    return (
        Driver(kernel, **settings).run(0, X, np.zeros(5, int), init_params=start, **model).posterior
    )


def errors(draws, probability):
    """The errors of the mean and of three tail probabilities, in standard errors."""
    functions = [
        lambda v: v,
        *(
            lambda v, q=q: (v < q) * 1.0
            for q in GRID[np.searchsorted(probability.cumsum(), [0.25, 0.5, 0.75])]
        ),
    ]
    for function in functions:
        found, wanted = function(draws), probability @ function(GRID)
        yield float((found.mean() - wanted) / found.std() * np.sqrt(az.ess(found)))


def uniform_p(posterior):
    """p-value of the parameters of all groups, which are Beta given partition and beta."""
    z, beta = posterior["z"].values, posterior["beta"].values[..., None, None]
    of_group = z[..., None, :] == np.arange(5)[:, None]
    ones, zeros = of_group @ np.nan_to_num(X), of_group @ np.nan_to_num(1 - X)
    u = stats.beta(beta + ones, beta + zeros).cdf(posterior["p"].values[..., 0, :, :])
    return stats.kstest(u.ravel(), "uniform").pvalue


def test_beside_nuts_all_marginals_are_exact():
    posterior = beside_nuts()
    for name, probability in exact().items():
        assert np.abs(list(errors(posterior[name], probability))).max() < 4, name
    assert uniform_p(posterior) > 1e-3


def test_a_concentration_that_is_not_handed_over_is_seen(monkeypatch):
    monkeypatch.setattr(
        CollapsedGibbs, "refresh", lambda self, state, model_args, model_kwargs: state
    )
    found = list(errors(beside_nuts()["alpha"], exact()["alpha"]))
    assert np.abs(found).max() > 8


def test_parameters_of_another_group_are_seen(monkeypatch):
    plant(monkeypatch, collapsed_gibbs, "in_order", groups_mixed_up)
    assert uniform_p(beside_nuts()) < 1e-6


# Against the particle filter, on 200 rows of five groups.

NUM_ROWS, NUM_NEW = 200, 20
KINDS = np.array([[0] * 10, [1] * 10, [1] * 5 + [0] * 5, [0] * 5 + [1] * 5, [1, 0] * 5])


def table():
    rng = np.random.default_rng(0)
    group = rng.integers(0, 5, NUM_ROWS + NUM_NEW)
    x = (rng.random((len(group), 10)) < np.where(KINDS[group] == 1, 0.95, 0.05)).astype(float)
    x[rng.random(x.shape) < 0.1] = np.nan
    return x[:NUM_ROWS], x[NUM_ROWS:]


SEEN, NEW = table()
LARGEST = 20  # numbers of groups are counted up to here


def of_rows(x):
    return {"x": x, "y": np.zeros(len(x), int), "num_classes": 1}


def density_of_new_rows(z):
    """[row] given a partition: the predictive of each group and of a new one, in shares of rows
    and 1.
    """
    size = np.bincount(z)
    ones = np.array([np.nansum(SEEN[z == g], 0) for g in range(len(size))])
    seen = np.array([(~np.isnan(SEEN[z == g])).sum(0) for g in range(len(size))])
    p = np.vstack([(ones + 0.5) / (seen + 1), np.full(10, 0.5)])[:, None]
    density = np.where(np.isnan(NEW), 1.0, np.where(NEW == 1, p, 1 - p)).prod(-1)
    return np.append(size, 1.0) @ density / (NUM_ROWS + 1)


def by_gibbs():
    """Probabilities of each number of groups and log densities of the new rows, and the standard
    errors of both.
    """
    driver = Driver(
        CollapsedGibbs(aclass), num_warmup=200, num_samples=6000, thinning=6, num_chains=4, **QUIET
    )
    z = driver.run(0, **of_rows(SEEN), num_groups=50).posterior["z"].values
    is_number = ((z.max(-1) + 1)[..., None] == np.arange(LARGEST)) * 1.0
    density = np.array([[density_of_new_rows(one) for one in chain] for chain in z])
    return *mean_of_chains(is_number), *logs(*mean_of_chains(density))


def mean_of_chains(draws):
    """Over [chain, draw, quantity]."""
    sd = draws.std((0, 1))
    ess = np.array([az.ess(each) if each.std() else 1.0 for each in np.moveaxis(draws, -1, 0)])
    return draws.mean((0, 1)), sd / np.sqrt(ess)


def by_filter(num_replicates=16):
    """The same; replicates are weighted by their evidence."""
    kernel = ParticleFilter(aclass, num_particles=200)
    driver = Driver(kernel, num_chains=num_replicates, **QUIET)
    particles = driver.run(0, **of_rows(SEEN))["particles"]
    weight, number = (
        np.exp(particles["log_weight"].values[:, 0, 0]),
        particles["num_groups"].values[:, 0, 0, :, 0],
    )
    each = np.array(
        [np.bincount(n, w, LARGEST)[:LARGEST] for n, w in zip(number, weight, strict=True)]
    )
    program = Program(aclass, **of_rows(NEW))
    reading = driver.reading
    density = np.exp([kernel.log_classes(state, reading, program)[:, 0] for state in driver.states])
    log_z = np.array([float(state.log_prior[0] + state.log_evidence[0]) for state in driver.states])
    share = np.exp(log_z - logsumexp(log_z))
    assert 1 / np.sum(share**2) > num_replicates / 2  # the filter has found the same everywhere
    mean = lambda values: (share @ values, np.sqrt(share**2 @ (values - share @ values) ** 2))
    return *mean(each), *logs(*mean(density))


def logs(mean, error):
    return np.log(mean), error / mean


def gaps():
    """Between the two, of the numbers of groups: total variation over a tolerance of three standard
    errors each; of the densities of new rows: the largest difference over four. And that tolerance.
    """
    number, number_error, density, density_error = by_gibbs()
    other, other_error, other_density, other_density_error = filtered()
    tolerance = 3 * 0.5 * np.hypot(number_error, other_error).sum()
    apart = np.abs(density - other_density) / np.hypot(density_error, other_density_error)
    return {
        "groups": 0.5 * np.abs(number - other).sum() / tolerance,
        "densities": apart.max() / 4,
    }, tolerance


filtered = cache(by_filter)


def test_gibbs_and_the_filter_agree_on_200_rows():
    found, tolerance = gaps()
    assert max(found.values()) < 1
    assert tolerance < 0.12  # so that it says something


@pytest.mark.parametrize(
    ("wrong", "module", "name", "planted"),
    [
        ("groups", collapsed_gibbs, "_prior", double_alpha),
        ("densities", collapsed_gibbs, "_without", features_stay),
    ],
    ids=["alpha doubled", "the features are not taken out"],
)
def test_a_planted_bug_breaks_the_agreement(wrong, module, name, planted, monkeypatch):
    plant(monkeypatch, module, name, planted)
    assert gaps()[0][wrong] > 1
