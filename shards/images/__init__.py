"""Single images: headers, smaller copies, perceptual hashes."""
