"""The commands for datasets: pack, index, verify and card."""
