"""A short part of `python -m tests.faults`."""

import signal
import sys

import numpy as np
import pytest
import xarray as xr
from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import check_is_fitted

from gallery import (
    AClassClassifier,
    ArchipelagoClassifier,
    AugmentReduceClassifier,
    BSVDCompleter,
    IQGMEClassifier,
    StagedMixtureClassifier,
)
from inference import Interrupted
from inference.run import store as _store
from inference.run.session import Bar
from tests.faults import faults

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("numpyro_promotion")]


@pytest.mark.parametrize("name", ["NUTS", "NestedSampler", "SVI"])
@pytest.mark.parametrize("kind", ["signalled", "damaged"])
def test_nothing_passes_in_silence(name, kind, tmp_path):
    times = {"signalled": 1, "damaged": 6}[kind]
    found = getattr(faults, kind)(name, tmp_path / "run", times, np.random.default_rng(0))
    assert not faults.is_silent(found), found
    assert found.total() >= times


@pytest.mark.parametrize("name", ["ParticleFilter", "CoordinateAscent"])
def test_killed_runs_go_on(name, tmp_path):
    found = faults.killed(name, tmp_path / "run", 3, np.random.default_rng(0))
    assert not faults.is_silent(found), found
    assert found["killed"] == 3
    assert found["same"] >= 1


@pytest.mark.parametrize("bug", ["checksums", "saved"])
def test_what_passes_would_be_seen(bug, tmp_path, monkeypatch):
    """Planted bugs: no block is compared with its checksum; a signal is not heard."""
    if bug == "checksums":
        monkeypatch.setattr(_store.zlib, "crc32", lambda content: 0)
        found = faults.damaged("NUTS", tmp_path / "run", 12, np.random.default_rng(0))
    else:
        monkeypatch.setattr("inference.run.driver.Signals", type("None", (), {"__members__": ()}))
        found = faults.signalled("SVI", tmp_path / "run", 1, np.random.default_rng(0))
    assert faults.is_silent(found), found


RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(24, 3)), np.arange(24) % 2
QUIET = {"random_state": 0, "progress_bar": False}
ESTIMATORS = [
    AClassClassifier(num_particles=5, **QUIET),
    ArchipelagoClassifier(num_warmup=20, num_samples=20, num_chains=1, **QUIET),
    AugmentReduceClassifier(batch_size=5, max_iter=2000, **QUIET),
    IQGMEClassifier(truncation=3, **QUIET),
    IQGMEClassifier(truncation=3, inference="gibbs", num_samples=20, **QUIET),
    StagedMixtureClassifier(order=1, num_stages=2, num_live=20, **QUIET),
    BSVDCompleter(num_components=2, num_warmup=20, num_samples=20, **QUIET),
]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda each: type(each).__name__)
def test_an_estimator_that_is_interrupted_stays_unfitted(estimator, monkeypatch):
    monkeypatch.setattr(Bar, "update", lambda *args: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    given = (X,) if isinstance(estimator, BSVDCompleter) else (X, Y)
    with pytest.raises(Interrupted) as caught:
        estimator.fit(*given)
    assert isinstance(caught.value.tree, xr.DataTree)
    assert caught.value.tree.attrs["ended"] == "SIGTERM"
    with pytest.raises(NotFittedError):
        check_is_fitted(estimator)
