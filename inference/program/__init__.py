"""A model with its arguments, and what may be asked of it.

program     `Program`: sites, plates, terms, transforms, rows, draws
sites       what a trace says of each site and plate; checks of data and settings
compiling   hashes of traced code, and compiled code that is remembered in this process
"""
