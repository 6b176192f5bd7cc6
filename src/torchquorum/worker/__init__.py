"""A worker task: flat parameters, the link that pushes and pulls, the optimizer that users see."""
