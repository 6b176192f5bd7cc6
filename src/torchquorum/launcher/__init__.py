"""Starts tasks and looks after them: local processes, forks of a function, actors of Ray."""
