"""Sequential Monte Carlo over the rows of a mixture whose groups are integrated out.

Every particle is a partition of the rows so far. A row may join each group of each particle; these
candidates are weighted, and a resampling scheme keeps some of them.

    kernel      `ParticleFilter`: settings, the state, a step, the tree
    particles   the table of groups that particles share; candidates, their resampling (`choose`),
                Gibbs steps on past rows, joining the filters of the classes; the genealogy, from
                which the group of every row is read
    predict     class probabilities, imputation and draws of new rows

The resampling schemes themselves are in `inference.maths.resampling`, which tempering shares.
"""
