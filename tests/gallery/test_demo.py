"""The demonstration is a model like any other of the zoo: exact log joint, simulator, sites of the card."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from scipy import stats

from gallery.demo import CARD, demo, simulate
from inference import Program

pytestmark = pytest.mark.usefixtures("numpyro_promotion")


def test_log_joint_equals_its_formula(x64):
    data = simulate(random.key(0), num_rows=20)
    program = Program(demo, **data)
    values = program.draw_prior(random.key(1))
    logits = np.asarray(data["x"]) @ np.asarray(values["weight"]) + np.asarray(values["bias"])
    chosen = logits[np.arange(20), np.asarray(data["y"])] - np.log(np.exp(logits).sum(1))
    prior = stats.norm.logpdf(values["weight"], 0, 1).sum() + stats.norm.logpdf(values["bias"], 0, 2).sum()
    np.testing.assert_allclose(program.log_joint(values), chosen.sum() + prior, rtol=1e-10)


def test_card_has_words_for_exactly_the_sites():
    program = Program(demo, **simulate(random.key(0)))
    assert set(CARD.sites) == set(program.sites)
    assert program.dims == {"bias": ("class",), "weight": ("feature", "class"), "y": ("row",)}


def test_simulate_draws_classes_as_often_as_the_model_says():
    """Over many data sets each of three classes is as likely as the others: the prior is symmetric."""
    draw = jax.jit(lambda key: simulate(key, num_rows=1)["y"][0])
    y = np.array([draw(key) for key in random.split(random.key(0), 3000)])
    counts = np.bincount(y, minlength=3)
    assert stats.chisquare(counts).pvalue > 1e-3


def test_missing_features_are_refused_by_name():
    data = simulate(random.key(0))
    with pytest.raises(ValueError, match="argument 'x': 1 entries are NaN"):
        Program(demo, **data | {"x": data["x"].at[3, 0].set(jnp.nan)}).check()


def test_unlabelled_row_is_refused_by_name():
    data = simulate(random.key(0))
    with pytest.raises(ValueError, match="site 'y': 1 of its observations are outside"):
        Program(demo, **data | {"y": data["y"].at[5].set(-1)}).check()
