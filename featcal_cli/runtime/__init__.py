"""Foundations that every other package uses: errors, files, processes, devices, memory, sanitising, logs."""
