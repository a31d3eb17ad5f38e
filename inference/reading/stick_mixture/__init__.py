"""A truncated stick-breaking mixture of conjugate blocks, read off a model.

`CoordinateAscent` and `ConditionalGibbs` use it.

structure   `Assignment`: which site plays which part, the numbers of its priors, its data by row
read        finds the structure in a program, and proves it site by site
"""
