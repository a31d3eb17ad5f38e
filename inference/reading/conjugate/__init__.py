"""Conjugate pairs: what a prior and a likelihood must offer to be integrated out, and which pairs
there are.

pairs       the interface of a pair, and what pairs of columns have in common
table       the table, how it is looked up, and `register_conjugate`
counts      Beta-Bernoulli, Dirichlet-categorical, Gamma-Poisson
normal      Normals of unknown mean and variance, or precision matrix
derived     a pair all of whose functions follow from the densities of its two distributions
quadratic   Normal priors of linear predictors, in natural parameters
loadings    the loadings and the noise of a factor analysis
"""
