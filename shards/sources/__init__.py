"""Sources of images, in the layouts that published datasets have. Each source yields entries and the bytes of its
images."""
