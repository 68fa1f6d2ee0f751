"""Studies on top of the core: plans, shardings, validation, checks of hand-offs, predictors."""
