"""Patchline's bytes at rest: storage, sources, packing, index, verification, sample order. Never imports torch."""
