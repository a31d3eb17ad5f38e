"""What the commands of `zoo` do, one module an idea.

`gallery.cli` imports them when they are asked for.
"""

__all__: list[str] = []
