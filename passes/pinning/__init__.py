"""Offsets written into executables: what runs is read, moved, proved and written back."""
