"""The nested sampler against exact evidences; bugs that its tests must see; models that it must
refuse.
"""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.handlers import scope

from diagnostics import insertion_rank_test, report
from inference import Driver, NestedSampler, Program, StructureError
from inference.kernels.nested import kernel as _nesting
from inference.kernels.nested import state as _state
from inference.maths import slice_walk
from inference.maths.slice_walk import Limit
from tests.inference.nests import EXACT, X, Y, line, line_evidence, two_modes

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")


def run(model, *args, seed=0, num_chains=1, num_samples=500, **settings):
    kernel = NestedSampler(model, **({"num_live": 200} | settings))
    return Driver(kernel, num_samples=num_samples, num_chains=num_chains, progress_bar=False).run(
        seed, *args
    )


def errors(name, count=8, **settings):
    """Errors of the log-evidence in several runs, in units of the claimed error."""
    model, args, exact = EXACT[name]
    tree = run(model, *args, num_chains=count, **settings)
    return (tree.attrs["log_evidence_of_replicates"] - exact) / tree.attrs[
        "log_evidence_se_of_replicates"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT, ids=EXACT)
def test_claimed_errors_are_those_that_are_made(name):
    if name == "constant":
        assert np.abs(run(*EXACT[name][:1]).attrs["log_evidence"] - EXACT[name][2]) < 1e-6
        return
    z = errors(name, 16)
    assert 0.55 < np.sqrt(np.mean(z**2)) < 1.6
    assert np.abs(z).max() < 3.7


def same_share_of_each(live, mode, count, batch, lowest=_nesting.lowest):
    """A planted bug: each mode loses its own lowest, and"""
    death = lowest(live, mode, count, batch)
    mode = mode[death.order]
    rank = jnp.arange(len(mode)) - death.first[mode]
    chosen = jnp.argsort((rank + 0.5) / count[mode])[:batch]
    dying = jnp.zeros_like(count).at[mode[chosen]].add(1)
    return death._replace(dying=dying, chosen=death.order[chosen], rank=rank[chosen])


def limit_of_its_own(state, death, mode):
    """walks above the limit that it has come to."""
    last = death.order[jnp.maximum(death.first + death.dying - 1, 0)][mode]
    return Limit(state.live.log_likelihood[last], state.live.label[last])


@pytest.mark.slow
@pytest.mark.parametrize("bug", [False, True], ids=["as it is", "planted"])
def test_modes_that_hang_together_do_not_bias_the_evidence(bug, monkeypatch):
    """Flat places, split a dozen times where nothing is apart."""
    monkeypatch.setattr(_state, "ON_A_LINE", 7)
    if bug:
        monkeypatch.setattr(_nesting, "lowest", same_share_of_each)
        monkeypatch.setattr(_nesting, "limit_of", limit_of_its_own)
    model, args, exact = EXACT["flat places"]
    attrs = run(model, *args, num_chains=16, num_sweeps=10.0).attrs
    assert np.mean(attrs["num_modes_of_replicates"]) > 8
    off = attrs["log_evidence_of_replicates"] - exact
    assert (abs(off.mean()) < 3.3 * off.std(ddof=1) / 4) is not bug


@pytest.mark.slow
def test_a_constant_likelihood_is_its_own_evidence():
    model, args, exact = EXACT["constant"]
    assert abs(run(model, *args, num_live=50).attrs["log_evidence"] - exact) < 1e-6


@pytest.mark.slow
def test_the_tree_is_what_diagnostics_read():
    """Posterior, weighted particles, ranks; replicates of other lengths side by side; the page
    of trust says yes.
    """
    tree = run(line, X, Y, num_chains=2, num_samples=1000)
    page = report(tree)
    assert page.kind == "nested"
    assert all(verdict.ok for verdict in page.verdicts if verdict.ok is not None), page
    precision = np.diag([1.0, 0.25]) + X.T @ X / 0.25
    exact = np.linalg.solve(precision, X.T @ Y / 0.25)
    drawn = tree["posterior"]["weight"].values.reshape(-1, 2)
    np.testing.assert_allclose(
        drawn.mean(0), exact, atol=4 * np.sqrt(np.diag(np.linalg.inv(precision)).max() / 400)
    )
    np.testing.assert_allclose(drawn.std(0), np.sqrt(np.diag(np.linalg.inv(precision))), rtol=0.15)
    weight = np.exp(tree["particles"]["log_weight"].values)
    assert weight.shape[0] == 2
    np.testing.assert_allclose(
        np.log(weight.sum(1)), tree.attrs["log_evidence_of_replicates"], atol=0.1
    )
    assert json.loads(tree.attrs["kernel_settings"])["NestedSampler.num_live"] == 200


