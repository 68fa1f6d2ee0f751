"""Studies on top of the core: plans, shardings, validation, hand-off checks, predictors."""
