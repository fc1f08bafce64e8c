"""Measurements that users can repeat; their results are kept beside them as data, with the command that made them."""
