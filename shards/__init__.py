"""Bytes at rest: storage, sources, packing, index, verification and the pure sample order. Never imports torch."""
