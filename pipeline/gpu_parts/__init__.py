"""What `patchline doctor --gpu` measures, each part in a process of its own."""
