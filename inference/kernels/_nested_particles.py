"""Weighted points of a nested sampler, as a group of the tree."""

from jax import Array

from inference.protocol import Results

__all__ = ["particles"]


def particles(named: dict[str, Array], **beside: Array) -> Results:
    """The group `particles`: what is known of each point, and its sites."""
    named = {name.replace("/", "."): value for name, value in named.items()}
    return Results({"particles": beside | named}, {}, dict.fromkeys(beside | named, ("particle",)))
