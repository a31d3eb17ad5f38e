"""Members without names: plates whose members may change places in every latent site, and the model
says the same.

The clusters of a mixture, the nodes of a layer: with m of them the posterior has m! parts that are
copies of each other. Such a plate is read off the names of the dimensions of the latent sites
(`Program.dims`), and proved at vectors drawn at random: the prior, and each term of the likelihood,
must stay as they are when its members change places. (Their sum may by chance: the columns of a
standardised table have the same mean and spread. It would not for a part of the rows.) A vector and
the same with other places are then as good as each other, and a kernel may take whichever it likes:
`alike` gives a vector the places in which its members are near to those of a reference, and gives
all m! copies of a vector the same. So the vectors that are alike already are one of each m! copies.

Cost of a vector: members^2 (features + members).
"""

from functools import partial
from math import lgamma
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.flatten_util import ravel_pytree

from inference.program.program import Program
from inference.reading.density import NUM_PROOFS, Split
from inference.reading.proof import gap, random_settings, root_epsilon, worst

__all__ = ["NO_REFERENCE", "Exchangeable", "Reference", "exchangeable"]


class Reference(NamedTuple):
    """What members without names are named after; of no member where all have names."""

    place: Array | np.ndarray  # [member, feature]
    spread: Array | np.ndarray  # [feature]: variance about it

    @property
    def gives_names(self) -> bool:
        """Whether there are members without."""
        return len(self.place) > 0


# and no None: states of all stages have the same parts
NO_REFERENCE = Reference(np.zeros((0, 0)), np.zeros(0))


class Exchangeable:
    """The members of `plate` in the vectors of a split."""

    def __init__(self, split: Split, plate: str):
        self.split, self.plate, self.count = split, plate, split.program.plates[plate].size
        dims = {name: split.program.dims[name] for name in split.program.latent}
        self._axis = {name: each.index(plate) for name, each in dims.items() if plate in each}
        self._by_member = [name for name in self._axis if plate in split.program.sites[name].plates]
        self.log_copies = lgamma(self.count + 1)

    def features(self, z: Array) -> Array:
        """[member, feature]: the free numbers that each member has of its own, and its entries
        of what they share.
        """
        free, values = self.split.free(z), self.split.values(z)
        parts = {name: (free if name in self._by_member else values)[name] for name in self._axis}
        return jnp.concatenate(
            [
                jnp.moveaxis(part, self._axis[name], 0).reshape(self.count, -1)
                for name, part in parts.items()
            ],
            axis=1,
        )

    def placed(self, z: Array, order: Array) -> Array:
        """The vector in which place j has the member `order[j]`."""
        return ravel_pytree(
            self.split.program.unconstrain(self._ordered(self.split.values(z), order))
        )[0]

    def shuffled(self, rng_key: Array, values: dict[str, Array]) -> dict[str, Array]:
        """Values of the latent sites, their members in random places."""
        return self._ordered(values, random.permutation(rng_key, self.count))

    def _ordered(self, values: dict[str, Array], order: Array) -> dict[str, Array]:
        return values | {
            name: jnp.take(values[name], order, axis=axis) for name, axis in self._axis.items()
        }

    # else all that the model computes of rows would be there for all vectors
    @partial(jax.jit, static_argnums=0)
    def reference(self, z: Array) -> Reference:
        """Of vectors [point, size]."""
        features = jax.vmap(self.features)(z)
        place = features.mean(0)
        return Reference(place, jnp.mean((features - place) ** 2, (0, 1)))

    def first_reference(self, z: Array) -> Reference:
        """One of the vectors [point, size]: in the mean of all, none of whose members has a
        name, members are alike.
        """
        features = jax.vmap(self.features)(z)
        return Reference(features[0], jnp.mean((features - features[0]) ** 2, (0, 1)))

    def alike(self, z: Array, reference: Reference) -> Array:
        """The copy of a vector with its members where those of the reference are."""
        order = self._order(z, reference)
        stays = (order == jnp.arange(self.count)).all() | ~jnp.isfinite(z).all()
        return jnp.where(stays, z, self.placed(z, order))

    def is_alike(self, z: Array, reference: Reference) -> Array:
        """Whether a vector is the one of its copies that is alike."""
        return (self._order(z, reference) == jnp.arange(self.count)).all()

    def _order(self, z: Array, reference: Reference) -> Array:
        """[place]: the member that comes there.

        Of all members and places the nearest find each other, then of those that are left. Copies
        of a vector have the same pairs, so all come to the same places.
        """
        apart = self.features(jax.lax.stop_gradient(z))[:, None] - reference.place[None]
        tiny = jnp.finfo(z.dtype).tiny
        distance = jnp.sum(apart**2 / jnp.maximum(reference.spread, tiny), -1)  # [member, place]
        # below that of a pair that is taken
        distance = jnp.nan_to_num(distance, nan=jnp.finfo(z.dtype).max)

        def paired(_: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
            order, left = found
            member, place = jnp.divmod(jnp.argmin(left), self.count)
            return order.at[place].set(member.astype(order.dtype)), left.at[member].set(jnp.inf).at[
                :, place
            ].set(jnp.inf)

        return jax.lax.fori_loop(
            0, self.count, paired, (jnp.zeros(self.count, jnp.int32), distance)
        )[0]

    def proved(self, program: Program | None = None) -> bool:
        """Whether members may change places: at Normal vectors the prior and each term of the
        likelihood stay what they are.

        :param program: with other data; None: that of the split.
        """
        terms_of = partial(self._terms, program or self.split.program)

        def gaps(rng_key: Array) -> tuple[dict[str, Array], Array]:
            draw_key, order_key = random.split(rng_key)
            values = self.split.values(
                random.normal(draw_key, (self.split.size,), self.split.dtype)
            )
            before, after = terms_of(values), terms_of(self.shuffled(order_key, values))
            either = ~(jnp.isnan(before) & jnp.isnan(after))  # is a number
            missed = gap(jnp.where(either, before, 0), jnp.where(either, after, 0))
            return {self.plate: missed}, jnp.isfinite(before).all()

        found, is_known = worst(gaps, random_settings(random.key(3), num=NUM_PROOFS))
        return any(is_known) and bool(found[self.plate] < root_epsilon())

    def _terms(self, program: Program, values: dict[str, Array]) -> Array:
        """The prior, and each term of the likelihood."""
        terms = program.log_probs(values)
        prior = sum(jnp.sum(terms.pop(name)) for name in self.split.program.latent if name in terms)
        return jnp.concatenate([jnp.reshape(each, -1) for each in (prior, *terms.values())])


def exchangeable(split: Split) -> Exchangeable | None:
    """The plate of the latent sites whose members have no names; the one with the most members
    where there are several.
    """
    program = split.program
    names = {dim for name in program.latent for dim in program.dims[name]} & set(program.plates)
    found = [
        Exchangeable(split, name)
        for name in sorted(names, key=lambda name: (-program.plates[name].size, name))
    ]
    return next((each for each in found if each.count > 1 and each.proved()), None)
