"""The ground: errors, files, processes, devices, memory, text of strangers, logs."""
