"""Gibbs sampling of any model with conjugate sites: a Markov chain.

A *route* draws the sites of a known structure jointly; the kernel draws the others one by one.

kernel               `ConditionalGibbs`; route "each": every site by its own complete conditional
route                what a route must offer
crossed              route "crossed": the sites of a crossed predictor, such as effects of rows and
                     columns or the components of a matrix factorisation
crossed_sides        the sites of all rows given those of the columns, or the reverse
crossed_components   switches, amplitudes and shared sites; moves of scale and intercepts
crossed_births       births and deaths of components, which change the rank, by annealed importance
                     sampling
mixture              route "mixture": a truncated stick-breaking mixture, rows and groups
mixture_predict      predictions by the draws of a run
"""
