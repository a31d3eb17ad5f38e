"""Nested sampling and approximation in turn, within a stage: as right as once, with a smaller
error; resumed bit for bit.
"""

import numpy as np
import pytest

from inference.kernels.staged.search import Start
from tests.inference.kernels.staged.test_kernel import driver_of
from tests.inference.nests import line_evidence
from tests.inference.stages import DEVIATION, MEAN, X, Y, check_same

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("x64", "numpyro_promotion")]

SMALL = {"num_live": 40, "most_lost": np.inf}
# the error of one turn, of what all rows tell, some six nats
ONCE = np.sqrt(6.0 / SMALL["num_live"])


@pytest.mark.parametrize(
    ("summary", "bug"),
    [("state", False), ("code", False), ("state", True)],
    ids=["state", "code", "planted"],
)
def test_what_was_fitted_is_gone_over(summary, bug, monkeypatch):
    """All rows are one stage, which nobody explores.

    The planted bug: points are drawn from what was fitted, as if it were the prior.
    """
    if bug:
        monkeypatch.setattr(
            Start, "rest", lambda self, clumps, program, sampled: self.densities(clumps, program)
        )
    driver = driver_of(num_stages=1, num_iterations=3, summary=summary, **SMALL)
    tree = driver.run(0, X, Y)
    attrs = tree.attrs
    assert (attrs["ended"], attrs["num_stages"], int(driver.states[0].iteration)) == (
        "finished",
        1,
        2,
    )
    assert attrs["log_evidence_se"] < ONCE / 2
    assert (abs(attrs["log_evidence"] - line_evidence(X, Y)) < 3.5 * attrs["log_evidence_se"]) == (
        not bug
    )
    drawn = tree["posterior"]["weight"].values[0]
    assert bug or (np.abs(drawn.mean(0) - MEAN) < 0.5 * DEVIATION).all()


def test_a_run_is_resumed_in_a_later_turn_bit_for_bit(tmp_path):
    """Two stages of two turns, ended in the last; then an update has as many."""
    settings = {"num_stages": 2, "num_iterations": 2, **SMALL}
    whole = driver_of(**settings)
    wanted = whole.run(0, X[:60], Y[:60])
    stats = wanted["sample_stats"]
    starts = np.flatnonzero(np.diff(stats["log_volume"].values[0]) > 0) + 1  # where a turn begins
    assert stats["stage"].values[0][starts].tolist() == [0, 1, 1]
    ends = int(starts[2]) + 2
    driver_of(checkpoint=tmp_path / "run", num_warmup=ends, **settings).run(0, X[:60], Y[:60])
    found = driver_of(checkpoint=tmp_path / "run", **settings).run(0, X[:60], Y[:60])
    assert found.attrs["steps_run"] == wanted.attrs["steps"] - ends
    check_same(found, wanted)
    whole.update(X[60:], Y[60:])
    assert int(whole.states[0].iteration) == 1
    attrs = whole.tree().attrs
    assert attrs["num_stages"] == 3
    assert abs(attrs["log_evidence"] - line_evidence(X, Y)) < 3.5 * attrs["log_evidence_se"]
