"""Variational Bayes for truncated stick-breaking mixtures of conjugate blocks.

The evidence bound rises by coordinate ascent, or by natural-gradient steps on batches of rows.

kernel        `CoordinateAscent`, and the strategy for mixtures of features
factors       the strategy for mixtures among common factors
rows          q of a row: its group, its missing entries, its soft labels
factor_rows   q of a row whose features are sums of common factors
posterior     q of sticks, parameters of groups and weights of experts
start         groups of the rows before the first sweep
merges        which groups to merge once sweeps gain little
draws         draws from q, with their density
predict       groups, missing entries and labels of other rows
"""
