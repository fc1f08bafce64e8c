"""One runnable stage a file, the recipes, the command line, the run record. No mathematics."""
