"""Stochastic variational EM for choices among very many classes (augment and reduce).

kernel            `AugmentReduce`: a step draws some rows and some classes
noise_posterior   q of the noise of a row, in closed form or by draws
weights           rows of the weights in a step: layout, optimiser, prior
"""
