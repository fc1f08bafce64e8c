"""From a source to a dataset: listing, scan, plan, shards, merge."""
