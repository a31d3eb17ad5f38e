"""Distributions that NumPyro lacks: partitions, data with missing entries, integers with a Normal behind them, orders of models."""

from inference.distributions._crp import CRP
from inference.distributions._missing import Missing
from inference.distributions._orders import PositivePoisson, Zeta
from inference.distributions._probit import BinomialProbit, OrderedProbit

__all__ = ["CRP", "BinomialProbit", "Missing", "OrderedProbit", "PositivePoisson", "Zeta"]
