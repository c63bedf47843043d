"""What each way to train costs in loss: studies over methods, learning rates and seeds."""
