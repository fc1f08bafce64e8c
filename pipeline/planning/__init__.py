"""Predicts what a run will cost: FLOPs, GPUs, its time, and the share of that time that failures leave for training."""
