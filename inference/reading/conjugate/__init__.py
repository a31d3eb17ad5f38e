"""Conjugate pairs: what a prior and a likelihood must offer, and which pairs there are.

The parameters of such a pair can be integrated out.

pairs       the interface of a pair, and the functions that pairs share
counts      Beta-Bernoulli, Dirichlet-categorical, Gamma-Poisson
normal      normal distributions of unknown mean and variance, or precision matrix
table       the table of pairs, its look-up, and `register_conjugate`
quadratic   normal priors of linear predictors, in natural parameters
loadings    the loadings and the noise of a factor analysis
"""