@pytest.mark.slow
def test_separated_modes_keep_their_masses():
    tree = run(two_modes, num_live=300)
    assert tree.attrs["num_modes"] >= 2
    x = tree["posterior"]["x"].values[0]
    assert 0.1 < (x[:, 0] > 0).mean() < 0.55


def two_widths(width):
    """Modes of mass .9 and .1 in four dimensions; the smaller one has a width of its own."""
    x = numpyro.sample("x", dist.Uniform(-10.0, 10.0).expand([4]).to_event(1))
    shares = dist.Categorical(probs=jnp.array([0.9, 0.1]))
    widths = jnp.stack([jnp.array(0.5), width])[:, None] * jnp.ones(4)
    each = dist.Normal(x + 4.0 * jnp.array([[1.0], [-1.0]]) * jnp.ones(4), widths).to_event(1)
    numpyro.sample("y", dist.MixtureSameFamily(shares, each), obs=jnp.zeros(4))


@pytest.mark.slow
@pytest.mark.parametrize("bug", [False, True], ids=["as it is", "planted"])
def test_a_needle_is_found(bug, monkeypatch):
    """It has a 625th of the volume, less than a live point. Planted: nothing is proved."""
    if bug:
        nothing = lambda densities, limit, here, *_: (jnp.zeros(len(here), bool), 0)
        monkeypatch.setattr(_nesting, "_are_apart", nothing)
    tree = run(two_widths, jnp.array(0.1), num_live=500, num_chains=10)
    mass = (tree["posterior"]["x"].values[..., 0] > 0).mean(1)
    assert (np.sum(mass > 0.01) >= 9) != bug
    assert bug or 0.04 < mass.mean() < 0.2
    z = tree.attrs["log_evidence_of_replicates"] + 4 * np.log(20)
    z = z / tree.attrs["log_evidence_se_of_replicates"]
    assert bug or np.sqrt(np.mean(z**2)) < 1.45


@pytest.mark.slow
def test_masses_of_modes_do_not_drift():
    """Ten runs: the mass .3 of the wider mode, with a spread that is no more than volumes of two
    modes leave.
    """
    tree = run(two_modes, num_live=300, num_chains=10)
    mass = (tree["posterior"]["x"].values[..., 0] > 0).mean(1)
    assert abs(mass.mean() - 0.3) < 0.05
    assert mass.std() < 0.1
    assert mass.min() > 0.1


@pytest.mark.slow
def test_another_name_for_everything_changes_nothing():
    one = run(line, X, Y, num_live=50)
    other = run(scope(line, prefix="a"), X, Y, num_live=50)
    assert one.attrs["log_evidence"] == other.attrs["log_evidence"]
    assert "a.weight" in other["posterior"]


@pytest.mark.slow
def test_an_edited_model_is_followed():
    """A wider prior of the first weight: the evidence is that of the edited model."""

    def wider(x, y):
        weight = numpyro.sample("weight", dist.Normal(0.0, 4.0).expand([2]).to_event(1))
        with numpyro.plate("row", len(x)):
            numpyro.sample("y", dist.Normal(x @ weight, 0.5), obs=y)

    from scipy import stats

    exact = stats.multivariate_normal(np.zeros(12), 16 * X @ X.T + 0.25 * np.eye(12)).logpdf(Y)
    attrs = run(wider, X, Y).attrs
    assert abs(attrs["log_evidence"] - exact) < 3.5 * attrs["log_evidence_se"]
    assert abs(exact - line_evidence()) > 3.5 * attrs["log_evidence_se"]


@pytest.mark.slow
def test_a_run_is_the_same_run_again():
    first, second = (run(line, X, Y, num_live=50).attrs["log_evidence"] for _ in range(2))
    assert first == second


# Planted bugs.


