"""The engine loop and the in-process engine."""
