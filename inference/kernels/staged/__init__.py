"""Learning in stages: a part of the rows at a time, each stage from a summary of those before.

kernel           `Staged`: which stage comes next, and the account of evidence and losses
search           what a stage goes over in place of what it starts from
peaks            walkers that climb to peaks, and slice sample outwards from them
climbing         Normals near a peak, by the slopes of the posterior
weighing         what was found, weighed by all rows so far
hilbert_clumps   the paper's summary: clumps on Hilbert codes
merge            `MergedStages`: what workers have learned apart
"""
