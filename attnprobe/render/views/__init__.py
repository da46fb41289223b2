"""One view of results a file; each gives the blocks of a page from top to bottom."""
