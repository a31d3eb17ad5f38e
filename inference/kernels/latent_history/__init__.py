"""Latent histories: MCMC moves of the points that a process rejected on its way to the data.

The values of a Gaussian process at these points are moved as well.

kernel      `LatentHistory`: births, deaths and relocations of points
surrogate   scales and noise of the functions, by surrogate data and Hamiltonian trajectories
"""
