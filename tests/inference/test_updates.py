"""What a tree tells after an update is of all rows; and what an update is refused for."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

from inference import DataTempering, Driver, Program, Staged, _tree
from tests.inference.importance import ImportanceSampling

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

X, MORE = np.linspace(0.0, 2.0, 20), np.full(6, 1.0)


class Streaming(ImportanceSampling):
    """Takes more rows, and learns nothing from them."""

    def row_dim(self, program):
        return "row"

    def updated(self, state, program, before):
        return state


def level(x):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    with numpyro.plate("row", len(x)):
        numpyro.deterministic("above", x - level)
        numpyro.sample("x", dist.Normal(level, 1.0), obs=x)


def streaming(**settings):
    driver = Driver(Streaming(level, num_batches=2, batch_size=16), num_samples=10, progress_bar=False, **settings)
    driver.run(0, X)
    return driver


@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_groups_after_an_update_are_of_all_rows(bug, monkeypatch):
    """The planted bug: they are of those of the update."""
    driver = streaming(groups=("log_likelihood", "posterior_predictive"))
    driver.update(MORE)
    if bug:
        monkeypatch.setattr(_tree, "joined", lambda programs, row_dim: programs[-1])
    tree, rows = driver.tree(), np.concatenate([X, MORE])
    found = [tree[group].sizes["row"] for group in ("observed_data", "log_likelihood", "posterior_predictive", "posterior")]
    assert (found == [26] * 4) != bug
    if not bug:
        of_draws = tree["posterior"]["level"].values[..., None]
        np.testing.assert_allclose(tree["posterior"]["above"], rows - of_draws)
        np.testing.assert_allclose(tree["log_likelihood"]["x"], stats.norm.logpdf(rows, of_draws), rtol=1e-6)


def test_rows_of_an_update_may_be_as_many_as_columns():
    """Rows are told by the run: by an update alone they might be the columns."""

    def crossed(x, scale):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        with numpyro.plate("row", x.shape[0], dim=-2), numpyro.plate("column", x.shape[1], dim=-1):
            numpyro.sample("x", dist.Normal(level, scale), obs=x)

    kernel, scale = DataTempering(crossed, num_stages=1), np.array([1.0, 2.0, 3.0])
    programs = [Program(crossed, np.zeros((size, 3)), scale) for size in (20, 3)]
    assert kernel.row_dim(programs[0]) == "row"
    assert _tree.joined(programs, kernel.row_dim(programs[0])).sites["x"].shape == (23, 3)


def test_what_goes_on_has_the_precision_of_what_began():
    driver = streaming()
    with jax.enable_x64(False):
        for asked, go_on in (("update", lambda: driver.update(MORE)), ("extend", lambda: driver.extend(3))):
            with pytest.raises(ValueError, match=f"{asked}: the run began with jax_enable_x64=True, and now it is False"):
                go_on()
    driver.update(MORE)


def linked(x, link):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    with numpyro.plate("row", len(x)):
        numpyro.sample("x", dist.Normal(link(level), 1.0), obs=x)


def times(factor):
    return lambda level: factor * level


@pytest.mark.parametrize(
    "make",
    [lambda: DataTempering(linked, num_stages=1, num_particles=20), lambda: Staged(linked, num_stages=1, num_live=20, num_walkers=0)],
    ids=["tempering", "staged"],
)
def test_functions_among_arguments_are_told_by_what_they_do(make):
    """Their names are the same."""
    kernel, program = make(), Program(linked, X, times(jnp.ones(())))
    kernel.init(jax.random.key(0), program)
    kernel._check_alike(Program(linked, MORE, times(jnp.ones(()))))
    with pytest.raises(ValueError, match="update: more rows of the same model are wanted, and this is another one"):
        kernel._check_alike(Program(linked, MORE, times(-9.0 * jnp.ones(()))))
