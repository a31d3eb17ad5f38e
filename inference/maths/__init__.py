"""Functions of arrays: no model, no state.

host             what work on the host takes: random numbers by NumPy, chunks of rows
resampling       resampling schemes; tempering of a likelihood, and the error by genealogies
slice_walk       slice sampling of many particles above a limit of the likelihood
normal_mixture   Normal mixtures fitted by EM and score matching; defensive mixtures
hilbert          codes along a Hilbert curve
orthants         probabilities of orthants under a multivariate Normal
"""
