"""What a recipe will cost."""
