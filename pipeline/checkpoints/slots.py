"""What is saved of each parameter beside the optimiser's moments, which keep PyTorch's names."""

MASTER = "master"
AVERAGE = "average"
