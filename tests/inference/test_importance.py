"""Importance sampling against an exact evidence and posterior, and by calibration; the same tests
of a sampler with a planted bug fail.
"""

import numpyro
import pytest

from diagnostics import sbc, with_kernel
from inference import Driver, Program
from tests.inference.importance import ImportanceSampling
from tests.inference.models import Y, exact_log_evidence, exact_posterior, normal_mean

pytestmark = pytest.mark.usefixtures("numpyro_promotion")


class Slip(ImportanceSampling):
    """Reads a model whose log densities are halved."""

    def read(self, program):
        halved = numpyro.handlers.scale(program.model, scale=0.5)
        return super().read(Program(halved, *program.args, **program.kwargs))


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "is_right"), [(ImportanceSampling, True), (Slip, False)])
def test_evidence_and_posterior_are_exact(kernel, is_right):
    driver = Driver(kernel(normal_mean, batch_size=256), num_samples=2000, progress_bar=False)
    tree = driver.run(0, Y)
    mean, spread = exact_posterior()
    found = tree.posterior["mu"]
    gaps = {
        "evidence": float(tree.attrs["log_evidence"]) - exact_log_evidence(),
        "mean": float(found.mean()) - mean,
        "spread": float(found.std()) - spread,
    }
    assert all(abs(gap) < 0.05 for gap in gaps.values()) == is_right, gaps


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "is_right"), [(ImportanceSampling, True), (Slip, False)])
def test_calibration(kernel, is_right):
    fit = with_kernel(kernel, num_warmup=None, num_samples=31)
    assert sbc(normal_mean, fit, Y, num_replicates=100).passed == is_right
