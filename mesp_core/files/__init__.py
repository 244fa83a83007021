"""Model files: read through mappings, never trusted, never pickled."""
