"""The foundation of every other package: errors, files, processes, devices, memory, sanitising, logs."""
