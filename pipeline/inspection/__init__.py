"""What a trained model has learned, made visible: filters, positions, attention, and effects of shifts."""
