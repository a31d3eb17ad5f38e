"""Inference kernels, one file a kernel."""

from inference.kernels.stochastic_vi import StochasticVI

__all__ = ["StochasticVI"]
