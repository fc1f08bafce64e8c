"""Commands that look after runs: status, watch, logs, stop, save, cancel, doctor."""
