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
from functools import lru_cache, partial
from math import lgamma
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import random
from jaxtyping import Bool, Float, Int
from numpyro import handlers
from numpyro.distributions import biject_to

from inference.maths.host import Array, generator, in_chunks, key_data
from inference.program.compiling import QUICKLY, is_traced
from inference.program.interpreting import interpreted
from inference.program.program import Program
from inference.program.sites import StructureError, require
from inference.reading.proof import gap, refuse, root_epsilon, worst

__all__ = [
    "BLOCK",
    "NO_REFERENCE",
    "NUM_PROOFS",
    "Exchangeable",
    "Reference",
    "Split",
    "canonical_densities",
    "exchangeable",
    "relabel",
    "relabel_alike",
    "site_values",
]

NUM_PROOFS = 8  # draws at which an identity is proved
BLOCK = 500  # vectors that are drawn, or computed, together
IN_USE = 16  # splits whose traces are remembered


class Split:
    """Prior and likelihood of a program over vectors [size]; StructureError if it has none."""

    def __init__(self, program: Program):
        _refuse(program)
        self.program = program
        draw = lambda key: program.unconstrain(program.draw_prior(key))
        shapes = jax.eval_shape(draw, jax.eval_shape(random.key, 0))
        self.shapes = dict(sorted(shapes.items()))  # in unconstrained space
        # sizes of the sites, in their order in the vector
        self.blocks = tuple(leaf.size for leaf in self.shapes.values() if leaf.size)
        self.size = sum(self.blocks)
        require(
            self.size,
            f"{sorted(program.latent)}: these latent sites have no free number among them; "
            "there is nothing to infer.",
        )
        self.dtype = jnp.result_type(*self.shapes.values())

    def unconstrained(self, z: Array) -> dict[str, Array]:
        """The unconstrained values of the latent sites at a vector."""
        ends = np.cumsum([leaf.size for leaf in self.shapes.values()])
        parts = zip(self.shapes.items(), ends, strict=True)
        return {
            name: z[end - leaf.size : end].reshape(leaf.shape).astype(leaf.dtype)
            for (name, leaf), end in parts
        }

    def vector(self, values: dict[str, Array]) -> Array:
        """The vector of constrained values of the latent sites."""
        free = self.program.unconstrain(values)
        return jnp.concatenate([jnp.ravel(free[name]).astype(self.dtype) for name in self.shapes])

    def draw(self, rng_key: Array) -> Array:
        """A vector from the prior."""
        return self.vector(self.program.draw_prior(rng_key))

    def draws(self, rng: np.random.Generator, num_draws: int) -> Float[np.ndarray, "draw size"]:
        """Vectors from the prior, in blocks that share one compiled program."""
        blocks = [_block(self, key_data(rng)) for _ in range(-(-num_draws // BLOCK))]
        return np.concatenate(jax.device_get(blocks))[:num_draws]

    @property
    def chunk(self) -> Float[np.ndarray, "point size"]:
        """Vectors of the number and type that are computed together."""
        return np.zeros((BLOCK, self.size), self.dtype)

    def log_priors(self, z: Float[np.ndarray, "point size"]) -> Float[np.ndarray, " point"]:
        """Log priors at vectors."""
        return in_chunks(_log_priors(self), z)

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

        def gaps(z: Array) -> tuple[dict[str, Array], Array]:
            log_prior, log_likelihood = self.densities(z)
            log_joint = self.program.log_density_unconstrained(self.unconstrained(z))
            return {
                f"sites {list(self.program.latent)}": jnp.where(
                    jnp.isfinite(log_joint),
                    gap(log_prior + log_likelihood, log_joint, 10 + jnp.abs(log_joint)),
                    0.0,
                )
            }, jnp.isnan(log_likelihood)

        settings = [(z,) for z in self.draws(np.random.default_rng(1), NUM_PROOFS)]
        found, is_nan = worst(gaps, settings)
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
        require(
            not program.sites[name].is_discrete,
            f"site {name!r}: it is latent and discrete ({program.sites[name].family}); wanted "
            "continuous latent sites. Sum it out of the model (a dist.MixtureSameFamily does "
            "for a mixture).",
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
            require(
                not is_masked and trace[name]["scale"] is None,
                f"site {name!r}: its prior is {'masked' if is_masked else 'scaled'}, so that "
                "draws from it are not draws of its density; wanted a prior as it is. Take "
                "the handler away from it.",
            )

    jax.eval_shape(check_prior, jax.eval_shape(random.key, 0))  # no number is computed


# takes a third of the time to compile, and 4 times as long to run
@partial(jax.jit, static_argnums=0, compiler_options=QUICKLY)
def _block(split: Split, key_data: Array) -> Array:
    return jax.vmap(split.draw)(random.split(random.wrap_key_data(key_data), BLOCK))


# Other functions of few vectors are run by NumPy. Their traces are remembered.


@lru_cache(IN_USE)
def _log_priors(split: Split) -> Callable:
    return interpreted(jax.vmap(lambda z: split.densities(z)[0]), split.chunk)


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
        return self.split.vector(self.ordered(self.split.values(z), order))

    def ordered(self, values: dict[str, Array], order: Int[Array, " member"]) -> dict[str, Array]:
        """Values of the latent sites with the members in another order."""
        return values | {
            name: jnp.take(values[name], order, axis=axis) for name, axis in self._axis.items()
        }

    def reference(self, z: Float[Array, "point size"]) -> Reference:
        """The mean of the features of vectors, and the variance about it."""
        features = self._features(z)
        location = features.mean(0)
        return Reference(location, ((features - location) ** 2).mean((0, 1)))

    def first_reference(self, z: Float[Array, "point size"]) -> Reference:
        """The features of the first vector, and the variance about it.

        Before vectors are relabelled their mean is useless: all members are equal in it.
        """
        features = self._features(z)
        return Reference(features[0], ((features - features[0]) ** 2).mean((0, 1)))

    def _features(self, z: Any) -> Any:
        """Features of vectors: of NumPy's by compiled chunks, in which no row is computed."""
        if is_traced(z):
            return jax.vmap(self.features)(z)
        return in_chunks(_features(self), z)

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

        def gaps(
            z: Float[Array, " size"], order: Int[Array, " member"]
        ) -> tuple[dict[str, Array], Bool[Array, ""]]:
            values = self.split.values(z)
            before, after = terms_of(values), terms_of(self.ordered(values, order))
            is_number = ~(jnp.isnan(before) & jnp.isnan(after))
            missed = gap(jnp.where(is_number, before, 0), jnp.where(is_number, after, 0))
            return {self.plate: missed}, jnp.isfinite(before).all()

        rng = np.random.default_rng(3)
        settings = [
            (rng.normal(size=self.split.size).astype(self.split.dtype), rng.permutation(self.count))
            for _ in range(NUM_PROOFS)
        ]
        found, is_finite = worst(gaps, settings)
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


def relabel(exchange: Exchangeable | None, z: Any, reference: Reference) -> Any:
    """The canonical copies of vectors; the vectors themselves where no plate is exchangeable.

    Args:
        exchange: the plate whose members may be permuted; None for none.
        z: vectors [point, size]; those that are not traced become an array of NumPy.
        reference: what makes vectors canonical.
    """
    if exchange is None or not len(reference.location):
        return z
    if is_traced((z, reference)):
        return jax.vmap(exchange.relabelled, (0, None))(z, reference)
    relabelled = _relabelled(exchange, np.shape(reference.location))
    return in_chunks(lambda z: relabelled(z, reference), z)


def relabel_alike(exchange: Exchangeable, z: Float[np.ndarray, "point size"]) -> np.ndarray:
    """Vectors relabelled with the first of them as reference, and then with the mean of all."""
    for reference in (exchange.first_reference, exchange.reference):
        z = relabel(exchange, z, reference(z))
    return z


def site_values(
    rng_key: Any, split: Split, exchange: Exchangeable | None, z: Float[Array, "point size"]
) -> dict[str, np.ndarray]:
    """The latent sites at vectors, exchangeable members in random order.

    Args:
        rng_key: a JAX key, or a generator of NumPy.
        split: prior and likelihood of the model.
        exchange: the plate whose members are shuffled; None for none.
        z: the vectors.
    """
    count = 0 if exchange is None else exchange.count
    order = generator(rng_key).permuted(np.tile(np.arange(count), (len(z), 1)), axis=1)
    return in_chunks(_values(split, exchange), (z, order))


@lru_cache(IN_USE)
def _features(exchange: Exchangeable) -> Callable:
    return interpreted(jax.vmap(exchange.features), exchange.split.chunk)


@lru_cache(IN_USE)
def _relabelled(exchange: Exchangeable, shape: tuple[int, int]) -> Callable:
    dtype = exchange.split.dtype
    reference = Reference(np.zeros(shape, dtype), np.zeros(shape[1], dtype))
    return interpreted(jax.vmap(exchange.relabelled, (0, None)), exchange.split.chunk, reference)


@lru_cache(IN_USE)
def _values(split: Split, exchange: Exchangeable | None) -> Callable:
    def one(z: Float[Array, " size"], order: Int[Array, " member"]) -> dict[str, Array]:
        values = split.values(z)
        return values if exchange is None else exchange.ordered(values, order)

    order = np.zeros((len(split.chunk), (0 if exchange is None else exchange.count)), int)
    return interpreted(lambda both: jax.vmap(one)(*both), (split.chunk, order))


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
