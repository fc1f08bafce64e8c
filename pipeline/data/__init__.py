"""The data loader: it plans reads, decodes and augments images, and returns batches of uint8 images."""
