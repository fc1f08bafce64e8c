"""What a trained model has learned, made visible: filters, positions, and where attention looks."""
