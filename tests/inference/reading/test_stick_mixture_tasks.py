"""Reading of mixtures of several tasks: whose rows are whose, edits that are followed, and what
is refused by name.
"""

from functools import partial

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import plate
from numpyro.handlers import scope

from inference import Program, StructureError
from inference.reading.stick_mixture.read import read_assignment
from inference.reading.stick_mixture.structure import StickLevel
from tests.inference.mixtures import GATE, TASKS, of_tasks
from zoo.iqgme import Axes, sticks
from zoo.iqgme_tasks import iqgme_tasks

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")
sample = numpyro.sample
# each reading is compiled for seconds
SLOW = {"binary tasks", "tasks of three classes", "tasks of bits"}


def quick(names):
    return [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in names]


@pytest.mark.parametrize("name", quick(TASKS))
def test_tasks_are_read(name):
    model, data = of_tasks(name)
    program = Program(model, **data)
    found = read_assignment(program)
    assert found.known >= {*program.latent, *program.observed}
    assert found.upper == StickLevel("c", "U", None if "beta" not in program.latent else "beta")
    assert (found.num_own, found.num_groups) == (2, 3)
    np.testing.assert_array_equal(found.rows(program).task, data["task"])
    assert tuple(found.prior.upper) == pytest.approx(
        (0.8, np.inf) if name == "tasks without labels" else (3.0, 2.0)
    )


@pytest.mark.slow
def test_more_rows_and_tasks_than_are_read_by_other_names():
    """The proof sees a few; whose rows are whose is that of all."""
    rng = np.random.default_rng(0)
    task = rng.integers(0, 40, 300)
    program = Program(
        scope(iqgme_tasks, prefix="a"),
        rng.normal(size=(300, 2)),
        None,
        task,
        num_groups=3,
        num_experts=4,
        expert=None,
    )
    found = read_assignment(program)
    assert found.few.sites["a/z"].shape[0] < 20
    assert found.upper == StickLevel("a/c", "a/U", "a/beta")
    np.testing.assert_array_equal(found.rows(program).task, task)


def edited(
    x, task, upper=sticks, own=lambda V, task: sticks(V)[task], pick=lambda c, task, z: c[task, z]
):
    """A model of two tasks, its parts open to edits; without `upper` a task has its own shares
    of the same groups.
    """
    tasks = plate("task", 2, dim=-2)
    with tasks, plate("stick", 2, dim=-1):
        V = sample("V", dist.Beta(1.0, 1.3))
    at = Axes(plate("expert", 3, dim=-1), plate("row", len(x), dim=-1), 2, 2)
    with at.rows:
        group = z = sample("z", dist.Categorical(own(V, task)))
    if upper:
        with plate("expert_stick", 2, dim=-1):
            U = sample("U", dist.Beta(1.0, 0.7))
        with tasks, plate("group", 3, dim=-1):
            group = pick(sample("c", dist.Categorical(upper(U))), task, z)
    GATE(x, group, at)


X, TASK = np.random.default_rng(0).normal(size=(10, 2)), np.arange(10) % 2


def test_weights_of_tasks_over_groups_that_they_all_use():
    program = Program(partial(edited, upper=None), X, TASK)
    found = read_assignment(program)
    assert found.upper is None
    assert (found.num_own, found.num_groups) == (3, 3)
    np.testing.assert_array_equal(found.rows(program).task, TASK)


REFUSALS = {
    "weights of the groups": (
        {"upper": lambda U: sticks(U)[::-1]},
        "site 'c' .CategoricalProbs.: read as stick-breaking weights",
    ),
    "weights of the tasks": (
        {"own": lambda V, task: sticks(V)[task][:, ::-1]},
        "site 'z': the probabilities of row 0 are .* no row of 'V'",
    ),
    "another task's index": (
        {"pick": lambda c, task, z: c[1 - task, z]},
        "site 'x' .MultivariateNormal.: read as .* but the log prob",
    ),
    "an index that is shifted": (
        {"pick": lambda c, task, z: (c[task, z] + 1) % 3},
        "site 'x' .MultivariateNormal.: read as .* but",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSALS)
def test_another_model_is_refused_by_name(name):
    change, message = REFUSALS[name]
    with pytest.raises(StructureError, match=message):
        read_assignment(Program(partial(edited, **change), X, TASK))


def test_indices_of_another_shape_are_refused():
    def model(x):
        with plate("stick", 2):
            U, V = sample("U", dist.Beta(1.0, 0.7)), sample("V", dist.Beta(1.0, 1.3))
        with plate("one", 1, dim=-2), plate("group", 3):
            c = sample("c", dist.Categorical(sticks(U)))
        at = Axes(plate("expert", 3, dim=-1), plate("row", len(x), dim=-1), 2, 2)
        with at.rows:
            z = sample("z", dist.Categorical(sticks(V)))
        GATE(x, c[0, z], at)

    with pytest.raises(
        StructureError,
        match=r"site 'c' .CategoricalProbs.: latent, of shape \(1, 3\); wanted, beside 'z', one "
        r"index",
    ):
        read_assignment(Program(model, X))
