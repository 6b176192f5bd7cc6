"""The built-in jobs: the models that `torchquorum train` offers, how they are judged, and the program that trains them."""
