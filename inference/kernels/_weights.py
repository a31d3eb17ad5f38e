"""The weights that one step reads and moves, and their prior."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random

from inference.kernels._lazy_updates import update_rows
from inference.kernels._reduced_model import Index, ReducedModel
from inference.kernels._touched_rows import Asked
from inference.program import Program

__all__ = ["View", "view_of"]


class View(NamedTuple):
    """Of some rows of the sites, as a step sees them."""

    model: ReducedModel
    program: Program
    index: Index
    state: Any  # a ReduceState
    asked: dict[str, Asked]
    parameters: dict[str, Any]  # of q of each site: the rows that were asked for, or all; {"loc": ..., "log_scale": ...}
    noise: dict[str, Array]  # standard normal, the same for requests of the same row; nothing where the weights are a point

    def sites(self, parameters: dict[str, Any]) -> dict[str, Array]:
        """A draw of each site: rows, or all, constrained."""
        at = {name: own["loc"] for name, own in parameters.items()}
        at |= {name: at[name] + jnp.exp(parameters[name]["log_scale"]) * z for name, z in self.noise.items()}
        return {name: self.model.constrained(name, value) if name in self.model.whole else value for name, value in at.items()}

    def values(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """The same, as the model is given them."""
        return {name: self.asked[name].answers(value) if name in self.asked else value for name, value in self.sites(parameters).items()}

    def terms(self, parameters: dict[str, Any]) -> Callable[[Array | None], tuple[Array, Array]]:
        """The log joint of each row as a function of its own site."""
        return self.model.terms(self.program, self.index, self.values(parameters))

    def log_prior(self, parameters: dict[str, Any]) -> Array:
        """With the entropy of q, less its constant. A row that was asked for answers for all steps since it was asked for last: on average,
        and in the sum over steps, every row counts as it does in the whole prior."""
        by_row, total = self.model.priors(self.program, self.index, self.values(parameters))
        sites = self.sites(parameters)
        for name, last in self.state.touched.items():
            asked, log_prob = self.asked[name], jnp.asarray(jax.vmap(by_row[name].log_prob)(sites[name]))
            steps = (self.state.count + 1 - asked.gather(last)).astype(float) / asked.multiplicity
            each = log_prob.reshape(len(asked.ids), -1).sum(1)
            if name in self.noise:
                each = each + parameters[name]["log_scale"].reshape(len(asked.ids), -1).sum(1)
            total = total + jnp.sum(steps * each)
        entropies = (jnp.sum(parameters[name]["log_scale"]) for name in self.noise if name in self.model.whole)
        return total + sum(entropies, start=jnp.zeros(()))

    def moved(self, optimizer: Any, slopes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """All values, and the state of the optimizer, after a step down the slopes of the parameters."""
        values, states = {}, {}
        for name, whole in self.state.values.items():
            known = self.state.optimizer[name]
            if name in self.asked:
                merged = jax.tree.map(self.asked[name].merged, slopes[name])
                values[name], states[name] = update_rows(optimizer, self.asked[name], merged, known, whole)
            else:
                moves, states[name] = optimizer.update(slopes[name], known, whole)
                values[name] = jax.tree.map(jnp.add, whole, moves)
        return values, states


def view_of(model: ReducedModel, program: Program, index: Index, state: Any, rng_key: Array | None) -> View:
    """What the model asks for at these indices; without a key the weights are at their means."""
    whole = {name: model.constrained(name, state.values[name]["loc"]) for name in model.whole}
    asked = model.asked(program, index, whole)
    parameters = {name: jax.tree.map(asked[name].gather, value) if name in asked else value for name, value in state.values.items()}
    noise: dict[str, Array] = {}
    if rng_key is not None:
        for key, (name, own) in zip(random.split(rng_key, max(len(parameters), 1)), parameters.items(), strict=False):
            if "log_scale" in own:
                z = random.normal(key, own["loc"].shape)
                noise[name] = asked[name].spread(z) if name in asked else z
    return View(model, program, index, state, asked, parameters, noise)
