"""Plans with pages: copies that wait in the host's memory, both queues of the link, and who goes when."""
