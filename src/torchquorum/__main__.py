"""`python -m torchquorum`: the command line, where the `torchquorum` program is not on the PATH."""

from torchquorum.cli.main import main

if __name__ == "__main__":
    main()
