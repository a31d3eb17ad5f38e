"""scikit-learn's own checks of an estimator: all of them by `-m slow`, those that cost little in
every run.
"""

import subprocess
import sys

import pytest
from sklearn.utils.estimator_checks import estimator_checks_generator

import gallery
from gallery import AClassClassifier
from tests.gallery.estimator_checks import NOTHING_FITTED

pytestmark = pytest.mark.usefixtures("numpyro_promotion")

QUICK = NOTHING_FITTED | {
    "check_estimator_sparse_array",
    "check_estimator_sparse_tag",
    "check_supervised_y_no_nan",
}


def cases():
    for estimator, check in estimator_checks_generator(AClassClassifier()):
        name, settings = (
            check.func.__name__,
            "".join(f"-{value}" for value in check.keywords.values()),
        )
        yield pytest.param(
            estimator, check, id=name + settings, marks=[] if name in QUICK else [pytest.mark.slow]
        )


@pytest.mark.parametrize(("estimator", "check"), list(cases()))
def test_checks_of_scikit_learn(estimator, check):
    check(estimator)


def test_every_quick_check_is_there():
    assert {case.values[1].func.__name__ for case in cases()} > QUICK


def test_the_room_is_imported_without_the_estimators():
    """`zoo --help` imports it."""
    code = (
        "import sys, gallery; print([name for name in ('jax', 'sklearn', 'pandas') if name in "
        "sys.modules], gallery.__all__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([]) + " " + str(gallery.__all__)
    with pytest.raises(ImportError, match="cannot import name 'NoClassifier' from 'gallery'"):
        exec("from gallery import NoClassifier")


@pytest.mark.slow
def test_an_import_after_arviz_leaves_numpyro_whole():
    """NumPyro's submodules must not be imported before NumPyro itself: ArviZ's lazy modules
    would then load them twice.
    """
    code = (
        "import arviz; from gallery import AClassClassifier; import "
        "numpyro.distributions.distribution"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
