"""The compiled loop: what is compiled once serves runs on other data of the same shapes, and
nothing else.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import HMC, MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

from inference import Driver, Program
from inference.program import compiling
from tests.inference.models import LABELS, X, logistic

pytestmark = pytest.mark.usefixtures("numpyro_promotion")

OTHER = np.asarray(X)[::-1] + 1  # of the same shape


@pytest.fixture(autouse=True)
def built(monkeypatch):
    """Programs that this test has compiled, and that may serve again."""
    programs = {}
    monkeypatch.setattr(compiling, "BUILT", programs)
    return programs


def run(*data, model=logistic, kernel=HMC, jit_model_args=True, **settings):
    driver = Driver(
        kernel(model),
        num_warmup=20,
        num_samples=20,
        progress_bar=False,
        jit_model_args=jit_model_args,
        **settings,
    )
    return driver.run(3, *data).posterior["weight"].values


def test_data_may_be_arguments_of_the_loop():
    reference = MCMC(
        HMC(logistic), num_warmup=20, num_samples=20, progress_bar=False, jit_model_args=True
    )
    reference.run(random.key(3), X, LABELS)
    np.testing.assert_allclose(
        run(X, LABELS)[0], reference.get_samples()["weight"], rtol=1e-3, atol=1e-3
    )


def test_other_data_of_the_same_shapes_are_not_compiled_again(built):
    first = run(X, LABELS)
    programs = list(built)
    second = run(OTHER, LABELS)
    assert set(built) == set(programs)
    assert not np.array_equal(first, second)
    assert np.abs(second.mean() - run(OTHER, LABELS, jit_model_args=False).mean()) < 0.3
    run(np.concatenate([X, X]), np.concatenate([LABELS, LABELS]))
    assert len(built) > len(programs)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("jit_model_args", [True, False])
def test_a_model_that_differs_in_a_constant_is_compiled_again(jit_model_args):
    """Where the constants were not in the text of the program, the second model would get the
    first one's draws.
    """

    def about(place):
        def model(x, y):
            weight = numpyro.sample("weight", dist.Normal(place, 0.01))
            numpyro.sample("y", dist.Bernoulli(logits=x[:, 0] * weight), obs=y)

        return model

    for place in (0.0, 5.0):
        table = jnp.full(1000, place)
        assert (
            np.abs(
                run(
                    X, LABELS, model=about(table[7]), kernel=NUTS, jit_model_args=jit_model_args
                ).mean()
                - place
            )
            < 0.1
        )


@pytest.mark.slow
def test_programs_that_were_not_asked_for_the_longest_are_forgotten(built, monkeypatch):
    run(X[:4], LABELS[:4])
    each = len(built)
    monkeypatch.setattr(compiling, "MOST_BUILT", 2 * each)
    for num_rows in (5, 4, 6):
        run(X[:num_rows], LABELS[:num_rows])
    newest = set(built)
    assert len(newest) == 2 * each
    run(X[:4], LABELS[:4])
    assert set(built) == newest  # 4 was asked for later than 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_maps", "is_let_go"), [(40_000, True), (20_000, False)], ids=["many", "few"]
)
def test_code_is_let_go_before_memory_has_no_more_maps(num_maps, is_let_go, monkeypatch, tmp_path):
    """A process dies where they run out, after some hundred runs."""
    for name, text in (("MAPS", "a map\n" * num_maps), ("MOST_MAPS", "65530\n")):
        monkeypatch.setattr(compiling, name, tmp_path / name)
        (tmp_path / name).write_text(text)
    compiled = []
    code = jax.jit(lambda x: compiled.append(x) or x + 1)
    code(1.0)
    run(X, LABELS)
    code(1.0)
    assert len(compiled) == 1 + is_let_go


@pytest.mark.parametrize("jit_model_args", [True, False])
def test_a_start_that_is_impossible_is_numpyros_error(jit_model_args, monkeypatch):
    """`init` as one program cannot raise it."""

    def model(x, y):
        weight = numpyro.sample("weight", dist.Normal(0.0, 1.0))
        numpyro.factor("never", jnp.where(jnp.abs(weight) < 100, -jnp.inf, 0.0))

    monkeypatch.setattr(Program, "check", lambda self, start=None: None)  # which would see it first
    with pytest.raises(RuntimeError, match="Cannot find valid initial parameters"):
        run(X, LABELS, model=model, jit_model_args=jit_model_args)


def test_an_algorithm_sees_to_its_data_itself():
    kernel = SVI(logistic, AutoNormal(logistic), numpyro.optim.Adam(0.02), Trace_ELBO())
    with pytest.raises(ValueError, match="jit_model_args: SVI is no chain"):
        Driver(kernel, num_warmup=5, jit_model_args=True)
