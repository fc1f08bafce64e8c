"""One page that shows what is in a dataset."""
