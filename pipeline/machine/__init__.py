"""Checks of this machine: disks, GPUs, network and speed, each with a deadline; and the parts of `doctor --gpu`."""
