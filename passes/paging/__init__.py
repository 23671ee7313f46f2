"""Pages: copies that wait in the host's memory, the link that carries them, and the time that it takes."""
