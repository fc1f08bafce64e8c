"""Checks of this machine: disks, GPUs, network and speed. Each check has a deadline."""
