"""Sequential Monte Carlo over the rows, a stage at a time, by powers of the likelihood.

kernel   `DataTempering`; exponents are in `inference.maths.resampling`, moves in `slice_walk`
"""
