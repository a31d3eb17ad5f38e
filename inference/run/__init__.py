"""One run: the driver and its parts.

protocol      the protocols of kernels: `Algorithm`, and `GibbsBlock` for chains
driver        `Driver`: settings, `run`, `extend`, `update`, `tree`
loop          the compiled loop, over steps of a chain or of an algorithm
session       a run under way: chunks, saves, stops, signals, the bar
result        the identity of a run, for its checkpoint, and the tree that it returns
store         records in memory, or in a checkpoint folder
stopping      rules that end a run early
command       what a kernel says of itself to a command line
cluster       runs as tasks of a Dask cluster
svi           NumPyro's SVI as an algorithm
"""
