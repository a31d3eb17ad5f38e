"""Nested sampling of any model with continuous latent sites, and a finish by importance sampling.

kernel              `NestedSampler`
nesting             the start, the steps and the offers of nested sampling on a model
state               live points, dead points, simulated prior volumes and the evidence
live_points         which die, which are copied, insertion ranks, separate modes
importance_finish   `ImportanceFinish`
"""
