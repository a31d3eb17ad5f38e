"""The joint distribution of latent values and data, drawn by a model."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.core import Tracer
from numpyro.ops.provenance import eval_provenance

__all__ = ["Joint", "Values"]

Values = dict[str, Array]


class Joint:
    """The joint distribution of latent values and data.

    Args:
        program: an `inference.Program`.
        data: observed site -> the argument that takes its data; None: the argument that equals it.
    """

    def __init__(self, program: Any, data: Mapping[str, str] | None):
        self.program = program
        self.is_traceable = True  # False for a model that inspects the values of its data
        self._check()
        self.arguments = {site: self._argument(site, data or {}) for site in program.observed}
        if unknown := sorted(set(data or {}) - set(program.observed)):
            raise ValueError(
                f"data: {unknown[0]!r} is no observed site; the model observes "
                f"{list(program.observed)}."
            )
        if len(set(self.arguments.values())) < len(self.arguments):
            raise ValueError(
                f"data: two observed sites have the same argument ({self.arguments}); give each "
                "its own."
            )
        self._check_fit()
        self._check_free_of_data()

    def draw(self, rng_key: Array) -> tuple[Values, Values]:
        """Draw latent values from the prior, and data given them, by argument."""
        values_key, data_key = random.split(rng_key)
        values = jax.tree.map(jnp.asarray, self.program.draw_prior(values_key))
        return values, self.draw_data(data_key, values)

    def draw_data(self, rng_key: Array, values: Values) -> Values:
        """Draw data given latent values, by argument."""
        drawn = self.program.predict(rng_key, values)
        return {
            argument: self._as_argument(argument, drawn[site])
            for site, argument in self.arguments.items()
        }

    def given(self, data: Values) -> Any:
        """Return the model on given data."""
        return self.program.with_arguments(**data)

    def _as_argument(self, name: str, drawn: Array) -> Array:
        """Data with the dtype of the argument, and NaN where it has NaN."""
        like = np.asarray(self.program.arguments[name])
        drawn = jnp.asarray(drawn).astype(jax.dtypes.canonicalize_dtype(like.dtype))
        missing = np.isnan(like) if like.dtype.kind == "f" else np.zeros(like.shape, bool)
        return jnp.where(missing, jnp.full_like(drawn, jnp.nan), drawn) if missing.any() else drawn

    def _argument(self, site: str, data: Mapping[str, str]) -> str:
        arguments = self.program.arguments
        if site in data:
            found = [data[site]] if data[site] in arguments else []
        else:
            value = np.asarray(self.program.observed_values[site])
            found = [name for name, argument in arguments.items() if _same(argument, value)]
            found = [site] if site in found else found
        if len(found) != 1:
            problem = (
                f"equals each of the arguments {found}"
                if found
                else f"is none of the arguments {list(arguments)}"
            )
            raise ValueError(
                f"site {site!r}: which argument holds its data? It {problem}. Give "
                f"data={{{site!r}: <argument>}}, with an argument that is an array."
            )
        return found[0]

    def _check(self) -> None:
        program = self.program
        for kind, names in (("latent", program.latent), ("observed", program.observed)):
            if not names:
                raise ValueError(
                    f"{program!r}: found no {kind} site among {list(program.sites)}; the test "
                    "needs one. Give data as arguments; only their shapes matter."
                )
        for name in program.factors:
            if program.parents[name]:
                raise ValueError(
                    f"site {name!r}: a factor of {sorted(program.parents[name])} makes a prior "
                    "that cannot be drawn from. Write it as a distribution to test the model."
                )
        for name, plate in program.plates.items():
            if plate.subsample_size < plate.size:
                raise ValueError(
                    f"plate {name!r}: it is subsampled, so not all data are drawn. Test the model "
                    "without subsampling."
                )
        for name, scale in _scales(program).items():
            raise ValueError(
                f"site {name!r}: its log density is scaled by {scale}, so the model is not the "
                "distribution that its data are drawn from. Test it without "
                "`numpyro.handlers.scale`."
            )

    def _check_fit(self) -> None:
        """Raise ValueError unless each argument has the shape and dtype of the data of its site."""
        drawn = jax.eval_shape(
            lambda key: self.program.predict(key, self.program.draw_prior(key)), random.key(0)
        )
        for site, name in self.arguments.items():
            like, wanted = np.asarray(self.program.arguments[name]), drawn[site]
            if like.shape != wanted.shape or (
                like.dtype.kind in "iub" and jnp.issubdtype(wanted.dtype, jnp.inexact)
            ):
                raise ValueError(
                    f"argument {name!r}: it cannot hold the data of site {site!r}: found "
                    f"{like.dtype}{list(like.shape)}, wanted {wanted.dtype}{list(wanted.shape)}."
                )

    def _check_free_of_data(self) -> None:
        """Raise ValueError where a distribution is computed from the data of the model.

        New data cannot be drawn from such a model, because it has no joint distribution.
        """

        def drawn(**data):
            here = self.given(data)
            values = here.draw_prior(random.key(0))
            return {**values, **here.predict(random.key(0), values)}

        names = set(self.arguments.values())
        shapes = {
            name: jax.ShapeDtypeStruct(np.shape(self.program.arguments[name]), self._dtype(name))
            for name in names
        }
        try:
            found = eval_provenance(drawn, **shapes)
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
            self.is_traceable = False
            return
        for name in (*self.program.latent, *self.program.observed):
            if used := sorted(frozenset(found[name]) & names):
                raise ValueError(
                    f"site {name!r}: its distribution is computed from the data in argument "
                    f"{used[0]!r}, so new data cannot be drawn from the model. Compute it from "
                    "other sites, or from another argument."
                )

    def _dtype(self, name: str) -> Any:
        return jax.dtypes.canonicalize_dtype(np.asarray(self.program.arguments[name]).dtype)


def _scales(program: Any) -> dict[str, Any]:
    """Factors other than 1 that multiply the log density of a site."""
    found = {}

    def run(rng_key):
        trace = program.trace(program.draw_prior(rng_key))
        for name in (*program.latent, *program.observed):
            scale = trace[name]["scale"]
            if isinstance(scale, Tracer):
                found[name] = "a computed number"
            elif scale is not None and not np.all(np.asarray(scale) == 1):
                found[name] = scale

    jax.eval_shape(run, random.key(0))
    return found


def _same(argument: Any, value: np.ndarray) -> bool:
    if (
        not isinstance(argument, np.ndarray | Array | np.generic | float | int)
        or np.shape(argument) != value.shape
    ):
        return False
    array = np.asarray(argument)
    return bool(
        np.array_equal(array, value, equal_nan=array.dtype.kind == "f" and value.dtype.kind == "f")
    )
