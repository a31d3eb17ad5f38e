"""The command and the estimators on a cluster of two processes."""

import joblib
import numpy as np
import pytest
from sklearn.model_selection import GridSearchCV

from gallery import AClassClassifier, cli
from gallery.commands.runs import open_run

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("numpyro_promotion")]


def test_the_command(client, tmp_path, capsys, monkeypatch):
    """Chains are those of one process, and `zoo resume` goes on without the cluster."""
    monkeypatch.chdir(tmp_path)
    options = ("--option", "num_particles=10", "num_samples=20", "num_chains=2", "--test", "0")
    fit = ("fit", "aclass", "--data", "wine", *options)
    assert cli.main([*fit, "-o", "here.nc"]) in (0, 1)
    on_cluster = ("--cluster", client.scheduler.address, "--checkpoint", "run")
    assert cli.main([*fit, "-o", "there.nc", *on_cluster]) in (0, 1)
    here, there = open_run("here.nc"), open_run("there.nc")
    for group in ("posterior", "sample_stats"):
        assert here[group].to_dataset().equals(there[group].to_dataset())
    assert here.attrs["log_evidence"] == there.attrs["log_evidence"]
    capsys.readouterr()
    assert cli.main(["check", "run"]) == 0
    assert capsys.readouterr().out.count("whole; 178 steps") == 2
    assert cli.main(["resume", "run"]) in (0, 1)
    assert np.all(open_run("there.nc").attrs["steps_run_of_chains"] == 0)
    assert cli.main([*fit, "--seed", "1", "-o", "other.nc", *on_cluster]) == 2
    assert "--checkpoint run: it holds another run (seed: 0 there, 1 here)" in (
        capsys.readouterr().err
    )
    assert cli.main([*fit, "-o", "other.nc", "--cluster", "tcp://127.0.0.1:9"]) == 2
    assert "no scheduler answers" in capsys.readouterr().err


def test_a_search_over_an_estimator(client):
    rng = np.random.default_rng(0)
    y = np.arange(30) % 2
    x = rng.normal(size=(30, 2)) + 3 * y[:, None]
    search = lambda: GridSearchCV(
        AClassClassifier(num_particles=5, random_state=0), {"alpha": [0.5, 2.0]}, cv=2, n_jobs=2
    )
    with joblib.parallel_config(backend="dask", client=client):
        found = search().fit(x, y)
    wanted = search().set_params(n_jobs=1).fit(x, y)
    scores = "mean_test_score"
    np.testing.assert_array_equal(found.cv_results_[scores], wanted.cv_results_[scores])
    assert found.best_score_ > 0.9
