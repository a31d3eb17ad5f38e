"""A model as prior times likelihood over one unconstrained vector; label switching.

    evidence  =  integral over z of  prior(z) likelihood(z)

z holds all latent sites in NumPyro's unconstrained space, one after another. The prior is the
density of the latent sites times the Jacobian of the transform; the likelihood is that of the
observed sites. `Split` raises StructureError, by the name of the site, for improper priors,
discrete latent sites and factors that depend on a latent site; and for priors that are scaled or
masked, because draws from such a prior do not have its density. The split is proved at draws from
the prior against NumPyro's potential energy.

Label switching: the members of a plate, such as the clusters of a mixture or the nodes of a layer,
may be permuted without a change of the posterior density. So each mode has m! copies for m members.
`exchangeable` finds such a plate by the dimension names of the latent sites (`Program.dims`). It
proves at random vectors that the prior, and each term of the likelihood, are the same when the
members are permuted. (Each term alone, since a sum may be the same by chance: the columns of a
standardised table have the same mean and variance.) `Exchangeable.relabelled` permutes the members
of a vector to be near to those of a reference; it maps all m! copies of a vector to the same one,
the canonical one.

Cost of relabelling a vector: members^2 (features + members).
"""

from collections.abc import Callable
from functools import partial
from math import lgamma
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import random
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int
from numpyro import handlers
from numpyro.distributions import biject_to

from inference.program.compiling import once
from inference.program.program import Program
from inference.program.sites import StructureError
from inference.reading.proof import gap, random_settings, refuse, root_epsilon, worst

__all__ = [
    "NO_REFERENCE",
    "NUM_PROOFS",
    "Exchangeable",
    "Reference",
    "Split",
    "canonical_densities",
    "canonical_draw",
    "exchangeable",
    "relabel",
    "relabel_alike",
    "site_values",
]

NUM_PROOFS = 8  # draws at which an identity is proved


