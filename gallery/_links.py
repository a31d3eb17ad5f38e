"""Links of matrix entries to the model: real numbers, ordered levels, or successes among trials.

link = LINKS["ordered"].learn(entries)       # from the entries of the first call
entries = link.coded(entries)                # as the model takes them; others are refused
arguments |= link.settings                   # of the model: the link, and priors that suit it
kernel = link.kernel(gibbs, program)         # what draws all sites of the model
start = link.start(entries, program)         # initial values of some sites
mean, variance = link.moments(distribution)  # of entries given the parameters of a draw
mean, deviation = link.restore_moments(mean, deviation)  # on the scale of the data
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from numpyro import distributions as dist
from numpyro.infer import NUTS
from numpyro.infer.gibbs import Gibbs
from numpyro.infer.mcmc import MCMCKernel
from scipy.special import ndtri

from gallery._entries import Entries
from gallery._standardise import Standardiser
from inference import ConditionalGibbs, Program
from zoo.bsvd import binomial_probit, gaussian, ordered_probit

__all__ = [
    "LINKS",
    "Binomial",
    "Gaussian",
    "Link",
    "Ordered",
    "num_initial_components",
    "truncation",
]

MOST_COMPONENTS = 50  # by default
ENTRIES_PER_FACTOR = 8  # a chain that starts with fewer would start overfitted
# a probit link fixes the scale by its noise
PROBIT_PRIORS = dict.fromkeys(("alpha_s", "precision"), dist.Gamma(1.0, 0.1))


@dataclass(frozen=True)
class Gaussian:
    """Real entries, standardised for the model."""

    standardiser: Standardiser
    settings: ClassVar[dict[str, Any]] = {"link": gaussian}
    wanted = "(rows, columns, values)"

    @classmethod
    def learn(cls, entries: Entries) -> "Gaussian":
        """Learn mean and standard deviation of the entries."""
        return cls(Standardiser.learn(entries.value))

    def kernel(self, gibbs: ConditionalGibbs, program: Program) -> MCMCKernel:
        """Return the kernel, which draws all sites."""
        return gibbs

    def start(self, entries: Entries, program: Program) -> dict[str, Any]:
        """Return as many components as the entries allow."""
        width = program.arguments["num_components"]
        return {"z": (np.arange(width) < num_initial_components(entries, width)).astype(int)}

    def coded(self, entries: Entries) -> Entries:
        """Standardise the entries."""
        return entries._replace(value=self.standardiser.standardise(entries.value))

    def decoded(self, values: np.ndarray) -> np.ndarray:
        """Return values on the scale of the data.

        In float64, for the mean may be far larger than the standard deviation.
        """
        return self.standardiser.restore(np.asarray(values, float))

    def moments(self, fn: Any) -> tuple[Any, Any]:
        """Return mean and variance of an entry, noise included, on the standardised scale."""
        return fn.loc, jnp.broadcast_to(fn.scale**2, fn.loc.shape)

    def restore_moments(
        self, mean: np.ndarray, deviation: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return a mean and a standard deviation on the scale of the data."""
        return self.decoded(mean), deviation * self.standardiser.scale


@dataclass(frozen=True)
class Ordered:
    """Integer levels of which only the order counts."""

    levels: tuple[int, ...]
    wanted = "(rows, columns, values)"

    @classmethod
    def learn(cls, entries: Entries) -> "Ordered":
        """Learn which levels occur."""
        _refuse_fractions(entries.value, "values", entries)
        levels = tuple(np.unique(entries.value).astype(int).tolist())
        if len(levels) < 2:
            raise ValueError(f"values: found the one level {levels[0]}, wanted two at least.")
        return cls(levels)

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of the model."""
        return {"link": partial(ordered_probit, num_levels=len(self.levels))} | PROBIT_PRIORS

    def coded(self, entries: Entries) -> Entries:
        """Code the levels 0, 1, ... in their order."""
        _refuse_fractions(entries.value, "values", entries)
        if (unknown := ~np.isin(entries.value, self.levels)).any():
            raise ValueError(
                f"values: found the level {entries.value[np.argmax(unknown)]:g}, wanted one of "
                f"those learned, {self.levels}."
            )
        return entries._replace(value=np.searchsorted(self.levels, entries.value))

    def kernel(self, gibbs: ConditionalGibbs, program: Program) -> MCMCKernel:
        """Leave the gaps to NUTS, for their complete conditional has no known form."""
        if "gaps" not in program.latent:
            return gibbs
        others = [name for name in program.latent if name != "gaps"]
        return Gibbs([(gibbs, others), (NUTS(gibbs.model), ["gaps"])])

    def start(self, entries: Entries, program: Program) -> dict[str, Any]:
        """Return the intercept and unconstrained gaps that put cutpoints at observed quantiles.

        The chain starts without components and effects.
        """
        share = np.bincount(entries.value.astype(int)) / len(entries.value)
        cutpoints = ndtri(np.cumsum(share)[:-1])
        gaps = {"gaps": np.log(np.diff(cutpoints))} if len(cutpoints) > 1 else {}
        return _bare(program) | {"intercept": -cutpoints[0]} | gaps

    def decoded(self, values: np.ndarray) -> np.ndarray:
        """Return the levels of codes."""
        return np.array(self.levels)[values]

    def moments(self, fn: Any) -> tuple[Any, Any]:
        """Return mean and variance of a level."""
        share = jnp.exp(
            jnp.stack(
                [fn.log_prob(jnp.full(fn.batch_shape, code)) for code in range(len(self.levels))],
                axis=-1,
            )
        )
        levels = jnp.array(self.levels, share.dtype)
        mean = share @ levels
        return mean, jnp.sum(share * jnp.subtract.outer(mean, levels) ** 2, axis=-1)

    def restore_moments(
        self, mean: np.ndarray, deviation: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return both as they are."""
        return mean, deviation


