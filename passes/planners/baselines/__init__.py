"""Other people's ways to rematerialize, replayed on the pool that ours are held to, for honest tables."""
