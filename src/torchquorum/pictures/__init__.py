"""Pictures of runs: what a run's folder holds, figured out, drawn as SVG for a page and as PNG."""
