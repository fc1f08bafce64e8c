"""Makes a dataset from a source of images: lists it, then goes through the phases scan, plan, shards and merge."""
