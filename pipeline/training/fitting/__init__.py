"""What fits into memory: the batch plan that a device and its host can hold."""
