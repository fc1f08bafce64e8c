"""Holds the commands that train: pretrain, finetune, sweep, vtab, verify-resume and demo."""
