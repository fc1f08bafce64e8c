"""One file per stage, the recipes, the command line, the run record. No mathematics.

Each imports only those to its left: a stage's job < recipes < record < words of a command < stages < command line.
"""
