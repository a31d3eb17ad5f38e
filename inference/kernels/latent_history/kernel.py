"""Moves of a latent history: a chain, and a block of NumPyro's `Gibbs`.

    history = ["num_rejected", "rejected", "rejected_noise"]
    field = ["noise", "amplitude", "lengthscale"]
    Gibbs([(LatentHistory(model), history + field), (NUTS(model), None)])

The model has the structure of `inference.reading.history`: it has room for `capacity` points that
left no data, the slots, and a count says how many of them are used. The kernel draws the places of
the points that left no data, and the values of functions there. It also draws those sites of
`inference.reading.field` that it is given: the noise of the functions at the data, and their
scales. NUTS can draw these as well, but then the scales hardly move. A draw is one sweep:

1. Unused slots are drawn from the prior, functions included. They are the possible births.
2. Births and deaths, `num_rounds` times. Used slots are put into a random order. The count is drawn
   from its conditional, p(count) x the probabilities of the events in the slots below it, within a
   random window around it. Used slots are swapped with unused ones by Metropolis.
3. Each used point proposes a place nearby, with the functions there drawn given all their other
   values. All propose at once, for they are independent given the functions.
4. The noise of the used slots is computed anew for their order. Then the count is summed out within
   such a window, while the scales take `num_steps` steps and all noise `num_trajectories`
   Hamiltonian trajectories (`surrogate`). The count is drawn at the end. With the count held, the
   level of the functions could hardly move: low functions only mean more points.

All densities are the model's own. The draw is `full` where the conditional of the count gives more
than a chance of `SPARE` to counts beyond the capacity. Then the driver doubles the capacity, an
argument of the model. NumPyro's own `MCMC` does not: look at the extra field `full`, and give more.

Cost of a sweep: O(K n^3) for K functions, n = data and slots: 3 Cholesky factors of n points for
each function serve O(n) births, deaths and relocations, O(K n^2) a move; 2 for each step of the
scales; O(K n^2) for each leap of a trajectory. A gradient of NUTS costs O(K n^3).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from jax.nn import logsumexp
from jaxtyping import Bool, Int
from numpyro.util import is_prng_key

from inference.kernels.latent_history.surrogate import move_field
from inference.program.program import Program
from inference.program.sites import StructureError, check_whole
from inference.reading.field import Field, read_field
from inference.reading.history import HistorySites, like, read_history, shuffled
from inference.run.command import Command
from inference.run.protocol import GibbsBlock, Reading

__all__ = ["HistoryReading", "HistoryState", "LatentHistory"]

SPARE = 1e-6  # chance, by the conditional of the count, that there is no slot left


@dataclass(frozen=True, eq=False)
class HistoryReading(Reading):
    """The history of a model, and its functions."""

    history: HistorySites
    field: Field
    scale: dict[str, Any]  # prior standard deviations of the places


class HistoryState(NamedTuple):
    """A draw, and what the next one needs."""

    values: dict[str, Array]  # of the sites that the kernel owns
    full: Array  # whether the draw came near the capacity
    # acceptance rates of the last sweep
    moved: Array  # of relocations
    rescaled: Array  # of steps of the scales
    flown: Array  # of trajectories
    rng_key: Array


class LatentHistory(GibbsBlock):
    """Draws the latent history of a model.

    It runs in `Driver`, in `numpyro.infer.MCMC`, and as a block of `Gibbs` beside NUTS.

    Args:
        model: a NumPyro model.
        capacity: name of the model's argument for the number of slots.
        max_capacity: the most slots; a history that wants more ends the run with an error.
        num_rounds: rounds of births and deaths in a sweep; they are cheap.
        num_steps: steps of the scales in a sweep.
        num_trajectories: Hamiltonian trajectories of the noise in a sweep.
    """

    default_fields = ("values", "moved", "rescaled", "flown", "full")
    command = Command(
        driver={"num_chains": 1, "num_warmup": 300, "num_samples": 400}, double_below=jnp.inf
    )
    reading: HistoryReading

    def __init__(
        self,
        model: Callable,
        *,
        capacity: str = "capacity",
        max_capacity: int = 4096,
        num_rounds: int = 20,
        num_steps: int = 6,
        num_trajectories: int = 4,
    ):
        self.model, self.capacity, self.max_capacity = model, capacity, max_capacity
        self.num_rounds, self.num_steps = num_rounds, num_steps
        self.num_trajectories = num_trajectories
        check_whole(1, max_capacity=max_capacity)

    # The protocol of NumPyro's kernels.

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs) -> HistoryState:
        """Reads the history and the field, proves them, and starts.

        Args:
            rng_key: a key.
            num_warmup: not used.
            init_params: values of some sites; the others are drawn.
            model_args: positional arguments of the model.
            model_kwargs: its keyword arguments.
        """
        if not is_prng_key(rng_key):
            raise ValueError(
                "LatentHistory takes one key; chain_method: 'sequential', 'parallel' or jax.vmap."
            )
        if not jax.config.jax_enable_x64:
            raise ValueError(
                "LatentHistory: found float32, wanted float64, for Cholesky factors of smooth "
                "functions: jax.enable_x64(True)."
            )
        program, others = self._program(model_args, model_kwargs)
        start_key, chain_key = random.split(rng_key)
        owned = [name for name in program.latent if name not in others]
        size = self._bind(
            program, owned, lambda: _read(program.with_stand_ins(), owned, sorted(others))
        ).history.capacity
        if size > self.max_capacity:
            raise ValueError(
                f"LatentHistory: found {size} slots at the start, wanted no more than "
                f"max_capacity, {self.max_capacity}."
            )
        given = {
            name: jnp.asarray(value, program.sites[name].dtype)
            for name, value in (init_params or {}).items()
        }
        values = {**program.draw_initial(start_key), **others, **given}
        zero = jnp.zeros((), jnp.result_type(float))
        return HistoryState(
            {name: values[name] for name in owned}, jnp.zeros((), bool), zero, zero, zero, chain_key
        )

    def sample(self, state: HistoryState, model_args, model_kwargs) -> HistoryState:
        """One sweep."""
        program, others = self._program(model_args, model_kwargs)
        history = replace(self.reading.history, capacity=self._size(state))
        rng_key, *keys = random.split(state.rng_key, 5)
        values = history.refreshed(keys[0], program, {**others, **state.values})
        function = program.deterministics(values)[history.function]
        values, function, is_full = self._exchanged(keys[1], program, history, values, function)
        values, function, moved = self._relocated(keys[2], program, history, values, function)
        values, ends_full, *taken = self._settled(keys[3], program, history, values, function)
        return HistoryState(
            {name: values[name] for name in state.values},
            is_full | ends_full,
            moved,
            *taken,
            rng_key,
        )

    def get_diagnostics_str(self, state: HistoryState) -> str:
        """The number of points.

        Raises:
            RuntimeError: where the draw is `full`, which `Driver` prevents.
        """
        if bool(state.full):
            raise RuntimeError(
                f"LatentHistory: {self._count(state)} points of {self._size(state)} slots, found "
                f"no room for more; give a larger {self.capacity!r}, or run in inference.Driver, "
                "which doubles it."
            )
        return f"{self._count(state)} points"

    # The driver gives a state that is full more slots.

    def needs_host(self, state: HistoryState) -> Array:
        """Whether more points than slots were probable."""
        return state.full

    def on_host(self, states: Sequence[HistoryState]) -> list[HistoryState]:
        """The states with twice as many slots; a sweep draws the new ones before it uses them."""
        size, history = self._size(states[0]), self.reading.history
        if 2 * size > self.max_capacity:
            [count, *_] = [self._count(state) for state in states if state.full]
            raise RuntimeError(
                f"LatentHistory: found {count} points that left no data, with {size} slots, and "
                f"max_capacity is {self.max_capacity}. A base density that is nearer to the data "
                "has fewer; or raise max_capacity (time grows as its cube)."
            )
        doubled = lambda old: jnp.concatenate([old, jnp.zeros_like(old)])
        wider = lambda values: (
            values | {name: doubled(values[name]) for name in (*history.places, history.noise)}
        )
        return [
            state._replace(values=wider(state.values), full=jnp.zeros_like(state.full))
            for state in states
        ]

    def arguments(self, values: dict[str, Any]) -> dict[str, Any]:
        """The model's argument for the number of slots, as many as `values` have."""
        return {self.capacity: len(values[self.reading.history.noise])}

    # The parts of a sweep.

    def _exchanged(
        self,
        rng_key: Array,
        program: Program,
        history: HistorySites,
        values: dict[str, Any],
        function: Array,
    ):
        log_count = history.log_count(program, values)
        log_events = history.log_events(program, values, function)
        counts = jnp.arange(history.capacity + 1)

        def one_round(key: Array, at: tuple[Array, ...]) -> tuple[Array, ...]:
            order, count, is_full = at
            order_key, window_key, count_key, swap_key = random.split(key, 4)
            order = order[shuffled(order_key, count, history.capacity)]
            is_inside = _within(_window(window_key, count, history.capacity), counts)
            log_joint = log_count + jnp.append(0.0, jnp.cumsum(log_events[order]))
            logits = jnp.where(is_inside, log_joint, -jnp.inf)
            count = random.categorical(count_key, logits).astype(count.dtype)
            partner = _partners(count, history.capacity)
            gain = log_events[order[partner]] - log_events[order]
            swaps = (jnp.arange(history.capacity) < count) & (
                jnp.log(random.uniform(swap_key, gain.shape)) < gain
            )
            return _swapped(order, partner, swaps), count, is_full | _is_full(logits)

        start = jnp.arange(history.capacity), values[history.count], jnp.zeros((), bool)
        keys = random.split(rng_key, self.num_rounds)
        order, count, is_full = lax.fori_loop(
            0, self.num_rounds, lambda i, at: one_round(keys[i], at), start
        )
        places = {name: values[name][order] for name in history.places}
        return {**values, **places, history.count: count}, function[order], is_full

    def _relocated(
        self,
        rng_key: Array,
        program: Program,
        history: HistorySites,
        values: dict[str, Any],
        function: Array,
    ):
        """Each used slot proposes a place nearby, as far as unused slots can hold the proposals."""
        size_key, step_key, noise_key, accept_key = random.split(rng_key, 4)
        count = values[history.count]
        is_used, partner = jnp.arange(history.capacity) < count, _partners(count, history.capacity)
        size = 10.0 ** random.uniform(size_key, minval=-2.0, maxval=0.0)
        proposed = dict(values)
        for i, name in enumerate(history.places):
            old, noise = (
                values[name],
                random.normal(random.fold_in(step_key, i), values[name].shape),
            )
            step = size * self.reading.scale[name] * noise
            proposed[name] = jnp.where(like(is_used, step), old, (old + step)[partner])
        level, root = history.function_of(program, proposed)
        noise = jnp.where(
            is_used[:, None],
            history.noise_of(level, root, function),
            random.normal(noise_key, function.shape),
        )
        function = history.values_of(level, root, noise)
        density = history.log_places(program, proposed) + history.log_events(
            program, proposed, function
        )
        is_tried = is_used & (partner != jnp.arange(history.capacity))
        accepts = is_tried & (
            jnp.log(random.uniform(accept_key, density.shape)) < density[partner] - density
        )
        order = _swapped(jnp.arange(history.capacity), partner, accepts)
        moved = jnp.sum(accepts) / jnp.maximum(jnp.sum(is_tried), 1)
        return (
            {**proposed, **{name: proposed[name][order] for name in history.places}},
            function[order],
            moved,
        )

    def _settled(
        self,
        rng_key: Array,
        program: Program,
        history: HistorySites,
        values: dict[str, Any],
        function: Array,
    ):
        """The noise for the new order of the slots; then moves of scales, noise and count."""
        window_key, fresh_key, move_key, count_key = random.split(rng_key, 4)
        values = history.refreshed(fresh_key, program, values)
        level, root = history.function_of(program, values)
        noise, count = history.noise_of(level, root, function), values[history.count]
        values[history.noise] = jnp.where(
            (jnp.arange(history.capacity) < count)[:, None], noise, values[history.noise]
        )
        window, field = _window(window_key, count, history.capacity), self.reading.field
        by_count = self._by_count(program, history, values, window)
        seen = {name: jnp.ones(program.sites[name].shape[0], bool) for name in field.functions}
        seen[history.function] = jnp.arange(history.capacity) < window[1]  # those that may be used
        log_events = lambda function: logsumexp(by_count(function))
        values, *taken = move_field(
            move_key,
            field,
            program,
            values,
            jnp.concatenate(list(seen.values())),
            log_events,
            self.num_steps,
            self.num_trajectories,
        )
        logits = by_count(field.function(program, values))
        values[history.count] = random.categorical(count_key, logits).astype(count.dtype)
        return values, _is_full(logits), *taken

    def _by_count(
        self,
        program: Program,
        history: HistorySites,
        values: dict[str, Any],
        window: tuple[Array, Array],
    ) -> Callable:
        """The log probability of each count in a window and of all events, jointly.

        It is returned as a function of the functions' values; other counts have -inf.
        """
        field, used = self.reading.field, history.all_used(program, values)
        is_inside = _within(window, jnp.arange(history.capacity + 1))
        log_count = jnp.where(is_inside, history.log_count(program, values), -jnp.inf)

        def by_count(function: Array) -> Array:
            rest, events = field.log_events(program, used, function, history.events)
            return rest + log_count + jnp.append(0.0, jnp.cumsum(events))

        return by_count

    def _size(self, state: HistoryState) -> int:
        return len(state.values[self.reading.history.noise])

    def _count(self, state: HistoryState) -> int:
        return int(state.values[self.reading.history.count])


