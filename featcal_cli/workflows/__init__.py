"""The verbs: calibrate, inspect_drift, evaluate, demo; what they check before, and what they write."""
