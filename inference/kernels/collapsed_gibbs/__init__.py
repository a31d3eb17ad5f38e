"""Gibbs sampling of the partition of a mixture whose groups are integrated out: a Markov chain.

Each sweep takes every row out of its group, and draws a new group by its complete conditional.

    kernel   one sweep over the rows, and `CollapsedGibbs`, a block of NumPyro's Gibbs
"""
