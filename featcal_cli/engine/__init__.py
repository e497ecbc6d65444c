"""Expert and students run block by block side by side: hooks, token weights, offload, drift metrics."""
