"""Variational Bayes for truncated mixtures of conjugate blocks, by coordinate ascent or by batches
of rows.

kernel         `CoordinateAscent`, and the route for mixtures of features
rows           the factors of a row: its group, its missing entries, its soft labels
posterior      the factors of the groups, from sums over the rows
sticks         the factors of the sticks, and of the level above
start          groups of the rows before the first sweep
draws          draws from q, with their density
predict        groups, missing entries and labels of other rows
factors        the route for mixtures among common factors, with its start
factor_rows    the factors of a row there
factor_draws   draws and predictions there
"""
