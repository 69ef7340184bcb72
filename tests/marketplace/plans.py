"""How a database would run a query when there is much in its tables."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, text
from sqlalchemy.dialects import postgresql, sqlite

from marketplace.store.db import Database


def explain(database: Database, query: Select[*tuple[Any, ...]]) -> str:
    """Return the plan as text. On PostgreSQL everything is dear that only pays in small tables."""
    dialect = postgresql.dialect() if database.dialect == "postgresql" else sqlite.dialect()
    written = str(query.compile(dialect=dialect, compile_kwargs={"literal_binds": True})).replace("%%", "%")
    with database._writer.begin() as connection:
        if database.dialect == "postgresql":
            for dear in ("seqscan", "bitmapscan", "sort"):
                connection.exec_driver_sql(f"SET LOCAL enable_{dear} = off")
            return "\n".join(row[0] for row in connection.execute(text(f"EXPLAIN {written}")))
        return "\n".join(str(row[3]) for row in connection.execute(text(f"EXPLAIN QUERY PLAN {written}")))
