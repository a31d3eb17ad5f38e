"""Gibbs sampling of any model with conjugate sites, by one of three routes: a chain.

kernel               `ConditionalGibbs`; route "each": one site after the other, by its complete
                     conditional
route                what a route must offer
crossed              route "crossed": the sites of a crossed predictor, jointly
crossed_sides        all rows, or all columns, given the other side
crossed_components   components one after the other, their scale integrated out
crossed_births       components that are born or die: annealed importance sampling from a mean-field
                     guess
mixture              route "mixture": a stick-breaking mixture, rows and groups
mixture_groups       all that belongs to groups, given the rows
mixture_splits       split and merge moves
mixture_predict      predictions by the draws of a run
"""
