"""Nested sampling of any model with continuous latent sites, and a finish by importance sampling.

kernel              `NestedSampler`, and `Nesting`, its steps, which `Staged` has as well
state               live points and their modes, who dies and who is copied, prior volumes
importance_finish   `ImportanceFinish`
"""
