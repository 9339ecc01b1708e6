"""Loads, routes and placements as files: ours, and those of other engines."""
