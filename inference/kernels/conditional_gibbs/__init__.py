"""Gibbs sampling of any model with conjugate sites: a chain that takes one of three routes.

kernel               `ConditionalGibbs`; route "each": one site after the other, by its complete
                     conditional
route                what a route must offer
crossed              route "crossed": the sites of a crossed predictor, such as a matrix
                     factorisation with effects of rows and columns, jointly
crossed_sides        all rows, or all columns, given the other side
crossed_components   switches, amplitudes and shared sites; moves of scale and intercepts
crossed_births       births and deaths of components, which change the rank, by annealed importance
                     sampling
mixture              route "mixture": a truncated stick-breaking mixture, rows and groups
mixture_predict      predictions by the draws of a run
"""
