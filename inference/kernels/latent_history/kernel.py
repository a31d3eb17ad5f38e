"""Moves of a latent history: a chain, and a block of NumPyro's `Gibbs`.

    history, field = ["num_rejected", "rejected", "rejected_noise"], ["noise", "amplitude",
    "lengthscale"] Gibbs([(LatentHistory(model), history + field), (NUTS(model), None)])

Of the model, any with the structure of `inference.reading.history`, the kernel knows where points
were that left no data, and the values of functions there. Beside these sites it draws those of
`inference.reading.field` that it is given: the noise of the functions at the data, and their
scales. NUTS can draw them as well, but the scales then hardly move. A draw is one sweep:

1. Slots that are not used are drawn from the prior, functions included: they are the births that
   stand ready.
2. Points are exchanged, `num_rounds` times: used slots are put into a random order, the count is
   drawn from its conditional p(count) x product of the events' probabilities over the slots below
   it, within a window that is laid around it at random, and used slots are swapped with unused ones
   by Metropolis.
3. Each used point tries to go to a place nearby, at which the functions are drawn given all that is
   known of them; all at once,
for
   they are independent given the functions.
4. The noise of the used slots is computed anew for their order. Then, while the count is summed out
   within such a window, scales
take
   `num_steps` steps and all noise moves along `num_trajectories` (`surrogate`); the count is drawn
   at the end. With the count held, the level of the functions could hardly move: where they are low
   everywhere, lower ones only mean more points.

All densities are the model's own. Where the conditional of the count leaves room above the capacity
no more than a chance of `SPARE`, nothing is cut off; where it leaves more, the draw is `full`, and
the driver doubles the capacity, an argument of the model. In NumPyro's own `MCMC` nothing grows:
look at `full`, an extra field, and give more.

Cost of a sweep: O(K n^3), n = data and slots: 3 Cholesky factors of n points for each function, for
O(n) births, deaths and relocations, so O(K n^2) a move; 2 for each step of the scales; O(K n^2) for
each leap of a trajectory. A gradient of NUTS costs O(K n^3).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from jax.nn import logsumexp
from numpyro.util import is_prng_key

from inference.kernels.latent_history import surrogate as _surrogate
from inference.program.program import Program
from inference.program.sites import StructureError, check_whole
from inference.reading.field import Field, read_field
from inference.reading.history import History, like, read_history, shuffled
from inference.run.protocol import GibbsBlock, Reading

__all__ = ["HistoryReading", "HistoryState", "LatentHistory"]

SPARE = 1e-6  # chance, by the conditional of the count, that there is no slot left
WINDOWS = 4  # the count moves within a part of the capacity, so that not all of it need stand ready


@dataclass(frozen=True, eq=False)
class HistoryReading(Reading):
    """The history of a model, and the functions that it is of."""

    history: History
    field: Field
    scale: dict[str, Any]  # how far the prior spreads the places


class HistoryState(NamedTuple):
    """A draw, and what the next one needs."""

    values: dict[str, Array]  # of the sites that the kernel owns
    full: Array  # whether the draw came near the capacity
    moved: Array  # share of the used points that went to a place nearby, in the last sweep
    rescaled: Array  # share of the steps of scales that were taken, in the last sweep
    flown: Array  # share of the trajectories
    rng_key: Array


class LatentHistory(GibbsBlock):
    """Draws the history of `model`; runs in `Driver` and in `numpyro.infer.MCMC`, as a block of
    `Gibbs` beside NUTS.

    :param capacity: name of the model's argument that says how many slots there are.
    :param max_capacity: the most slots; a history that wants more ends the run with an error.
    :param num_rounds: exchanges of points in a sweep, cheap ones.
    :param num_steps: steps of the scales in a sweep.
    :param num_trajectories: of the noise in a sweep, by Hamiltonian Monte Carlo.
    """

    default_fields = ("values", "moved", "rescaled", "flown", "full")
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
        self.num_rounds, self.num_steps, self.num_trajectories = (
            num_rounds,
            num_steps,
            num_trajectories,
        )
        check_whole(1, max_capacity=max_capacity)

    # The protocol of NumPyro's kernels.

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs) -> HistoryState:
        """Reads the history and the field and proves them.

        `init_params` are values of sites, drawn where there are none.
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
        """How many points there are; raises where the capacity was met, which the driver's
        growing prevents.
        """
        if bool(state.full):
            raise RuntimeError(
                f"LatentHistory: {self._count(state)} points of {self._size(state)} slots, found "
                "no room for more; give a larger "
                f"{self.capacity!r}, or run in inference.Driver, which doubles it."
            )
        return f"{self._count(state)} points"

    # The driver gives a state that is full more slots.

    def needs_host(self, state: HistoryState) -> Array:
        """Whether the capacity may have cut something off."""
        return state.full

    def on_host(self, states: Sequence[HistoryState]) -> list[HistoryState]:
        """Twice the slots; the new ones are drawn before they serve."""
        size, slots = (
            self._size(states[0]),
            (*self.reading.history.places, self.reading.history.noise),
        )
        if 2 * size > self.max_capacity:
            [count, *_] = [self._count(state) for state in states if state.full]
            raise RuntimeError(
                f"LatentHistory: found {count} points that left no data, with {size} slots, and "
                "max_capacity is "
                f"{self.max_capacity}. A base density that is nearer to the data has fewer; or "
                "raise max_capacity (time grows as its cube)."
            )
        doubled = lambda old: jnp.concatenate([old, jnp.zeros_like(old)])
        wider = lambda values: values | {name: doubled(values[name]) for name in slots}
        return [
            state._replace(values=wider(state.values), full=jnp.zeros_like(state.full))
            for state in states
        ]

    def arguments(self, values: dict[str, Any]) -> dict[str, Any]:
        """What values of the slots say of the model's arguments."""
        return {self.capacity: len(values[self.reading.history.noise])}

    # The parts of a sweep.

    def _exchanged(
        self,
        rng_key: Array,
        program: Program,
        history: History,
        values: dict[str, Any],
        function: Array,
    ):
        """Which slots are used, and how many: rounds of an exact draw of the count and of swaps,
        given the functions everywhere.
        """
        log_count = history.log_count(program, values)
        log_events = history.log_events(program, values, function)
        counts = jnp.arange(history.capacity + 1)

        def one_round(key: Array, at: tuple[Array, ...]) -> tuple[Array, ...]:
            order, count, is_full = at
            order_key, window_key, count_key, swap_key = random.split(key, 4)
            order = order[shuffled(order_key, count, history.capacity)]
            is_near = _within(_window(window_key, count, history.capacity), counts)
            logits = jnp.where(
                is_near, log_count + jnp.append(0.0, jnp.cumsum(log_events[order])), -jnp.inf
            )
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
        history: History,
        values: dict[str, Any],
        function: Array,
    ):
        """Each used slot, as far as unused ones are there to hold its proposal, tries to go to a
        place nearby.
        """
        size_key, step_key, noise_key, accept_key = random.split(rng_key, 4)
        count = values[history.count]
        is_used, partner = jnp.arange(history.capacity) < count, _partners(count, history.capacity)
        size = 10.0 ** random.uniform(size_key, minval=-2.0, maxval=0.0)
        proposed = dict(values)
        for i, name in enumerate(history.places):
            step = (
                size
                * self.reading.scale[name]
                * random.normal(random.fold_in(step_key, i), values[name].shape)
            )
            proposed[name] = jnp.where(
                like(is_used, step), values[name], (values[name] + step)[partner]
            )
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
        history: History,
        values: dict[str, Any],
        function: Array,
    ):
        """The noise for the order that the slots now have; then scales, noise and the count move
        within a window of counts.
        """
        window_key, fresh_key, move_key, count_key = random.split(rng_key, 4)
        values = history.refreshed(fresh_key, program, values)
        level, root = history.function_of(program, values)
        noise, count = history.noise_of(level, root, function), values[history.count]
        values[history.noise] = jnp.where(
            (jnp.arange(history.capacity) < count)[:, None], noise, values[history.noise]
        )
        window, field = _window(window_key, count, history.capacity), self.reading.field
        by_count, may_be_used = (
            self._by_count(program, history, values, window),
            jnp.arange(history.capacity) < window[1],
        )
        seen = [
            may_be_used
            if name == history.function
            else jnp.ones(program.sites[name].shape[0], bool)
            for name in field.functions
        ]
        log_events = lambda function: logsumexp(by_count(function))
        values, *taken = _surrogate.moved(
            move_key,
            field,
            program,
            values,
            jnp.concatenate(seen),
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
        history: History,
        values: dict[str, Any],
        window: tuple[Array, Array],
    ) -> Callable:
        """Log probability of each count of a window and of all that happened, given the values
        of the functions.
        """
        field, counts, used = (
            self.reading.field,
            jnp.arange(history.capacity + 1),
            history.all_used(program, values),
        )
        log_count = jnp.where(_within(window, counts), history.log_count(program, values), -jnp.inf)

        def by_count(function: Array) -> Array:
            rest, events = field.log_events(program, used, function, history.events)
            return rest + log_count + jnp.append(0.0, jnp.cumsum(events))

        return by_count

    def _size(self, state: HistoryState) -> int:
        return len(state.values[self.reading.history.noise])

    def _count(self, state: HistoryState) -> int:
        return int(state.values[self.reading.history.count])


def _read(shown: Program, owned: list[str], others: list[str]) -> HistoryReading:
    """The history and its field, proved."""
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
    """The first and the last of the counts among which it moves: laid around it at random, so that
    from each the others are as likely.
    """
    width = max(2, capacity // WINDOWS)
    first = count - random.randint(rng_key, (), 0, width)
    return first, first + width - 1


def _within(window: tuple[Array, Array], counts: Array) -> Array:
    return (counts >= window[0]) & (counts <= window[1])


def _is_full(logits: Array) -> Array:
    """Whether more counts might follow: by those of the last one."""
    return logits[-1] > jnp.log(SPARE) + logsumexp(logits)


def _partners(count: Array, capacity: int) -> Array:
    """For each used slot an unused one, and the other way round, as far as they go; a slot
    without one is its own.
    """
    here = jnp.arange(capacity)
    there = jnp.where(here < count, here + count, here - count)
    return jnp.where((there < capacity) & (here < 2 * count), there, here)


def _swapped(order: Array, partner: Array, accepts: Array) -> Array:
    """The order in which each used slot that accepts has changed places with its partner."""
    return jnp.where(accepts | accepts[partner], order[partner], order)
