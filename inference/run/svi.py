"""NumPyro's SVI as an `Algorithm`, so that it checkpoints, resumes and reports as others do.

    maximise over the guide's parameters   E_q[log p(x, z) - log q(z)]        (the ELBO)

`Driver(numpyro.infer.SVI(...), num_warmup=steps, num_samples=draws)` wraps it; nobody needs to name
this class. Cost: one gradient of the loss a step.
"""

from copy import deepcopy
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.svi import SVIState

from inference.program.program import Program
from inference.run.protocol import Algorithm, Results, init_strategy

__all__ = ["ELBO", "GuidedModel", "OrderedTraceELBO", "StochasticVI"]


class ELBO(NamedTuple):
    """The record of one step."""

    elbo: Array  # the stochastic estimate of this step, minus the loss


class OrderedTraceELBO(Trace_ELBO):
    """NumPyro's `Trace_ELBO`, its sites added in the order of their names.

    NumPyro adds them in the order of a set of names, which differs between processes: a resumed run
    would differ from an uninterrupted one in the last bit.
    """

    def __init__(self, loss: Trace_ELBO):
        super().__init__(
            loss.num_particles, multi_sample_guide=loss.multi_sample_guide, sum_sites=False
        )
        self.vectorize_particles_fn = loss.vectorize_particles_fn

    def loss_with_mutable_state(self, *args: Any, **kwargs: Any) -> Any:
        """The loss of each site, summed."""
        found = super().loss_with_mutable_state(*args, **kwargs)
        return found | {"loss": sum(jax.tree.leaves(found["loss"]))}


class GuidedModel(NamedTuple):
    """The reading: the model with its arguments, and an `SVI` that has run its guide on them."""

    program: Program
    svi: SVI

    def __hash__(self) -> int:
        return id(self.svi)

    @property
    def given(self) -> tuple[tuple, dict[str, Any]]:
        """The arguments of the run, without those that the `SVI` was built with and adds itself."""
        kwargs = {
            name: value
            for name, value in self.program.kwargs.items()
            if name not in self.svi.static_kwargs
        }
        return self.program.args, kwargs


class StochasticVI(Algorithm):
    """An `Algorithm` around an `SVI`: one step calls its `update` once."""

    report = "variational"

    def __init__(self, svi: SVI):
        self.svi = deepcopy(svi)
        if type(svi.loss) is Trace_ELBO and svi.loss.sum_sites:
            self.svi.loss = OrderedTraceELBO(svi.loss)
        self.model = svi.model

    def read(self, program: Program) -> tuple[GuidedModel, dict]:
        """Checks the model, and runs the guide once, by which NumPyro finds its transforms."""
        program.check(init_strategy(self.svi))
        reading = GuidedModel(program, deepcopy(self.svi))
        args, kwargs = reading.given
        reading.svi.init(random.key(0), *args, **kwargs)
        return reading, {}

    def init(self, rng_key: Array, reading: GuidedModel, data: dict) -> SVIState:
        """NumPyro's initial state, by a copy: an autoguide keeps the start of its first run."""
        args, kwargs = reading.given
        return deepcopy(self.svi).init(rng_key, *args, **kwargs)

    def step(
        self, rng_key: Array, state: SVIState, reading: GuidedModel, data: dict
    ) -> tuple[SVIState, ELBO]:
        """One gradient step with the key of this step."""
        args, kwargs = reading.given
        state, loss = reading.svi.update(state._replace(rng_key=rng_key), *args, **kwargs)
        return state, ELBO(-loss)

    def finished(self, state: SVIState) -> Array:
        """Always False: the budget of steps (`num_warmup`) or `stop` ends the run."""
        return jnp.zeros((), bool)

    def draw(
        self, rng_key: Array, state: SVIState, reading: GuidedModel, data: dict, num_draws: int
    ) -> dict[str, Array]:
        """Draws from the fitted guide, and their log density under it.

        A site that the loss sums out (enumeration) has no draws.
        """
        program, svi = reading
        guide = substitute(svi.guide, data=svi.get_params(state))

        def one(key: Array) -> dict[str, Array]:
            sites = trace(seed(guide, key)).get_trace(*program.args, **program.kwargs)
            drawn = [site for site in sites.values() if site["type"] == "sample"]
            log_q = sum(
                (jnp.sum(site["fn"].log_prob(site["value"])) for site in drawn), start=jnp.zeros(())
            )
            return {
                "log_q": log_q,
                **{name: sites[name]["value"] for name in program.latent if name in sites},
            }

        return jax.vmap(one)(random.split(rng_key, num_draws))

    def results(self, state: SVIState, reading: GuidedModel, data: dict) -> Results:
        """The constrained variational parameters; ValueError where one of them is NaN."""
        parameters = reading.svi.get_params(state)
        lost = sorted(
            name
            for name, value in parameters.items()
            if any(np.isnan(leaf).any() for leaf in jax.tree.leaves(value))
        )
        if lost:
            raise ValueError(
                f"parameter {lost[0]!r}: NaN, since the gradient of some step was; wanted a "
                "number. Give the optimiser smaller steps, or "
                f"clipped ones: `numpyro.optim.ClippedAdam`."
            )
        return Results({"variational_parameters": parameters}, {}, {})
