"""Training: depth draws, losses, optimizers, run directories, the training loop."""
