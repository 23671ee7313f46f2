"""Scripts that rebuild every number that this project states."""
