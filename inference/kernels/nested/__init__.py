"""Nested sampling of any model with continuous latent sites, and a finish by importance sampling.

kernel              `NestedSampler`
nesting             a sampler at work on a model: the start, a step, draws that births are offered
state               live points, dead ones, and what is known of them
deaths              who dies, who is copied, insertion ranks
volumes             simulated prior volumes, the evidence and its error
modes               which live points hang together
relabel             label switching: members that may change places are named alike
importance_finish   `ImportanceFinish`
"""
