"""Makes a dataset from a source of images, in five phases: listing, scan, plan, shards, merge."""
