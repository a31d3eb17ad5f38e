"""Moves of the points that a process has rejected on its way to the data, and of a Gaussian process
at them: a chain.

kernel      `LatentHistory`: exchanges, relocations, the count
surrogate   scales and noise of the functions, by surrogate data and Hamiltonian trajectories
"""
