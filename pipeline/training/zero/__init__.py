"""DeepSpeed's ZeRO and the device: the engine, the optimisers, their state, and the check of the gradients."""
