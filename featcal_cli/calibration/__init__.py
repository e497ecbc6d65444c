"""The calibration method: Algorithm 1 of the paper, normal equations, closed-form solutions and hyperparameters."""
