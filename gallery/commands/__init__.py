"""The commands of `zoo`.

`gallery.cli` imports them when they are asked for.
"""

__all__: list[str] = []
