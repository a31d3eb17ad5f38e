"""What the reading reads off a model, followed through edits and names, or refused by the name
of a site.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import plate, sample

from inference import AugmentReduce, Driver, Program, StructureError
from inference.distributions import Below, log_cdf
from inference.kernels.augment_reduce import kernel as kernel_module
from inference.kernels.augment_reduce.noise_posterior import LocationScale, LogExponential
from inference.kernels.augment_reduce.weights import minibatch_of
from inference.program.sites import Site
from inference.reading import row_table
from inference.reading.row_table import note_requests
from tests.inference.reducing import TOLD, X, bound, estimate, fitted, step, weights_of, whole
from zoo.augment_reduce import augment_reduce

pytestmark = pytest.mark.usefixtures("x64")


def other_names(features, winner, noise=None, prior=None, num=5, rows_seen=3, seen=2, tau=None):
    """The same sum in other words: classes drawn among all, weights with a learned spread, the
    winner masked out.
    """
    spread = sample("spread", dist.HalfNormal(1.0)) if tau is None else tau
    slope_prior = dist.Normal(0.0, spread) if prior is None else prior
    with plate("label", num, dim=-1):
        slope = sample("slope", slope_prior.expand((features.shape[1],)).to_event(1))
    temperature = sample("temperature", dist.Normal(1.0, 0.5))
    noise = dist.Gumbel(0.3, 1.0) if noise is None else noise
    with plate("case", len(features), subsample_size=rows_seen, dim=-1) as case:
        z, mine = jnp.asarray(features)[case], jnp.asarray(winner)[case]
        score = lambda labels: temperature * jnp.tanh(slope[labels] @ z.T)
        won = temperature * jnp.tanh(jnp.sum(slope[mine] * z, -1))
        shock = sample("shock", noise)
        with plate("rival", num, subsample_size=seen, dim=-2) as rival:
            bound = (shock + won)[None] - score(rival)
            with numpyro.handlers.mask(mask=rival[:, None] != mine[None]):
                sample("loses", Below(bound, noise), obs=np.ones(bound.shape, np.int32))


OTHER = {"features": TOLD["x"], "winner": TOLD["y"]}


def fit_other(**options):
    return fitted(model=other_names, told=OTHER | options)


def test_model_of_the_zoo_is_read():
    reading, _, state = fitted("gumbel")
    found = reading.reduced
    assert (found.local, found.rows, found.classes, found.observed) == (
        "eps",
        "row",
        "other",
        ("is_below",),
    )
    assert found.sizes == {"row": (6, 3), "other": (4, 2)}
    assert set(found.by_row) == {"weights", "biases"}
    assert (found.row_shapes, found.whole) == ({"weights": (2,), "biases": ()}, {})
    assert found.together == (("weights", "biases"),)
    # each number, its square, and when it was touched
    assert [table.shape for table in state.tables] == [(5, 2 * (2 + 1) + 1)]


def test_other_names_and_another_utility_are_followed():
    reading, program, state = fit_other()
    found = reading.reduced
    assert (found.local, found.rows, found.classes, set(found.by_row), set(found.whole)) == (
        "shock", "case", "rival", {"slope"}, {"spread", "temperature"})  # fmt: skip
    assert isinstance(reading.q_noise, LogExponential)  # Gumbel of another place
    full = program.with_arguments(rows_seen=None, seen=None)
    v = weights_of(reading, state)
    v["spread"] = jnp.exp(v["spread"])
    rate = np.asarray(state.local["rate"])
    terms = jax.jit(full.log_probs)(v | {"shock": np.log(rate)})
    exact = float((terms["shock"] + terms["loses"].sum(0) + 1).sum())
    assert bound(reading, program, state) == pytest.approx(exact, rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "noise",
    [dist.Gumbel(0.0, 2.0), dist.Normal(0.2, 1.5), dist.Cauchy(0.0, 1.0)],
    ids=["gumbel", "normal", "cauchy"],
)
def test_another_noise_is_followed(noise, request):
    if isinstance(noise, dist.Cauchy):
        log_cdf.register(dist.Cauchy, lambda noise, value: jnp.log(noise.cdf(value)))
        request.addfinalizer(lambda: log_cdf.register(dist.Cauchy, log_cdf.dispatch(object)))
    reading, program, state = fit_other(noise=noise)
    assert isinstance(reading.q_noise, LocationScale)
    assert type(reading.q_noise.noise) is type(noise)
    new, report = jax.jit(lambda state: step(reading, program, state, 0))(state)
    assert np.isfinite(report.elbo)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(new))


def slopes_of_whole(reading, program, state):
    """The gradient of the log joint at q's points, by differentiating everything."""
    v = weights_of(reading, state)
    eps = jnp.log(state.local["rate"])

    def total(v):
        terms = program.log_probs({**v, "eps": eps})
        return terms["eps"].sum() + terms["is_below"].sum()

    return jax.jit(jax.grad(total))(v)


