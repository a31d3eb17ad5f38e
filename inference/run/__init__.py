"""One run: the driver and its parts.

protocol      what an algorithm owes the driver: eight pure functions
driver        `Driver`: settings, `run`, `extend`, `update`, `tree`
steppers      chains and algorithms behind one face
session       chunks, saves and stops of a run under way
loop          the compiled loop
result        what a run is (its identity) and what it leaves behind (its tree)
store         records in memory, or in a checkpoint folder
stopping      rules that end a run early
signals       Ctrl-C and SIGTERM between two chunks
progress      the bar
settings      checks of settings that are numbers
citations     what to cite for a run
svi           NumPyro's SVI as an algorithm
gibbs_block   what our chain kernels share as blocks of NumPyro's Gibbs
"""
