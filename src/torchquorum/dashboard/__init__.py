"""One page of running clusters, which a browser keeps open: `torchquorum dashboard`."""
