"""Readings: structures found in a model, and the engine that proves them.

proof            checks identities at random values; `StructureError` names the site that fails
conditional      the complete conditional of a site, by differentiating the log joint
conjugate/       the table of conjugate pairs, and `register_conjugate`
crp_mixture      a CRP partition of the rows, whose conjugate groups can be integrated out
stick_mixture/   a truncated stick-breaking mixture of conjugate blocks
factor_mixture   such a mixture among common factors behind many features
crossed          a crossed predictor: matrix factors, features, row and column effects
density          prior and likelihood over one unconstrained vector; label switching
stage_rows       the rows that are dealt out to the stages of `Staged` and `DataTempering`
history, field   a latent history of a process, and the functions of a Gaussian process
row_table        sites with a row for each class, of which a step needs some rows only
"""
