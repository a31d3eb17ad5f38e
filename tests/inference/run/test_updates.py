"""What a tree tells after an update is of all rows; and what an update is refused for."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

from inference import DataTempering, Driver, Program, Staged
from inference.kernels.tempering.kernel import TemperingReading
from inference.run import result
from inference.run.result import _combined
from tests.inference.importance import ImportanceSampling

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

X, MORE = np.linspace(0.0, 2.0, 20), np.full(6, 1.0)


class Stream(Program):
    """A reading that takes more rows."""

    def more(self, program):
        return Stream(program.model, *program.args, **program.kwargs), {}

    def by_row(self, programs):
        return ("x",)


class Streaming(ImportanceSampling):
    """Takes more rows, and learns nothing from them."""

    def read(self, program):
        return Stream(program.model, *program.args, **program.kwargs), {}

    def updated(self, state, reading, data, before):
        return state


def level(x):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    with numpyro.plate("row", len(x)):
        numpyro.deterministic("above", x - level)
        numpyro.sample("x", dist.Normal(level, 1.0), obs=x)


def streaming(**settings):
    driver = Driver(
        Streaming(level, num_batches=2, batch_size=16),
        num_samples=10,
        progress_bar=False,
        **settings,
    )
    driver.run(0, X)
    return driver


@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_groups_after_an_update_are_of_all_rows(bug, monkeypatch):
    """The planted bug: they are of those of the update."""
    driver = streaming(groups=("log_likelihood", "posterior_predictive"))
    driver.update(MORE)
    if bug:
        monkeypatch.setattr(result, "joined", lambda programs, by_row: programs[-1])
    tree, rows = driver.tree(), np.concatenate([X, MORE])
    found = [
        tree[group].sizes["row"]
        for group in ("observed_data", "log_likelihood", "posterior_predictive", "posterior")
    ]
    assert (found == [26] * 4) != bug
    if not bug:
        of_draws = tree["posterior"]["level"].values[..., None]
        np.testing.assert_allclose(tree["posterior"]["above"], rows - of_draws)
        np.testing.assert_allclose(
            tree["log_likelihood"]["x"], stats.norm.logpdf(rows, of_draws), rtol=1e-6
        )


def crossed(x, basis):
    weight = numpyro.sample("weight", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with numpyro.plate("row", x.shape[0], dim=-2), numpyro.plate("column", x.shape[1], dim=-1):
        numpyro.sample("x", dist.Normal(weight @ basis, 1.0), obs=x)


def without_the_last(self, program):
    """A planted bug: the last row of an update is lost."""
    data = self.rows.data(program)
    return self, data._replace(num_rows=data.num_rows - 1)


@pytest.mark.parametrize(
    ("array", "bug"), [(np.asarray, False), (jnp.asarray, False), (jnp.asarray, True)]
)
def test_rows_of_an_update_are_those_of_the_run(array, bug, monkeypatch):
    """By an update of three rows alone, five columns would be the rows: another argument has
    three entries as well.
    """
    if bug:
        monkeypatch.setattr(TemperingReading, "more", without_the_last)
    x, basis = np.arange(115.0).reshape(23, 5) / 100, np.array([1.0, 0.5, 0.2])
    driver = Driver(
        DataTempering(crossed, num_stages=1, num_particles=20), num_samples=10, progress_bar=False
    )
    driver.run(0, array(x[:20]), basis)
    driver.update(array(x[20:]), basis)
    state = driver.states[0]
    assert (int(state.num_rows) == 23) != bug
    if not bug:
        np.testing.assert_array_equal(state.table["x"][20:23], x[20:])
        np.testing.assert_array_equal(driver.tree()["observed_data"]["x"], x)


def test_what_goes_on_has_the_precision_of_what_began():
    driver = streaming()
    with jax.enable_x64(False):
        for asked, go_on in (
            ("update", lambda: driver.update(MORE)),
            ("extend", lambda: driver.extend(3)),
        ):
            with pytest.raises(
                ValueError,
                match=f"{asked}: the run began with jax_enable_x64=True, and now it is False",
            ):
                go_on()
    driver.update(MORE)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")  # of the planted bug
def test_a_tree_has_the_precision_of_its_run(monkeypatch):
    """The planted bug: as if the run had begun in that of today; states are then no arrays of
    it.
    """
    driver = streaming()
    wanted = driver.tree()
    with jax.enable_x64(False):
        found = driver.tree()
        assert found["posterior"].dataset.equals(wanted["posterior"].dataset)
        assert found.attrs["x64"] == 1
        monkeypatch.setattr(driver._last, "x64", False)
        with pytest.raises(TypeError, match="got float64, float32"):
            driver.tree()


def linked(x, link):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    with numpyro.plate("row", len(x)):
        numpyro.sample("x", dist.Normal(link(level), 1.0), obs=x)


def times(factor):
    return lambda level: factor * level


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataTempering(linked, num_stages=1, num_particles=20),
        lambda: Staged(linked, num_stages=1, num_live=20, num_walkers=0),
    ],
    ids=["tempering", "staged"],
)
@pytest.mark.parametrize(
    "kept", [lambda function: function, jax.tree_util.Partial], ids=["plain", "in a tree"]
)
def test_functions_among_arguments_are_told_by_what_they_do(make, kept):
    """Their names are the same."""
    kernel, link = make(), lambda factor: kept(times(factor * jnp.ones(())))
    reading, _ = kernel.read(Program(linked, X, link(1.0)))
    reading.more(Program(linked, MORE, link(1.0)))
    with pytest.raises(
        ValueError,
        match="update: more rows of the same model are wanted, but the model is not the same",
    ):
        reading.more(Program(linked, MORE, link(-9.0)))


def scaled(x, y, scale, unused=None):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    with numpyro.plate("row", len(x)):
        numpyro.sample("x", dist.Normal(level, scale), obs=x)
        numpyro.sample("y", dist.Normal(level, scale), obs=y)


def learned(scale, **more):
    reading, _ = DataTempering(scaled, num_stages=1, num_particles=20).read(
        Program(scaled, X, X, scale, **more)
    )
    return reading


def test_what_is_no_number_is_the_same_again():
    learned(2.0, unused=np.nan).more(Program(scaled, MORE, MORE, 2.0, unused=np.nan))


@pytest.mark.parametrize("again", [float, np.float64, np.array, jnp.array])
def test_a_number_may_come_as_another_kind_of_array(again):
    learned(np.float64(2.0)).more(Program(scaled, MORE, MORE, again(2.0)))


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (None, "argument 'y' is not the same"),
        (1.0, "argument 'y' is not the same"),
        (MORE > 0, "argument 'y' is not the same"),  # flags joined to numbers would be numbers
        (MORE[:0], "argument 'y' has no rows"),
        (MORE[:1], "arguments have {'x': 6, 'y': 1} rows; wanted as many in each"),
    ],
    ids=["none", "number", "flags", "empty", "fewer"],
)
def test_rows_of_an_update_are_in_all_arguments_of_rows(y, message):
    with pytest.raises(ValueError, match=message):
        learned(2.0).more(Program(scaled, MORE, y, 2.0))


PRIORS = {
    "tuple": (np.zeros(3), np.eye(3)),
    "distribution": dist.MultivariateNormal(np.zeros(3), np.eye(3)),
}


@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS)
def test_an_argument_may_be_no_array(prior):
    def model(x, prior):
        level = numpyro.sample(
            "level", dist.MultivariateNormal(*prior) if isinstance(prior, tuple) else prior
        )
        with numpyro.plate("row", len(x)):
            numpyro.sample("x", dist.Normal(level[0], 1.0), obs=x)

    driver = Driver(
        DataTempering(model, num_stages=1, num_particles=20), num_samples=10, progress_bar=False
    )
    driver.run(0, X, prior)
    driver.update(MORE, prior)
    assert driver.tree()["observed_data"].sizes["row"] == 26


@pytest.mark.parametrize(
    ("errors", "claimed"), [([0.1, np.inf], np.inf), ([np.nan, np.inf], np.nan)]
)
def test_replicates_claim_no_less_than_one_of_them(errors, claimed):
    """Where an update has led away from what was learned, the error is infinite, however near to
    each other replicates are.
    """
    found = _combined({"log_evidence": np.array([-3.0, -3.1]), "log_evidence_se": np.array(errors)})
    np.testing.assert_equal(found["log_evidence_se"], claimed)
