"""What a kernel has read of the data of a run, kept while another run of the same kernel reads others.

Kernels keep what they read off a model in their attributes, and so do kernels inside them. Where drivers share a kernel, the last run that
began has read it; what an earlier one had read is put back before that one goes on, or tells what it has found. NumPyro's own kernels read
nothing after a run has begun.
"""

from typing import Any

from inference.protocol import Algorithm

__all__ = ["Reading", "forget"]

MARK = "_reading_of_run"  # the attribute of a kernel that says whose reading it has


class Reading:
    """The attributes of a kernel, and of those inside it, as a run has them."""

    def __init__(self, kernel: Any):
        forget(kernel)
        self.attributes = [(part, dict(vars(part))) for part in _readers(kernel)]
        self._mark()

    def recall(self) -> None:
        """Put back where another run has read since."""
        for part, known in self.attributes:
            if vars(part).get(MARK) is not self:
                vars(part).update(known)
        self._mark()

    def _mark(self) -> None:
        for part, _ in self.attributes:
            setattr(part, MARK, self)


def forget(kernel: Any) -> None:
    """A run begins, and reads."""
    for part in _readers(kernel):
        vars(part).pop(MARK, None)


def _readers(kernel: Any) -> list[Any]:
    """Algorithms and chains that grow: the kernel, and those inside it."""
    is_reader = lambda part: isinstance(part, Algorithm) or hasattr(part, "grown")
    blocks = [part for part, _ in getattr(kernel, "blocks", ())]
    inside = [value for value in vars(kernel).values() if is_reader(value)] + [part for part in blocks if is_reader(part)]
    return [kernel] * is_reader(kernel) + [each for part in inside for each in _readers(part)]
