"""Looking after runs: status, watch, logs, requests to a run, cancel, doctor."""
