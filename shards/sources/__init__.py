"""Image collections as they are found. Each yields entries and the bytes of its images."""
