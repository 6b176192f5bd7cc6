"""Compressors of flat numbers, one file each; see `torchquorum.compress.compressor`."""
