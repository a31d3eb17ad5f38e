"""Conjugate pairs: their interface, and the pairs themselves.

pairs       the interface of a pair, and the functions that pairs share
counts      Beta-Bernoulli, Dirichlet-categorical, Gamma-Poisson
normal      normal distributions of unknown mean and variance, or precision matrix
table       the table of pairs, its look-up, and `register_conjugate`
quadratic   normal priors of linear predictors, in natural parameters
loadings    the loadings and the noise of a factor analysis
"""
