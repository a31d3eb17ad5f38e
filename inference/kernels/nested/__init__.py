"""Nested sampling of any model with continuous latent sites, and a finish by importance sampling.

kernel              `NestedSampler`
nesting             the start, the steps and the offers of nested sampling on a model
state               live points and their modes, who dies and who is copied, prior volumes
importance_finish   `ImportanceFinish`
"""
