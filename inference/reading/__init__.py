"""Structures that may be found in a model, and one engine that proves them.

proof            identities at random settings of the sites; raises `StructureError` by the site
conditional      the complete conditional of a site, by differentiating the log joint
families         the families that such a conditional may have
conjugate/       the table of conjugate pairs, and `register_conjugate`
crp_mixture      a partition of the rows by a CRP, with conjugate components (partition routes)
stick_mixture/   a truncated stick-breaking mixture of conjugate blocks
factor_mixture   such a mixture among common factors behind many features
crossed          a crossed predictor: matrix factors, features, row and column effects
density          prior and likelihood over one vector without bounds; label switching
stage_rows       the rows that are dealt out to stages
history, field   a latent history of a process, and the functions of a Gaussian process
row_table        tables of weights of which a step asks for some rows
"""
