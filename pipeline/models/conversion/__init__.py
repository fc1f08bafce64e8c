"""Weights of others, read and written: published .npz files, timm's, Hugging Face's. Nothing is unpickled."""
