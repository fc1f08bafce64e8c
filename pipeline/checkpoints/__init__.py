"""Checkpoints: fragments of tensors in files, manifests, attempts, and which of them count.

What only describes a checkpoint is loaded without torch: a light process can write and read manifests.
"""
