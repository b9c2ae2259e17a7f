"""How rows are made: read a dataset's files, convert each record, write parquet."""
