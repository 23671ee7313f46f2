"""Scans: pairs of a forward and a backward one, what they keep for each other, and what is recomputed."""
