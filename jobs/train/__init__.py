"""Training: pretrain, finetune, sweep, vtab, verify-resume and the demo."""
