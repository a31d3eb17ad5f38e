"""A model with its arguments, and what may be asked of it.

program     `Program`: sites, plates, terms, transforms, rows, draws
sites       what a trace says of each site and plate; checks of settings
checks      whether the log joint is finite for the data
compiling   hashes of traced code, and compiled code that is remembered in this process
interpreting
            traced code that NumPy runs, where a compiler would take longer than the code
"""
