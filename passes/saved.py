"""The marks on what a user asked to keep, which both stages read.

In a jaxpr a mark is the name of a `name` equation, whose result is the value that is kept; in the compiled
program it is a part of the names that XLA carries along with the instructions that make the value. What is
kept on the host is kept: its mark begins with that of what is kept anywhere.
"""

SAVED = "coop_saved"
OFFLOADED = f"{SAVED}_on_host"


def is_saved(name: str | None) -> bool:
    """True for the name of a value that is kept, wherever."""
    return name in (SAVED, OFFLOADED)
