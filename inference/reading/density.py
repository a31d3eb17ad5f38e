"""The prior and the likelihood of a model, apart, over one vector without bounds.

    evidence  =  integral over z of  prior(z) likelihood(z),      z = all latent sites in NumPyro's unconstrained space, one after another

The prior is the density of the latent sites with the Jacobian of the way to z, the likelihood that
of the observed sites. Whatever has no place in this split is refused by the name of its site:
improper priors, discrete sites, factors that depend on a latent site, priors that are scaled or
masked, so that draws from them are not draws of their density. What was read is proved at draws
from the prior against NumPyro's own potential energy.
"""

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, random
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.distributions import biject_to

from inference.program.program import Program
from inference.program.sites import StructureError
from inference.reading.proof import gap, random_settings, refuse, worst

__all__ = ["Split"]

NUM_PROOFS = 8  # draws at which the reading is proved


class Split:
    """A program as prior and likelihood over vectors [size]; refused where it cannot be."""

    def __init__(self, program: Program):
        _refuse(program)
        self.program = program
        draw = lambda key: program.unconstrain(program.draw_prior(key))
        shapes = jax.eval_shape(draw, random.key(0))
        flat, self._unravel = ravel_pytree(
            {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in shapes.items()}
        )
        self.size, self.dtype = flat.size, flat.dtype
        # of each site, in the order of the vector
        self.blocks = tuple(leaf.size for leaf in jax.tree.leaves(shapes) if leaf.size)
        if not self.size:
            raise StructureError(
                f"{sorted(program.latent)}: these latent sites have no free number among them; "
                "there is nothing to infer."
            )

    def draw(self, rng_key: Array) -> Array:
        """A vector from the prior."""
        return ravel_pytree(self.program.unconstrain(self.program.draw_prior(rng_key)))[0]

    def values(self, z: Array) -> dict[str, Array]:
        """The latent sites at a vector, constrained."""
        return self._placed(self.program, z)[0]

    def free(self, z: Array) -> dict[str, Array]:
        """The latent sites at a vector, without bounds."""
        return self._unravel(z)

    def densities(self, z: Array, program: Program | None = None) -> tuple[Array, Array]:
        """Logarithms of prior and likelihood at a vector; with the data of another program,
        where one is given.
        """
        log_prior, rest = self.terms(z, program)
        return log_prior, jnp.asarray(sum(map(jnp.sum, rest.values())), log_prior.dtype)

    def terms(self, z: Array, program: Program | None = None) -> tuple[Array, dict[str, Array]]:
        """The same, with the likelihood term by term: one for each site that is not latent, by
        its batch dimensions.
        """
        program = program or self.program
        values, jacobian = self._placed(program, z)
        terms = program.log_probs(values)
        log_prior = jacobian + sum(jnp.sum(terms[name]) for name in program.latent)
        return log_prior, {name: term for name, term in terms.items() if name not in program.latent}

    def _placed(self, program: Program, z: Array) -> tuple[dict[str, Array], Array]:
        free, jacobian = self._unravel(z), jnp.zeros((), z.dtype)
        place = lambda message: (
            biject_to(message["fn"].support)(free[message["name"]])
            if message["name"] in free
            else None
        )
        trace = handlers.trace(handlers.substitute(program.model, substitute_fn=place)).get_trace(
            *program.args, **program.kwargs
        )
        values = {name: site["value"] for name, site in trace.items() if name in free}
        for name, value in values.items():
            jacobian += jnp.sum(
                biject_to(trace[name]["fn"].support).log_abs_det_jacobian(free[name], value)
            )
        return values, jacobian

    def prove(self) -> None:
        """At draws from the prior: the two add up to minus the potential energy, and the
        likelihood is a number.
        """

        def gaps(key: Array) -> tuple[dict[str, Array], Array]:
            z = self.draw(key)
            log_prior, log_likelihood = self.densities(z)
            whole = self.program.log_density_unconstrained(self._unravel(z))
            missed = gap(log_prior + log_likelihood, whole, 10 + jnp.abs(whole))
            return {
                f"sites {list(self.program.latent)}": jnp.where(jnp.isfinite(whole), missed, 0.0)
            }, jnp.isnan(log_likelihood)

        found, is_nan = worst(gaps, random_settings(random.key(1), num=NUM_PROOFS))
        sites = " and ".join(map(repr, self.program.observed)) or "none observed"
        if any(is_nan):
            raise ValueError(
                f"site {sites}: its log probability is NaN at {sum(is_nan)} of {NUM_PROOFS} draws "
                "from the prior; "
                f"wanted a number, or -inf where the data are impossible."
            )
        refusal = lambda sites, missed: (
            f"{sites}: prior and likelihood do not add up to the log joint (they differ by "
            f"{missed:.2g}, relative); the model is "
            f"not read right."
        )
        refuse(found, refusal, 1e-3)


def _refuse(program: Program) -> None:
    discrete = [name for name in program.latent if program.sites[name].is_discrete]
    if discrete:
        raise StructureError(
            f"site {discrete[0]!r}: it is latent and discrete "
            f"({program.sites[discrete[0]].family}); wanted continuous latent sites. "
            f"Sum it out of the model (a dist.MixtureSameFamily does for a mixture)."
        )
    for name in program.factors:
        if parents := program.parents[name]:
            raise StructureError(
                f"site {name!r}: a factor that depends on the latent sites {sorted(parents)} is "
                "neither prior nor likelihood. Write it as "
                f"an observed site, or as the density of a latent one."
            )
    for name in program.subsampled:
        raise StructureError(
            f"plate {name!r}: it shows a part of its rows at a time; wanted the whole likelihood. "
            "Drop subsample_size."
        )
    for name, how in _changed(program).items():
        raise StructureError(
            f"site {name!r}: its prior is {how}, so that draws from it are not draws of its "
            "density; wanted a prior as it is. Take the "
            f"handler away from it."
        )


def _changed(program: Program) -> dict[str, str]:
    """Latent sites whose priors are scaled or masked; found without a number being computed."""
    found: dict[str, str] = {}

    def look(rng_key: Array) -> None:
        # where a prior cannot be drawn from, the program says so by its site
        trace = program.trace(program.draw_prior(rng_key))
        for name in program.latent:
            if isinstance(trace[name]["fn"], dist.MaskedDistribution):
                found[name] = "masked"
            elif trace[name]["scale"] is not None:
                found[name] = "scaled"

    jax.eval_shape(look, random.key(0))
    return found
