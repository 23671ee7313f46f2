"""Plans with pages: what waits in the host's memory, both queues of the link, and who goes when."""
