"""Inference kernels, one folder for each.

In a folder `kernel.py` has the class, and `__init__.py` says which file does what.
"""