@pytest.mark.parametrize("own_negatives", [False, True], ids=["shared by the batch", "of each row"])
def test_slopes_of_touched_rows_are_those_of_all(own_negatives):
    reading, program, state = fitted("gumbel", own_negatives=own_negatives)
    other = jnp.array([[0, 1, 2], [3, 0, 0]]) if own_negatives else jnp.array([1, 3])
    # two of the class that is last, and stands in
    index = {"row": jnp.array([1, 3, 0]), "other": other}
    _, found = jax.jit(lambda state: estimate(reading, program, state, index, None))(state)

    def total(v):
        terms = program.log_probs({**v, "eps": jnp.log(state.local["rate"])[index["row"]], **index})
        return terms["eps"].sum() + terms["is_below"].sum()

    exact = jax.jit(jax.grad(total))(weights_of(reading, state))
    for name, value in exact.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-10, atol=1e-10)


def shifted(x, y):
    """A class takes its weight from its own row and its level from that of the class before, by
    indices of their own.
    """
    with plate("class", 5, dim=-1):
        w, level = sample("w", dist.Normal(0.0, 1.0)), sample("level", dist.Normal(0.0, 1.0))
    with plate("row", 6, subsample_size=3, dim=-1) as row:
        eps, z, own = (
            sample("eps", dist.Gumbel(0.0, 1.0)),
            jnp.asarray(x)[row, 0],
            jnp.asarray(y)[row],
        )
        utility = lambda of: w[of] * jnp.broadcast_to(z, of.shape) + level[(of - 1) % 5]
        with plate("other", 4, subsample_size=2, dim=-2) as other:
            bound = (eps + utility(own))[None] - utility(
                jnp.where(other[:, None] == own[None], 4, other[:, None])
            )
            sample("loses", Below(bound, dist.Gumbel(0.0, 1.0)), obs=np.ones((2, 3), np.int32))


def test_sites_that_are_asked_for_other_rows_are_tables_of_their_own():
    reading, program, state = fitted(
        model=shifted, told={"x": X, "y": np.array([0, 4, 1, 4, 2, 0])}
    )
    assert reading.reduced.together == (("w",), ("level",))
    index = {"row": jnp.array([1, 3, 0]), "other": jnp.array([1, 3])}
    _, found = jax.jit(lambda state: estimate(reading, program, state, index, None))(state)

    def total(v):
        terms = program.log_probs({**v, "eps": jnp.log(state.local["rate"])[index["row"]], **index})
        return terms["eps"].sum() + terms["loses"].sum()

    for name, value in jax.jit(jax.grad(total))(weights_of(reading, state)).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-10, atol=1e-10)


def test_tables_that_mix_up_rows_are_seen(monkeypatch):
    from inference.reading import row_table

    joined = row_table._requested_rows
    monkeypatch.setattr(
        row_table, "_requested_rows", lambda *told: (joined(*told)[0], (("w", "level"),))
    )
    reading, program, state = fitted(
        model=shifted, told={"x": X, "y": np.array([0, 4, 1, 4, 2, 0])}
    )
    with pytest.raises(
        AssertionError, match="other rows of it are requested than when the model was read"
    ):
        jax.eval_shape(lambda state: step(reading, program, state, 0), state)


def test_rows_that_are_not_merged_are_seen(monkeypatch):
    from inference.reading import row_table

    monkeypatch.setattr(row_table, "_slots", lambda ids: jnp.arange(len(ids)))
    with pytest.raises(AssertionError):
        test_slopes_of_touched_rows_are_those_of_all(False)


def test_all_rows_and_classes_give_the_whole_gradient():
    reading, program, state = fitted("gumbel")
    exact = slopes_of_whole(
        reading, program.with_arguments(batch_size=None, num_negatives=None), state
    )
    found = np.asarray(whole(reading, program, state))[1:]
    np.testing.assert_allclose(
        found, np.concatenate([exact[name].ravel() for name in sorted(exact)]), rtol=1e-9, atol=1e-9
    )


