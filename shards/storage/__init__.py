"""Where bytes lie: folders and S3 buckets behind one interface."""
