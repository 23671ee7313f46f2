"""The mark on what a user asked to keep, which both stages read.

In a jaxpr it is the name of a `name` equation, whose result is the value that is kept; in the compiled
program it is a part of the names that XLA carries along with the instructions that make the value.
"""

SAVED = "coop_saved"
