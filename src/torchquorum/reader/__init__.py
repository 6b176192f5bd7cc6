"""Reading a run while it trains: `tq.Reader`."""