class Split:
    """Prior and likelihood of a program over vectors [size]; StructureError if it has none."""

    def __init__(self, program: Program):
        _refuse(program)
        self.program = program
        draw = lambda key: program.unconstrain(program.draw_prior(key))
        shapes = jax.eval_shape(draw, random.key(0))
        zeros = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in shapes.items()}
        flat, self.unconstrained = ravel_pytree(zeros)
        self.size, self.dtype = flat.size, flat.dtype
        # sizes of the sites, in their order in the vector
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
        """The constrained values of the latent sites at a vector."""
        return self._constrained(self.program, z)[0]

    def densities(self, z: Array, program: Program | None = None) -> tuple[Array, Array]:
        """Log prior and log likelihood at a vector.

        Args:
            z: a vector [size].
            program: the model with other data; None for the data of the split.
        """
        log_prior, rest = self.terms(z, program)
        return log_prior, jnp.asarray(sum(map(jnp.sum, rest.values())), log_prior.dtype)

    def terms(self, z: Array, program: Program | None = None) -> tuple[Array, dict[str, Array]]:
        """Log prior, and the log probability of each site that is not latent.

        Args:
            z: a vector [size].
            program: the model with other data; None for the data of the split.
        """
        program = program or self.program
        values, log_jacobian = self._constrained(program, z)
        terms = program.log_probs(values)
        log_prior = log_jacobian + sum(jnp.sum(terms[name]) for name in program.latent)
        return log_prior, {name: term for name, term in terms.items() if name not in program.latent}

    def _constrained(self, program: Program, z: Array) -> tuple[dict[str, Array], Array]:
        free, log_jacobian = self.unconstrained(z), jnp.zeros((), z.dtype)
        transformed = lambda message: (
            biject_to(message["fn"].support)(free[message["name"]])
            if message["name"] in free
            else None
        )
        model = handlers.substitute(program.model, substitute_fn=transformed)
        trace = handlers.trace(model).get_trace(*program.args, **program.kwargs)
        values = {name: site["value"] for name, site in trace.items() if name in free}
        for name, value in values.items():
            transform = biject_to(trace[name]["fn"].support)
            log_jacobian += jnp.sum(transform.log_abs_det_jacobian(free[name], value))
        return values, log_jacobian

    def prove(self) -> None:
        """Raises StructureError unless log prior + log likelihood = - NumPyro's potential energy.

        Raises ValueError where the likelihood is NaN at a draw from the prior.
        """

        def gaps(key: Array) -> tuple[dict[str, Array], Array]:
            z = self.draw(key)
            log_prior, log_likelihood = self.densities(z)
            log_joint = self.program.log_density_unconstrained(self.unconstrained(z))
            return {
                f"sites {list(self.program.latent)}": jnp.where(
                    jnp.isfinite(log_joint),
                    gap(log_prior + log_likelihood, log_joint, 10 + jnp.abs(log_joint)),
                    0.0,
                )
            }, jnp.isnan(log_likelihood)

        found, is_nan = worst(gaps, random_settings(random.key(1), num=NUM_PROOFS))
        if any(is_nan):
            sites = " and ".join(map(repr, self.program.observed)) or "none observed"
            raise ValueError(
                f"site {sites}: its log probability is NaN at {sum(is_nan)} of {NUM_PROOFS} draws "
                "from the prior; wanted a number, or -inf where the data are impossible."
            )
        refusal = lambda sites, missed: (
            f"{sites}: prior and likelihood do not add up to the log joint (relative difference "
            f"{missed:.2g}), so the model was read wrongly."
        )
        refuse(found, refusal, 1e-3)

    def check_start(
        self,
        z: Float[Array, "point size"] | np.ndarray,
        log_likelihood: Float[Array, " point"] | np.ndarray,
        where: str = "draws from the prior",
    ) -> None:
        """Raises ValueError unless points and likelihoods are finite and some likelihood positive.

        Args:
            z: the points that an algorithm starts from.
            log_likelihood: at the points.
            where: what the points are, for the error.
        """
        sites = " and ".join(map(repr, self.program.observed)) or "none observed"
        z, log_likelihood = np.asarray(z), np.asarray(log_likelihood)
        if (count := np.isfinite(z).all(1).sum()) < len(z):
            raise ValueError(
                f"{count} of {len(z)} {where} are finite; look for a prior that is too wide for "
                "its dtype."
            )
        if np.isnan(log_likelihood).any() or np.isposinf(log_likelihood).any():
            what = "NaN" if np.isnan(log_likelihood).any() else "infinite"
            raise ValueError(
                f"site {sites}: its likelihood is {what} at some of {len(z)} {where}; wanted a "
                "number."
            )
        if not np.isfinite(log_likelihood).any():
            raise ValueError(
                f"site {sites}: its likelihood is 0 at all of {len(z)} {where}; wanted a prior "
                "under which the data are possible."
            )


def _refuse(program: Program) -> None:
    for name in program.latent:
        if program.sites[name].is_discrete:
            raise StructureError(
                f"site {name!r}: it is latent and discrete ({program.sites[name].family}); wanted "
                "continuous latent sites. Sum it out of the model (a dist.MixtureSameFamily does "
                "for a mixture)."
            )
    for name in program.factors:
        if parents := program.parents[name]:
            raise StructureError(
                f"site {name!r}: a factor that depends on the latent sites {sorted(parents)} is "
                "neither prior nor likelihood. Write it as an observed site, or as the density of "
                "a latent one."
            )
    for name in program.subsampled:
        raise StructureError(
            f"plate {name!r}: it subsamples its rows; wanted the whole likelihood. Drop "
            "subsample_size."
        )

    def check_prior(rng_key: Array) -> None:
        trace = program.trace(program.draw_prior(rng_key))
        for name in program.latent:
            is_masked = isinstance(trace[name]["fn"], dist.MaskedDistribution)
            if is_masked or trace[name]["scale"] is not None:
                raise StructureError(
                    f"site {name!r}: its prior is {'masked' if is_masked else 'scaled'}, so that "
                    "draws from it are not draws of its density; wanted a prior as it is. Take "
                    "the handler away from it."
                )

    jax.eval_shape(check_prior, random.key(0))  # no number is computed


# Label switching.


class Reference(NamedTuple):
    """Features of the members of a plate that others are matched to; empty for no such plate."""

    location: Array | np.ndarray  # [member, feature]
    variance: Array | np.ndarray  # [feature], about the location, over vectors and members


