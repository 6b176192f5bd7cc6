"""Several devices in one worker: a copy of the model on each, and the mean of their gradients."""
