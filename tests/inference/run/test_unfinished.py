"""A run that ends before its algorithm has finished has no posterior and no evidence."""

import numpy as np
import pytest

from diagnostics import report
from inference import DataTempering, Driver, ImportanceFinish, NestedSampler, ParticleFilter, Staged
from tests.inference.nests import X, Y, line
from zoo.aclass import aclass

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

ROWS = ((X > 0).astype(np.float32), np.arange(len(X), dtype=np.int32) % 2)
KERNELS = {
    "filter": lambda: (ParticleFilter(aclass, num_particles=5), ROWS, {"num_classes": 2}),
    "nested": lambda: (NestedSampler(line, num_live=20), (X, Y), {}),
    "finish": lambda: (ImportanceFinish(NestedSampler(line, num_live=20)), (X, Y), {}),
    "staged": lambda: (Staged(line, num_stages=2, num_live=20, num_walkers=0), (X, Y), {}),
    "tempering": lambda: (DataTempering(line, num_stages=3, num_particles=20), (X, Y), {}),
}


def run(name, **settings):
    kernel, args, options = KERNELS[name]()
    driver = Driver(kernel, num_samples=30, progress_bar=False, **settings)
    return driver, driver.run(0, *args, **options)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
@pytest.mark.parametrize("name", KERNELS)
def test_before_its_end_a_run_claims_nothing(name, bug, monkeypatch):
    """The planted bug is a kernel that takes its draws for those of the posterior at any time."""
    if bug:
        monkeypatch.setattr(type(KERNELS[name]()[0]), "draws_at_end", False)
    driver, tree = run(name, num_warmup=2)
    assert tree.attrs["ended"] == "budget"
    claims = {key for key, value in tree.attrs.items() if "log_evidence" in key and value == value}
    assert ("posterior" in tree.children, bool(claims)) == (bug, bug)
    if not bug:
        page = report(tree)
        assert page.text.startswith("NOT TRUSTED: ")
        assert page["ended"].ok is False
        assert tree["unfinished"].sizes["draw"] == 30
        whole, again = driver.extend(1_000_000), run(name)[1]
        assert "unfinished" not in whole.children
        assert np.isfinite(whole.attrs["log_evidence"])
        for site, draws in again["posterior"].data_vars.items():
            np.testing.assert_array_equal(whole["posterior"][site], draws)
