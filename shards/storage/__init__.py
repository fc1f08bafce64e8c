"""Reads and writes bytes in folders and S3 buckets, behind one interface."""