def test_prior_of_a_row_is_felt_for_the_steps_since_it_was_touched():
    reading, program, state = fitted("gumbel")
    [table], [packed] = reading.layouts, state.tables
    touched = jnp.array([0.0, 9.0, 4.0, 7.0, 8.0])
    state = state._replace(
        count=jnp.array(9), tables=(table.pack(table.unpack(packed)._replace(touched=touched)),)
    )
    # classes 0, 2 are chosen; 0, 3, and 4, which stands in, are not
    index = {"row": jnp.array([0, 5, 4]), "other": jnp.array([0, 3])}

    @jax.jit
    def slopes(state):
        view = minibatch_of(reading, program, index, state, None)
        found = jax.grad(view.log_prior)(view.parameters)
        zeros = {name: jnp.zeros(site.shape) for name, site in reading.reduced.by_row.items()}
        return {
            name: asked.scatter(zeros[name], asked.merged(found[name]["loc"]))
            for name, asked in view.requests.items()
        }

    for name, merged in slopes(state).items():
        steps = np.array([10, 0, 6, 3, 2]).reshape(-1, *(1,) * (merged.ndim - 1))
        np.testing.assert_allclose(
            merged, -np.asarray(weights_of(reading, state)[name]) * steps, rtol=1e-10
        )


# Refusals.


def of(**changes):
    """A model that lacks something, as an edit would leave it."""

    def edited(x, y):
        with plate("class", 5, dim=-1):
            w = sample("w", changes.get("prior", dist.Normal(0.0, 1.0).expand((2,)).to_event(1)))
            if "more" in changes:
                sample("more", dist.Normal(0.0, 1.0))
        if "level" in changes:
            sample("level", changes["level"])
        w = changes.get("use", lambda w: w)(w)
        with plate("row", 6, subsample_size=3, dim=-1) as row:
            eps = sample(
                "eps", changes.get("own_noise", changes.get("noise", dist.Gumbel(0.0, 1.0)))
            )
            if "second" in changes:
                eps = eps + sample("second", dist.Normal(0.0, 1.0))
            z = jnp.asarray(x)[row]
            with plate("other", 5, subsample_size=2, dim=-2) as other:
                sample(
                    "loses",
                    Below(eps[None] - w[other] @ z.T, changes.get("noise", dist.Gumbel(0.0, 1.0))),
                    obs=np.ones((2, 3), int),
                )

    return edited


class NoCdf(dist.Uniform):
    support = dist.constraints.real


ROWS = dist.Normal(0.0, 1.0).expand((2,)).to_event(1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use": lambda w: 2.0 * w}, "site 'w': the model uses all of it"),
        ({"use": jnp.tanh}, "site 'w': the model uses all of it"),
        ({"use": lambda w: w.T.T}, "site 'w': the model uses all of it"),
        ({"use": lambda w: w[1:]}, "site 'w': the model uses all of it"),
        ({"second": True}, "site 'second': .* at most one"),
        ({"noise": NoCdf(0.0, 1.0)}, r"site 'loses': .*NoCdf has no log_cdf"),
        ({"noise": dist.Exponential(1.0)}, "site 'eps': found Exponential"),
        ({"own_noise": dist.Normal(np.zeros(3), 1.0)}, "site 'eps': its prior Normal differs from row to row"),
        ({"prior": dist.HalfNormal(1.0).expand((2,)).to_event(1)}, "site 'w': its support"),
        ({"prior": dist.Normal(np.zeros((5, 2)), 1.0).to_event(1)}, "site 'w': its prior differs from row to row"),
        ({"prior": ROWS.mask(np.arange(5) > 2)}, "site 'w': its prior is masked"),
        ({"more": True}, "site 'more': the model asks for none of its rows"),
        ({"level": dist.Poisson(3.0)}, "site 'level': Poisson is discrete"),
    ],
    ids=["product", "function", "attribute", "slice", "two local", "no log_cdf", "positive noise", "noise by row", "positive rows",
         "prior by row", "masked prior", "unasked", "discrete"],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_its_name(changes, message):
    model = of(**changes)
    with pytest.raises((StructureError, TypeError), match=message) as caught:
        AugmentReduce(model).read(Program(model, TOLD["x"], TOLD["y"]))
    assert isinstance(caught.value, StructureError)


def test_more_rows_than_can_be_counted_are_refused():
    site = Site(
        "w",
        "latent",
        "Normal",
        (10**6, 10**5),
        jnp.float32,
        0,
        ("class", "feature"),
        None,
        False,
        ("class", "feature"),
    )
    places = jnp.arange(2)
    with pytest.raises(
        StructureError, match=r"site 'w': its first axes \(1000000, 100000\) have 1e\+11 rows"
    ):
        note_requests(lambda rows: rows["w"][places, places], {"w": site})
    assert note_requests(lambda rows: rows["w"][places], {"w": site})["w"].row_shape == (10**5,)


