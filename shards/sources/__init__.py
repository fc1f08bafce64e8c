"""Collections of images as they are found, each handing out entries and bytes."""
