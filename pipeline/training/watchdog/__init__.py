"""Ends ranks that hang or are asked to stop: signals, stopping, heartbeat, last resort."""
