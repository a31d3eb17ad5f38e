"""A truncated stick-breaking mixture of conjugate blocks.

`CoordinateAscent` and `ConditionalGibbs` read it.

structure   `Assignment`: the part of each site, hyper-parameters, data by row
read        finds the structure in a program, and proves it site by site
"""