def _read(shown: Program, owned: list[str], others: list[str]) -> HistoryReading:
    history = read_history(shown)
    history.prove(shown, random.key(0))
    scale = history.scale_of_places(shown, random.key(0))
    if absent := [name for name in others if name in history.sites]:
        raise StructureError(
            f"LatentHistory draws {list(history.sites)}, and {absent} belong to another block of "
            "Gibbs."
        )
    own_alone = [name for name in owned if name == history.noise or name not in history.sites]
    return HistoryReading(
        history, read_field(shown, history.noise, own_alone).proved(shown, random.key(0)), scale
    )


def _window(rng_key: Array, count: Array, capacity: int) -> tuple[Array, Array]:
    """The first and the last count of a random window around a count.

    The window is equally probable from each count inside, so a draw among these is a Gibbs step. It
    is as wide as a quarter of the capacity, so no more unused slots are needed.
    """
    width = max(2, capacity // 4)
    first = count - random.randint(rng_key, (), 0, width)
    return first, first + width - 1


def _within(window: tuple[Array, Array], counts: Array) -> Array:
    return (counts >= window[0]) & (counts <= window[1])


def _is_full(logits: Array) -> Array:
    """Whether counts beyond the last one are probable, by the probability of that one."""
    return logits[-1] > jnp.log(SPARE) + logsumexp(logits)


def _partners(count: Array, capacity: int) -> Array:
    """The partner of each slot: used and unused slots are paired; a slot left over is its own."""
    here = jnp.arange(capacity)
    there = jnp.where(here < count, here + count, here - count)
    return jnp.where((there < capacity) & (here < 2 * count), there, here)


def _swapped(
    order: Int[Array, " slot"], partner: Int[Array, " slot"], accepts: Bool[Array, " slot"]
) -> Int[Array, " slot"]:
    return jnp.where(accepts | accepts[partner], order[partner], order)
