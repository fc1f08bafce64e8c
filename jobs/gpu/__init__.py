"""`patchline doctor --gpu`: training on this machine's GPU, measured part by part and drawn beside the plan."""
