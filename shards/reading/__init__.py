"""A stream's reader: planned reads, one window ahead, in threads that one call closes."""
