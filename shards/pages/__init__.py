"""HTML pages and the plots on them."""
