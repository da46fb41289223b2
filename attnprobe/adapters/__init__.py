"""Models whose own code does not run on today's transformers, on today's classes."""
