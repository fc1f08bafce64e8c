"""Sources of images, in the layouts in which datasets are published. Each source yields entries and the bytes of its
images."""
