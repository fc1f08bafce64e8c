"""Makes a dataset from a source of images: lists the source, then runs the phases scan, plan, shards and merge."""
