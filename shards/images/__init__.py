"""Works on single images: headers, smaller copies, perceptual hashes."""
