"""Inference kernels, a folder a kernel: `kernel.py` has the class, and each `__init__.py` says
which file does what.
"""
