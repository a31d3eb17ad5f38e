"""Distributions that NumPyro lacks.

They are partitions of rows, data with missing entries, probit regression, discrete choice, and
orders of a model; and a faster product of normal distributions.
"""

from inference.distributions.diagonal import DiagonalNormal
from inference.distributions.missing import Missing
from inference.distributions.noise import Below, Choice, expectation_nodes, log_cdf
from inference.distributions.orders import PositivePoisson, Zeta
from inference.distributions.partitions import CRP, ExchangeablePartition, PitmanYor
from inference.distributions.probit import BinomialProbit, OrderedProbit

__all__ = [
    "CRP",
    "Below",
    "BinomialProbit",
    "Choice",
    "DiagonalNormal",
    "ExchangeablePartition",
    "Missing",
    "OrderedProbit",
    "PitmanYor",
    "PositivePoisson",
    "Zeta",
    "expectation_nodes",
    "log_cdf",
]
