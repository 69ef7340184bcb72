"""The database: engines, units of work, schema and migrations."""
