"""The commands (calibrate, inspect_drift, evaluate, demo), as called by the command line and by Python users, and their
steps."""