def broken(monkeypatch, change):
    """Walks whose arguments are changed before they begin."""
    monkeypatch.setattr(
        "inference.kernels.nested.kernel.walk",
        lambda key, *rest: slice_walk.walk(key, *change(*rest)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("bug", [False, True], ids=["as it is", "planted"])
def test_walks_that_forget_the_prior_are_seen(bug, monkeypatch):
    """Without offers: those are draws of the prior, and most births here would be."""

    def change(densities, start, *rest):
        flat = lambda z: (jnp.zeros((), z.dtype), densities(z)[1])
        return flat, start._replace(log_prior=jnp.zeros_like(start.log_prior)), *rest

    monkeypatch.setattr(_nesting.Nesting, "_num_offers", lambda *_: 0)
    if bug:
        broken(monkeypatch, change)
    assert (np.abs(errors("counts", 4)).max() > 3.5) == bug


@pytest.mark.slow
def test_walks_that_forget_the_limit_show_in_the_ranks(monkeypatch):
    def change(densities, start, limit, *rest):
        return densities, start, limit._replace(log_likelihood=limit.log_likelihood - 0.5), *rest

    good = run(line, X, Y)["sample_stats"]["insertion_rank"].values
    broken(monkeypatch, change)
    bad = run(line, X, Y)["sample_stats"]["insertion_rank"].values
    assert insertion_rank_test(good, 200) > 0.001
    assert insertion_rank_test(bad, 200) < 1e-6


def nests(num_live, num_runs, width, bug=None):
    """Exact nested sampling in one dimension, many runs: L(X) = exp(-X / width), points that are
    left are Uniform below the last that died. [run]: errors of the log-evidence, and the errors
    that are claimed; the evidence over the exact one.
    """
    exact = width * -np.expm1(-1 / width)
    steps = int(num_live * (-np.log(width) + 6))
    zeros = jnp.zeros(num_live, jnp.int32)

    def one(key):
        start_key, key = random.split(key)
        live = random.uniform(start_key, (num_live,))

        def step(t, carry):
            live, volumes = carry
            volume_key, new_key = random.split(random.fold_in(key, t))
            worst = jnp.argmax(live)
            zero = jnp.zeros(1, jnp.int32)
            _, volumes = _state.shrink_volumes(
                random.uniform(volume_key, (1, 50)),
                volumes,
                -live[worst][None] / width,
                zero,
                zero,
                zero + num_live,
            )
            if bug == "the mean of t":  # n / (n + 1) for 1 - 1 / n
                up = jnp.log(num_live / (num_live + 1)) - jnp.log1p(-1 / num_live)
                volumes = volumes._replace(log_volume=volumes.log_volume.at[:, 0].add(up))
            return live.at[worst].set(live[worst] * random.uniform(new_key)), volumes

        live, volumes = jax.lax.fori_loop(0, steps, step, (live, _state.whole_prior(1, 50)))
        points = SimpleNamespace(log_likelihood=-live / width)
        state = SimpleNamespace(volumes=volumes, mode=zeros, live=points)
        log_evidence, error = _state.evidence(state)
        return log_evidence - jnp.log(exact), error, log_evidence - error**2 / 2 - jnp.log(exact)

    found = jax.jit(jax.vmap(one))(random.split(random.key(0), num_runs))
    return [np.asarray(part) for part in found]


@pytest.mark.slow
@pytest.mark.parametrize("num_live", [5, 20])
def test_the_evidence_of_few_points_is_unbiased_and_its_error_honest(num_live):
    error, claimed, log_ratio = nests(num_live, 1000, 0.05)
    ratio = np.exp(log_ratio)
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / np.sqrt(1000)
    assert 0.85 < np.sqrt(np.mean((error / claimed) ** 2)) < 1.15


@pytest.mark.slow
def test_the_mean_of_t_makes_the_evidence_too_large():
    """The planted bug: volumes shrink by n / (n + 1)."""
    ratio = np.exp(nests(5, 1000, 0.05, "the mean of t")[2])
    assert ratio.mean() - 1 > 4 * ratio.std() / np.sqrt(1000)


@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_volumes_of_dead_and_live_points_add_up_to_the_prior(bug):
    """With the printed weight of a live point, X / (m + 1) for X / m, they do not."""
    mode, count = jnp.array([0, 0, 1, 1, 1]), jnp.array([4, 6])
    volumes = _state.whole_prior(2, 3)
    volumes = _state.share_volumes(
        random.key(0), volumes, jnp.zeros(10, int), jnp.repeat(jnp.arange(2), count), jnp.arange(10)
    )
    rank = jnp.array([0, 1, 0, 1, 2])
    log_shell, volumes = _state.shrink_volumes(
        random.uniform(random.key(1), (5, 3)), volumes, jnp.zeros(5), mode, rank, count[mode]
    )
    live = jnp.repeat(jnp.arange(2), jnp.array([2, 3]))
    printed = jnp.log(jnp.array([2 / 3, 3 / 4]))[:, None] if bug else 0.0
    state = SimpleNamespace(
        volumes=volumes._replace(log_volume=volumes.log_volume + printed),
        mode=live,
        live=SimpleNamespace(log_likelihood=jnp.zeros(5)),
    )
    left = _state.remaining(state)
    total = np.exp(np.asarray(volumes.log_evidence)) + np.exp(np.asarray(left))
    assert (np.abs(total - 1) < 1e-12).all() != bug
    np.testing.assert_allclose(np.exp(log_shell).sum(), np.exp(volumes.log_evidence[0]))


# Refusals.


def improper(y=0.0):
    level = numpyro.sample("level", dist.ImproperUniform(dist.constraints.real, (), ()))
    numpyro.sample("y", dist.Normal(level, 1.0), obs=y)


def discrete(y=0.0):
    side = numpyro.sample("side", dist.Bernoulli(0.5))
    numpyro.sample("y", dist.Normal(2.0 * side, 1.0), obs=y)


def factor(y=0.0):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    numpyro.factor("penalty", -jnp.abs(level))
    numpyro.sample("y", dist.Normal(level, 1.0), obs=y)


def scaled(y=0.0):
    with numpyro.handlers.scale(scale=2.0):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(level, 1.0), obs=y)


def masked(y=0.0):
    with numpyro.handlers.mask(mask=False):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(level, 1.0), obs=y)