def test_data_outside_of_plates_are_refused():
    def lonely(y):
        mu = sample("mu", dist.Normal(0.0, 1.0))
        sample("y", dist.Normal(mu, 1.0), obs=y)

    with pytest.raises(StructureError, match="site 'y': it is observed outside of any plate"):
        AugmentReduce(lonely).read(Program(lonely, 1.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_draws": 0}, "num_draws: found 0"),
        ({"init_scale": -1.0}, "init_scale: found -1.0"),
        ({"local_decay": 0.3}, "local_decay: found 0.3"),
    ],
    ids=["draws", "start", "decay"],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AugmentReduce(augment_reduce, **options)


def test_posterior_of_a_flat_prior_is_refused():
    program = Program(augment_reduce, **TOLD, prior_scale=None)
    with pytest.raises(StructureError, match="site 'weights': its prior is flat"):
        AugmentReduce(augment_reduce, posterior=True).read(program)


def test_infinite_features_are_refused():
    program = Program(other_names, np.full((6, 2), np.nan), TOLD["y"])
    with pytest.raises(ValueError, match="site 'loses': its log probability is not finite"):
        AugmentReduce(other_names).read(program)


# Rows that pad the data.


def looks_at_all_rows(x, y, batch_size=8):
    """Softmax regression whose features are centred."""
    with plate("class", 3, dim=-1):
        weights = sample("weights", dist.Normal(0.0, 1.0).expand((2,)).to_event(1))
    with plate("row", len(x), subsample_size=batch_size, dim=-1) as row:
        z = (x - x.mean(0, keepdims=True))[row]
        logits = (weights[jnp.arange(3)] @ z.T).T
        sample("y", dist.Categorical(logits=logits), obs=y[row])


def prior_follows_the_rows(x, y, batch_size=8):
    """Softmax regression whose prior is narrower for more rows."""
    with plate("class", 3, dim=-1):
        weights = sample("weights", dist.Normal(0.0, 9 / len(x)).expand((2,)).to_event(1))
    with plate("row", len(x), subsample_size=batch_size, dim=-1) as row:
        logits = (weights[jnp.arange(3)] @ x[row].T).T
        sample("y", dist.Categorical(logits=logits), obs=y[row])


def plain(x, y, batch_size=8):
    """Softmax regression."""
    with plate("class", 3, dim=-1):
        weights = sample("weights", dist.Normal(0.0, 1.0).expand((2,)).to_event(1))
    with plate("row", len(x), subsample_size=batch_size, dim=-1) as row:
        logits = (weights[jnp.arange(3)] @ x[row].T).T
        sample("y", dist.Categorical(logits=logits), obs=y[row])


def table(num_rows):
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(1.0, 1.0, (num_rows, 2))), jnp.asarray(
        rng.integers(0, 3, num_rows)
    )


@pytest.mark.parametrize(
    ("model", "num_places"),
    [(plain, 128), (looks_at_all_rows, 90), (prior_follows_the_rows, 90)],
)
def test_rows_pad_the_data_where_this_changes_nothing(model, num_places, monkeypatch):
    kernel, program = AugmentReduce(model), Program(model, *table(90))
    after = {}
    for most in (row_table.MOST_PADDED, 0):
        monkeypatch.setattr(row_table, "MOST_PADDED", most)
        reading, data = kernel.read(program)
        assert reading.num_places == (num_places if most else 90)
        state = kernel.init(jax.random.key(0), reading, data)
        new, report = kernel.step(jax.random.key(1), state, reading, data)
        after[most] = weights_of(reading, new)["weights"], report.elbo
    for found, wanted in zip(*after.values(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-10)


def test_rows_that_pad_change_a_model_that_looks_at_them(monkeypatch):
    monkeypatch.setattr(kernel_module, "gap_of_numbers", lambda *_: jnp.zeros(()))
    with pytest.raises(AssertionError):
        test_rows_pad_the_data_where_this_changes_nothing(looks_at_all_rows, 128, monkeypatch)


def test_other_data_of_a_similar_size_compile_no_loop():
    compiled = []
    for num_rows in (120, 100):
        driver = Driver(AugmentReduce(plain), num_warmup=3, num_samples=1, progress_bar=False)
        driver.run(0, *table(num_rows))
        compiled += [loop.advance for loop in driver._last.session.compiled.values()]
    assert compiled[0] is compiled[1]
