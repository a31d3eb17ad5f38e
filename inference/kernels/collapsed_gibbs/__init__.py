"""Gibbs sampling of the partition of a mixture whose groups are integrated out: a chain.

Each sweep takes every row out of its group, and puts it back by its complete conditional.

    kernel   `CollapsedGibbs`, a NumPyro kernel and a block of NumPyro's Gibbs
    sweep    one sweep over the rows, and the table of their groups
"""
