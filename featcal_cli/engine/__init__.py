"""Run expert and students block by block, side by side, with hooks, token weights, offloading and drift metrics."""
