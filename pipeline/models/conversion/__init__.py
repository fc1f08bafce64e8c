"""Reads and writes weights of other libraries: published .npz files, timm, Hugging Face. Nothing is unpickled."""
