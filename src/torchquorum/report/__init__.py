"""Pages about runs: reads a run's folder, computes its figures, and draws charts as SVG for a page and as PNG."""
