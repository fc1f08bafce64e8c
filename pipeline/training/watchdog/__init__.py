"""Ends ranks that hang or are asked to stop, by signals, stop requests, the heartbeat and the last resort."""
