"""The dialects of the outside world, one a file; key tables are data."""