# an empty one rather than None, so that states of all stages have the same structure
NO_REFERENCE = Reference(np.zeros((0, 0)), np.zeros(0))


class Exchangeable:
    """A plate whose members may be permuted, in the vectors of a split."""

    def __init__(self, split: Split, plate: str):
        self.split, self.plate, self.count = split, plate, split.program.plates[plate].size
        dims = {name: split.program.dims[name] for name in split.program.latent}
        self._axis = {name: each.index(plate) for name, each in dims.items() if plate in each}
        self._in_plate = [name for name in self._axis if plate in split.program.sites[name].plates]
        self.log_copies = lgamma(self.count + 1)

    def features(self, z: Array) -> Float[Array, "member feature"]:
        """The numbers of each member, by which members are told apart.

        Sites in the plate give their unconstrained values; sites whose event has an axis of
        members, such as the weights of a mixture, give their constrained values.
        """
        free, values = self.split.unconstrained(z), self.split.values(z)
        parts = {name: (free if name in self._in_plate else values)[name] for name in self._axis}
        by_member = lambda name: jnp.moveaxis(parts[name], self._axis[name], 0)
        return jnp.concatenate([by_member(name).reshape(self.count, -1) for name in parts], axis=1)

    def permuted(self, z: Float[Array, " size"], order: Int[Array, " member"]) -> Array:
        """The vector whose member j is the member `order[j]` of z."""
        values = self._permuted(self.split.values(z), order)
        return ravel_pytree(self.split.program.unconstrain(values))[0]

    def shuffled(self, rng_key: Array, values: dict[str, Array]) -> dict[str, Array]:
        """Values of the latent sites with the members in random order."""
        return self._permuted(values, random.permutation(rng_key, self.count))

    def _permuted(self, values: dict[str, Array], order: Array) -> dict[str, Array]:
        return values | {
            name: jnp.take(values[name], order, axis=axis) for name, axis in self._axis.items()
        }

    # compiled as a whole, or what the model computes for each row would be held for all vectors
    @partial(jax.jit, static_argnums=0)
    def reference(self, z: Float[Array, "point size"]) -> Reference:
        """The mean of the features of vectors, and the variance about it."""
        features = jax.vmap(self.features)(z)
        location = features.mean(0)
        return Reference(location, jnp.mean((features - location) ** 2, (0, 1)))

    def first_reference(self, z: Float[Array, "point size"]) -> Reference:
        """The features of the first vector, and the variance about it.

        Before vectors are relabelled their mean is useless: all members are equal in it.
        """
        features = jax.vmap(self.features)(z)
        return Reference(features[0], jnp.mean((features - features[0]) ** 2, (0, 1)))

    def relabelled(self, z: Float[Array, " size"], reference: Reference) -> Array:
        """The canonical copy of a vector: its members in the order that matches the reference."""
        order = self._matching(z, reference)
        return jnp.where(
            (order == jnp.arange(self.count)).all() | ~jnp.isfinite(z).all(),
            z,
            self.permuted(z, order),
        )

    def is_canonical(self, z: Float[Array, " size"], reference: Reference) -> Array:
        """Whether a vector is the canonical one of its copies."""
        return (self._matching(z, reference) == jnp.arange(self.count)).all()

    def _matching(self, z: Array, reference: Reference) -> Array:
        """The member of z that is matched to each member of the reference, greedily.

        The nearest of all pairs is matched first, then the nearest of the rest. All copies of a
        vector have the same pairs, and so the same matching.
        """
        apart = self.features(jax.lax.stop_gradient(z))[:, None] - reference.location[None]
        variance = jnp.maximum(reference.variance, jnp.finfo(z.dtype).tiny)
        distance = jnp.sum(apart**2 / variance, -1)  # [member, member of the reference]
        # finite, because an infinite distance marks members that are matched already
        distance = jnp.nan_to_num(distance, nan=jnp.finfo(z.dtype).max)

        def match(_: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
            order, left = found
            member, place = jnp.divmod(jnp.argmin(left), self.count)
            left = left.at[member].set(jnp.inf).at[:, place].set(jnp.inf)
            return order.at[place].set(member.astype(order.dtype)), left

        start = jnp.zeros(self.count, jnp.int32), distance
        return jax.lax.fori_loop(0, self.count, match, start)[0]

    def proved(self, program: Program | None = None) -> bool:
        """Whether a permutation leaves the prior and each likelihood term as it is.

        Args:
            program: the model with other data; None for the data of the split.
        """
        terms_of = partial(self._terms, program or self.split.program)

        def gaps(rng_key: Array) -> tuple[dict[str, Array], Array]:
            draw_key, order_key = random.split(rng_key)
            values = self.split.values(
                random.normal(draw_key, (self.split.size,), self.split.dtype)
            )
            before, after = terms_of(values), terms_of(self.shuffled(order_key, values))
            is_number = ~(jnp.isnan(before) & jnp.isnan(after))
            missed = gap(jnp.where(is_number, before, 0), jnp.where(is_number, after, 0))
            return {self.plate: missed}, jnp.isfinite(before).all()

        found, is_finite = worst(gaps, random_settings(random.key(3), num=NUM_PROOFS))
        return any(is_finite) and bool(found[self.plate] < root_epsilon())

    def _terms(self, program: Program, values: dict[str, Array]) -> Array:
        terms = program.log_probs(values)
        prior = sum(jnp.sum(terms.pop(name)) for name in self.split.program.latent if name in terms)
        return jnp.concatenate([jnp.reshape(each, -1) for each in (prior, *terms.values())])


def exchangeable(split: Split) -> Exchangeable | None:
    """The plate whose members may be permuted, the largest where there are several."""
    program = split.program
    names = {dim for name in program.latent for dim in program.dims[name]} & set(program.plates)
    order = sorted(names, key=lambda name: (-program.plates[name].size, name))
    found = (Exchangeable(split, name) for name in order if program.plates[name].size > 1)
    return next((each for each in found if each.proved()), None)


def relabel(
    exchange: Exchangeable | None, z: Float[Array, "point size"], reference: Reference
) -> Float[Array, "point size"]:
    """The canonical copies of vectors; the vectors themselves where no plate is exchangeable."""
    if exchange is None or not len(reference.location):
        return z
    return _relabel(exchange, z, reference)


@partial(jax.jit, static_argnums=0)
def _relabel(exchange: Exchangeable, z: Array, reference: Reference) -> Array:
    return jax.vmap(lambda z: exchange.relabelled(z, reference))(z)


@partial(jax.jit, static_argnums=0)
def relabel_alike(exchange: Exchangeable, z: Float[Array, "point size"]) -> Array:
    """Vectors relabelled with the first of them as reference, and then with the mean of all."""
    for reference in (exchange.first_reference, exchange.reference):
        z = _relabel(exchange, z, reference(z))
    return z


def site_values(
    rng_key: Array, split: Split, exchange: Exchangeable | None, z: Float[Array, "point size"]
) -> dict[str, Array]:
    """The latent sites at vectors, exchangeable members in random order."""
    keys = random.split(rng_key, len(z))
    one = lambda key, z: (
        split.values(z) if exchange is None else exchange.shuffled(key, split.values(z))
    )
    return once(jax.vmap(one), keys, z)(keys, z)


def canonical_densities(
    exchange: Exchangeable | None, reference: Reference, densities: Callable
) -> Callable:
    """Log prior and log likelihood, restricted to canonical vectors.

    The prior is m! times as large there, because a canonical vector stands for all its copies, and
    0 elsewhere.

    Args:
        exchange: the plate whose members may be permuted; None for none.
        reference: what makes vectors canonical.
        densities: a function of a vector that returns its log prior and log likelihood.
    """
    if exchange is None or not len(reference.location):
        return densities

    def of_all_copies(z: Array) -> tuple[Array, Array]:
        log_prior, log_likelihood = densities(z)
        of_copies = log_prior + exchange.log_copies
        return jnp.where(exchange.is_canonical(z, reference), of_copies, -jnp.inf), log_likelihood

    return of_all_copies


def canonical_draw(exchange: Exchangeable | None, reference: Reference, draw: Callable) -> Callable:
    """Draws from the prior of `canonical_densities`, by relabelling those of `draw`."""
    if exchange is None or not len(reference.location):
        return draw
    return lambda rng_key: exchange.relabelled(draw(rng_key), reference)
