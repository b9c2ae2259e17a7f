"""How rows are made: read a dataset's files, convert each record, write parquet."""

from samplers.rows.schema import Row, row_id

__all__ = ["Row", "row_id"]
