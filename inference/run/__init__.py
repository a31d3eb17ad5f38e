"""One run: the driver and its parts.

protocol      what kernels owe the driver: `Algorithm`, and `GibbsBlock` for chains
driver        `Driver`: settings, `run`, `extend`, `update`, `tree`
loop          the compiled loop, over steps of a chain or of an algorithm
session       a run under way: chunks, saves, stops, signals, the bar
result        what a run is (its identity) and what it leaves behind (its tree)
store         records in memory, or in a checkpoint folder
stopping      rules that end a run early
citations     what to cite for a run
svi           NumPyro's SVI as an algorithm
"""
