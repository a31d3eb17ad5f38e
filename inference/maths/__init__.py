"""Functions of arrays: no model, no state.

resampling       systematic, multinomial and optimal resampling, effective sample size
slice_walk       slice sampling of many particles above a limit of the likelihood
tempering        powers of a likelihood: the next exponent, MCMC moves, the error by genealogies
normal_mixture   Normal mixtures fitted by EM and score matching; defensive mixtures
hilbert          codes along a Hilbert curve
orthants         probabilities of orthants under a multivariate Normal
"""
