"""Output for people: escaped text, progress, command lines, and quantities with their units."""
