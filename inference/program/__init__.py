"""A model with its arguments, and what may be asked of it.

program     `Program`: sites, plates, terms, transforms, rows, draws
sites       what a trace says of each site and plate
checks      whether data and model can give a finite density, before anything is compiled for long
hashing     one hash of arrays, and one of traced code
compiling   compiled code that is remembered in this process
"""
