"""A worker task: flat parameters, the client that pushes and pulls, the optimizer that users see."""
