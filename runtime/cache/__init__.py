"""The prefix cache: pools and tree as one, from lookup to commit."""