@dataclass(frozen=True)
class Binomial:
    """Numbers of successes among trials."""

    settings: ClassVar[dict[str, Any]] = {"link": binomial_probit} | PROBIT_PRIORS
    wanted = "(rows, columns, successes, trials)"

    @classmethod
    def learn(cls, entries: Entries) -> "Binomial":
        """Return the link, which has nothing to learn."""
        return cls()

    def coded(self, entries: Entries) -> Entries:
        """Return the entries as integers; refuse more successes than trials."""
        trials = np.asarray(entries.trials)
        _refuse_fractions(entries.value, "values", entries)
        _refuse_fractions(trials, "trials", entries)
        if (bad := (entries.value < 0) | (entries.value > trials)).any():
            i = int(np.argmax(bad))
            place = f"row {entries.row[i]}, column {entries.column[i]}"
            raise ValueError(
                f"X: found {entries.value[i]:g} successes of {trials[i]:g} trials at {place}."
            )
        return entries._replace(value=entries.value.astype(int), trials=trials.astype(int))

    def kernel(self, gibbs: ConditionalGibbs, program: Program) -> MCMCKernel:
        """Return the kernel, which draws all sites."""
        return gibbs

    def start(self, entries: Entries, program: Program) -> dict[str, Any]:
        """Return the intercept of the overall success probability.

        Half a success and half a failure are added, so that the probability is never 0 or 1. The
        chain starts without components and effects.
        """
        share = (entries.value.sum() + 0.5) / (np.asarray(entries.trials).sum() + 1)
        return _bare(program) | {"intercept": ndtri(share)}

    def decoded(self, values: np.ndarray) -> np.ndarray:
        """Return the values as they are."""
        return values

    def moments(self, fn: Any) -> tuple[Any, Any]:
        """Return the success probability, and 0: a draw of the parameters fixes it."""
        success = jnp.exp(fn.log_prob(jnp.ones_like(fn.trials)))
        return success, jnp.zeros_like(success)

    def restore_moments(
        self, mean: np.ndarray, deviation: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return both as they are."""
        return mean, deviation


type Link = Gaussian | Ordered | Binomial

MOST = np.iinfo(np.int32).max
LINKS = {
    "gaussian": Gaussian,
    "ordered": Ordered,
    "ordered_probit": Ordered,  # its name in the model, and for the command
    "binomial": Binomial,
}


def _bare(program: Program) -> dict[str, Any]:
    """No components and no effects, for a chain hardly ever leaves an overfitted start."""
    sites = program.sites
    effects = {name: np.zeros(sites[name].shape) for name in ("row_weights", "column_weights")}
    return {"z": np.zeros(sites["z"].shape, int)} | effects


def truncation(entries: Entries) -> int:
    """Return how many components the entries allow: a power of two, 8 at least, at most 50.

    Rows and columns without entries do not count.
    """
    items = len(np.unique(entries.row)) + len(np.unique(entries.column))
    return min(max(2 ** int(np.ceil(np.log2(len(entries.value) / items))), 8), MOST_COMPONENTS)


def num_initial_components(entries: Entries, num_components: int) -> int:
    """Return how many components a chain starts with: what the entries allow, at most half."""
    return min(
        max(1, len(entries.value) // (ENTRIES_PER_FACTOR * sum(entries.shape))), num_components // 2
    )


def _refuse_fractions(values: np.ndarray, name: str, entries: Entries) -> None:
    if (parts := ~(np.abs(values) <= MOST) | (values != np.floor(values))).any():
        i = int(np.argmax(parts))
        raise ValueError(
            f"{name}: found {values[i]:g} at row {entries.row[i]}, column {entries.column[i]}, "
            "wanted integers under this link."
        )
