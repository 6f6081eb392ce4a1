"""Decisions about cached state: tree, groups, validation, planning. Standard library and numpy."""
