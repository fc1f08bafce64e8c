"""What a person reads: escaped text, progress, command lines, and quantities with their units."""
