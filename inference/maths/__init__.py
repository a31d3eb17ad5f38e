"""Functions of arrays: no model, no state.

resampling       systematic, multinomial and optimal resampling, effective sample size
slice_walk       slice sampling above a limit of the likelihood, along directions between points
tempering        powers of a likelihood: the next exponent, moves, the error by genealogies
normal_mixture   mixtures of Normals fitted to weighted points, or to slopes of a density
summary          what a summary of weighted points is, how many clumps it has, and what it loses
hilbert          codes along a Hilbert curve
orthants         probabilities of orthants under a multivariate Normal
"""
