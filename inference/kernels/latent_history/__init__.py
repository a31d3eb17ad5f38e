"""MCMC moves of latent histories.

A latent history is the points that a process rejected on its way to the data, with the values of a
Gaussian process at them.

kernel      `LatentHistory`: births, deaths and relocations of points
surrogate   scales and noise of the functions, by surrogate data and Hamiltonian trajectories
"""
