"""Checks of this machine: disks, GPUs, network and speed, each given up at a deadline."""
