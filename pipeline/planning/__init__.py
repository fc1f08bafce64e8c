"""What a run will cost: FLOPs, GPUs, a forecast of its time, and the share of it that failures leave."""
