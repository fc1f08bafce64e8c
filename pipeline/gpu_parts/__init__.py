"""The measurements of `patchline doctor --gpu`, each part in a process of its own."""
