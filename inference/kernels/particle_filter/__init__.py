"""Sequential Monte Carlo over the rows of a mixture whose groups are integrated out.

Every particle is a partition of the rows so far. A row may go into each group of each particle;
these candidates are weighed, and a resampling scheme keeps some of them.

    kernel       `ParticleFilter`: settings, the state, a step, the tree
    candidates   weighs the candidates of one row; resampling; rejuvenation; filters of classes
                 joined into one
    groups       the table of distinct groups that particles share
    ancestry     which row went where, by the genealogy of the particles
    predict      class probabilities, imputation and draws of other rows
"""
