"""Tables in files: CSV, JSON lines, Parquet."""
