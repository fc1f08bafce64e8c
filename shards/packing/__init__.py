"""Makes a dataset of a source: listing, scan, plan, shards, merge."""
