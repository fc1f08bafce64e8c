"""Makes the card of a dataset: one page that shows what is in it."""