def not_a_number(y=0.0):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Delta(0.0, log_density=jnp.log(level), validate_args=False), obs=0.0)


def far_away(y=0.0):
    level = numpyro.sample("level", dist.Uniform(0.0, 1.0))
    numpyro.sample(
        "y",
        dist.Delta(0.0, log_density=jnp.where(level > 0.9999, 0.0, -jnp.inf), validate_args=False),
        obs=0.0,
    )


def parts(y=0.0):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    with numpyro.plate("row", 10, subsample_size=5):
        numpyro.sample("y", dist.Normal(level, 1.0), obs=jnp.zeros(5))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (improper, "site 'level': its prior is ImproperUniform"),
        (discrete, "site 'side': it is latent and discrete"),
        (factor, r"site 'penalty': a factor that depends on the latent sites \['level'\]"),
        (scaled, "site 'level': its prior is scaled"),
        (masked, "site 'level': its prior is masked"),
        (not_a_number, "site 'y': its log probability is NaN"),
        (far_away, "'y'"),
        (parts, "plate 'row': it subsamples its rows"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_refused_by_name(model, message):
    with pytest.raises(ValueError, match=message):
        run(model)


def test_a_likelihood_without_bound_is_given_up():
    """A width that may shrink to nothing: one observation, at the mean."""

    def spike(y=0.0):
        log_width = numpyro.sample("log_width", dist.Normal(0.0, 300.0))
        numpyro.sample("y", dist.Delta(0.0, log_density=-100.0 * log_width**3), obs=0.0)

    kernel = NestedSampler(spike, num_live=20)
    reading, data = kernel.read(Program(spike))
    states = [kernel.init(random.key(0), reading, data)]
    for _ in range(3):
        states = kernel.on_host(states, reading, data)
    with pytest.raises(
        StructureError,
        match=r"sites \['y'\]: after .* e-folds .* the likelihood still rises, .* or data",
    ):
        kernel.on_host(states, reading, data)


@pytest.mark.slow
def test_fewer_live_points_than_a_mode_needs_are_one_mode():
    """In 30 dimensions a mode of its own would need 60 points; there are 20."""

    def wide(y=0.0):
        x = numpyro.sample("x", dist.Normal(0.0, 1.0).expand([30]).to_event(1))
        numpyro.sample("y", dist.Normal(x.sum(), 1.0), obs=y)

    kernel = NestedSampler(wide, num_live=20)
    reading, data = kernel.read(Program(wide))
    state = kernel.init(random.key(0), reading, data)
    assert state.volumes.log_volume.shape[0] == 1
    state, info = jax.jit(lambda key, at: kernel.step(key, at, reading, data))(random.key(1), state)
    assert np.isfinite(info.log_evidence)


@pytest.mark.slow
def test_a_run_knows_whom_its_points_descend_from():
    """After an e-fold and a half: fewer ancestors the further back."""
    kernel = NestedSampler(two_modes, num_live=40, num_sweeps=0.5)
    reading, data = kernel.read(Program(two_modes))
    state = kernel.init(random.key(0), reading, data)
    assert all(len(set(row)) == 40 for row in np.asarray(state.ancestor))
    step = jax.jit(lambda key, at: kernel.step(key, at, reading, data)[0])
    for number in range(15):
        state = step(random.key(number), state)
    families = [len(set(row)) for row in np.asarray(state.ancestor)]
    assert 35 < families[0] <= 40
    assert families[0] > families[1] > families[2] > families[3]
    assert families[3] < 25


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_live": 5}, "num_live: found 5"),
        ({"batch": 300}, "batch: found 300"),
        ({"num_sweeps": 0}, "num_sweeps: found 0"),
        ({"num_sweeps": np.inf}, "num_sweeps: found inf"),
        ({"memory": 0.0}, "memory: found 0.0"),
        ({"memory": "long"}, "memory: found 'long', wanted a number above 0, up to 1"),
        ({"tolerance": 2.0}, "tolerance: found 2.0"),
        ({"tolerance": None}, "tolerance: found None, wanted a number between 0 and 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        NestedSampler(line, **settings)
