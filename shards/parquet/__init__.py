"""Parquet files from strangers: footers and pages are checked before Arrow reads them."""
