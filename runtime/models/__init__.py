"""Model files, their loaders and the registry that picks one by architecture."""
