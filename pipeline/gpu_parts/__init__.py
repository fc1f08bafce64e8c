"""The measurements of `patchline doctor --gpu`, each part in a separate process."""
