"""Sequential Monte Carlo over the rows, a stage at a time, by powers of the likelihood.

kernel   `DataTempering`; moves and exponents are in `inference.maths.tempering`
"""
