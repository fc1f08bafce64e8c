"""DeepSpeed's ZeRO and the device: engine, optimizer, its state, and the check of its gradients."""
