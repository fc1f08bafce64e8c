"""Checkpoints: fragments of tensors in files, manifests, attempts, and which checkpoints count.

Modules that only describe checkpoints do not load torch, so a light process can write and read manifests.
"""
