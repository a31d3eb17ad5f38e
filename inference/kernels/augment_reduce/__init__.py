"""Stochastic variational EM for choices among very many classes.

kernel            `AugmentReduce`: a step draws some rows and some classes
noise_posterior   q of the noise of a row, in closed form or by draws
weights           the rows of the weights that a step asks for
row_optimizer     steps of weights of which each step touches some rows
"""
