"""Mail to people: an outbox in the database, what letters say, how they leave."""
