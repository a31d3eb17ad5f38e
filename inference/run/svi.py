"""NumPyro's SVI as an `Algorithm`, so that it checkpoints, resumes, replicates and reports as every
other one does.

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
from numpyro.infer.elbo import ELBO as ELBOLoss
from numpyro.infer.svi import SVIState

from inference.program.program import Program
from inference.run.protocol import Algorithm, Results, init_strategy

__all__ = ["ELBO", "GuidedModel", "OrderedTraceELBO", "StochasticVI"]


class ELBO(NamedTuple):
    """What a step reports."""

    elbo: Array  # the stochastic estimate of this step, minus the loss


class OrderedTraceELBO(Trace_ELBO):
    """NumPyro's `Trace_ELBO`, its sites added in the order of their names.

    NumPyro adds them in the order of a set of texts, which is another one in each process: a
    resumed run would part from an uninterrupted one in the last bit.
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


def _in_order(loss: ELBOLoss) -> ELBOLoss:
    if type(loss) is Trace_ELBO and loss.sum_sites:
        return OrderedTraceELBO(loss)
    return loss


class GuidedModel(NamedTuple):
    """What was read: the arguments of the run, and an `SVI` that has seen them."""

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
    """One step is one update of `svi`; its own `update` is called, nothing is repeated here."""

    report = "variational"

    def __init__(self, svi: SVI):
        self.svi = deepcopy(svi)
        self.svi.loss = _in_order(svi.loss)
        self.model = svi.model

    def read(self, program: Program) -> tuple[GuidedModel, dict]:
        """The model is evaluated, and the guide run once: NumPyro finds its transforms in this
        way.
        """
        program.check(init_strategy(self.svi))
        reading = GuidedModel(program, deepcopy(self.svi))
        args, kwargs = reading.given
        reading.svi.init(random.key(0), *args, **kwargs)
        return reading, {}

    def init(self, rng_key: Array, reading: GuidedModel, data: dict) -> SVIState:
        """NumPyro's own initial state, of a fresh copy: an autoguide remembers the start of its
        first run.
        """
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
        """Never by itself: the steps are the budget (`num_warmup`), or `stop` ends them."""
        return jnp.zeros((), bool)

    def draw(
        self, rng_key: Array, state: SVIState, reading: GuidedModel, data: dict, num_draws: int
    ) -> dict[str, Array]:
        """Draws from the fitted guide, with their density under it; a site that the loss sums
        out (enumeration) has none.
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
        """The variational parameters, constrained; refused where they are lost."""
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
