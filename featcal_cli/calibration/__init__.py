"""The method: Algorithm 1, normal equations, closed forms, hyperparameters."""
