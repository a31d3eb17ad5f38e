"""Learning in stages: a part of the rows at a time, each stage from a summary of those before.

kernel           `Staged`: which stage comes next, what it starts from, the results
search           the search for a proposal of the nested sampling of a stage
peaks            Normal mixtures near the peaks of a posterior
weighing         importance weighting by all rows so far, and the account of evidence and errors
hilbert_clumps   `HilbertClumps`, the paper's summary
merge            `MergedStages`: several runs on different rows become one posterior
"""
