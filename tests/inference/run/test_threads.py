"""LAPACK has one thread while compiled code runs, and afterwards as many as before."""

import jax
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import NUTS
from threadpoolctl import threadpool_info, threadpool_limits

from inference import Driver
from inference.run.loop import Loop
from inference.run.session import one_lapack_thread


def counts():
    return {each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"}


@pytest.fixture(autouse=True)
def _two_threads():
    with threadpool_limits(2, user_api="blas"):
        yield


def model():
    numpyro.sample("z", dist.Normal(0.0, 1.0))


def test_a_run_has_one_thread(monkeypatch, numpyro_promotion):
    seen, chunk = [], Loop.chunk

    def spied(*args, **kwargs):
        seen.append(counts())
        return chunk(*args, **kwargs)

    monkeypatch.setattr(Loop, "chunk", spied)
    Driver(NUTS(model), num_warmup=2, num_samples=2).run(jax.random.key(0))
    assert seen
    assert all(each == {1} for each in seen)
    assert counts() == {2}


def test_threads_come_back_after_an_error():
    with pytest.raises(KeyError), one_lapack_thread():
        raise KeyError
    assert counts() == {2}
